"""Bringing a save back: which one, which of its files, and what to do when it is damaged.

The manifest is proven by its digest first, then the plan says which files this rank needs, then they are loaded. After
each of the three all ranks vote; where one has met damage, all go on to the save before.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from job_contract.checkpoint_layout import MANIFEST_FILE, Manifest, SavePointer, open_manifest, read_manifest
from job_contract.node_files import JobFile, Needs, Provided, read_message, write_message
from job_contract.reports import FellBack
from job_contract.version import ContractError
from trainer.checkpoint import METADATA_FILE, LoadPlanner, Refused, VerifiedReader, files_needed, read_metadata
from trainer.config import Config
from trainer.control import ENDS, ControlFile, Order
from trainer.endings import BadCheckpoint, UserError
from trainer.parallel import Ranks

POLL_S = 0.02


class OrderedMeanwhile(Exception):
    """An order to end came before the first step; every rank leaves together. `order` where they agreed on it."""

    def __init__(self, order: Order | None = None) -> None:
        super().__init__()
        self.order = order


@dataclass(frozen=True)
class Restored:
    """The save whose state the tensors now hold, and the newer ones that had to be passed over."""

    pointer: SavePointer
    facts: dict[str, Any]
    fell_back: tuple[FellBack, ...]


class Restore:
    """Brings the newest undamaged save of the chain resume_from, its parent, and so on into all ranks' tensors."""

    def __init__(
        self, run_dir: Path, job: JobFile, config: Config, corpus_digest: str, ranks: Ranks, control: ControlFile
    ) -> None:
        self.run_dir, self.job, self.config, self.corpus_digest = run_dir, job, config, corpus_digest
        self.ranks, self.control = ranks, control
        self.number = 0
        self.ordered = False

    def into(self, tensors: dict[str, Tensor]) -> Restored:
        """Return what was restored. Raises BadCheckpoint, UserError, or OrderedMeanwhile; each on every rank."""
        passed_over: list[FellBack] = []
        candidate = self.job.resume_from
        while candidate is not None:
            folder, manifest, problems = self._manifest(candidate)
            readable = self._all_true(manifest is not None)
            if readable and manifest is not None:
                self._refuse_another_config(manifest)
                problems += self._load(candidate, manifest, folder, tensors, problems)
            all_problems = self._merge(problems)
            if manifest is not None and not all_problems:
                return Restored(candidate, manifest.facts, tuple(passed_over))
            passed_over += all_problems
            candidate = self._before(candidate, manifest if readable else None)
        reasons = "; ".join(f"{item.save}/{item.file}: {item.reason}" for item in passed_over)
        raise BadCheckpoint(f"nothing is left to resume from: {reasons}")

    def _before(self, candidate: SavePointer, manifest: Manifest | None) -> SavePointer | None:
        if manifest is not None:
            return manifest.parent
        return self.job.resume_parent if candidate == self.job.resume_from else None

    def _manifest(self, candidate: SavePointer) -> tuple[Path, Manifest | None, list[FellBack]]:
        folder, problems = self._ask(candidate, (METADATA_FILE,))
        try:
            manifest = open_manifest((folder / MANIFEST_FILE).read_bytes(), job=self.job.job, pointer=candidate)
        except (ContractError, OSError) as error:
            if not any(problem.file == MANIFEST_FILE for problem in problems):
                problems.append(FellBack(save=candidate.save, file=MANIFEST_FILE, reason=str(error)))
            return folder, None, problems
        return folder, manifest, problems

    def _load(
        self,
        candidate: SavePointer,
        manifest: Manifest,
        folder: Path,
        tensors: dict[str, Tensor],
        known: list[FellBack],
    ) -> list[FellBack]:
        """Return what kept this rank from loading; nothing when every rank has loaded, or when another could not."""
        metadata: Metadata | None = None
        problems: list[FellBack] = []
        if not known:
            try:
                metadata = read_metadata(folder / METADATA_FILE)
                folder, problems = self._ask(candidate, self._wanted(metadata, manifest, tensors))
            except Refused as refused:
                problems = [FellBack(save=candidate.save, file=refused.file, reason=refused.reason)]
        all_provided = self._all_true(metadata is not None and not problems)
        if not all_provided or metadata is None:
            return problems
        try:
            dcp.load(
                tensors,
                storage_reader=VerifiedReader(folder, metadata),
                planner=LoadPlanner(),
                process_group=self.ranks.saves,
            )
        except CheckpointException as error:
            reason = "; ".join(f"rank {rank}: {cause[0]}" for rank, cause in error.failures.items())
            return [FellBack(save=candidate.save, file=METADATA_FILE, reason=f"it cannot be loaded: {reason}")]
        return []

    def _wanted(self, metadata: Metadata, manifest: Manifest, tensors: dict[str, Tensor]) -> tuple[str, ...]:
        wanted = files_needed(metadata, tensors)
        foreign = wanted - {file.path for file in manifest.files}
        if foreign:
            raise Refused(
                METADATA_FILE, f"it points to files that the manifest does not list: {', '.join(sorted(foreign)[:3])}"
            )
        return tuple(sorted(wanted))

    def _refuse_another_config(self, manifest: Manifest) -> None:
        """Every rank holds the same manifest here, so all raise or none does."""
        saved, fixed = manifest.facts.get("config", {}), self.config.fixed
        wrong = sorted(name for name in fixed if name in saved and saved[name] != fixed[name])
        if manifest.config_hash != self.config.hash:
            raise UserError(
                f"{manifest.save} was made with another config; different: {', '.join(wrong) or 'config_hash'}"
            )
        if manifest.corpus_digest != self.corpus_digest:
            raise UserError(
                f"{manifest.save} was made on another corpus; different: corpus_digest "
                f"({manifest.corpus_digest[:12]}, here {self.corpus_digest[:12]})"
            )

    def _ask(self, save: SavePointer, files: tuple[str, ...]) -> tuple[Path, list[FellBack]]:
        """Return the folder in which the agent has put the files, and what it found damaged."""
        self.number += 1
        file = f"rank-{self.ranks.rank}.json"
        write_message(self.run_dir / "needs" / file, Needs(number=self.number, save=save, files=files))
        while True:
            answer = read_message(self.run_dir / "provided" / file, Provided)
            if answer is not None and answer.number == self.number:
                return Path(answer.folder), list(answer.damaged)
            if self.control.read().kind in ENDS:
                self.ordered = True
                return Path(), [FellBack(save=save.save, file=name, reason="ordered to end") for name in files]
            time.sleep(POLL_S)

    def _all_true(self, fact: bool) -> bool:
        undisturbed, holds = self.ranks.all_true(not self.ordered, fact)
        if not undisturbed:
            raise OrderedMeanwhile
        return holds

    def _merge(self, problems: list[FellBack]) -> list[FellBack]:
        everywhere = self.ranks.collect(problems)
        return sorted({item for items in everywhere for item in items}, key=lambda item: (item.file, item.reason))  # type: ignore[attr-defined]


