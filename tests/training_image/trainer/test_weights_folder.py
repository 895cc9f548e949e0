"""Where a rank reads the weights that it starts from, and what it hears meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from job_contract.node_files import DAMAGED_DATA_FILE, WEIGHTS_FOLDER, ControlKind, DamagedData, write_message
from tests.training_image.trainer.test_llama_layout import MODEL, theirs
from trainer import train
from trainer.control import Order
from trainer.endings import UserError
from trainer.llama import Weights
from trainer.pulse import Lack
from trainer.restore import OrderedMeanwhile

URI = "s3://bucket/teams/research/llama"


class Alone:
    """The agreement of a rank that has no peers; `answers` are what it agrees on, look by look."""

    def __init__(self, answers: Iterator[Order | None]) -> None:
        self.answers, self.data_lacking = answers, False

    def now(self, *, data_lacking: bool) -> Order | None:
        self.data_lacking = data_lacking
        return next(self.answers)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    shown: list[tuple[str, Lack | None]] = []
    monkeypatch.setattr(train, "WEIGHTS_LOOK_S", 0.0)
    monkeypatch.setattr(train, "show", lambda run, state, *, always=False, lack=None: shown.append((state, lack)))
    return SimpleNamespace(
        journal=SimpleNamespace(run_dir=tmp_path, event=lambda *_, **__: None),
        learner=SimpleNamespace(weight_bytes=280_000_000_000),
        agreement=Alone(iter(())),
        answered_generation=0,
        shown=shown,
    )


def agreed(*answers: Order | Callable[[], object] | None) -> Iterator[Order | None]:
    for answer in answers:
        yield answer() if callable(answer) else answer  # type: ignore[misc]


def test_a_mounted_folder_is_read_in_place(run: SimpleNamespace) -> None:
    assert train.weights_folder(run, "file:///mnt/llama%20two") == Path("/mnt/llama two")


def test_a_rank_waits_for_the_weights_of_a_bucket_and_says_what_it_waits_for_and_how_long(
    run: SimpleNamespace, tmp_path: Path
) -> None:
    run.agreement.answers = agreed(None, (tmp_path / WEIGHTS_FOLDER).mkdir, None)
    assert train.weights_folder(run, URI) == tmp_path / WEIGHTS_FOLDER
    lack = run.shown[0][1]
    assert lack.what == f"the weights in {URI}" and lack.bound_s == 14_000
    assert {state for state, _ in run.shown} == {"loading_weights"}
    assert run.shown[-1][1] is None


def test_an_order_to_save_is_answered_while_the_weights_come_and_one_to_end_is_obeyed(
    run: SimpleNamespace, tmp_path: Path
) -> None:
    stop = Order(generation=6, kind=ControlKind.CHECKPOINT_STOP)
    run.agreement.answers = agreed(Order(generation=5, kind=ControlKind.CHECKPOINT), None, stop)
    with pytest.raises(OrderedMeanwhile) as left:
        train.weights_folder(run, URI)
    assert run.answered_generation == 5
    assert left.value.order == stop


def test_an_order_to_end_is_heard_between_two_reads_of_the_weights(tmp_path: Path) -> None:
    theirs(tmp_path)
    heard = False

    def between() -> None:
        if heard:
            raise OrderedMeanwhile

    weights = Weights(tmp_path, MODEL, between=between)
    assert weights.digest()
    assert weights.read("norm.weight", (MODEL.dim,), ()).numel() == MODEL.dim
    heard = True
    for read in (weights.digest, lambda: weights.read("norm.weight", (MODEL.dim,), ())):
        with pytest.raises(OrderedMeanwhile):
            read()


def test_weights_that_could_not_be_proved_are_the_users_to_mend(run: SimpleNamespace, tmp_path: Path) -> None:
    write_message(tmp_path / DAMAGED_DATA_FILE, DamagedData(file="model.safetensors", reason="sha256 differs"))
    with pytest.raises(UserError, match=r"model.safetensors in s3://bucket.*sha256 differs"):
        train.weights_folder(run, URI)
