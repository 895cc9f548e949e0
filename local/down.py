"""End the embedded cloud that `make up` left running."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from local.up import running

STOP_S = 10.0


def main() -> int:
    ready = running()
    if ready is None:
        print("no embedded cloud is running")
        return 0
    os.kill(ready["pid"], signal.SIGTERM)
    give_up_at = time.monotonic() + STOP_S
    while Path(f"/proc/{ready['pid']}").exists() and time.monotonic() < give_up_at:
        time.sleep(0.05)
    if Path(f"/proc/{ready['pid']}").exists():
        # Its warden ends the rest as soon as it is gone.
        os.kill(ready["pid"], signal.SIGKILL)
    print("the embedded cloud is down")
    return 0


if __name__ == "__main__":
    sys.exit(main())
