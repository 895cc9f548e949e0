"""holdfast.control/1 -> what a user wants of a job that exists, or of the whole queue."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from holdfast.domain.errors import Rejected
from holdfast.domain.ledger import NO_QUOTA, Quota
from holdfast.messages.envelope import open_envelope
from holdfast.messages.job_request import DATASET_NAME
from holdfast.messages.refusal import Coded, printable, validated

SCHEMA = "holdfast.control/1"

Count = Annotated[int, Field(ge=1, le=31_536_000)]


class _Control(BaseModel):
    """A wish. `dedup_id` tells two wishes of one kind apart; without it they are one."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_: Literal["holdfast.control/1"] = Field(alias="schema", description=f'"{SCHEMA}"')
    dedup_id: Annotated[str, AfterValidator(printable)] | None = Field(
        None, min_length=1, max_length=128, description="1 to 128 printable characters"
    )
    requested_by: Annotated[str, AfterValidator(printable)] | None = Field(
        None, min_length=1, max_length=128, description="who asks, 1 to 128 printable characters"
    )


class JobControl(_Control):
    """A wish for one job."""

    action: str
    job: str = Field(pattern=r"^[a-z0-9-]{1,40}$", description="the job's id, as submit printed it")


class Cancel(JobControl):
    """Checkpoint, stop, release, for good."""

    action: Literal["cancel"] = Field(description='"cancel"')


class Pause(JobControl):
    """Checkpoint, stop, release, until resumed."""

    action: Literal["pause"] = Field(description='"pause"')


class Resume(JobControl):
    """Go on, with another number of nodes where one is given."""

    action: Literal["resume"] = Field(description='"resume"')
    nodes: int | None = Field(None, ge=1, le=1_000, description="machines, a whole number from 1 to 1000")


class Checkpoint(JobControl):
    """Save now and go on."""

    action: Literal["checkpoint"] = Field(description='"checkpoint"')


class Priority(JobControl):
    """Another place in the queue."""

    action: Literal["priority"] = Field(description='"priority"')
    priority: int = Field(ge=0, le=100, description="a whole number from 0 (last) to 100 (first)")


class Extend(JobControl):
    """Other limits, from now on."""

    action: Literal["extend"] = Field(description='"extend"')
    run_s: Count | None = Field(None, description="seconds one attempt may train")
    wait_s: Count | None = Field(None, description="seconds to wait for the first machines")
    attempts: int | None = Field(None, ge=1, le=1_000, description="failed attempts before the job fails")
    budget_usd: float | None = Field(None, gt=0, le=1_000_000_000, description="US dollars that may be spent")


class Retry(JobControl):
    """An ended job goes on from a save, on a new branch."""

    action: Literal["retry"] = Field(description='"retry"')
    save: str | None = Field(
        None, pattern=r"^step-\d{8}\.a\d{4,}\.s\d{2,}$", description="a save's name; the newest where none is given"
    )


class Hold(_Control):
    """Nothing more is dispatched, of one team or at all; what runs goes on."""

    action: Literal["hold"] = Field(description='"hold"')
    team: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="a team; all where none is given")


class Unhold(_Control):
    """Dispatching goes on."""

    action: Literal["unhold"] = Field(description='"unhold"')
    team: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="a team; all where none is given")


NO_LIMIT = "none"
Amount = Annotated[int, Field(ge=0, le=1_000_000)] | Literal["none"] | None
OF_TEAMS = ("weight", "preempt_from", "preemptible")


