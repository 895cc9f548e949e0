"""Claims about saves beside the training: what they hold, what they cost in memory, and when a file has its name."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from trainer.checkpoint import LoadPlanner, SavePlanner, SaveWriter, VerifiedReader, no_room, read_metadata
from trainer.host_memory import available_bytes, staging_fits
from trainer.staging import Stager

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class GatedWriter(SaveWriter):
    """Writes once the gate is open."""

    def __init__(self, folder: Path, gate: threading.Event) -> None:
        super().__init__(folder)
        self.gate = gate

    def write_data(self, *plan):
        assert self.gate.wait(10)
        return super().write_data(*plan)


def loaded(folder: Path, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    tensors = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
    reader = VerifiedReader(folder, read_metadata(folder / ".metadata"))
    dcp.load(tensors, storage_reader=reader, planner=LoadPlanner(), no_dist=True)
    return tensors


def test_a_save_holds_the_state_of_its_step_though_the_training_went_on_and_the_buffers_serve_again(tmp_path):
    stager, tensors = Stager(torch.device("cpu")), {"w": torch.zeros(50, 50), "v": torch.zeros(7)}
    buffers = set()
    for step in (1.0, 2.0):
        for tensor in tensors.values():
            tensor.fill_(step)
        folder, gate = tmp_path / f"save-{step}", threading.Event()
        stager.begin()
        saving = threading.Thread(
            target=dcp.save,
            args=(tensors,),
            kwargs={
                "storage_writer": GatedWriter(folder, gate),
                "planner": SavePlanner(frozenset(), stager),
                "no_dist": True,
            },
        )
        saving.start()
        stager.fence()
        for tensor in tensors.values():
            tensor.fill_(-1.0)
        gate.set()
        saving.join()
        assert all(bool((tensor == step).all()) for tensor in loaded(folder, tensors).values())
        buffers.add(tuple(stager.tensors[name].data_ptr() for name in ("v", "w")))
    assert len(buffers) == 1


def test_a_fence_without_a_save_holds_nobody_up():
    Stager(torch.device("cpu")).fence()


def test_a_share_is_cut_into_files_and_each_has_its_name_only_once_it_is_whole(tmp_path):
    tensors = {f"t{n}": torch.full((64,), float(n)) for n in range(5)}
    seen = []

    class Watched(SaveWriter):
        def _write_data(self, planner, files):
            create = self.fs.create_stream

            def watched(path, mode):
                seen.append({entry.name for entry in tmp_path.iterdir()})
                return create(path, mode)

            self.fs.create_stream = watched
            return super()._write_data(planner, files)

    dcp.save(
        tensors,
        storage_writer=Watched(tmp_path, file_bytes=2 * 64 * 4),
        planner=SavePlanner(frozenset()),
        no_dist=True,
    )
    assert {path.name for path in tmp_path.iterdir()} == {
        ".metadata", "__0_0.distcp", "__0_1.distcp", "__0_2.distcp"
    }  # fmt: skip
    assert seen[:3] == [set(), {"__0_0.distcp"}, {"__0_0.distcp", "__0_1.distcp"}]
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in loaded(tmp_path, tensors).items())


@pytest.mark.parametrize(
    ("limit", "used", "inactive", "available"),
    [("max", 0, 0, 8 << 20), (str(6 << 20), 4 << 20, 1 << 20, 3 << 20), (str(64 << 20), 0, 0, 8 << 20)],
    ids=["no limit", "the container has less", "the machine has less"],
)
def test_free_memory_is_that_of_the_machine_or_of_the_container_where_that_is_less(
    tmp_path, limit, used, inactive, available
):
    (tmp_path / "meminfo").write_text(f"MemTotal: 99999 kB\nMemAvailable:   {8 << 10} kB\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path / "none") == 8 << 20
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text(str(used))
    (tmp_path / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\n")
    assert available_bytes(tmp_path / "meminfo", tmp_path) == available


def test_a_disk_without_room_for_three_saves_is_told_with_the_way_out():
    assert no_room(100, 300) == ""
    assert "3 of them need 300.0 GB of local disk, of which 299.0 GB are free" in no_room(100 * 10**9, 299 * 10**9)


def test_staging_fits_with_a_tenth_to_spare():
    assert staging_fits(90, 100)
    assert not staging_fits(91, 100)
