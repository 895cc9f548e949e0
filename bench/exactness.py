"""Is a resumed training the training that was never interrupted? `python -m bench.exactness` answers with a table.

Same world size (FSDP2 and DDP on 2, 3 and 4 ranks, HSDP on two nodes of 2): every loss, the sha256 over all parameters
and that over all moments are identical to an uninterrupted run, after an order to checkpoint and stop at a step that no
interval names. Another world size: each loss within 1e-6 over 20 steps in which the loss falls by 5 % or more. And each
check fails when one thing is wrong.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.table import Row, report
from job_contract.checkpoint_layout import SavePointer
from job_contract.node_files import ControlKind
from job_contract.spec import JobSpec
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec
from tests.training_image.trainer.states import state_sha256

STEPS = 20
SAVED_AT, COMPARED_STEPS = 5, 20
MOST_DIFFERENCE, LEAST_FALL = 1e-6, 0.05
NEGATIVE_CONTROLS = ("sample_swapped", "moments_zeroed", "optimizer_step_off_by_one", "data_off_by_one")
# DDP's first bucket is 1 MiB, and only several buckets can change their order: this model has 4 MB of gradients.
MODEL = {"dim": 128, "layers": 4, "ffn_dim": 512}


@dataclass(frozen=True)
class Trained:
    """What a training left: the losses by step, the digests of its last save, the save it stopped at."""

    losses: dict[int, float]
    sha256: str
    last: SavePointer
    parameters_sha256: str = ""
    moments_sha256: str = ""


def spec_for(parallel: str, steps: int = STEPS, interval_steps: int = 1000) -> JobSpec:
    return tiny_spec(
        parallel=parallel,
        ranks_per_node=2 if parallel == "hsdp" else 1,
        steps=steps,
        interval_steps=interval_steps,
        model=MODEL,
        sequence_length=32,
        learning_rate=1e-3,
    )


def trained(
    root: Path,
    spec: JobSpec,
    world_size: int,
    bucket: FolderBucket,
    *,
    attempt: int = 1,
    resume_from: SavePointer | None = None,
    stop: bool = False,
    altered: str | None = None,
) -> Trained:
    """Return what the ranks trained; with `stop`, they are ordered to checkpoint and stop after their first step."""
    command = ("-m", "bench.altered_trainer", altered) if altered else ("-m", "trainer")
    with started(
        root,
        root / "corpus",
        spec,
        world_size,
        bucket=bucket,
        attempt=attempt,
        resume_from=resume_from,
        command=command,
    ) as ranks:
        if stop:
            ranks.until(lambda: ranks.saw("first_step"))
            ranks.order(ControlKind.CHECKPOINT_STOP)
        codes = ranks.finish()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}: {ranks.log(0)[-2000:]}")
        last = bucket.committed[-1]
        folder = bucket.folder(last.save)
        digests = (state_sha256(folder, part) for part in ("", "parameter.", "moment"))
        whole, parameters, moments = digests
        return Trained(ranks.losses(), whole, last, parameters, moments)


def same_size(root: Path, parallel: str, world_size: int) -> Row:
    """Return whether a stopped and resumed training equals the uninterrupted one."""
    spec, bucket = spec_for(parallel), FolderBucket(root / f"{parallel}-{world_size}")
    whole = trained(root, spec, world_size, FolderBucket(root / f"{parallel}-{world_size}-whole"))
    first = trained(root, spec, world_size, bucket, stop=True)
    second = trained(root, spec, world_size, bucket, attempt=2, resume_from=first.last)
    parts = {
        "losses": first.losses | second.losses == whole.losses,
        "parameters": second.parameters_sha256 == whole.parameters_sha256,
        "moments": second.moments_sha256 == whole.moments_sha256,
    }
    different = [name for name, same in parts.items() if not same]
    between = 0 < first.last.step < STEPS
    told = f"{', '.join(different)} differ" if different else "losses, parameters, moments identical"
    name = f"{parallel} 2x2" if parallel == "hsdp" else f"{parallel} on {world_size}"
    value = f"{told}, stopped at step {first.last.step}"
    return Row(f"{name}, resumed on as many", value, "identical", not different and between)


def other_sizes(root: Path) -> Iterator[Row]:
    """Yield how far a training that is resumed on other world sizes leaves the one that went on."""
    spec, bucket = spec_for("fsdp", SAVED_AT + COMPARED_STEPS, SAVED_AT), FolderBucket(root / "sizes")
    whole = trained(root, spec, 2, bucket)
    compared = range(SAVED_AT + 1, SAVED_AT + COMPARED_STEPS + 1)
    fall = 1 - whole.losses[compared[-1]] / whole.losses[compared[0]]
    yield Row(f"fall of the loss over {COMPARED_STEPS} steps", fall, f">= {LEAST_FALL}", fall >= LEAST_FALL)
    for attempt, world_size in enumerate((1, 4, 3), start=2):
        start = bucket.pointer(SAVED_AT)
        resumed = trained(
            root, spec, world_size, FolderBucket(bucket.root, [start]), attempt=attempt, resume_from=start
        )
        apart = max(abs(resumed.losses[step] / whole.losses[step] - 1) for step in compared)
        name = f"fsdp saved on 2, resumed on {world_size}: largest relative difference"
        yield Row(name, apart, f"<= {MOST_DIFFERENCE}", apart <= MOST_DIFFERENCE)


def negative_controls(root: Path) -> Iterator[Row]:
    """Yield whether each single fault is found, by both judges and at the looser bound too."""
    spec, bucket = spec_for("fsdp", interval_steps=SAVED_AT), FolderBucket(root / "controls")
    whole = trained(root, spec, 2, bucket)
    start = bucket.pointer(SAVED_AT)
    for attempt, altered in enumerate(NEGATIVE_CONTROLS, start=2):
        wrong = trained(
            root, spec, 2, FolderBucket(bucket.root, [start]), attempt=attempt, resume_from=start, altered=altered
        )
        apart = max(abs(loss / whole.losses[step] - 1) for step, loss in wrong.losses.items())
        found = wrong.sha256 != whole.sha256 and apart > MOST_DIFFERENCE
        yield Row(
            f"control: {altered}",
            f"{'differs' if found else 'not found'} by {apart:.1e}",
            f"differs by > {MOST_DIFFERENCE}",
            found,
        )


def warm_up_alone(root: Path) -> Row:
    """Return whether the throw-away steps change nothing: a fresh FSDP2 training is the same without them."""
    warm = trained(root, spec_for("fsdp"), 2, FolderBucket(root / "warm"))
    cold = trained(root, spec_for("fsdp"), 2, FolderBucket(root / "not-warm"), altered="not_warmed_up")
    same = warm == replace(cold, last=warm.last)
    return Row(
        "fsdp on 2, with and without the throw-away steps", "identical" if same else "differs", "identical", same
    )


def without_warm_up(root: Path) -> Row:
    """Return whether the throw-away steps are needed: DDP on 3 differs without them, in parameters if not in losses."""
    spec, bucket = spec_for("ddp", interval_steps=SAVED_AT), FolderBucket(root / "cold")
    whole = trained(root, spec, 3, bucket)
    start = bucket.pointer(SAVED_AT)
    cold = trained(
        root, spec, 3, FolderBucket(bucket.root, [start]), attempt=2, resume_from=start, altered="not_warmed_up"
    )
    differs = cold.sha256 != whole.sha256
    return Row("control: ddp on 3, not_warmed_up", "differs" if differs else "identical", "differs", differs)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="holdfast-exactness-") as folder:
        root = Path(folder)
        for parallel in ("fsdp", "ddp"):
            for world_size in (2, 3, 4):
                yield same_size(root, parallel, world_size)
        yield same_size(root, "hsdp", 4)
        yield from other_sizes(root)
        yield from negative_controls(root)
        yield warm_up_alone(root)
        yield without_warm_up(root)


if __name__ == "__main__":
    sys.exit(report("exactness", rows()))
