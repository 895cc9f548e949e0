"""What the operator does to the queue as a whole: hold, unhold, quotas, and the repair of the ledger."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace

from holdfast.application.ports import Ports
from holdfast.domain.errors import Raced, Rejected
from holdfast.domain.ledger import ALL_TEAMS, Ledger, Quota, QuotaChange

TRIES = 20
LONGEST_PAUSE_S = 0.5
TEAM = re.compile(r"[a-z0-9][a-z0-9-]{0,30}")


def hold(scope: str, ports: Ports, *, by: str = "") -> bool:
    """No job of the scope (`all`, or a team) is started any more; running ones go on. False when it was held already.

    Raises Rejected for a scope that is no team's name.
    """
    name = _scope(scope)
    return _changed(lambda ledger: ledger.held(name, ports.clock(), by), ports)


def unhold(scope: str, ports: Ports) -> bool:
    """The hold on the scope is gone, and the dispatcher woken; False when there was none.

    A hold on `all` and one on a team stand side by side: each is taken away by its own unhold.
    """
    name = _scope(scope)
    return _changed(lambda ledger: ledger.unheld(name), ports)


def set_quota(
    kind: str, name: str, changed: Callable[[Quota], Quota], ports: Ports, *, by: str = "", wish: str | None = None
) -> bool:
    """The quota of the team or the market is what `changed` makes of it, from the next dispatch on; what runs goes on.

    The change stands in the table with who asked. `wish` tells two wishes apart: one that was obeyed before changes
    nothing, also when the quota was set anew meanwhile. False when nothing was changed. Raises Raced.
    """

    def once() -> bool:
        before = ports.store.quota(kind, name)
        after = changed(before)
        if wish is None and after == before:
            return False
        version = before.version + 1
        key = f"id#{wish}" if wish is not None else f"v#{version}"
        after = replace(after, version=version)
        change = QuotaChange(kind=kind, name=name, before=before, after=after, by=by, at=ports.clock(), key=key)
        return ports.store.put_quota(change)

    return _tried(once, ports)


def repair_ledger(ports: Ports) -> list[str]:
    """Places are gone whose job's row holds none; returns those jobs.

    Row and ledger move in one transaction, so there is nothing to find unless somebody wrote by hand. The ledger is
    read before the rows: a place that appears in between is not looked at, and one that goes moves the version, so that
    this repair is left to the next one.
    """
    ledger = ports.store.ledger()
    rows = {job.id: job for job in ports.store.load_all([place.job for place in ledger.in_flight])}
    stale = {place.job for place in ledger.in_flight if place.job not in rows or rows[place.job].reserved is None}
    if not stale:
        return []
    try:
        ports.store.put_ledger(ledger, ledger.without(stale, ports.clock()))
    except Raced:
        return []
    return sorted(stale)


def _changed(change: Callable[[Ledger], Ledger], ports: Ports) -> bool:
    """Apply the change to the newest ledger; False when it changes nothing. Raises Raced after many lost races."""

    def once() -> bool:
        before = ports.store.ledger()
        after = change(before)
        if after is not before:
            ports.store.put_ledger(before, replace(after, version=before.version + 1))
        return after is not before

    return _tried(once, ports)


def _tried(once: Callable[[], bool], ports: Ports) -> bool:
    """Return what the write returns, read and tried again after each race. Raises Raced after many."""
    for _ in range(TRIES - 1):
        try:
            return once()
        except Raced:
            ports.pause(random.uniform(0, LONGEST_PAUSE_S))
    return once()


def _scope(scope: str) -> str:
    if scope == "all":
        return ALL_TEAMS
    if not TEAM.fullmatch(scope):
        raise Rejected("bad_scope", f"{scope!r} is neither `all` nor the name of a team (a-z, 0-9 and -)")
    return scope
