"""Claims about the trainers of other frameworks under the contract, with the real libraries and real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from job_contract.checkpoint_layout import parse_save_name
from job_contract.node_files import ControlKind
from tests.training_image.trainer.folder_agent import FolderBucket, started, tiny_spec

pytestmark = pytest.mark.ranks
STEPS = 60
FRAMEWORKS = {"hugging_face": 2, "lightning": 2}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_framework_saves_by_order_and_goes_on_from_there_as_if_it_had_never_stopped(
    tmp_path: Path, framework: str
) -> None:
    command, spec = ("-m", f"examples.{framework}"), tiny_spec(steps=STEPS, interval_steps=1000, global_batch=4)
    bucket = FolderBucket(tmp_path / "bucket")
    with started(tmp_path, tmp_path, spec, FRAMEWORKS[framework], bucket=bucket, command=command) as ranks:
        ranks.until(lambda: len(ranks.metrics()) > 2)
        order = ranks.order(ControlKind.CHECKPOINT, nodes=[1])
        ranks.finish()
        whole = ranks.losses()
        assert [(told.outcome, told.step) for told in ranks.outcomes()] == [("finished", STEPS)] * 2, ranks.logs()
        assert ranks.progress().answered_generation == order
    ordered, last = bucket.committed
    assert list(whole) == list(range(1, STEPS + 1)) and last.step == STEPS and 2 < ordered.step < STEPS

    resumed = {"bucket": bucket, "command": command, "attempt": 2, "resume_from": ordered}
    with started(tmp_path, tmp_path, spec, FRAMEWORKS[framework], **resumed) as ranks:
        ranks.until(lambda: len(ranks.metrics()) > 2)
        order = ranks.order(ControlKind.CHECKPOINT_STOP, nodes=[0], doomed=(1,))
        ranks.finish()
        (outcome, other), again = ranks.outcomes(), ranks.losses()
    assert (outcome.outcome, outcome.save) == (other.outcome, other.save)
    assert list(again) == list(range(ordered.step + 1, outcome.step + 1))
    assert again == {step: whole[step] for step in again}
    assert (outcome.outcome, outcome.answers_generation) == ("stopped", order)
    assert parse_save_name(outcome.save).step == outcome.step == bucket.committed[-1].step
