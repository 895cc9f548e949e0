"""How weights to start from lie in a bucket, for the door that pins them, the agent and the trainer."""

from __future__ import annotations

import re
from dataclasses import dataclass

from job_contract.checkpoint_layout import SAVE_NAME

SUMS_FILE = "SHA256SUMS"
SUMS_LIMIT_BYTES = 1 << 20
# Some seventy thousand files of a save.
MANIFEST_LIMIT_BYTES = 16 << 20

_SAVE = re.compile(rf"s3://[^/]+/teams/[^/]+/jobs/(?P<job>[^/]+)/saves/(?P<save>{SAVE_NAME.pattern})/?")


@dataclass(frozen=True)
class SaveOf:
    """A save by its name, and the job whose it is."""

    job: str
    save: str


def save_of(init_from: str) -> SaveOf | None:
    """Return the save that an address names, None for a folder of weights."""
    match = _SAVE.fullmatch(init_from)
    return SaveOf(match["job"], match["save"]) if match else None
