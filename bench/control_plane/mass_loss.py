"""A thousand machines go within a second, each told of three times: is every job ordered, and only once?"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from bench.control_plane import published as p
from bench.control_plane.lost_cloud import TEAM, Cloud, Tally
from bench.table import Row, show
from holdfast.application.notices import interrupted, lost
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from job_contract import reports
from tests import builders as b

NOTICE_S = 120.0
ORDERED_WITHIN_S = 10.0
LONGEST_S = 3600.0
ROUNDS = 2
ONE_JOB = (1000,)
MANY_JOBS = (400, 100, 100, 100, *[25] * 8, *[1] * 100)


@dataclass(frozen=True)
class Round:
    """One loss: seconds to each job's order, to everything at work again, spare attempts, and what went wrong."""

    ordered_s: Sequence[float]
    recovered_s: float
    spare_attempts: int
    faults: Sequence[str]


@dataclass(frozen=True)
class Drill:
    rounds: Sequence[Round]
    tally: Tally


def drill(sizes: Sequence[int], concurrency: int, seed: int = 1) -> Drill:
    """Every job loses all of its machines within one second, and again when all of them are at work again."""
    lost_at: dict[str, float] = {}
    ordered: dict[str, float] = {}

    def note(job: Job) -> None:
        if job.id in lost_at and job.phase is not Phase.LAUNCHING:
            ordered.setdefault(job.id, cloud.agenda.now - lost_at[job.id])

    cloud = Cloud(concurrency, seed, note)
    for number, nodes in enumerate(sizes):
        job = b.a_job(id=f"job-{number:04d}-{nodes}", team=TEAM, nodes=nodes, submitted_at=cloud.clock(), wait_s=10**9)
        cloud.raw.create(job, {}, None)  # type: ignore[arg-type]
    with cloud.running():
        cloud.stream()
        cloud.tick()
        _until_running(cloud, dict.fromkeys(cloud.raw.rows, 0))
        rounds = [_round(cloud, lost_at, ordered) for _ in range(ROUNDS)]
    return Drill(rounds, cloud.tally)


def _round(cloud: Cloud, lost_at: dict[str, float], ordered: dict[str, float]) -> Round:
    begun = cloud.agenda.now
    attempts = {job.id: job.attempt for job in cloud.raw.rows.values()}
    lost_at.clear()
    ordered.clear()
    dead = len(cloud.tally.dead)
    for job in cloud.raw.rows.values():
        assert job.fleet is not None
        for instance in cloud.raw.intents[job.fleet].instances:
            _lose(cloud, job, instance, lost_at)
    _until_running(cloud, attempts)
    recovered_s = cloud.agenda.now - begun
    # Everything that may still be on its way: the last retry of an asynchronous call, the last delivery of a report.
    cloud.agenda.run(for_s=600)
    faults = [
        *(f"{job.id} is {job.phase}" for job in cloud.raw.rows.values() if not _runs_again(job, attempts)),
        *(f"{job} was never ordered" for job in cloud.raw.rows if job not in ordered),
        *(f"{door}: dead letter" for door in cloud.tally.dead[dead:]),
        *cloud.fleets.doubled,
        *(f"raised: {failure!r}" for failure in cloud.fibers.failures),
        *_counted_wrong(cloud),
    ]
    spare = sum(job.attempt - attempts[job.id] - 1 for job in cloud.raw.rows.values())
    return Round(sorted(ordered.values()), recovered_s, spare, faults)


def _lose(cloud: Cloud, job: Job, instance: str, lost_at: dict[str, float]) -> None:
    """Within one second the machine is warned of, tells of it itself, and goes; in whatever order."""

    def at_random(deed: Callable[[], object]) -> None:
        cloud.agenda.after(cloud.chance.random(), deed)

    def told(deed: Callable[[], object]) -> None:
        lost_at.setdefault(job.id, cloud.agenda.now)
        deed()

    now = cloud.agenda.now
    warning = partial(interrupted, instance, cloud, deadline_at=now + NOTICE_S)
    report = reports.NoticeSeen(
        job=job.id, attempt=job.attempt, instance=instance, at=now, action="terminate", deadline_at=now + NOTICE_S
    )

    def goes() -> None:
        cloud.machines.kill(instance)
        cloud.event("OnInstanceStateChange", partial(lost, instance, cloud))

    at_random(lambda: told(lambda: cloud.event("OnSpotInterruption", warning)))
    at_random(lambda: told(lambda: cloud.report(report)))
    at_random(lambda: told(goes))


def _until_running(cloud: Cloud, attempts: Mapping[str, int]) -> None:
    rows = cloud.raw.rows
    cloud.agenda.run(for_s=LONGEST_S, until=lambda: all(_runs_again(job, attempts) for job in rows.values()))


def _runs_again(job: Job, attempts: Mapping[str, int]) -> bool:
    return job.phase is Phase.RUNNING and job.attempt > attempts[job.id]


def _counted_wrong(cloud: Cloud) -> Iterator[str]:
    by_job: defaultdict[str, int] = defaultdict(int)
    for instance in cloud.machines.instances.values():
        by_job[instance.job or ""] += instance.live
    for job in cloud.raw.rows.values():
        if by_job[job.id] != job.nodes:
            yield f"{job.id} has {by_job[job.id]} machines, wants {job.nodes}"
    attempts = sum(job.attempt for job in cloud.raw.rows.values())
    if len(cloud.runs.executions) != attempts:
        yield f"{len(cloud.runs.executions)} executions of {attempts} attempts"


def rows() -> Iterator[Row]:
    """Yield for each limit and load whether every job was ordered in time, and whether all came back once."""
    for concurrency in (p.LAMBDA_CONCURRENCY, p.LAMBDA_CONCURRENCY_NEW_ACCOUNT):
        for name, sizes in (("one job of 1,000", ONE_JOB), (f"{len(MANY_JOBS)} jobs of 1 to 400", MANY_JOBS)):
            done = drill(sizes, concurrency)
            for number, one in enumerate(done.rounds, start=1):
                what = f"Lambda limit {concurrency:,}, {name}, loss {number}"
                late = sum(s > ORDERED_WITHIN_S for s in one.ordered_s)
                last = one.ordered_s[-1] if one.ordered_s else float("inf")
                yield Row(f"{what}: last order after s ({late} late)", last, f"<= {ORDERED_WITHIN_S:g}", not late)
                yield Row(f"{what}: lost or doubled", len(one.faults), "0", not one.faults)
                again = f"{one.recovered_s:.0f} s, {one.spare_attempts} attempts more than losses"
                yield Row(f"{what}: all at work again", again, "reported", True)
                for fault in one.faults[:5]:
                    print("   ", fault)
            print(f"    Lambda limit {concurrency:,}, {name}: {done.tally.told()}")


if __name__ == "__main__":
    sys.exit(show(list(rows())))
