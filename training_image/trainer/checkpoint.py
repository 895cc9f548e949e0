"""Saves and restores of the sharded state with torch's distributed checkpoint (DCP), tensors only.

DCP checks neither its files' bytes nor what they hold: `.metadata` is a pickle, and an item that is no tensor is
unpickled at a load. So every file comes from the agent, which has verified it against the manifest; the pickle is
opened with a list of allowed names; and anything but a tensor is refused.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import platform
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from job_contract.checkpoint_layout import (
    SavePointer,
    parse_save_name,
    save_name,
)
from job_contract.node_files import JobFile, RankSave, write_message
from trainer.config import Config
from trainer.endings import UserError
from trainer.host_memory import available_bytes, staging_fits
from trainer.metrics import Journal
from trainer.parallel import Ranks
from trainer.staging import Stager, local

METADATA_FILE = ".metadata"
# A rank's share is cut here, so that the upload of its first file starts while the next one is written.
FILE_BYTES = 512 << 20
# The one that was restored or committed last, the one that is being uploaded, and the one that is being written.
SAVES_ON_DISK = 3

# The classes in a .metadata (torch 2.13).
ALLOWED = {
    ("torch", "Size"),
    ("torch", "float32"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.metadata", "BytesStorageMetadata"),  # known, to be refused by the name of its item
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}


class Refused(Exception):
    """A file of a save that must not be used; `file` is its path in the save's folder."""

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file, self.reason = file, reason


def versions() -> dict[str, str]:
    """Return what the bits of a save depend on beside the config."""
    return {"torch": torch.__version__, "numpy": numpy.__version__, "python": platform.python_version()}


# Saving


class SavePlanner(dcp.DefaultSavePlanner):
    """Deals what several ranks hold out to those of them outside `doomed`, whose nodes may end before the upload.

    With a stager, what this rank is to write is copied as soon as that is known, and written from the copy.
    """

    def __init__(self, doomed: frozenset[int], stager: Stager | None = None) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self.doomed, self.stager = doomed, stager

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        if self.stager is not None:
            self.stager.copy(self.state_dict, {item.index.fqn for item in plan.items})
        return plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        if self.stager is not None:
            return self.stager.tensors[index.fqn]
        return super().lookup_object(index)

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        holders: dict[MetadataIndex, list[int]] = {}
        sizes: dict[MetadataIndex, int] = {}
        for rank, plan in enumerate(all_plans):
            for item in plan.items:
                holders.setdefault(item.index, []).append(rank)
                sizes[item.index] = _size_bytes(item)
        owners, dealt_bytes = {}, [0] * len(all_plans)
        for index, ranks in holders.items():
            living = [rank for rank in ranks if rank not in self.doomed] or ranks
            owner = owners[index] = min(living, key=lambda rank: dealt_bytes[rank])
            dealt_bytes[owner] += sizes[index]
        return [
            dataclasses.replace(plan, items=[item for item in plan.items if owners[item.index] == rank])
            for rank, plan in enumerate(all_plans)
        ]


class _WholeFiles(FileSystem):
    """A file has its name only once it is complete."""

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        draft = Path(path).with_name(f"{Path(path).name}.part")
        with draft.open(mode) as stream:
            yield stream
        draft.replace(path)


