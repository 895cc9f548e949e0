"""What a step of a job usually takes, and when one takes more for so long that somebody should know.

A signal is all that comes of it: nothing here stops or moves a job. Which machine of a gang is slow by its own doing,
and is left for it, is straggler.py's question.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from job_contract.reports import Steady
from job_contract.version import canonical_json

OFF_FACTOR, BACK_FACTOR = 1.2, 1.1
"""More than this is off the baseline; what was off is back once it is no more than the second."""

LEAST_SHARE, LEAST_MS = 0.01, 1.0
"""And by so much of a usual step, and by so many milliseconds: below that it is noise of a short wait."""

OFF_REPORTS, OFF_LEAST_S = 3, 300.0
"""In so many reports running, and for so long: a neighbour, one slow shard."""

WINDOW_STEPS = 50
"""So many steady steps are a job's own first window, and worth keeping as a baseline."""

RENEWED_AFTER_S, KEPT_S = 30 * 86_400, 90 * 86_400
"""A baseline that is still true is written anew after the first, and forgotten after the second."""

MODEL_FIELDS = ("model", "sequence_length", "precision", "trainable", "lora")
WORK_FIELDS = (
    "global_batch",
    "micro_batch",
    "parallel",
    "activation_checkpointing",
    "compile",
    "prefetch",
    "reshard_after_forward",
)

FIGURES = {
    "step_ms": "a step takes",
    "comm_ms": "waiting for other ranks takes",
    "data_wait_ms": "waiting for data takes",
}


@dataclass(frozen=True, kw_only=True)
class BaselineKey:
    """What makes two jobs' steps comparable: the model, the type of instance, the world size, and the work of a step.

    `model` stands for the model, the length of a sequence and what else a token costs; `work` for how many tokens a
    step has and how they are split over ranks.
    """

    model: str
    instance_type: str
    world_size: int
    work: str

    @classmethod
    def of(cls, request: Mapping[str, Any], instance_type: str, world_size: int) -> BaselineKey:
        """Return the key of a job by its accepted request."""
        return cls(
            model=model_of(request),
            instance_type=instance_type,
            world_size=world_size,
            work=_digest({name: request["training"].get(name) for name in WORK_FIELDS}),
        )


def model_of(request: Mapping[str, Any]) -> str:
    """Return the name under which baselines of the request's model are kept."""
    command = (request.get("image") or {}).get("command")
    return _digest({**{name: request["training"].get(name) for name in MODEL_FIELDS}, "command": command})


def _digest(data: Mapping[str, Any]) -> str:
    return hashlib.sha256(canonical_json(data)).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """What steady steps of one job took at `at`, in milliseconds; `comm_ms` None = not measured there (GPUs)."""

    job: str
    at: float
    nodes: int
    world_size: int
    tokens_per_s: float
    step_ms: float
    data_wait_ms: float
    comm_ms: float | None = None

    @classmethod
    def of(cls, steady: Steady, *, job: str, at: float, nodes: int) -> Baseline:
        return cls(
            job=job,
            at=at,
            nodes=nodes,
            world_size=steady.world_size,
            tokens_per_s=steady.tokens_per_s,
            step_ms=steady.step_ms,
            data_wait_ms=steady.data_wait_ms,
            comm_ms=steady.comm_ms,
        )

    def outdone_by(self, own: Baseline) -> bool:
        """True when `own` should take this one's place: it is far faster, or this one is old and still true.

        A slower one never does, so what has become slow is not taken for usual.
        """
        if own.step_ms * OFF_FACTOR < self.step_ms:
            return True
        return own.at - self.at > RENEWED_AFTER_S and not excesses(own, self)


def one_node(known: Iterable[Baseline]) -> Baseline | None:
    """Return the fastest of those that one node alone reached, None when there is none."""
    return max((one for one in known if one.nodes == 1), key=lambda one: one.tokens_per_s, default=None)


@dataclass(frozen=True, kw_only=True)
class Excess:
    """One of FIGURES that is off its baseline, in milliseconds a step."""

    figure: str
    now_ms: float
    usual_ms: float

    @property
    def ms(self) -> float:
        return self.now_ms - self.usual_ms

    def __str__(self) -> str:
        more = f" (+{self.now_ms / self.usual_ms - 1:.0%})" if self.usual_ms >= LEAST_MS else ""
        return f"{FIGURES[self.figure]} {self.now_ms:,.0f} ms where {self.usual_ms:,.0f} is usual{more}"


