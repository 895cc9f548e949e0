"""The verbs. Reading goes to the jobs table, acting goes through the queues."""

from __future__ import annotations

import json
import time
from typing import Annotated

import typer

from holdfast.application.intake import accepted_before
from holdfast.domain.errors import Rejected, UnknownJob
from holdfast.domain.job import Job
from holdfast.domain.phase import Phase
from holdfast.messages.acceptance import Acceptance
from holdfast.messages.envelope import open_envelope
from holdfast.messages.request_reference import reference_in
from holdfast_cli import ask, show
from holdfast_cli.dataset import dataset
from holdfast_cli.dlq import dlq
from holdfast_cli.errors import UserError, told
from holdfast_cli.explain import explain, history_of
from holdfast_cli.files import text_of
from holdfast_cli.machines import capacity, nodes, quarantine, release, sweep_orphans
from holdfast_cli.options import AsJson, JobId, StackName, known
from holdfast_cli.place import queue
from holdfast_cli.plan import add_to, order_of, warned
from holdfast_cli.quotas import quota
from holdfast_cli.report import report
from holdfast_cli.saves import checkpoints, verify_save
from holdfast_cli.stack import Sight, Stack

POLL_S = 2.0
ACCEPTED_WITHIN_S = 120.0
EXIT_NOT_COMPLETED = 1

app = typer.Typer(
    name="holdfast",
    help="Distributed training jobs on AWS that outlive their machines.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

add_to(app)


@app.command()
@told
def submit(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The request as JSON; - reads standard input.")],
    dedup_id: Annotated[str | None, typer.Option(help="The same id of one team is the same job.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Watch the job until it ends.")] = False,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Send a job request and print the job's id."""
    target = Stack(stack)
    order, message = _order(text_of(file), dedup_id, target)
    job = order.job.id
    if not _accepted(order, target):
        warned(order, target)
    message_id = target.send("RequestQueueUrl", message)
    if as_json:
        show.as_json_line({"job": job, "message_id": message_id})
    else:
        print(job, flush=True)
    if wait:
        _watch(target, job, as_json, appears_within_s=ACCEPTED_WITHIN_S)


@app.command("list")
@told
def list_jobs(
    team: Annotated[str | None, typer.Option(help="Only this team's jobs.")] = None,
    ended: Annotated[int, typer.Option(min=0, help="How many ended jobs to show, newest first.")] = 10,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Show the jobs that run or wait, and those that ended last."""
    jobs, now = _listed(Stack(stack), team, ended), time.time()
    if as_json:
        show.as_json([show.job_data(job, now) for job in jobs])
    else:
        show.jobs_table(jobs, now)


@app.command()
@told
def status(job: JobId, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show one job: phase, progress, last committed save, what is wanted and why."""
    sight, now = known(Stack(stack), job), time.time()
    if as_json:
        show.as_json(show.sight_data(sight, now))
    else:
        show.status(sight, now)


@app.command()
@told
def watch(job: JobId, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Print a line for each change until the job is over; exit code 0 when it completed, 1 when it did not."""
    _watch(Stack(stack), job, as_json)


@app.command()
@told
def events(job: JobId, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show what happened to a job, oldest first."""
    items = history_of(Stack(stack), job)
    if as_json:
        show.as_json(items)
    else:
        show.history(items)


for verb in (
    explain,
    *(ask.cancel, ask.pause, ask.resume, ask.checkpoint, ask.retry, ask.priority, ask.extend, ask.hold, ask.unhold),
    checkpoints,
    report,
    queue,
    *(nodes, quarantine, release, capacity, sweep_orphans),
):
    app.command()(verb)
app.command("verify")(verify_save)
app.add_typer(quota, name="quota")
app.add_typer(dlq, name="dlq")
app.add_typer(dataset, name="dataset")


def _order(text: str, dedup_id: str | None, target: Stack) -> tuple[Acceptance, str]:
    """Return the request as the supervisor will read it, and the message that is to be sent."""
    if dedup_id is not None:
        text = json.dumps({**open_envelope(text), "dedup_id": dedup_id})
    order = order_of(text, target)
    plain = order.asked.template is None and reference_in(open_envelope(text)) is None
    # A template or an address is the door's to follow, so that message leaves as it is.
    return order, str(order.request["body"]) if plain else text


def _accepted(order: Acceptance, target: Stack) -> bool:
    """Return whether the same request was accepted before. Raises UserError when another one was."""
    try:
        return accepted_before(order.job, order.request, target.table)
    except Rejected as conflict:
        raise UserError(f"{conflict.reason}, with --dedup-id") from conflict


def _listed(target: Stack, team: str | None, ended: int) -> list[Job]:
    """Return live jobs, then waiting ones by place, then the newest that are over."""
    table = target.table
    teams = [team] if team else table.teams()
    over = [job for name in teams for job in table.ended(name)[-ended:]] if ended else []
    waiting = [job for name in teams for job in table.waiting(name)]
    jobs = [job for job in target.jobs([*table.alive(), *waiting, *over]) if team in (None, job.team)]
    alive = sorted((job for job in jobs if job.attempt_open), key=lambda job: job.submitted_at)
    queued = sorted((job for job in jobs if not job.attempt_open and not job.over), key=lambda job: job.rank)
    newest = sorted((job for job in jobs if job.over), key=lambda job: job.ended_at or 0.0, reverse=True)
    return [*alive, *queued, *newest[:ended]]


def _watch(target: Stack, job: str, as_json: bool, appears_within_s: float = 0.0) -> None:
    """Every change was printed, and the job is over; exits 1 unless it completed."""
    give_up_at, last = time.monotonic() + appears_within_s, ""
    while True:
        sight = target.see(job)
        if sight is not None:
            last = _print_change(sight, last, as_json)
            if sight.job.over:
                raise typer.Exit(0 if sight.job.phase is Phase.COMPLETED else EXIT_NOT_COMPLETED)
        elif not appears_within_s:
            raise UnknownJob(job)
        elif time.monotonic() > give_up_at:
            raise UserError(
                f"{job} was not accepted within {appears_within_s:.0f} s; "
                "look for a refusal on the result queue, and for the request on its dead-letter queue"
            )
        time.sleep(POLL_S)


def _print_change(sight: Sight, last: str, as_json: bool) -> str:
    """Return the state that was printed now or before: equal states are printed once."""
    state = show.line(sight, 0.0)
    if state != last:
        if as_json:
            show.as_json_line(show.sight_data(sight, time.time()))
        else:
            print(show.line(sight, time.time()), flush=True)
    return state
