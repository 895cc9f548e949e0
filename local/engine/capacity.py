"""EC2 capacity as a pure model: who gets how many machines, which error says why not, and the life of each instance.

No clock, no I/O, no ministack: times come in as epoch seconds, and whoever changes a state publishes it.
Answers follow CreateFleet `type=instant`: a shortfall is an answer with errors, not an exception.
"""

import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

ANY = "*"

MESSAGES = {
    "InsufficientInstanceCapacity": (
        "We currently do not have sufficient {instance_type} capacity in the Availability Zone you requested ({zone})."
    ),
    "MaxSpotInstanceCountExceeded": "Max spot instance count exceeded",
    "VcpuLimitExceeded": (
        "You have requested more vCPU capacity than your current vCPU limit of 192 allows for the instance bucket "
        "that the specified instance type belongs to."
    ),
    "UnfulfillableCapacity": (
        "Unable to fulfill capacity due to your request configuration. Please adjust your request and try again."
    ),
    "InsufficientFreeAddressesInSubnet": (
        "There are not enough free addresses in subnet '{subnet_id}' to satisfy the requested number of instances."
    ),
    "ReservationCapacityExceeded": (
        "The requested reservation does not have sufficient compatible and available capacity for this request."
    ),
    "SpotMaxPriceTooLow": (
        "Your Spot request price of 9.0 is lower than the minimum required Spot request fulfillment price of 9.8321."
    ),
    "UnauthorizedOperation": (
        "You are not authorized to perform this operation. Encoded authorization failure message: EXAMPLE"
    ),
}

USER_SHUTDOWN = "Client.UserInitiatedShutdown"
INSTANCE_SHUTDOWN = "Client.InstanceInitiatedShutdown"
SPOT_TERMINATION = "Server.SpotInstanceTermination"
HOST_FAILURE = "Server.InternalError"

STATE_CODES = {"pending": 0, "running": 16, "shutting-down": 32, "terminated": 48}
STATE_REASONS = {
    USER_SHUTDOWN: "Client.UserInitiatedShutdown: User initiated shutdown",
    INSTANCE_SHUTDOWN: "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
    SPOT_TERMINATION: "Server.SpotInstanceTermination: Spot instance termination",
    HOST_FAILURE: "Server.InternalError: Internal error on launch",
}


class IdempotentParameterMismatch(Exception):
    """The client token was used before with other parameters."""


class InstanceNotFound(Exception):
    """Ids that don't exist, or are not visible yet; `args[0]` is the list."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One override of one launch template: what may be launched, and where."""

    instance_type: str
    zone: str
    subnet_id: str = ""
    launch_template: str = ""
    version: str = "$Default"
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class FleetRequest:
    candidates: tuple[Candidate, ...]
    market: str
    target: int
    minimum: int = 0
    single_type: bool = False
    single_zone: bool = False
    client_token: str = ""
    instance_tags: tuple[tuple[str, str], ...] = ()
    fleet_tags: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Filled:
    candidate: Candidate
    instance_ids: tuple[str, ...]


@dataclass(frozen=True)
class Refused:
    candidate: Candidate
    code: str
    message: str


@dataclass(frozen=True)
class FleetAnswer:
    fleet_id: str
    filled: tuple[Filled, ...] = ()
    refused: tuple[Refused, ...] = ()

    @property
    def instance_ids(self) -> tuple[str, ...]:
        return tuple(instance_id for part in self.filled for instance_id in part.instance_ids)


@dataclass(kw_only=True)
class Instance:
    instance_id: str
    fleet_id: str
    candidate: Candidate
    market: str
    launched_at: float
    tags: dict[str, str]
    state: str = "pending"
    reason: str = ""
    ended_at: float | None = None
    claimed: bool = False
    scheduled: list[tuple[str, float, str]] = field(default_factory=list)
    """Scheduled events: code, when it begins at the earliest, description."""
    impaired_since: float | None = None

    @property
    def reason_text(self) -> str:
        return STATE_REASONS.get(self.reason, self.reason)


@dataclass
class Pool:
    """Free machines of one (type, zone, market); `slots` None means plenty. `code` says why when they run out.
    A `partial` pool gives what it has although a minimum was asked."""

    slots: int | None = None
    code: str = "InsufficientInstanceCapacity"
    partial: bool = False

    def take(self, wanted: int) -> int:
        if self.slots is None:
            return wanted
        taken = min(wanted, self.slots)
        self.slots -= taken
        return taken

    def give_back(self, count: int) -> None:
        if self.slots is not None:
            self.slots += count


def _instance_id() -> str:
    return f"i-0{uuid.uuid4().hex[:16]}"


