"""What the nodes tell the supervisor: small messages on the report queue, one dataclass a kind.

A report counts only when the queue's SenderId ends in `:<instance>` and the instance is a member of the job.
Times (`at`, `deadline_at`) are seconds since 1970 (UTC).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from job_contract.checkpoint_layout import SavePointer
from job_contract.version import CONTRACT_VERSION, ContractError, decode, encode


@dataclass(frozen=True, kw_only=True)
class Report:
    """What every report carries."""

    kind: ClassVar[str] = ""
    job: str
    attempt: int
    instance: str
    at: float


@dataclass(frozen=True, kw_only=True)
class Ready(Report):
    """The node waits for orders; repeated until its orders name it. `port` is free and held for rank 0.

    None = not known: the GPU driver's version, the cluster placement group, the sum of the EFA links, and a name of
    the hardware itself (such as a digest of its GPUs' serial numbers) that stays when the instance is gone.
    `efa_provider` is empty where libfabric was asked and has none. `topology` is one line a GPU, in the order of
    local ranks: PCI address, NUMA node, nearest CPUs, nearest EFA devices.
    """

    kind: ClassVar[str] = "ready"
    ip: str
    port: int
    interface: str
    instance_type: str
    zone: str
    gpus: int = 0
    efa_devices: int = 0
    clock_offset_s: float = 0.0
    driver: str | None = None
    placement_group: str | None = None
    bandwidth_gbps: float | None = None
    host: str | None = None
    efa_provider: str | None = None
    disk_free_bytes: int | None = None
    memory_free_bytes: int | None = None
    topology: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkChecked(Report):
    """The preflight group worked; `provider` is what carried it (efa, gloo), `bandwidth_gbps` what it reached."""

    kind: ClassVar[str] = "network_checked"
    provider: str
    seconds: float
    bandwidth_gbps: float | None = None


@dataclass(frozen=True, kw_only=True)
class FellBack:
    """A save that could not be restored, with the file and the reason."""

    save: str
    file: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Started(Report):
    """The first new optimizer step is done; `restored` is the save it started from, `step` the step it had."""

    kind: ClassVar[str] = "started"
    step: int
    world_size: int
    restored: str | None = None
    fell_back: tuple[FellBack, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Heard(Report):
    """The node has handed the order of this generation to its ranks."""

    kind: ClassVar[str] = "heard"
    generation: int
    action: str


@dataclass(frozen=True, kw_only=True)
class Steady:
    """What an optimizer step took since the report before, as the median over `steps` steps, in milliseconds.

    Left out are the first steps after a start, and those beside a save or an evaluation. `comm_ms` None = not known.
    """

    steps: int
    world_size: int
    step_ms: float
    tokens_per_s: float
    data_wait_ms: float
    comm_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Progress(Report):
    """Where training is; `tokens_per_s` is of the whole job. None = not known, as all below are on a CPU.

    Milliseconds are means of a step over the last few: all of it, waiting for data, waiting for other ranks.
    `node_ms` is each node's own time by node rank, without what it waited for others: the sum of a step's own parts,
    or where a GPU hides them, a fixed piece of work; it compares the nodes of one report and nothing else. `mfu` is
    (6 N + 12 L D T) x tokens/s / (ranks x peak), N parameters without the embedding, L layers, D width, T tokens a
    sequence. `gpus` has one line a GPU of the reporting node. `steady` is what is compared with a baseline.
    """

    kind: ClassVar[str] = "progress"
    step: int
    loss: float
    tokens_per_s: float
    state: str = "running"
    step_ms: float | None = None
    data_wait_ms: float | None = None
    comm_ms: float | None = None
    node_ms: tuple[float, ...] | None = None
    mfu: float | None = None
    gpus: tuple[str, ...] | None = None
    disk_free_bytes: int | None = None
    memory_free_bytes: int | None = None
    evaluation_loss: float | None = None
    steady: Steady | None = None


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Report):
    """The save is committed: manifest and head are in. `existing` = it already held the step, nothing was written.

    From node rank 0 it is a progress report at once: the figures that both have, as they were last.
    `answered_after_s` is the time from the order that it answers, as this node saw it, to the commit.
    """

    kind: ClassVar[str] = "checkpoint_saved"
    save: str
    manifest_sha256: str
    step: int
    final: bool = False
    answers_generation: int = 0
    existing: bool = False
    size_bytes: int = 0
    parent: SavePointer | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    node_ms: tuple[float, ...] | None = None
    answered_after_s: float | None = None
    evaluation_loss: float | None = None
    steady: Steady | None = None


@dataclass(frozen=True, kw_only=True)
class SaveLost(Report):
    """A save that was begun is not committed, and the ranks go on; `reason` has node, file and error code."""

    kind: ClassVar[str] = "save_lost"
    save: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Finished(Report):
    """All steps are trained and the last save is committed."""

    kind: ClassVar[str] = "finished"
    step: int
    loss: float
    save: str


@dataclass(frozen=True, kw_only=True)
class Failed(Report):
    """The ranks ended without a save that answers an order; `failure` is one of `FAILURES`."""

    kind: ClassVar[str] = "failed"
    failure: str
    reason: str
    exit_code: int | None = None
    rank: int | None = None
    log_tail: str = ""


@dataclass(frozen=True, kw_only=True)
class Unfit(Report):
    """The node should not take part in another attempt; `host` as in Ready."""

    kind: ClassVar[str] = "unfit"
    reason: str
    host: str | None = None


@dataclass(frozen=True, kw_only=True)
class NoticeSeen(Report):
    """The node's own metadata says that it will be ended; the node has already started its checkpoint.

    Where `action` is `rebalance`, or EC2's code of a maintenance that begins at `deadline_at`, it has started nothing.
    """

    kind: ClassVar[str] = "notice_seen"
    action: str
    deadline_at: float


FAILURES = (
    "preemption",
    "peer_lost",
    "hardware",
    "hang",
    "network",
    "out_of_memory",
    "diverged",
    "user_error",
    "bad_checkpoint",
    "crash",
    "fenced",
    "save_failed",
)

KINDS: dict[str, type[Report]] = {
    kind.kind: kind
    for kind in (
        Ready,
        NetworkChecked,
        Started,
        Heard,
        Progress,
        CheckpointSaved,
        SaveLost,
        Finished,
        Failed,
        Unfit,
        NoticeSeen,
    )
}


def encode_report(report: Report) -> dict[str, Any]:
    """Return the report as the body of a message."""
    return {"contract": CONTRACT_VERSION, "kind": report.kind, **encode(report)}


def decode_report(body: Mapping[str, Any]) -> Report:
    """Return the report in a message's body. Raises UnknownVersion or ContractError."""
    kind = KINDS.get(str(body.get("kind")))
    if kind is None:
        raise ContractError(f"unknown kind of report {body.get('kind')!r}; known are {', '.join(KINDS)}")
    return decode(kind, body)
