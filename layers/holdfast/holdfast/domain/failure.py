"""Classes of failure, each with a budget of its own: how many attempts of a job may end that way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class FailureClass:
    """`budget` attempts may end this way before the job fails; None = as many as it takes.

    `counts` says whether such an end also counts against the job's `limits.attempts`.
    `advice` is the way out, told when the budget is spent.
    """

    budget: int | None
    counts: bool
    advice: str


CLASSES: Mapping[str, FailureClass] = {
    "preemption": FailureClass(None, False, "none needed: spot capacity was taken back"),
    "capacity": FailureClass(None, False, "allow more instance types, zones or on-demand"),
    "peer_lost": FailureClass(20, False, "look at the ranks' logs: peers vanish without a notice"),
    "hardware": FailureClass(None, True, "quarantine the pool or choose another instance type"),
    "network": FailureClass(5, True, "check the security group, the EFA devices and the placement of the nodes"),
    "hang": FailureClass(3, True, "look at the ranks' stacks"),
    "crash": FailureClass(3, True, "look at the log tail of the rank that died first"),
    "save_failed": FailureClass(3, True, "check the bucket's policy and the nodes' way to it"),
    "fenced": FailureClass(3, True, "two attempts wrote at once: report this"),
    "supervisor": FailureClass(3, True, "the fault is Holdfast's, not the job's: report it with the agent's journal"),
    "lost": FailureClass(None, True, "the nodes fell silent: check endpoints and the image"),
    "bad_checkpoint": FailureClass(1, True, "restore from an older checkpoint"),
    "limit": FailureClass(0, True, "extend the limit and try again: `holdfast extend`, `holdfast retry`"),
    "budget_spent": FailureClass(0, True, "raise the budget: `holdfast extend JOB --budget-usd USD`"),
    "out_of_memory": FailureClass(
        0, True, "use more nodes, a bigger type, activation checkpointing, or a smaller micro batch"
    ),
    "diverged": FailureClass(0, True, "lower the learning rate or clip harder"),
    "user_error": FailureClass(0, True, "correct the request and submit it anew"),
}

PRIMARY = frozenset(CLASSES) - {"peer_lost", "fenced", "lost", "save_failed"}
"""Classes that say what went wrong; the others say only that something did, and a notice explains them."""


FRUITLESS_ATTEMPTS = 3
"""So many attempts in a row that end the same way without a new durable step are a loop."""

NEVER_A_LOOP = frozenset({"preemption", "capacity", "peer_lost"})
"""Ends in which the job has no part; a peer that is lost without a word was mostly reclaimed."""


def failure_class(name: str) -> FailureClass:
    """Return the class; a name that this release does not know is treated as a crash."""
    return CLASSES.get(name, CLASSES["crash"])


def spent(charged: Mapping[str, int], failure: str, attempts_limit: int) -> str | None:
    """Return why no further attempt is due after one more end of this class, None while one is."""
    rule = failure_class(failure)
    times = charged.get(failure, 0) + 1
    if rule.budget is not None and times > rule.budget:
        return f"{failure}: {times} of at most {rule.budget} tolerated; {rule.advice}"
    counted = sum(count for name, count in charged.items() if failure_class(name).counts) + rule.counts
    if rule.counts and counted >= attempts_limit:
        return f"{failure}: {counted} failed attempts reach limits.attempts = {attempts_limit}; {rule.advice}"
    return None


def looping(failure: str, fruitless: int) -> str | None:
    """Return why another attempt would only repeat the last ones, None while it may do better."""
    if failure in NEVER_A_LOOP or fruitless < FRUITLESS_ATTEMPTS:
        return None
    advice = failure_class(failure).advice
    return f"{failure}: {fruitless} attempts in a row ended so without one new checkpointed step; {advice}"