@dataclass
class Capacity:
    """Pools, fleets and instances of one region. A terminated instance stays visible."""

    new_instance_id: Callable[[], str] = _instance_id
    visible_delay_s: float = 0.0
    pools: dict[tuple[str, str, str], Pool] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)
    fleets: dict[str, FleetRequest] = field(default_factory=dict)
    _answers: dict[str, tuple[FleetRequest, FleetAnswer]] = field(default_factory=dict)

    def set_pool(
        self,
        *,
        instance_type: str = ANY,
        zone: str = ANY,
        market: str = ANY,
        slots: int | None,
        code: str = "",
        partial: bool = False,
    ) -> None:
        """The pool has `slots` free machines and refuses the rest with `code`; a code without slots refuses all."""
        if code and slots is None:
            slots = 0
        self.pools[(instance_type, zone, market)] = Pool(slots, code or "InsufficientInstanceCapacity", partial)

    def create_fleet(self, request: FleetRequest, *, now: float) -> FleetAnswer:
        """The answer to the request, the same one for the same client token. Candidates are tried in their order;
        the first group (one type, one zone, if so asked) that gives everything wins, else the one that gives most."""
        if request.client_token in self._answers:
            first_request, answer = self._answers[request.client_token]
            if first_request != request:
                raise IdempotentParameterMismatch(request.client_token)
            return answer
        answer = self._fill(request, now)
        if request.client_token:
            self._answers[request.client_token] = (request, answer)
        return answer

    def describe(self, instance_ids: Iterable[str] = (), *, now: float) -> list[Instance]:
        """The named instances, or all. Raises InstanceNotFound for a name that is unknown or too young to be seen."""
        wanted = list(instance_ids)
        visible = {key: one for key, one in self.instances.items() if now >= one.launched_at + self.visible_delay_s}
        if missing := [key for key in wanted if key not in visible]:
            raise InstanceNotFound(missing)
        return [visible[key] for key in wanted] if wanted else list(visible.values())

    def boot(self, instance_id: str) -> bool:
        """A pending instance is running; whether anything changed."""
        return self._move(instance_id, {"pending"}, "running")

    def claim(self, instance_id: str) -> None:
        """AWS wants the machine back: whoever ends it, nobody gets its slot."""
        self.instances[instance_id].claimed = True

    def shut_down(self, instance_id: str, reason: str, *, now: float) -> bool:
        """A pending or running instance is shutting down for the reason; whether anything changed."""
        if not self._move(instance_id, {"pending", "running"}, "shutting-down"):
            return False
        one = self.instances[instance_id]
        one.reason, one.ended_at = reason, now
        return True

    def terminate(self, instance_id: str) -> bool:
        """An instance that was shutting down is terminated. Its slot is free again unless AWS took the machine away, or
        has claimed it by a notice."""
        if not self._move(instance_id, {"shutting-down"}, "terminated"):
            return False
        one = self.instances[instance_id]
        if one.reason.startswith("Client.") and not one.claimed:
            self._pool(one.candidate, one.market).give_back(1)
        return True

    def _move(self, instance_id: str, allowed: set[str], state: str) -> bool:
        one = self.instances[instance_id]
        if one.state not in allowed:
            return False
        one.state = state
        return True

    def _pool(self, candidate: Candidate, market: str) -> Pool:
        for instance_type in (candidate.instance_type, ANY):
            for zone in (candidate.zone, ANY):
                for kind in (market, ANY):
                    if (instance_type, zone, kind) in self.pools:
                        return self.pools[(instance_type, zone, kind)]
        return Pool()

    def _fill(self, request: FleetRequest, now: float) -> FleetAnswer:
        fleet_id = f"fleet-{uuid.uuid4()}"
        self.fleets[fleet_id] = request
        refused: list[Refused] = []
        best: list[tuple[Candidate, int]] = []
        for group in _groups(request):
            taken = self._try(group, request)
            short = _total(taken) < request.target
            if short:
                refused += [self._refusal(candidate, request) for candidate in group]
            if _total(taken) > _total(best):
                best, taken = taken, best
            self._undo(taken, request.market)
            if not short:
                break
        if _total(best) < request.minimum and not any(self._pool(one, request.market).partial for one, _ in best):
            self._undo(best, request.market)
            best = []
        filled = tuple(self._launch(fleet_id, candidate, count, request, now) for candidate, count in best)
        return FleetAnswer(fleet_id, filled, tuple(dict.fromkeys(refused)))

    def _try(self, group: list[Candidate], request: FleetRequest) -> list[tuple[Candidate, int]]:
        taken: list[tuple[Candidate, int]] = []
        for candidate in group:
            count = self._pool(candidate, request.market).take(request.target - _total(taken))
            if count:
                taken.append((candidate, count))
        return taken

    def _undo(self, taken: list[tuple[Candidate, int]], market: str) -> None:
        for candidate, count in taken:
            self._pool(candidate, market).give_back(count)

    def _refusal(self, candidate: Candidate, request: FleetRequest) -> Refused:
        code = self._pool(candidate, request.market).code
        message = MESSAGES.get(code, code).format(
            instance_type=candidate.instance_type, zone=candidate.zone, subnet_id=candidate.subnet_id
        )
        return Refused(candidate, code, message)

    def _launch(self, fleet_id: str, candidate: Candidate, count: int, request: FleetRequest, now: float) -> Filled:
        ids = tuple(self.new_instance_id() for _ in range(count))
        for instance_id in ids:
            self.instances[instance_id] = Instance(
                instance_id=instance_id,
                fleet_id=fleet_id,
                candidate=candidate,
                market=request.market,
                launched_at=now,
                tags=dict(request.instance_tags) | {"aws:ec2:fleet-id": fleet_id},
            )
        return Filled(candidate, ids)


def _groups(request: FleetRequest) -> list[list[Candidate]]:
    groups: dict[tuple[str, str], list[Candidate]] = {}
    for candidate in request.candidates:
        key = (
            candidate.instance_type if request.single_type else ANY,
            candidate.zone if request.single_zone else ANY,
        )
        groups.setdefault(key, []).append(candidate)
    return list(groups.values())


def _total(taken: list[tuple[Candidate, int]]) -> int:
    return sum(count for _, count in taken)
