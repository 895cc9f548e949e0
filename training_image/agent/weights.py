"""Brings the weights that a training starts from out of a bucket, each file proved: by SHA256SUMS, or a manifest."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agent.cloud import CLOUD_ERRORS, error_code
from agent.files import plain_name, sha256_of
from agent.journal import Journal
from agent.shards import NotAsPinned, Place, streamed
from agent.threads import Loop
from job_contract.checkpoint_layout import MANIFEST_FILE, SavePointer, open_manifest, read_manifest
from job_contract.node_files import DAMAGED_DATA_FILE, WEIGHTS_FOLDER, DamagedData, write_message
from job_contract.spec import TrainingSpec
from job_contract.version import ContractError
from job_contract.weights import MANIFEST_LIMIT_BYTES, SUMS_FILE, SUMS_LIMIT_BYTES, SaveOf, save_of

WANTED = (".safetensors", ".json")
RETRY_S = 1.0
DONE_S = 60.0


def address_of(training: TrainingSpec, resume_from: object) -> str | None:
    """Return where in a bucket the weights lie that the ranks will read: at the first start, and under adapters."""
    if training.init_from is None or not training.init_from.startswith("s3://"):
        return None
    return training.init_from if resume_from is None or training.lora is not None else None


class WeightFiles:
    """Serves one attempt. `store` outlives it, so that a survivor brings nothing twice.

    Once every file is proved the run directory has WEIGHTS_FOLDER; a file that is missing or differs is `damaged`;
    `trouble` is how the place answered last, empty when it did as it should.
    """

    field = "init_from"

    def __init__(
        self,
        uri: str,
        pinned: str | None,
        *,
        run_dir: Path,
        root: Path,
        place: Place,
        downloads: int,
        journal: Journal,
    ) -> None:
        """`pinned` is the sha256 that the list must have, or the manifest of a save; None for any."""
        self._pinned, self._save = pinned, save_of(uri)
        self.store = root / "weights" / hashlib.sha256(uri.encode()).hexdigest()[:16]
        self._run_dir, self._place, self._downloads, self._journal = run_dir, place, downloads, journal
        self.damaged: DamagedData | None = None
        self.trouble = ""
        for folder in self.store.parent.glob("*"):
            if folder != self.store:
                shutil.rmtree(folder, ignore_errors=True)
        self.store.mkdir(parents=True, exist_ok=True)
        self.loop = Loop("weights", self.round, journal)

    def round(self) -> float:
        """All files are there, or one is damaged; returns the seconds until the next look."""
        if self.damaged or (self._run_dir / WEIGHTS_FOLDER).exists():
            return DONE_S
        try:
            digests = self._manifest(self._save) if self._save else self._sums()
            with ThreadPoolExecutor(self._downloads, thread_name_prefix="weights") as pool:
                for _ in pool.map(self._bring, *zip(*digests.items(), strict=True)):
                    pass
        except NotAsPinned as error:
            self.damaged = DamagedData(file=error.file, reason=error.reason)
            self._journal.note("data_damaged", file=error.file, reason=error.reason)
            write_message(self._run_dir / DAMAGED_DATA_FILE, self.damaged)
        except (*CLOUD_ERRORS, OSError) as error:
            self.trouble = f"{error_code(error)}: {str(error)[:200]}"
            self._journal.note("data_retry", error=error_code(error), text=str(error)[:200])
            return RETRY_S
        else:
            (self._run_dir / WEIGHTS_FOLDER).symlink_to(self.store)
            self.trouble = ""
            self._journal.note("weights_brought", files=len(digests))
        return DONE_S

    def _sums(self) -> dict[str, str]:
        """Return the digest by file of what the trainer reads. Raises NotAsPinned for a list that cannot be used."""
        raw = self._read(SUMS_FILE, SUMS_LIMIT_BYTES)
        found = hashlib.sha256(raw).hexdigest()
        if self._pinned not in (None, found):
            raise NotAsPinned(
                SUMS_FILE,
                f"its sha256 is {found[:12]}, when the job was accepted it was {str(self._pinned)[:12]}: the weights "
                "were replaced; put the old ones back, or submit a new job",
            )
        (self.store / SUMS_FILE).write_bytes(raw)
        pairs = [line.split(maxsplit=1) for line in raw.decode(errors="replace").splitlines() if line.strip()]
        if any(len(pair) != 2 for pair in pairs):
            raise NotAsPinned(SUMS_FILE, "it is not what sha256sum writes: a digest and a name a line")
        digests = {name.removeprefix("*"): digest for digest, name in pairs if name.endswith(WANTED)}
        try:
            digests = {plain_name(name): digest for name, digest in digests.items()}
        except ContractError as error:
            raise NotAsPinned(SUMS_FILE, str(error)) from error
        if not any(name.endswith(".safetensors") for name in digests):
            raise NotAsPinned(
                SUMS_FILE, "it lists no safetensors file; make it with sha256sum * in the weights' folder"
            )
        return digests

    def _manifest(self, named: SaveOf) -> dict[str, str]:
        """Return the digest by file of a committed save. Raises NotAsPinned for another one than was accepted."""
        raw = self._read(MANIFEST_FILE, MANIFEST_LIMIT_BYTES)
        try:
            pinned = self._pinned or read_manifest(raw).sha256 or ""
            manifest = open_manifest(raw, job=named.job, pointer=SavePointer(save=named.save, manifest_sha256=pinned))
            digests = {plain_name(file.path): file.sha256 for file in manifest.files}
        except ContractError as error:
            raise NotAsPinned(MANIFEST_FILE, str(error)) from error
        (self.store / MANIFEST_FILE).write_bytes(raw)
        return digests

    def _read(self, name: str, limit_bytes: int) -> bytes:
        raw = b""
        for chunk in streamed(self._place, name, self.loop):
            raw += chunk
            if len(raw) > limit_bytes:
                raise NotAsPinned(name, f"it has more than {limit_bytes} bytes")
        return raw

    def _bring(self, name: str, digest: str) -> None:
        kept = self.store / name
        if kept.exists() and sha256_of(kept)[0] == digest:
            return
        for last in (False, True):
            found = self._download(name, kept.with_name(f".{name}.part"))
            if found == digest:
                kept.with_name(f".{name}.part").replace(kept)
                return
            if last:
                lister = MANIFEST_FILE if self._save else SUMS_FILE
                raise NotAsPinned(name, f"sha256 {found[:12]}, {lister} says {digest[:12]}")

    def _download(self, name: str, draft: Path) -> str:
        digest = hashlib.sha256()
        with draft.open("wb") as file:
            for chunk in streamed(self._place, name, self.loop):
                digest.update(chunk)
                file.write(chunk)
        return digest.hexdigest()