class SaveWriter(dcp.FileSystemWriter):
    """Writes files of about 512 MiB one after the other, without fsync, because local disk is never the durable copy,
    and keeps local paths out of `.metadata`.
    """

    def __init__(self, folder: Path, *, file_bytes: int = FILE_BYTES) -> None:
        super().__init__(folder, sync_files=False, thread_count=1)
        self.fs, self.file_bytes = _WholeFiles(), file_bytes

    def write_data(self, plan: SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        files: queue.Queue[tuple[Any, str, list[WriteItem]]] = queue.Queue()
        for number, items in enumerate(_cut(plan.items, self.file_bytes)):
            name = f"{plan.storage_data.prefix}{number}{DEFAULT_SUFFIX}"
            files.put((self.fs.concat_path(self.path, name), name, items))
        return self._write_data(planner, files)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _size_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0


def _cut(items: list[WriteItem], file_bytes: int) -> Iterator[list[WriteItem]]:
    """Yield the items file by file; one that is larger than a file gets its own."""
    file: list[WriteItem] = []
    size = 0
    for item in items:
        item_bytes = _size_bytes(item)
        if file and size + item_bytes > file_bytes:
            yield file
            file, size = [], 0
        file.append(item)
        size += item_bytes
    if file:
        yield file


def no_room(share_bytes: int, free_bytes: int) -> str:
    """Return what is missing on a disk of so many free bytes, nothing when there is room."""
    needed = SAVES_ON_DISK * share_bytes
    if needed <= free_bytes:
        return ""
    return (
        f"a node's share of a save is {share_bytes / 1e9:.1f} GB, and {SAVES_ON_DISK} of them need "
        f"{needed / 1e9:.1f} GB of local disk, of which {free_bytes / 1e9:.1f} GB are free; "
        "use larger disks or more nodes"
    )


class Saves:
    """The saves of this attempt, one at a time. All calls are made by all ranks at the same step."""

    def __init__(
        self,
        run_dir: Path,
        job: JobFile,
        config: Config,
        corpus_digest: str,
        ranks: Ranks,
        journal: Journal,
        tensors: dict[str, Tensor],
    ) -> None:
        self.folder, self.job, self.config, self.corpus_digest = run_dir / "saves", job, config, corpus_digest
        self.ranks, self.journal = ranks, journal
        self.restored: SavePointer | None = None
        self.newest: str | None = None
        self.number = self._highest_number()
        # A plain tensor is whole on every rank, and one of them writes it.
        share_bytes = sum(
            local(tensor).nbytes * (config.ranks_per_node if isinstance(tensor, DTensor) else 1)
            for tensor in tensors.values()
        )
        self._require_room(share_bytes)
        self.stager = self._stager(share_bytes)
        self._in_flight: threading.Thread | None = None

    @property
    def newest_name(self) -> str | None:
        """The newest complete save of this attempt, else the one it was restored from."""
        return self.newest or (self.restored.save if self.restored else None)

    def existing(self, step: int) -> str | None:
        """Return the save that already holds the state after `step` steps, None when there is none."""
        newest = self.newest_name
        return newest if newest and parse_save_name(newest).step == step else None

    def begin(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], *, generation: int, doomed: tuple[int, ...]
    ) -> str:
        """Return the name of a save that is being written while the training goes on, up to the fence.

        Where staging does not fit into the host's memory it is complete already.
        """
        if self.stager is None:
            return self.write(tensors, facts, generation=generation, doomed=doomed)
        self.finish()
        name = self._next_name(facts["step"])
        self.stager.begin()
        self._in_flight = threading.Thread(
            target=self._write_beside, args=(name, tensors, facts, generation, doomed), name=name, daemon=True
        )
        self._in_flight.start()
        return name

    @property
    def copying(self) -> bool:
        """Whether `fence` would wait."""
        return self.stager is not None and self.stager.copying

    def fence(self) -> None:
        """The state may be changed: what is being saved of it has been copied."""
        if self.stager is not None:
            self.stager.fence()

    def finish(self) -> None:
        """No save is in flight: it is complete, or its failure is in this rank's share of it."""
        if self._in_flight is not None:
            self._in_flight.join()
            self._in_flight = None

    def write(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], *, generation: int, doomed: tuple[int, ...]
    ) -> str:
        """Return the name of a save that is complete on the local disks, each rank's own share described beside it.

        Raises CheckpointException on every rank when one could not write.
        """
        self.finish()
        name = self._next_name(facts["step"])
        self._write(name, tensors, facts, generation, doomed, None)
        return name

    def _write_beside(
        self,
        name: str,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        generation: int,
        doomed: tuple[int, ...],
    ) -> None:
        assert self.stager is not None
        if self.ranks.device.type == "cuda":
            # Each thread has a current device of its own, and DCP would open a context on the first one.
            torch.cuda.set_device(self.ranks.device)
        try:
            self._write(name, tensors, facts, generation, doomed, self.stager)
        except (CheckpointException, RuntimeError, OSError) as error:
            # The training goes on without this save. A lost peer raises here too, and in the training itself.
            self.journal.event("save_failed", save=name, reason=str(error))
        finally:
            self.stager.release()

    def _write(
        self,
        name: str,
        tensors: dict[str, Tensor],
        facts: dict[str, Any],
        generation: int,
        doomed: tuple[int, ...],
        stager: Stager | None,
    ) -> None:
        step, started = facts["step"], time.perf_counter()
        self.journal.event("save_started", save=name, step=step, generation=generation)
        doomed_ranks = frozenset(
            rank for rank in range(self.ranks.world_size) if rank // self.config.ranks_per_node in doomed
        )
        try:
            dcp.save(
                tensors,
                storage_writer=SaveWriter(self.folder / name),
                planner=SavePlanner(doomed_ranks, stager),
                process_group=self.ranks.saves,
            )
        except CheckpointException as error:
            # DCP raises on every rank what failed on any.
            causes = "; ".join(f"rank {rank}: {cause[0]!r}" for rank, cause in sorted(error.failures.items()))
            self._describe(name, facts, generation, failed=causes)
            raise
        dist.barrier(group=self.ranks.saves)
        self.newest = name
        self._describe(name, facts, generation)
        self.journal.event(
            "save_written", save=name, step=step, generation=generation, seconds=time.perf_counter() - started
        )

    def _describe(self, name: str, facts: dict[str, Any], generation: int, failed: str | None = None) -> None:
        """This rank's share is complete, or failed, and the agent knows."""
        share = RankSave(
            rank=self.ranks.rank,
            save=name,
            step=facts["step"],
            world_size=self.ranks.world_size,
            mesh=self.config.mesh(self.ranks.world_size),
            config_hash=self.config.hash,
            corpus_digest=self.corpus_digest,
            versions=versions(),
            facts=facts,
            files=() if failed else self._own_files(name),
            final=facts["step"] >= self.config.training.steps,
            answers_generation=generation,
            restored=self.restored,
            failed=failed,
        )
        write_message(self.folder / name / f"rank-{self.ranks.rank}.json", share)

    def _require_room(self, share_bytes: int) -> None:
        """Raise UserError on every rank when the disk of some node cannot hold its share of the saves."""
        free = shutil.disk_usage(self.folder.parent).free
        short = [text for text in self.ranks.collect(no_room(share_bytes, free)) if text]
        if short:
            raise UserError(str(short[0]))

    def _stager(self, needed: int) -> Stager | None:
        """Return none where a copy of the state does not fit into the memory of some node; every rank then says so."""
        free = available_bytes()
        (fits,) = self.ranks.all_true(staging_fits(needed, free))
        how = "beside the training" if fits else "synchronous: a copy does not fit into the memory of some node"
        print(f"saves are {how}; a copy takes {needed / 1e9:.2f} GB of {free / 1e9:.2f} GB free here", flush=True)
        self.journal.event("saves_planned", staged=fits, needed_bytes=needed, free_bytes=free)
        return Stager(self.ranks.device) if fits else None

    def _next_name(self, step: int) -> str:
        self.number += 1
        return save_name(step, self.job.attempt, self.number)

    def _highest_number(self) -> int:
        """Return the number that rank 0 has reached; ranks on other nodes do not see its folder."""
        names = [parse_save_name(path.name) for path in self.folder.glob("step-*")]
        number = torch.tensor(max((name.number for name in names if name.attempt == self.job.attempt), default=0))
        dist.broadcast(number, src=0, group=self.ranks.saves)
        return int(number)

    def _own_files(self, name: str) -> tuple[str, ...]:
        written = sorted(path.name for path in (self.folder / name).glob(f"__{self.ranks.rank}_*{DEFAULT_SUFFIX}"))
        return (*written, *[METADATA_FILE] * (self.ranks.rank == 0))


