"""The life of a job in one picture.

    queued --> launching --> running ------> completed
                 ^    |          | notice
                 |    | lost     v
                 |    |      interrupted
                 |    v          | a node has heard the order
              resuming <-- checkpointing
                     saved, or the fleet lost at any moment        any phase --> failed (the class says why)

`paused` waits outside the line. Pause and cancel are an intent beside the phase: checkpoint, stop, release; then the
closing of the attempt reads the intent.
"""

from __future__ import annotations

from enum import StrEnum


class Phase(StrEnum):
    QUEUED = "queued"
    LAUNCHING = "launching"
    RUNNING = "running"
    INTERRUPTED = "interrupted"
    CHECKPOINTING = "checkpointing"
    RESUMING = "resuming"
    PAUSED = "paused"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLED = "cancelled"


class Intent(StrEnum):
    """What is wanted, whatever the phase; EXPIRE is what the job's own limits want."""

    RUN = "run"
    PAUSE = "pause"
    CANCEL = "cancel"
    EXPIRE = "expire"


ALIVE = frozenset({Phase.LAUNCHING, Phase.RUNNING, Phase.INTERRUPTED, Phase.CHECKPOINTING})
"""Machines are wanted or at work."""

WAITING = frozenset({Phase.QUEUED, Phase.RESUMING})
"""To be dispatched once the last attempt is closed."""

ENDED = frozenset({Phase.COMPLETED, Phase.FAILED, Phase.CANCELLED})
"""Nothing follows but the closing of the attempt."""
