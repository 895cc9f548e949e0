"""The world to look at and not to touch: reads are real, whatever would change something is left out."""

from __future__ import annotations

from typing import Any

from holdfast.application.ports import Ports

READS = frozenset(
    {
        "request",
        "load",
        "load_for",
        "waits",
        "intent",
        "node",
        "nodes",
        "roster",
        "teams",
        "waiting",
        "alive",
        "cold",
        "left_notices",
        "baseline",
        "baselines",
    }
    | {"patience", "quarantined", "subnets", "machine_types", "base_template", "reservation", "console_tail"}
    | {"groups", "templates"}
    | {"load_all", "history", "ledger", "quota", "quotas", "line", "template", "dataset", "holder"}
    | {"status", "of_fleet", "of_job", "of_stack", "described", "troubled", "pointer", "saves", "lineage"}
)
LEFT_OUT = frozenset(
    {"create", "save", "put_wait", "drop_wait", "put_roster", "open_intent", "close_intent", "own", "update_node"}
    | {"hold", "adopt", "mark_ending", "suspected", "expire", "claim", "explain"}
    | {
        "cool",
        "warm",
        "leave_notice",
        "keep_baseline",
        "keep_patience",
        "quarantine",
        "drop_group",
        "drop_template",
        "group_for",
        "template_for",
    }
    | {"put_ledger", "put_quota", "put_template", "put_dataset"}
    | {"start", "settle", "buy", "terminate", "take_over", "forget", "publish", "result"}
)
"""Every promise of ports.py is in one of the two; a test says so."""


class LookOnly:
    """A port of which only the reads are kept; anything else does nothing and returns None."""

    def __init__(self, port: Any) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Any:
        if name in READS:
            return getattr(self._port, name)
        if name not in LEFT_OUT:
            raise AttributeError(f"{name} is neither a read nor known to change something")
        return lambda *_, **__: None


class DryRun:
    """Keeps ports.Ports without consequences."""

    def __init__(self, ports: Ports) -> None:
        self.clock, self.pause = ports.clock, ports.pause
        self.store: Any = LookOnly(ports.store)
        self.workflow: Any = LookOnly(ports.workflow)
        self.fleets: Any = LookOnly(ports.fleets)
        self.checkpoints: Any = LookOnly(ports.checkpoints)
        self.outbox: Any = LookOnly(ports.outbox)
