"""The trainer, and each rank's own record of what its optimizer steps were made of.

`python -m tests.training_image.trainer.watched_trainer [halt=N] <run_dir>` adds `watched.jsonl` to the run directory.
With `halt=N` it makes no step after N, and waits to be killed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.training_image.trainer.folder_agent import DEADLINE_S
from trainer import data
from trainer.__main__ import main
from trainer.parallel import Learner

COMMAND = ("-m", "tests.training_image.trainer.watched_trainer")


def watch(run_dir: Path, halt: int | None = None) -> None:
    """Every step leaves a line: the samples by their place in the training, rate, decay and counter of each group."""
    sample, update, places = data.Order.sample, Learner.update, []

    def seen(order: data.Order, index: int) -> int:
        places.append(index)
        return sample(order, index)

    def updated(learner: Learner, learning_rate: float) -> None:
        if places and halt in {int(state["step"]) for state in learner.optimizer.state.values()}:
            time.sleep(DEADLINE_S)
        update(learner, learning_rate)
        if places:
            groups = learner.optimizer.param_groups
            line = {
                "places": sorted(places),
                "rates": [group["lr"] for group in groups],
                "decays": [group["weight_decay"] for group in groups],
                "counters": sorted({float(state["step"]) for state in learner.optimizer.state.values()}),
            }
            with (run_dir / "watched.jsonl").open("a") as stream:
                stream.write(json.dumps(line) + "\n")
            places.clear()

    data.Order.sample, Learner.update = seen, updated  # type: ignore[method-assign]


def watched(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines that a rank has written."""
    return [json.loads(line) for line in (run_dir / "watched.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    halts = [int(word.removeprefix("halt=")) for word in sys.argv[1:-1]]
    watch(Path(sys.argv[-1]), *halts)
    code = main(sys.argv[-1:])
    sys.stderr.flush()
    os._exit(code)
