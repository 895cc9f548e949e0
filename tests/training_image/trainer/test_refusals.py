"""Claims about checkpoints that must not be opened: nothing in them is run."""

from __future__ import annotations

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from trainer.checkpoint import (
    LoadPlanner,
    Refused,
    SavePlanner,
    SaveWriter,
    VerifiedReader,
    files_needed,
    read_metadata,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class RunsCode:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


def saved(folder: Path, items: dict) -> Path:
    dcp.save(items, storage_writer=SaveWriter(folder), no_dist=True)
    return folder


def test_an_item_of_bytes_is_refused_and_its_code_does_not_run(tmp_path):
    folder = saved(tmp_path / "save", {"w": torch.ones(3), "extra": RunsCode(tmp_path / "trace")})
    with pytest.raises(Refused, match="extra"):
        read_metadata(folder / ".metadata")
    assert not (tmp_path / "trace").exists()


def test_even_the_loader_alone_runs_nothing_from_an_item_of_bytes(tmp_path):
    folder = saved(tmp_path / "save", {"w": torch.ones(3), "extra": RunsCode(tmp_path / "trace")})
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    state = {"w": torch.zeros(3), "extra": 0}
    with pytest.raises(CheckpointException):
        dcp.load(state, storage_reader=VerifiedReader(folder, metadata), planner=LoadPlanner(), no_dist=True)
    assert not (tmp_path / "trace").exists()


def test_a_description_that_names_a_foreign_class_is_refused_and_its_code_does_not_run(tmp_path):
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(RunsCode(tmp_path / "trace")))
    with pytest.raises(Refused, match="mkdir"):
        read_metadata(path)
    assert not (tmp_path / "trace").exists()


def test_a_description_of_an_older_python_that_spells_an_enum_by_getattr_is_read(tmp_path, monkeypatch):
    with monkeypatch.context() as older:
        by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
        older.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
        folder = saved(tmp_path / "save", {"w": torch.ones(3)})
    assert b"getattr" in (folder / ".metadata").read_bytes()
    described = read_metadata(folder / ".metadata").state_dict_metadata["w"]
    assert described.properties.memory_format is torch.contiguous_format


@pytest.mark.parametrize("name", ["__class__", "mro", "_missing_", "__init_subclass__", "TORCH_NOTHING"])
def test_getattr_in_a_description_reaches_nothing_but_the_members_of_that_enum(tmp_path, name: str):
    class Reaches:
        def __reduce__(self):
            return (getattr, (_MEM_FORMAT_ENCODING, name))

    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(Reaches()))
    with pytest.raises(Refused, match="getattr"):
        read_metadata(path)


@pytest.mark.parametrize("raw", [b"", b"\x80\x04.", b"not a pickle", pickle.dumps({"a": 1})])
def test_a_description_that_is_none_is_refused(tmp_path, raw: bytes):
    path = tmp_path / ".metadata"
    path.write_bytes(raw)
    with pytest.raises(Refused):
        read_metadata(path)


def test_a_save_of_other_tensors_is_refused_in_both_directions(tmp_path):
    metadata = read_metadata(saved(tmp_path / "save", {"w": torch.ones(3), "v": torch.ones(2)}) / ".metadata")
    assert files_needed(metadata, {"w": torch.zeros(3), "v": torch.zeros(2)}) == {"__0_0.distcp"}
    for tensors in ({"w": torch.zeros(3)}, {"w": torch.zeros(3), "v": torch.zeros(2), "u": torch.zeros(1)}):
        with pytest.raises(Refused, match="other tensors"):
            files_needed(metadata, tensors)
    with pytest.raises(Refused, match="does not fit"):
        files_needed(metadata, {"w": torch.zeros(4), "v": torch.zeros(2)})


def test_what_several_ranks_hold_is_written_outside_the_doomed_ones():
    items = [WriteItem(index=MetadataIndex(name), type=WriteItemType.TENSOR) for name in ("a", "b")]
    alone = WriteItem(index=MetadataIndex("c"), type=WriteItemType.TENSOR)
    plans = [SavePlan([*items, alone]), SavePlan(items), SavePlan(items)]
    owned = SavePlanner(frozenset({0}))._dedup_save_plans(plans)
    assert [[item.index.fqn for item in plan.items] for plan in owned] == [["c"], ["a", "b"], []]