def excesses(now: Steady | Baseline, usual: Baseline, factor: float = OFF_FACTOR) -> tuple[Excess, ...]:
    """Return what takes more than `factor` times as long as usual, in the order of FIGURES."""
    found = []
    least_ms = max(LEAST_MS, LEAST_SHARE * usual.step_ms)
    for figure in FIGURES:
        now_ms, usual_ms = getattr(now, figure), getattr(usual, figure)
        if now_ms is None or usual_ms is None:
            continue
        if now_ms > factor * usual_ms and now_ms - usual_ms > least_ms:
            found.append(Excess(figure=figure, now_ms=now_ms, usual_ms=usual_ms))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What the leader's reports of one attempt add up to. It stands in the leader's item, so it does not grow.

    `own` is the first window while it is not whole, `usual` what the attempt is judged by from then on. `reports`
    running, since `since_at`, have said the opposite of `told`, the sentence of a signal that holds on. `signals`
    counts those of this attempt.
    """

    attempt: int
    own: Steady | None = None
    usual: Baseline | None = None
    reports: int = 0
    since_at: float = 0.0
    told: str = ""
    signals: int = 0

    @property
    def window(self) -> Steady | None:
        """The first window, None while it is not whole or when it has done its work."""
        return self.own if self.own is not None and self.own.steps >= WINDOW_STEPS else None

    def grown(self, steady: Steady) -> Watch:
        """Return it with these steps in its first window."""
        return self if self.usual is not None else replace(self, own=together(self.own, steady))

    def judging_by(self, usual: Baseline) -> Watch:
        return replace(self, own=None, usual=usual)

    def judged(self, steady: Steady, at: float) -> Watch:
        """Return it after one more report; a signal that has come to its end is forgotten."""
        if self.usual is None:
            return self
        off = excesses(steady, self.usual, BACK_FACTOR if self.told else OFF_FACTOR)
        if bool(off) == bool(self.told):
            return replace(self, reports=0, since_at=0.0)
        counted = replace(self, reports=self.reports + 1, since_at=self.since_at if self.reports else at)
        return replace(counted, told="", reports=0, since_at=0.0) if counted.told and counted.ripe(at) else counted

    def ripe(self, at: float) -> bool:
        return self.reports >= OFF_REPORTS and at - self.since_at >= OFF_LEAST_S

    def signalling(self, at: float) -> bool:
        """True when a signal is due that was not given yet."""
        return not self.told and self.ripe(at)

    def same_signals(self, before: Watch | None) -> bool:
        """True when no signal was given since."""
        return before is not None and (before.attempt, before.signals) == (self.attempt, self.signals)

    def signalled(self, sentence: str) -> Watch:
        return replace(self, told=sentence, signals=self.signals + 1, reports=0, since_at=0.0)


def together(before: Steady | None, more: Steady) -> Steady:
    """Return both as one: means of their medians, by steps. Of another world size only the newer counts."""
    if before is None or before.world_size != more.world_size:
        return more
    steps = before.steps + more.steps

    def mean(one: float, other: float) -> float:
        return round((one * before.steps + other * more.steps) / steps, 2)

    comm_ms = None if before.comm_ms is None or more.comm_ms is None else mean(before.comm_ms, more.comm_ms)
    return replace(
        more,
        steps=steps,
        step_ms=mean(before.step_ms, more.step_ms),
        tokens_per_s=mean(before.tokens_per_s, more.tokens_per_s),
        data_wait_ms=mean(before.data_wait_ms, more.data_wait_ms),
        comm_ms=comm_ms,
    )


def culprit(off: Sequence[Excess], node_ms: Sequence[float]) -> int | None:
    """Return the node rank whose own time explains the excess, None when none does.

    The nodes' own times leave out what they waited for each other. So where the network is slow none stands out, and
    where one machine is, the others wait for it.
    """
    longest = max((one.ms for one in off if one.figure != "data_wait_ms"), default=0.0)
    if len(node_ms) < 2 or min(node_ms) <= 0 or not longest:
        return None
    rank = max(range(len(node_ms)), key=node_ms.__getitem__)
    others_ms = median([*node_ms[:rank], *node_ms[rank + 1 :]])
    explains = node_ms[rank] - others_ms >= longest / 2 or node_ms[rank] > OFF_FACTOR * others_ms
    return rank if explains else None


def sentence(off: Sequence[Excess], *, measured_on: str, node: str, own_ms: float = 0.0, others_ms: float = 0.0) -> str:
    """Return the signal in words. `node` is the one whose own time explains it, empty when none does."""
    said = "; ".join(map(str, off))
    if node:
        why = f"{node} needs {own_ms:,.0f} ms of its own where the others need {others_ms:,.0f}"
    elif any(one.figure == "comm_ms" for one in off):
        why = "no node's own work stands out, so look at the network"
    else:
        why = ""
    return ", ".join(filter(None, [said, why, f"measured on {measured_on}"]))