class Lent:
    """The weights of another job's save, which the agent has brought to `folder` and proved.

    Raises UserError for what cannot be a start of this model.
    """

    def __init__(self, folder: Path, config: Config) -> None:
        self.folder = folder
        try:
            self.manifest = read_manifest((folder / MANIFEST_FILE).read_bytes())
            self.metadata = read_metadata(folder / METADATA_FILE)
        except (ContractError, Refused, OSError) as error:
            raise UserError(f"init_from: it is no whole save: {error}") from error
        if config.training.lora is not None:
            raise UserError(f"init_from: {self.manifest.save} is no base for adapters; export it to a folder first")
        saved, here = self.manifest.facts.get("config", {}).get("model", {}), config.fixed["model"]
        wrong = sorted(name for name in here if name != "dropout" and saved.get(name) != here[name])
        if wrong:
            raise UserError(f"init_from: {self.manifest.save} holds another model; different: {', '.join(wrong)}")

    def digest(self) -> str:
        """Return the digest of the manifest, which pins every file."""
        return self.manifest.sha256 or ""

    def into(self, tensors: dict[str, Tensor]) -> None:
        """The tensors hold the save's parameters of the same names; each rank has read its own shards."""
        try:
            reader = VerifiedReader(self.folder, self.metadata)
            dcp.load(dict(tensors), storage_reader=reader, planner=LoadPlanner(), no_dist=True)
        except (CheckpointException, Refused, RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"init_from: {self.manifest.save} cannot be loaded: {error}") from error
