"""What the agent and the ranks of a node tell each other: small JSON files in the run directory, replaced by rename.

    job.json                     agent -> ranks, once before they start: JobFile
    control.json                 agent -> ranks, read at each micro-step: Control
    needs/rank-<r>.json          rank -> agent: Needs, the files it wants of a save
    provided/rank-<r>.json       agent -> rank: Provided, the answer to that request
    data/index.json, data/...    agent -> ranks: the data set's proved index and shards, in the job's corpus_dir
    data-needs/rank-<r>.json     rank -> agent: DataNeeds, the shards it reads now and next
    evaluation/..., evaluation-needs/...  the same for the data set of the evaluation
    weights/                     agent -> ranks: the proved files of `init_from`, when it is an s3:// address
    damaged-data.json            agent -> ranks: DamagedData, what could not be brought as it was pinned
    saves/<save>/<files>         rank -> agent: the data files of a save, each complete once it has its name
    saves/<save>/rank-<r>.json   rank -> agent: RankSave, written when that rank's files are complete
    progress.json                global rank 0 -> agent: RankProgress
    network.json                 first rank of the node -> agent, once: NetworkCheck
    pulse/rank-<r>.json          rank -> agent: RankPulse
    outcome/rank-<r>.json        rank -> agent: Outcome, the last thing a rank writes
    metrics.jsonl                global rank 0: one line an optimizer step
    evaluations.jsonl            global rank 0: one line an evaluation
    events.jsonl                 each rank: what it did, with times

`r` is the global rank. Other exits of a rank than an Outcome with exit code 0 are crashes: see EXIT_CODES.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypeVar

from job_contract.checkpoint_layout import SavePointer
from job_contract.reports import FellBack
from job_contract.spec import JobSpec
from job_contract.version import decode, encode

T = TypeVar("T")

DAMAGED_DATA_FILE = "damaged-data.json"
WEIGHTS_FOLDER = "weights"
MEASURED_STEPS = 10

# Exit codes of a rank that ended on purpose without success; anything else is a crash.
EXIT_CODES = {
    70: "bad_checkpoint",
    71: "diverged",
    72: "out_of_memory",
    73: "peer_lost",
    74: "user_error",
    75: "network",
}


class ControlKind(StrEnum):
    NONE = "none"
    CHECKPOINT = "checkpoint"
    CHECKPOINT_STOP = "checkpoint_stop"
    STOP = "stop"


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """Everything a rank needs at its start; getppid must be `agent_pid`, so that no rank outlives its agent."""

    job: str
    attempt: int
    spec: JobSpec
    node_rank: int
    nodes: int
    agent_pid: int
    corpus_dir: str
    roster_id: str
    resume_from: SavePointer | None = None
    resume_parent: SavePointer | None = None


@dataclass(frozen=True, kw_only=True)
class Control:
    """The order for the ranks; generation only grows within an attempt. `doomed` are node ranks under notice."""

    attempt: int
    generation: int
    kind: ControlKind = ControlKind.NONE
    deadline_at: float | None = None
    doomed: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """`number` grows with each request of this rank. The manifest is always part of the answer."""

    number: int
    save: SavePointer
    files: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Provided:
    """Answer to the request of the same number: `folder` holds the verified files, or `damaged` says what was wrong."""

    number: int
    folder: str
    damaged: tuple[FellBack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DataNeeds:
    """Shards by their number in the index, in the order of need; `number` grows with each request of this rank.

    A shard is answered by its files: under their own names they are whole, and stay until no rank's needs have them.
    """

    number: int
    shards: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class DamagedData:
    """A file of the data set that is missing or has other bytes than were pinned; training cannot go on."""

    file: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RankSave:
    """One rank's share of a save, complete on local disk. Equal on all ranks but for `rank` and `files`.

    `failed` says which rank could not write, and why; there is no save then.
    """

    rank: int
    save: str
    step: int
    world_size: int
    mesh: tuple[int, ...]
    config_hash: str
    corpus_digest: str
    versions: dict[str, str]
    facts: dict[str, Any]
    files: tuple[str, ...]
    final: bool = False
    answers_generation: int = 0
    restored: SavePointer | None = None
    failed: str | None = None


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """`state`: warming_up, loading_weights, restoring, waiting_for_data, running, evaluating, saving, finished.

    `started` once the first new optimizer step is done.

    `answered_generation` is the last order that the ranks have carried out, `newest_save` the save that answers it: a
    `checkpoint` order that finds its step already saved shows here only. The last six as in the report of this name;
    the means are over the last MEASURED_STEPS.
    """

    step: int
    loss: float
    tokens_per_s: float
    state: str
    world_size: int
    started: bool = False
    restored: str | None = None
    fell_back: tuple[FellBack, ...] = ()
    answered_generation: int | None = None
    newest_save: str | None = None
    step_ms: float | None = None
    data_wait_ms: float | None = None
    comm_ms: float | None = None
    node_ms: tuple[float, ...] | None = None
    mfu: float | None = None
    evaluation_loss: float | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkCheck:
    """All ranks reached each other in one collective over `backend`; Gbit/s are what each node sent meanwhile."""

    backend: str
    world_size: int
    seconds: float
    bandwidth_gbps: float


@dataclass(frozen=True, kw_only=True)
class RankPulse:
    """What the rank is at: starting, warming_up, restoring, running, saving, evaluating, ending, or its own word.

    It hangs when no other pulse has come `bound_s` seconds after this one. A rank that writes none is not watched.
    `waits_for` names what the agent has to fetch for it first.
    """

    rank: int
    phase: str
    step: int
    bound_s: float
    waits_for: str | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a rank ended: finished, stopped (checkpointed) or aborted (stopped without a save).

    `save` is the final save; `existing` says that it had been made before the order came.
    """

    outcome: str
    step: int
    loss: float
    answers_generation: int = 0
    save: str | None = None
    existing: bool = False
    reason: str = ""
    fell_back: tuple[FellBack, ...] = field(default_factory=tuple)


def write_message(path: Path, message: Any) -> None:
    """Replace the file in one step, so that a reader sees the old message or the new one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(encode(message)))
    draft.replace(path)


def read_message(path: Path, kind: type[T]) -> T | None:
    """Return the message in the file, None when there is none yet."""
    try:
        raw = path.read_text()
    except FileNotFoundError:
        return None
    return decode(kind, json.loads(raw))
