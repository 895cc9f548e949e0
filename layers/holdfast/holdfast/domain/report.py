"""What a run has done, as one document (holdfast.report/1): progress, interruptions, saves, attempts, cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from holdfast.domain.baseline import WINDOW_STEPS, Baseline
from holdfast.domain.cost import cost
from holdfast.domain.job import Job
from job_contract.checkpoint_layout import parse_save_name

SCHEMA = "holdfast.report/1"
MOST_POINTS = 500
"""Points of each curve; more would not be seen on a page."""

TROUBLES = frozenset({"interruption_noticed", "fleet_lost", "failed", "move_planned"})
"""One loss may show as several of them; `interruptions` counts it once, as the result does."""
SMALL_MEMORY = 0.8
"""A GPU that never had more of its memory in use could take a larger batch."""

MFU_FORMULA = (
    "(6 N + 12 L D T) x tokens/s / (ranks x peak); "
    "N parameters without the embedding, L layers, D width, T tokens a sequence"
)
EFFICIENCY_FORMULA = "tokens/s / (nodes x tokens/s of one node)"

SLOWED = "steps_slowed"
STARTS = {"attempt_started": "started_at", "fleet_bought": "bought_at", "all_ready": "ready_at"}

History = Sequence[Mapping[str, Any]]


def run_report(
    job: Job,
    history: History,
    metrics: Iterable[Mapping[str, Any]],
    *,
    steps: int,
    speed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the report of a job from its row, its history (oldest first) and its ranks' metrics, in any order.

    `speed` is what speed_of made of the same, with the baseline that it was held against.
    Times are seconds since 1970 (UTC). `curve` holds at most MOST_POINTS points of the steps that count: where a step
    was trained twice, the later training. `goodput` is the share of the time since submission in which steps were
    made that count.
    """
    told = list(metrics)
    lines = counted(line for line in told if "loss" in line)
    evaluations = counted(line for line in told if "evaluation_loss" in line)
    ended_at = job.ended_at or job.phase_at
    useful_s = sum(line["seconds"] for line in lines)
    elapsed_s = ended_at - job.submitted_at
    return {
        "schema": SCHEMA,
        "job": job.id,
        "name": job.name,
        "team": job.team,
        "phase": job.phase.value,
        "reason": job.reason,
        "step": job.step,
        "steps": steps,
        "submitted_at": job.submitted_at,
        "ended_at": ended_at,
        "attempts": attempts(history),
        "interruptions": job.interruptions,
        "troubles": [trouble(one) for one in history if one["kind"] in TROUBLES],
        "checkpoints": checkpoints(history),
        "lost_steps": job.lost_steps,
        "node_seconds": job.node_seconds,
        "trained_s": job.trained_s,
        "cost_usd": cost(job, ended_at).known_usd,
        "goodput": round(useful_s / elapsed_s, 4) if lines and elapsed_s > 0 else None,
        "tokens": sum(line.get("tokens", 0) for line in lines),
        "speed": dict(speed_of(history, told) if speed is None else speed),
        "curve": [point(line) for line in thinned(lines, MOST_POINTS)],
        "evaluations": [{"step": line["step"], "loss": _finite(line["evaluation_loss"])} for line in evaluations],
    }


def speed_of(
    history: History, metrics: Iterable[Mapping[str, Any]], one_node: Baseline | None = None
) -> dict[str, Any]:
    """Return what steady steps took in the attempt that had most of them, and how well its nodes scaled.

    Milliseconds are medians of a step: all of it, waiting for data, waiting for other ranks. `efficiency` is by
    EFFICIENCY_FORMULA against `one_node`, None where that is not known, and `efficiency_unknown` says why; `mfu` by
    MFU_FORMULA, None without GPUs whose peak is known. `advice` is for the next run.
    """
    slow = [
        {"at": one["at"], "attempt": one["attempt"], "what": one["cause"]} for one in history if one["kind"] == SLOWED
    ]
    found: dict[str, Any] = {"slowdowns": slow, "mfu_formula": MFU_FORMULA, "efficiency_formula": EFFICIENCY_FORMULA}
    line = steadiest(metrics)
    if line is None:
        why = "no attempt told of steady steps: too few of them, or an image that does not measure them"
        return {**found, "efficiency": None, "efficiency_unknown": why, "advice": []}
    steady, attempt = line["steady"], line["attempt"]
    where = where_of(history, attempt)
    tokens_per_s, nodes = steady["tokens_per_s"], where.get("nodes")
    efficiency, unknown = None, ""
    if not nodes:
        unknown = f"the history does not say on how many nodes attempt {attempt} ran"
    elif one_node is None or not one_node.tokens_per_s:
        unknown = (
            f"no run of this model on one {where.get('instance_type')} is known; "
            f"one of {WINDOW_STEPS} steady steps or more makes it so"
        )
    else:
        efficiency = round(tokens_per_s / (nodes * one_node.tokens_per_s), 4)
    return {
        **found,
        "attempt": attempt,
        "instance_type": where.get("instance_type"),
        "nodes": nodes,
        **{name: steady.get(name) for name in ("world_size", "step_ms", "data_wait_ms", "comm_ms", "tokens_per_s")},
        "steady_steps": steady["steps"],
        "mfu": line.get("mfu"),
        "gpu_memory": line.get("gpu_memory"),
        "one_node_tokens_per_s": one_node.tokens_per_s if one_node else None,
        "one_node_job": one_node.job if one_node else None,
        "efficiency": efficiency,
        "efficiency_unknown": unknown,
        "advice": advice(line.get("gpu_memory")),
    }


