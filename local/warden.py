"""Run as a script beside the engine: once the engine is gone, however it ended, no process of its cloud is left.

A rank whose agent died is nobody's child, so no death signal reaches it; the marker in its environment does.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from local import containers
from local.processes import CLOUD_MARKER, kill_marked


def main(pipe: int, cloud_id: str) -> None:
    """Returns after the write end of `pipe`, held by the engine alone, was closed; the marked processes are dead then,
    and the networks of their containers gone."""
    while os.read(pipe, 1):
        pass
    kill_marked(CLOUD_MARKER, cloud_id)
    containers.remove(cloud_id)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
