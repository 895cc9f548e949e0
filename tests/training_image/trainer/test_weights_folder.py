"""Where a rank reads the weights that it starts from."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from job_contract.node_files import DAMAGED_DATA_FILE, WEIGHTS_FOLDER, DamagedData, write_message
from trainer import train
from trainer.endings import UserError

URI = "s3://bucket/teams/research/llama"


class Beats:
    def __init__(self) -> None:
        self.phases: list[str] = []

    def beat(self, phase: str) -> None:
        self.phases.append(phase)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(train, "WEIGHTS_LOOK_S", 0.001)
    return SimpleNamespace(journal=SimpleNamespace(run_dir=tmp_path), pulse=Beats())


def test_a_mounted_folder_is_read_in_place(run: SimpleNamespace) -> None:
    assert train.weights_folder(run, "file:///mnt/llama%20two") == Path("/mnt/llama two")


def test_a_rank_waits_for_the_weights_of_a_bucket_and_is_seen_to_wait(run: SimpleNamespace, tmp_path: Path) -> None:
    found: list[Path] = []
    thread = threading.Thread(target=lambda: found.append(train.weights_folder(run, URI)))
    thread.start()
    while not run.pulse.phases:
        thread.join(0.001)
    assert not found
    (tmp_path / WEIGHTS_FOLDER).mkdir()
    thread.join(10)
    assert found == [tmp_path / WEIGHTS_FOLDER] and set(run.pulse.phases) == {"loading_weights"}


def test_weights_that_could_not_be_proved_are_the_users_to_mend(run: SimpleNamespace, tmp_path: Path) -> None:
    write_message(tmp_path / DAMAGED_DATA_FILE, DamagedData(file="model.safetensors", reason="sha256 differs"))
    with pytest.raises(UserError, match=r"model.safetensors in s3://bucket.*sha256 differs"):
        train.weights_folder(run, URI)
