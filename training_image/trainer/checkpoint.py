"""Saves and restores of the sharded state with torch's distributed checkpoint (DCP), tensors only.

DCP checks neither its files' bytes nor what they hold: `.metadata` is a pickle, and an item that is no tensor is
unpickled at a load. So every file comes from the agent, which has verified it against the manifest; the pickle is
opened with a list of allowed names; and anything but a tensor is refused.
"""

from __future__ import annotations

import dataclasses
import pickle
import platform
import time
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch import distributed as dist
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from job_contract.checkpoint_layout import (
    SavePointer,
    parse_save_name,
    save_name,
)
from job_contract.node_files import JobFile, RankSave, write_message
from trainer.config import Config
from trainer.metrics import Journal
from trainer.parallel import Ranks

METADATA_FILE = ".metadata"

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
    """Deals what several ranks hold out to those of them outside `doomed`, whose nodes may end before the upload."""

    def __init__(self, doomed: frozenset[int]) -> None:
        super().__init__(dedup_save_to_lowest_rank=True)
        self.doomed = doomed

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


def _size_bytes(item: WriteItem) -> int:
    data = item.tensor_data
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize if data else 0


class SaveWriter(dcp.FileSystemWriter):
    """Writes without fsync, because local disk is never the durable copy, and keeps local paths out of `.metadata`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, sync_files=False, thread_count=1)

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class Saves:
    """The saves of this attempt. All calls are made by all ranks at the same step."""

    def __init__(
        self, run_dir: Path, job: JobFile, config: Config, corpus_digest: str, ranks: Ranks, journal: Journal
    ) -> None:
        self.folder, self.job, self.config, self.corpus_digest = run_dir / "saves", job, config, corpus_digest
        self.ranks, self.journal = ranks, journal
        self.restored: SavePointer | None = None
        self.newest: str | None = None
        self.number = self._highest_number()

    @property
    def newest_name(self) -> str | None:
        """The newest save of this attempt, else the one it was restored from."""
        return self.newest or (self.restored.save if self.restored else None)

    def existing(self, step: int) -> str | None:
        """Return the save that already holds the state after `step` steps, None when there is none."""
        newest = self.newest_name
        return newest if newest and parse_save_name(newest).step == step else None

    def write(
        self, tensors: dict[str, Tensor], facts: dict[str, Any], *, generation: int, doomed: tuple[int, ...]
    ) -> str:
        """Return the name of a save that is complete on the local disks, each rank's own share described beside it."""
        step, final = facts["step"], facts["step"] >= self.config.training.steps
        name = self._next_name(step)
        started = time.perf_counter()
        self.journal.event("save_started", save=name, step=step, generation=generation)
        doomed_ranks = frozenset(
            rank for rank in range(self.ranks.world_size) if rank // self.config.ranks_per_node in doomed
        )
        dcp.save(
            tensors,
            storage_writer=SaveWriter(self.folder / name),
            planner=SavePlanner(doomed_ranks),
            process_group=self.ranks.saves,
        )
        dist.barrier(group=self.ranks.saves)
        share = RankSave(
            rank=self.ranks.rank,
            save=name,
            step=step,
            world_size=self.ranks.world_size,
            mesh=self.config.mesh(self.ranks.world_size),
            config_hash=self.config.hash,
            corpus_digest=self.corpus_digest,
            versions=versions(),
            facts=facts,
            files=self._own_files(name),
            final=final,
            answers_generation=generation,
            restored=self.restored,
        )
        write_message(self.folder / name / f"rank-{self.ranks.rank}.json", share)
        self.newest = name
        self.journal.event(
            "save_written", save=name, step=step, generation=generation, seconds=time.perf_counter() - started
        )
        return name

    def _next_name(self, step: int) -> str:
        """Return the name that rank 0 gives; ranks on other nodes do not see its folder."""
        number = torch.tensor(self.number + 1)
        dist.broadcast(number, src=0, group=self.ranks.saves)
        self.number = int(number)
        return save_name(step, self.job.attempt, self.number)

    def _highest_number(self) -> int:
        names = [parse_save_name(path.name) for path in self.folder.glob("step-*")]
        return max((name.number for name in names if name.attempt == self.job.attempt), default=0)

    def _own_files(self, name: str) -> tuple[str, ...]:
        written = sorted((self.folder / name).glob(f"__{self.ranks.rank}_*.distcp"))
        files = [path.name for path in written if path.stat().st_size > 0]
        return tuple(files + [METADATA_FILE] * (self.ranks.rank == 0))


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