def steadiest(metrics: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the line about the most steady steps, None when no attempt told of any."""
    return max((line for line in metrics if "steady" in line), key=lambda line: line["steady"]["steps"], default=None)


def where_of(history: History, attempt: int) -> Mapping[str, Any]:
    """Return instance_type and nodes of an attempt, nothing when the history does not say."""
    bought = [one["detail"] for one in history if (one["kind"], one["attempt"]) == ("fleet_bought", attempt)]
    return bought[-1] if bought else {}


def advice(gpu_memory: float | None) -> list[str]:
    """Return hints for the next run; `gpu_memory` is the most that was in use of the fullest GPU, as a share."""
    if gpu_memory is None or gpu_memory >= SMALL_MEMORY:
        return []
    return [
        f"No GPU had more than {gpu_memory:.0%} of its memory in use: the batch may be too small. "
        "A larger micro_batch, or less activation checkpointing, may be faster."
    ]


def counted(metrics: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the lines that count, by step: of an attempt those before the first step of every later attempt.

    A line tells of `steps` steps, 1 when it does not say, and `step` is the last of them.
    """
    by_attempt: dict[int, dict[int, Mapping[str, Any]]] = {}
    for line in metrics:
        by_attempt.setdefault(line["attempt"], {})[line["step"]] = line
    counted, end = list[Mapping[str, Any]](), float("inf")
    for attempt in sorted(by_attempt, reverse=True):
        counted += [line for step, line in by_attempt[attempt].items() if step < end]
        end = min(end, *(line["step"] - line.get("steps", 1) + 1 for line in by_attempt[attempt].values()))
    return sorted(counted, key=lambda line: line["step"])


def thinned(lines: Sequence[Mapping[str, Any]], most: int) -> list[Mapping[str, Any]]:
    """Return at most `most` of the lines, evenly spread, the first and the last among them."""
    if len(lines) <= most:
        return list(lines)
    return [lines[round(place * (len(lines) - 1) / (most - 1))] for place in range(most)]


def point(line: Mapping[str, Any]) -> dict[str, Any]:
    seconds = line["seconds"]
    return {
        "step": line["step"],
        "attempt": line["attempt"],
        "at": line["at"],
        "loss": _finite(line["loss"]),
        "tokens_per_s": round(line.get("tokens", 0) / seconds, 1) if seconds else None,
    }


def attempts(history: History) -> list[dict[str, Any]]:
    """Return what each attempt was: when it started, had its machines, trained and ended, where, and why it ended."""
    found: dict[int, dict[str, Any]] = {}
    for one in history:
        if one["attempt"] < 1:
            continue
        this = found.setdefault(one["attempt"], {"attempt": one["attempt"]})
        detail = one["detail"]
        if field := STARTS.get(one["kind"]):
            this[field] = one["at"]
        if one["kind"] == "fleet_bought":
            this |= {name: detail[name] for name in ("instance_type", "zone", "market", "nodes") if name in detail}
        elif one["kind"] == "training_started":
            this |= {"trains_at": one["at"], "from_step": detail.get("step", 0)}
        elif one["kind"] == "attempt_closed":
            this |= {"closed_at": one["at"], "why": one["cause"]}
    return list(found.values())


def trouble(one: Mapping[str, Any]) -> dict[str, Any]:
    detail = one["detail"]
    what = detail.get("reason") or detail.get("failure") or one["cause"]
    return {"at": one["at"], "attempt": one["attempt"], "kind": one["kind"], "cause": one["cause"], "what": what}


def checkpoints(history: History) -> list[dict[str, Any]]:
    """Return the committed saves, oldest first, each once although several nodes may have told of it."""
    found: dict[str, dict[str, Any]] = {}
    for one in history:
        if one["kind"] != "checkpoint_saved":
            continue
        save = one["detail"]["pointer"]["save"]
        known = found.setdefault(
            save, {"save": save, "step": parse_save_name(save).step, "at": one["at"], "attempt": one["attempt"]}
        )
        known["final"] = known.get("final", False) or bool(one["detail"].get("final"))
    return list(found.values())


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
