"""What the node's environment says, and every interval and limit of the agent in one place."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_ROOT = "/var/lib/holdfast"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The HOLDFAST_* variables of the node. `root` is this node's alone; each start clears its run directory."""

    orders_table: str
    report_queue_url: str
    bucket: str
    root: Path
    corpus_dir: Path
    log_group: str = ""
    command: tuple[str, ...] = (sys.executable, "-m", "trainer")

    @property
    def run_dir(self) -> Path:
        return self.root / "run"

    @property
    def kept_dir(self) -> Path:
        """Holds the newest committed save of an earlier attempt, so that a survivor restores from its own disk."""
        return self.root / "kept"

    @property
    def past_dir(self) -> Path:
        """Holds what the ranks of earlier attempts wrote of themselves: metrics, events, logs, outcomes."""
        return self.root / "past"

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Settings:
        """Raises KeyError with the variable's name when one is missing."""
        root = Path(environment.get("HOLDFAST_NODE_ROOT", DEFAULT_ROOT)).resolve()
        return cls(
            orders_table=environment["HOLDFAST_ORDERS_TABLE"],
            report_queue_url=environment["HOLDFAST_REPORT_QUEUE_URL"],
            bucket=environment["HOLDFAST_BUCKET"],
            root=root,
            corpus_dir=Path(environment.get("HOLDFAST_CORPUS_DIR", root / "corpus")),
            log_group=environment.get("HOLDFAST_LOG_GROUP", ""),
        )


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Seconds between looks, and limits. Polls of other nodes than the leader are spread by `jitter`."""

    tick_s: float = 0.1
    orders_idle_s: float = 1.0
    orders_leader_s: float = 2.0
    orders_other_s: float = 5.0
    jitter: tuple[float, float] = (0.8, 1.2)
    metadata_s: float = 2.0
    warnings_s: float = 30.0
    ready_s: float = 3.0
    ready_most_s: float = 120.0
    heartbeat_s: float = 10.0
    heartbeat_nodes: int = 2
    progress_look_s: float = 0.5
    parts_s: float = 0.3
    save_grace_s: float = 600.0
    upload_retry_s: float = 30.0
    doomed_slack_s: float = 5.0
    uploads: int = 4
    uploads_doomed: int = 16
    downloads: int = 4
    rank_end_s: float = 1.0
    exits_settle_s: float = 0.5
    last_exit_s: float = 30.0
    hang_grace_s: float = 3.0
    stacks_s: float = 0.3
    flush_s: float = 2.0
    follow_s: float = 10.0
    faults_in_a_row: int = 50
