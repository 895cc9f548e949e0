"""What does a periodic save cost the training? `python -m bench.save_stall` answers with ratios of one run each.

The stall of a save is the wall time of the ten steps from it on, less ten median steps. Saves beside the training are
set against synchronous ones of the same state, both without an agent; the first save of each run, which allocates, is
left out. One rank leaves the writer a core, as training on GPUs does. Two ranks fill this machine's two cores, so the
writer's work can only be taken from the training's. The demand is the same.

A third run has the agent's own uploader bring each save to the S3 of the embedded cloud meanwhile. Its server works on
the same cores, which no real one does, so that the increase of a step is an upper bound.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from agent import cloud as agent_cloud
from agent.saves import Saves
from bench.table import Row, report
from bench.upload import agents_saves, patient
from job_contract.node_files import RankSave, read_message
from job_contract.spec import JobSpec
from local.cloud import Cloud
from tests.training_image.trainer.folder_agent import Attempt, started, tiny_spec

INTERVAL, SAVES, STEPS_MEASURED = 14, 8, 10
MOST_OF_SYNCHRONOUS = 0.35
OURS = ("-m", "trainer")
SYNCHRONOUS = ("-m", "bench.altered_trainer", "saves_synchronous")
# 21 million parameters: 250 MB of parameters and moments.
MODEL = {"dim": 512, "layers": 6, "heads": 8, "kv_heads": 4, "ffn_dim": 1536}


def spec() -> JobSpec:
    return tiny_spec(
        steps=INTERVAL * (SAVES + 1), interval_steps=INTERVAL, model=MODEL, sequence_length=32, global_batch=2
    )


@dataclass(frozen=True)
class Measured:
    """Seconds: medians of a save's stall, of a quiet step, of the writing; and each step beside uploads."""

    stall: float
    step: float
    written: float
    uploading: list[float]


class Uploads:
    """The agent's uploader of each rank's node, one save after the other."""

    def __init__(self, cloud: Cloud) -> None:
        self._client = cloud.client("s3", config=agent_cloud._CONFIG.merge(patient()))
        self._client.create_bucket(Bucket="saves")
        self.spans: list[tuple[float, float]] = []
        self._done: set[Path] = set()

    def look(self, ranks: Attempt) -> None:
        """Every share that is complete is in the bucket."""
        for rank in ranks.ranks:
            for described in sorted(ranks.run_dir(rank).glob(f"saves/step-*/rank-{rank}.json")):
                if described not in self._done:
                    self._done.add(described)
                    self._upload(ranks.run_dir(rank), described)

    def _upload(self, run_dir: Path, described: Path) -> None:
        share = read_message(described, RankSave)
        assert share is not None
        saves: Saves = agents_saves(self._client, "saves", run_dir, f"rank-{share.rank}/{share.save}")
        began = time.time()
        saves._upload_all(described.parent, list(share.files))
        self.spans.append((began, time.time()))


def measured(root: Path, ranks: int, command: tuple[str, ...] = OURS, uploads: Uploads | None = None) -> Measured:
    """Return what the steps and saves of one run took."""
    with started(root, root.parent / "corpus", spec(), ranks, command=command) as attempt:
        while not attempt.ended():
            if uploads:
                uploads.look(attempt)
            time.sleep(0.2)
        if any(process.returncode for process in attempt.processes):
            raise RuntimeError(attempt.logs())
        ended = {line["step"]: line["at"] for line in attempt.metrics()}
        written = [line["seconds"] for line in attempt.events() if line["event"] == "save_written"]
    took = {step: at - ended[step - 1] for step, at in ended.items() if step > 1}
    step_s = statistics.median(took[step] for step in took if (step - 1) % INTERVAL >= STEPS_MEASURED)
    saved_at = [INTERVAL * number for number in range(2, SAVES + 1)]
    spans = uploads.spans if uploads else []
    return Measured(
        stall=statistics.median(ended[at + STEPS_MEASURED] - ended[at] - STEPS_MEASURED * step_s for at in saved_at),
        step=step_s,
        written=statistics.median(written[1:SAVES]),
        uploading=[
            took[step]
            for step in took
            if step > INTERVAL * 2 and any(began <= ended[step - 1] and ended[step] <= end for began, end in spans)
        ],
    )


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="holdfast-save-stall-") as folder:
        root = Path(folder)
        for ranks, told in ((1, "a core free"), (2, "no core free")):
            beside = measured(root / f"beside-{ranks}", ranks)
            synchronous = measured(root / f"synchronous-{ranks}", ranks, SYNCHRONOUS)
            yield Row(f"{told}: step, s", beside.step, "reported", True)
            yield Row(f"{told}: a save beside the training, s until written", beside.written, "reported", True)
            yield Row(f"{told}: a synchronous save, s until written", synchronous.written, "reported", True)
            yield Row(f"{told}: stall of a save beside the training, s", beside.stall, "reported", True)
            yield Row(f"{told}: stall of a synchronous save, s", synchronous.stall, "reported", True)
            ratio = beside.stall / synchronous.stall
            ok = ratio <= MOST_OF_SYNCHRONOUS
            yield Row(f"{told}: ratio of the stalls", ratio, f"<= {MOST_OF_SYNCHRONOUS}", ok)
        with Cloud(root / "cloud") as cloud:
            uploading = measured(root / "uploading", 1, uploads=Uploads(cloud))
    steps = uploading.uploading
    yield Row("steps measured inside uploads", len(steps), ">= 3", len(steps) >= 3)
    if steps:
        yield Row("step during an upload / quiet step", statistics.median(steps) / uploading.step, "reported", True)


if __name__ == "__main__":
    sys.exit(report("save_stall", rows()))
