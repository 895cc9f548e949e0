"""Names and digests of a checkpoint's data files."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from job_contract.checkpoint_layout import MANIFEST_FILE
from job_contract.version import ContractError

# DCP's names: `.metadata`, `__0_0.distcp`. Anything with a slash, a lone dot or two, or a leading dash is no name.
_PLAIN = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._][A-Za-z0-9._-]{0,199}")


def plain_name(name: str) -> str:
    """Return the name unchanged. Raises ContractError when it could lead out of its folder or into an option."""
    if not _PLAIN.fullmatch(name) or name == MANIFEST_FILE:
        raise ContractError(f"{name!r} is not a plain file name")
    return name


def sha256_of(path: Path) -> tuple[str, int]:
    """Return the file's digest in hex and its size in bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
