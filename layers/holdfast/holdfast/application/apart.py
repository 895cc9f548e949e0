"""One job's failure is no other's: each has its turn, and what failed is told when all had theirs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.domain.errors import Raced, Unavailable

NAMED = 5
"""Failures that one message quotes."""


class Faults:
    """What went wrong, by the name of the job or machine it went wrong with."""

    def __init__(self) -> None:
        self.found: dict[str, Exception] = {}

    @contextmanager
    def apart(self, name: str) -> Iterator[None]:
        """Whatever goes wrong inside is kept under the name, and the caller goes on."""
        try:
            yield
        except Exception as fault:  # noqa: BLE001 raised again by `tell`
            self.found[name] = fault

    def tell(self, what: str) -> None:
        """Raise what went wrong: the first fault that another try would not heal, else Unavailable with all names."""
        if not self.found:
            return
        quoted = "; ".join(f"{name}: {fault}" for name, fault in list(self.found.items())[:NAMED])
        whole = f"{what} failed: {quoted}"
        ours = [fault for fault in self.found.values() if not isinstance(fault, (Unavailable, Raced))]
        if not ours:
            raise Unavailable(whole) from next(iter(self.found.values()))
        ours[0].add_note(whole)
        raise ours[0]
