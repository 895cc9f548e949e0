"""Verbs that want something of a job, or of the queue: one message each on the control queue."""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any

import typer

from holdfast.domain.job import Job, Saved
from holdfast.domain.phase import ENDED, Intent, Phase
from holdfast.messages.control_request import SCHEMA, read_control
from holdfast_cli import show
from holdfast_cli.errors import UserError, told
from holdfast_cli.options import AsJson, By, JobId, StackName, known
from holdfast_cli.stack import Stack

POLL_S = 2.0
EXIT_NOT_DONE = 1

Team = Annotated[str | None, typer.Option(help="Only this team; everybody when left out.")]


@told
def cancel(job: JobId, by: By = None, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Ask a job to save its state, stop, and release its machines."""
    target = Stack(stack)
    row = _not_over(target, job, "cancel")
    sent = ask(target, "cancel", by, job=row.id)
    answer(sent, as_json, f"asked {job} to stop after a last save; `holdfast watch {job}` shows it")


@told
def pause(job: JobId, by: By = None, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Ask a job to save its state and release its machines until it is resumed."""
    target = Stack(stack)
    row = _not_over(target, job, "pause")
    if row.phase is Phase.PAUSED or row.intent is Intent.PAUSE:
        raise UserError(f"{job} is paused already, or about to be; `holdfast resume {job}` lets it go on")
    sent = ask(target, "pause", by, job=job)
    answer(sent, as_json, f"asked {job} to save and pause; `holdfast resume {job}` lets it go on")


@told
def resume(
    job: JobId,
    nodes: Annotated[int | None, typer.Option(min=1, help="Go on with so many machines; as many as before.")] = None,
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Let a paused job go on, with another number of machines where one is given."""
    target = Stack(stack)
    row = _not_over(target, job, "resume")
    if row.phase is not Phase.PAUSED and row.intent is not Intent.PAUSE:
        raise UserError(f"{job} is {row.phase.value}, not paused; to change its machines, pause it first")
    sent = ask(target, "resume", by, job=job, nodes=nodes)
    answer(sent, as_json, f"asked {job} to go on" + (f" with {nodes} machines" if nodes else ""))


@told
def checkpoint(
    job: JobId,
    wait: Annotated[bool, typer.Option("--wait", help="Return when a save newer than now is committed.")] = False,
    within_s: Annotated[float, typer.Option(min=1, help="How long to wait.")] = 900.0,
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Ask a job that trains to save now and go on; with --wait, exit code 1 when no save was committed in time."""
    target = Stack(stack)
    row = _not_over(target, job, "save")
    if row.phase is not Phase.RUNNING:
        raise UserError(f"{job} is {row.phase.value}; only a running job has something to save")
    sent = ask(target, "checkpoint", by, job=job)
    if not wait:
        return answer(sent, as_json, f"asked {job} to save; `holdfast checkpoints {job}` lists what is committed")
    saved = _newer_save(target, row, within_s)
    answer({**sent, "save": saved.save}, as_json, f"{saved.save} is committed")
    return None


@told
def retry(
    job: JobId,
    save: Annotated[str | None, typer.Option("--from", metavar="SAVE", help="Go on from this save.")] = None,
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Let an ended job go on from a save, on a new branch; from its newest one when none is given."""
    target = Stack(stack)
    row = known(target, job).job
    if not row.over:
        raise UserError(f"{job} is {row.phase.value}; only a job that has ended can be tried again")
    sent = ask(target, "retry", by, job=job, save=save)
    answer(sent, as_json, f"asked {job} to go on from {save or 'its newest save'}; `holdfast watch {job}` shows it")


@told
def priority(
    job: JobId,
    value: Annotated[int, typer.Argument(metavar="PRIORITY", min=0, max=100, help="From 0 (last) to 100 (first).")],
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Give a job another place in the queue."""
    target = Stack(stack)
    row = _not_over(target, job, "move")
    sent = ask(target, "priority", by, job=job, priority=value)
    answer(sent, as_json, f"asked for priority {value} (it has {row.priority}); `holdfast queue` shows the order")


@told
def extend(
    job: JobId,
    run_s: Annotated[int | None, typer.Option(min=1, help="Seconds of training, all attempts together.")] = None,
    wait_s: Annotated[int | None, typer.Option(min=1, help="Seconds to wait for the first machines.")] = None,
    attempts: Annotated[int | None, typer.Option(min=1, help="Failed attempts before the job fails.")] = None,
    budget_usd: Annotated[float | None, typer.Option(min=0.01, help="US dollars that may be spent.")] = None,
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Give a job other limits from now on; one that has ended takes them into its next try."""
    limits = {"run_s": run_s, "wait_s": wait_s, "attempts": attempts, "budget_usd": budget_usd}
    given = {name: value for name, value in limits.items() if value is not None}
    if not given:
        raise UserError("no limit is given; name one of --run-s, --wait-s, --attempts, --budget-usd")
    target = Stack(stack)
    row = known(target, job).job
    sent = ask(target, "extend", by, job=job, **given)
    next_step = f"; `holdfast retry {job}` tries it again" if row.over else ""
    if row.intent is Intent.EXPIRE and not row.over:
        next_step = "; it is stopping at a limit: within the new one it goes on after its save, else it fails"
    answer(sent, as_json, f"asked for {', '.join(f'{name} = {value}' for name, value in given.items())}{next_step}")


@told
def hold(team: Team = None, by: By = None, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Start no more attempts, of one team or at all, until unhold; what runs goes on."""
    sent = ask(Stack(stack), "hold", by, team=team)
    whom = f"team {team}" if team else "everybody"
    answer(sent, as_json, f"asked to start nothing more of {whom}; `holdfast unhold` ends it")


@told
def unhold(team: Team = None, by: By = None, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Start attempts again."""
    sent = ask(Stack(stack), "unhold", by, team=team)
    answer(sent, as_json, f"asked to start attempts of {f'team {team}' if team else 'everybody'} again")


def ask(target: Stack, action: str, by: str | None, **values: Any) -> dict[str, Any]:
    """The message is on the control queue. It has an id of its own: asking again later is another wish."""
    message = {"schema": SCHEMA, "action": action, "dedup_id": uuid.uuid4().hex, "requested_by": by, **values}
    body = json.dumps({name: value for name, value in message.items() if value is not None})
    read_control(body)
    told_of = {name: values[name] for name in ("job", "team", "market") if values.get(name)}
    return {**told_of, "action": action, "message_id": target.send("ControlQueueUrl", body)}


def answer(sent: dict[str, Any], as_json: bool, sentence: str) -> None:
    if as_json:
        show.as_json(sent)
    else:
        print(sentence)


def _not_over(target: Stack, job: str, wish: str) -> Job:
    row = known(target, job).job
    if row.phase in ENDED:
        way_out = f"; `holdfast retry {job}` lets it go on" if wish != "cancel" else ""
        raise UserError(f"{job} is {row.phase.value} already; there is nothing to {wish}{way_out}")
    return row


def _newer_save(target: Stack, before: Job, within_s: float) -> Saved:
    """Return the first save that is committed after those of `before`; exits 1 when none is in time."""
    give_up_at = time.monotonic() + within_s
    while True:
        now = known(target, before.id).job
        if now.saved is not None and (before.saved is None or now.saved.order > before.saved.order):
            return now.saved
        if now.over or time.monotonic() > give_up_at:
            why = f"it is {now.phase.value}" if now.over else f"{within_s:.0f} s are over"
            typer.echo(f"holdfast: no newer save of {before.id} was committed: {why}; look at it with "
                       f"`holdfast explain {before.id}`", err=True)  # fmt: skip
            raise typer.Exit(EXIT_NOT_DONE)
        time.sleep(POLL_S)
