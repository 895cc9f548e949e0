"""What does a periodic save cost the training? `python -m bench.save_stall` answers with ratios of one run each.

The stall of a save is the wall time of the ten steps from it on, less ten median steps. Saves beside the training are
set against synchronous ones of the same state; the first save of each run, which allocates, is left out.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from bench.table import Row, report
from job_contract.spec import JobSpec
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec

RANKS = 2
INTERVAL, SAVES, STEPS_MEASURED = 14, 3, 10
MOST_OF_SYNCHRONOUS = 0.35
PATIENCE_S = 900.0
# 21 million parameters: 250 MB of parameters and moments, half of it on each rank.
MODEL = {"dim": 512, "layers": 6, "heads": 8, "kv_heads": 4, "ffn_dim": 1536}


def spec() -> JobSpec:
    return tiny_spec(
        steps=INTERVAL * (SAVES + 1), interval_steps=INTERVAL, model=MODEL, sequence_length=32, global_batch=2
    )


def stalls(root: Path, corpus: Path, command: tuple[str, ...]) -> tuple[list[float], float, list[float]]:
    """Return the stall of each save but the first in seconds, the median step, and how long the writing took."""
    with started(root, corpus, spec(), RANKS, bucket=FolderBucket(root / "bucket"), command=command) as ranks:
        ranks.until(ranks.ended, PATIENCE_S)
        if any(ranks.finish()):
            raise RuntimeError(ranks.log(0)[-2000:])
        ended = {line["step"]: line["at"] for line in ranks.metrics()}
        written = [line["seconds"] for line in ranks.events() if line["event"] == "save_written"]
    quiet = [ended[step] - ended[step - 1] for step in ended if step > 2 and (step - 1) % INTERVAL >= STEPS_MEASURED]
    step_s = statistics.median(quiet)
    saved_at = [INTERVAL * number for number in range(2, SAVES + 1)]
    return [ended[at + STEPS_MEASURED] - ended[at] - STEPS_MEASURED * step_s for at in saved_at], step_s, written


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        root, corpus = Path(folder), Path(folder) / "corpus"
        beside, step_s, written = stalls(root / "beside", corpus, ("-m", "trainer"))
        altered = ("-m", "bench.altered_trainer", "saves_synchronous")
        synchronous, _, _ = stalls(root / "synchronous", corpus, altered)
    ratio = statistics.median(beside) / statistics.median(synchronous)
    return report(
        "save_stall",
        [
            Row("median step, s", step_s, "reported", True),
            Row("save beside the training, s until written", statistics.median(written[1:SAVES]), "reported", True),
            Row("stall of a save beside the training, s", statistics.median(beside), "reported", True),
            Row("stall of a synchronous save, s", statistics.median(synchronous), "reported", True),
            Row("ratio of the stalls", ratio, f"<= {MOST_OF_SYNCHRONOUS}", ratio <= MOST_OF_SYNCHRONOUS),
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