# Reading


def _member(enum: Any, name: str) -> Any:
    """Return the member of the only enum in a `.metadata`. Raises Refused for whatever else getattr could reach."""
    if enum is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise Refused(METADATA_FILE, f"it reaches for {name!r} by getattr, which a save of tensors never does")
    return _MEM_FORMAT_ENCODING[name]


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        # Some releases of Python 3.11 (3.11.2 for one) pickle a member of an enum as getattr(enum, name).
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) not in ALLOWED:
            raise Refused(METADATA_FILE, f"it names {module}.{name}, which a save of tensors never holds")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """Return the description in a `.metadata` file, without running anything that it holds. Raises Refused."""
    try:
        with path.open("rb") as stream:
            metadata = _Unpickler(stream).load()
    except (
        pickle.UnpicklingError,
        EOFError,
        ValueError,
        TypeError,
        AttributeError,
        IndexError,
        KeyError,
        OSError,
    ) as error:
        raise Refused(METADATA_FILE, f"it cannot be read: {error}") from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise Refused(METADATA_FILE, "it does not describe a save")
    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            raise Refused(METADATA_FILE, f"its item {name} is no tensor, and loading it could run code")
    metadata.storage_meta = StorageMeta()
    return metadata


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Loads tensors only. An item of bytes would be unpickled by DCP, code included."""

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise Refused(read_item.dest_index.fqn, "it is no tensor")


class VerifiedReader(dcp.FileSystemReader):
    """Reads data files from `folder` by a description that has been checked before."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.metadata = metadata

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        return self.metadata


def files_needed(metadata: Metadata, tensors: dict[str, Tensor]) -> set[str]:
    """Return the data files that hold this rank's shards, planned without reading one. Raises Refused."""
    different = set(metadata.state_dict_metadata) ^ set(tensors)
    if different:
        raise Refused(METADATA_FILE, f"it holds other tensors than this model: {', '.join(sorted(different)[:3])}")
    planner = LoadPlanner()
    try:
        planner.set_up_planner(dict(tensors), metadata, is_coordinator=False)
        plan = planner.create_local_plan()
        return {metadata.storage_data[item.storage_index].relative_path for item in plan.items}
    except (ValueError, RuntimeError, KeyError) as error:
        raise Refused(METADATA_FILE, f"it does not fit this model: {error}") from error