class SetQuota(_Control):
    """What a team or a market may have in flight, a team's share, and who makes room for whom.

    What is not named stays as it is. Lowering a limit stops no job that runs.
    """

    action: Literal["quota"] = Field(description='"quota"')
    team: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9-]{0,30}$", description="a team")
    market: Literal["spot", "on_demand", "mixed"] | None = Field(None, description="spot, on_demand or mixed")
    nodes: Amount = Field(None, description='machines in flight, a whole number from 0 to 1000000, or "none"')
    vcpus: Amount = Field(None, description='vCPUs in flight, a whole number from 0 to 1000000, or "none"')
    gpus: Amount = Field(None, description='GPUs in flight, a whole number from 0 to 1000000, or "none"')
    weight: float | None = Field(
        None, gt=0, le=1_000_000, description="the team's share, a number above 0 and at most 1000000"
    )
    preempt_from: Annotated[int, Field(ge=0, le=100)] | Literal["none"] | None = Field(
        None, description='the priority from which jobs of the team are urgent, a whole number from 0 to 100, or "none"'
    )
    preemptible: bool | None = Field(None, description="whether jobs of the team may be asked to make room")
    clear: Literal[True] | None = Field(None, description="true, to take the whole quota away")

    @property
    def scope(self) -> tuple[str, str]:
        """What the quota is of: team or market, and its name."""
        return ("team", self.team) if self.team is not None else ("market", str(self.market))

    @property
    def named(self) -> dict[str, Any]:
        """The fields of the quota that the wish names, as they shall be."""
        asked = self.model_dump(include={"nodes", "vcpus", "gpus", *OF_TEAMS}, exclude_none=True)
        return {name: None if value == NO_LIMIT else value for name, value in asked.items()}

    def applied(self, quota: Quota) -> Quota:
        """Return the quota after this wish."""
        return replace(NO_QUOTA, version=quota.version) if self.clear else replace(quota, **self.named)

    @model_validator(mode="after")
    def _says_one_thing(self) -> SetQuota:
        if (self.team is None) == (self.market is None):
            raise Coded("bad_quota", "a quota is of one team or of one market; give team, or market")
        of_teams = [name for name in OF_TEAMS if name in self.named]
        if self.market is not None and of_teams:
            raise Coded("bad_quota", f"{', '.join(of_teams)} is of teams only; leave it out, or give team for market")
        if self.clear and self.named:
            raise Coded("bad_quota", f"clear takes the whole quota away; leave out {', '.join(self.named)}, or clear")
        if not self.clear and not self.named:
            fields = ", ".join(("nodes, vcpus, gpus", *OF_TEAMS))
            raise Coded("bad_quota", f"nothing is to be set; give one of {fields}, or clear")
        return self


class RegisterDataset(_Control):
    """A dataset is known by a name and a version, which never change."""

    action: Literal["register_dataset"] = Field(description='"register_dataset"')
    name: str = Field(pattern=f"^{DATASET_NAME}$", description="1 to 63 characters a-z, 0-9 and -, the first no dash")
    version: int = Field(ge=1, le=999_999, description="a whole number from 1 to 999999; a version is put once")
    uri: str = Field(
        max_length=1_024,
        pattern=r"^(s3://[a-z0-9.-]{3,63}|file://)/\S+$",
        description="the folder of the dataset, s3://bucket/prefix or file:///mnt/folder",
    )
    digest: str | None = Field(
        None, pattern=r"^[0-9a-f]{64}$", description="the digest that its index must have, 64 hex digits"
    )


ControlRequest = (
    Cancel | Pause | Resume | Checkpoint | Priority | Extend | Retry | Hold | Unhold | SetQuota | RegisterDataset
)

ACTIONS: dict[str, type[Any]] = {
    "cancel": Cancel,
    "pause": Pause,
    "resume": Resume,
    "checkpoint": Checkpoint,
    "priority": Priority,
    "extend": Extend,
    "retry": Retry,
    "hold": Hold,
    "unhold": Unhold,
    "quota": SetQuota,
    "register_dataset": RegisterDataset,
}


def read_control(body: str) -> ControlRequest:
    """Return the control request in a message's body, plain or wrapped by SNS or EventBridge. Raises Rejected."""
    message = open_envelope(body)
    if message.get("schema") != SCHEMA:
        raise Rejected(
            "unknown_schema", f"schema is {message.get('schema')!r}; this queue takes {SCHEMA!r}, so set it to that"
        )
    kind = ACTIONS.get(str(message.get("action")))
    if kind is None:
        known = ", ".join(ACTIONS)
        raise Rejected("unknown_action", f"action is {message.get('action')!r}; known are {known}")
    request: ControlRequest = validated(kind, message)
    return request


def control_identity(request: JobControl) -> str:
    """Return what makes two control requests for one job the same wish: the action and its dedup_id.

    Without a dedup_id, a wish that carries values is told apart by them.
    """
    if request.dedup_id is not None:
        return f"{request.action}#{request.dedup_id}"
    values = request.model_dump(exclude={"schema_", "job", "action", "dedup_id", "requested_by"}, exclude_none=True)
    told = ",".join(f"{name}={value}" for name, value in sorted(values.items()))
    return request.action + (f"#{told}" if told else "")
