"""`holdfast quota`: what teams and markets may have in flight, what they have, and who set it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import typer

from holdfast.domain.ledger import NO_QUOTA, Ledger, Quota, QuotaChange, Quotas
from holdfast.domain.queueing import hours
from holdfast.messages.control_request import NO_LIMIT
from holdfast_cli import show
from holdfast_cli.ask import answer, ask
from holdfast_cli.errors import UserError, told
from holdfast_cli.options import AsJson, By, StackName
from holdfast_cli.stack import Stack

UNITS = ("nodes", "vcpus", "gpus")
SAID = (*UNITS, "weight", "preempt_from", "preemptible")

Team = Annotated[str | None, typer.Option(help="The team.")]
Market = Annotated[str | None, typer.Option(help="The market: spot, on_demand or mixed.")]

quota = typer.Typer(
    name="quota",
    help="Show what teams and markets may have in flight and what they have; set it, clear it, see who set it.",
    invoke_without_command=True,
)


def _limit(help_text: str) -> Any:
    return typer.Option(metavar=f"N|{NO_LIMIT}", help=f"{help_text}; {NO_LIMIT} takes the limit away.")


@quota.callback()
@told
def show_quotas(context: typer.Context, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show every team and market: in flight of what is allowed, share, and who makes room for whom."""
    if context.invoked_subcommand is not None:
        _refuse_options_before_the_verb(context)
        return
    table = Stack(stack).table
    found = list(_all(table.quotas(), table.ledger().accrued(time.time()), table.teams()))
    if as_json:
        show.as_json(found)
    elif not found:
        print("no quota is set and nothing is in flight; `holdfast quota set --team TEAM --gpus 64` sets one")
    else:
        heads = ("OF", "NODES", "VCPUS", "GPUS", "WEIGHT", "URGENT FROM", "MAKES ROOM", "USED (GPU H)")
        show.table(heads, [_row(one) for one in found])


@quota.command("set")
@told
def set_quota(
    team: Team = None,
    market: Market = None,
    nodes: Annotated[str | None, _limit("Machines in flight")] = None,
    vcpus: Annotated[str | None, _limit("vCPUs in flight")] = None,
    gpus: Annotated[str | None, _limit("GPUs in flight")] = None,
    weight: Annotated[float | None, typer.Option(help="The team's share of each market; 1 unless set.")] = None,
    preempt_from: Annotated[str | None, typer.Option(metavar=f"PRIORITY|{NO_LIMIT}", help=(
        "Jobs of the team from this priority up go first, and may ask others to save and make room."))] = None,
    preemptible: Annotated[bool | None, typer.Option(
        "--preemptible/--no-preemptible", help="Whether jobs of the team may be asked to make room.")] = None,
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:  # fmt: skip
    """Set what is named and leave the rest as it is; what runs goes on, and starts are held against it at once."""
    values = {
        **{name: _whole(name, value) for name, value in (("nodes", nodes), ("vcpus", vcpus), ("gpus", gpus))},
        "weight": weight,
        "preempt_from": _whole("preempt_from", preempt_from),
        "preemptible": preemptible,
    }
    given = {name: value for name, value in values.items() if value is not None}
    kind, name = _scope(team, market)
    target = Stack(stack)
    sent = ask(target, "quota", by, **{kind: name}, **given)
    before = target.table.quota(kind, name)
    if kind == "team" and name not in target.table.teams():
        typer.echo(f"holdfast: warning: no job of team {name} has come so far; is it spelled so?", err=True)
    wished = ", ".join(f"{what} {_was(before, what)} -> {_word(value)}" for what, value in given.items())
    answer(sent, as_json, f"asked for {kind} {name}: {wished}; `holdfast quota` shows it in a moment")


@quota.command("clear")
@told
def clear(
    team: Team = None, market: Market = None, by: By = None, as_json: AsJson = False, stack: StackName = "holdfast"
) -> None:
    """Take the whole quota of a team or a market away: no limit, weight 1, no preemption."""
    kind, name = _scope(team, market)
    target = Stack(stack)
    if target.table.quota(kind, name) == NO_QUOTA:
        raise UserError(f"{kind} {name} has no quota; `holdfast quota` shows those there are")
    sent = ask(target, "quota", by, **{kind: name}, clear=True)
    answer(sent, as_json, f"asked to take the quota of {kind} {name} away; `holdfast quota` shows it in a moment")


@quota.command("history")
@told
def history(team: Team = None, market: Market = None, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show who set which quota, when, from what to what, oldest first."""
    wanted = None if team is None and market is None else _scope(team, market)
    changes = [one for one in Stack(stack).table.quota_changes() if wanted in (None, (one.kind, one.name))]
    if as_json:
        show.as_json([_change_data(change) for change in changes])
    elif not changes:
        print("nobody has set a quota" + (f" of {' '.join(wanted)}" if wanted else ""))
    else:
        show.table(("TIME (UTC)", "OF", "BY", "CHANGE"), [_change_row(change) for change in changes])


def _refuse_options_before_the_verb(context: typer.Context) -> None:
    """An option of `quota` itself would not reach the verb behind it, so another stack would be changed."""
    sources = {name: context.get_parameter_source(name) for name in ("stack", "as_json")}
    given = [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]
    if given:
        option = "--stack" if "stack" in given else "--json"
        raise UserError(f"write {option} behind the verb: holdfast quota {context.invoked_subcommand} ... {option} ...")


def _scope(team: str | None, market: str | None) -> tuple[str, str]:
    if (team is None) == (market is None):
        raise UserError("whose quota? name one of --team TEAM, --market spot|on_demand|mixed")
    return ("team", team) if team is not None else ("market", str(market))


def _whole(name: str, value: str | None) -> int | str | None:
    if value is None or value == NO_LIMIT:
        return value
    if not value.isascii() or not value.isdigit():
        option = f"--{name.replace('_', '-')}"
        raise UserError(f"{option} is {value!r}; give a whole number from 0 up, or {NO_LIMIT}")
    return int(value)


def _all(quotas: Quotas, ledger: Ledger, teams: Iterable[str]) -> Iterable[dict[str, Any]]:
    """Return a line for each team, then for each market that is used or limited."""
    scopes: list[tuple[str, str, Quota]] = []
    running = {("team", place.team) for place in ledger.in_flight}
    running |= {("market", place.reserved.market) for place in ledger.in_flight}
    for kind, known in (("team", quotas.teams), ("market", quotas.markets)):
        names = {*known, *(name for of, name in running if of == kind), *(teams if kind == "team" else ())}
        scopes += [(kind, name, known.get(name, NO_QUOTA)) for name in sorted(names)]
    for kind, name, own in scopes:
        mine = [one for one in ledger.in_flight if name == (one.team if kind == "team" else one.reserved.market)]
        part = 0 if kind == "team" else 1
        used = sum(shares for account, shares in ledger.usage.items() if account.split("/")[part] == name)
        yield {
            "of": kind,
            "name": name,
            **{unit: {"in_flight": sum(getattr(one.reserved, unit) for one in mine), "limit": getattr(own, unit)}
               for unit in UNITS},
            **({"weight": own.weight, "preempt_from": own.preempt_from, "preemptible": own.preemptible}
               if kind == "team" else {}),
            "used_gpu_hours": round(hours(used), 1),
        }  # fmt: skip


def _row(one: Mapping[str, Any]) -> tuple[str, ...]:
    of_team = one["of"] == "team"
    urgent_from = one.get("preempt_from")
    return (
        f"{one['of']} {one['name']}",
        *(_use(one[unit]) for unit in UNITS),
        f"{one['weight']:g}" if of_team else "-",
        "-" if urgent_from is None else f"priority {urgent_from}",
        ("yes" if one["preemptible"] else "never") if of_team else "-",
        f"{one['used_gpu_hours']:,.1f}",
    )


def _use(unit: Mapping[str, Any]) -> str:
    return f"{unit['in_flight']}" if unit["limit"] is None else f"{unit['in_flight']} of {unit['limit']}"


def _was(quota: Quota, name: str) -> str:
    return _word(getattr(quota, name))


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NO_LIMIT if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def _said(quota: Quota) -> dict[str, Any]:
    return {name: getattr(quota, name) for name in SAID}


def _change_data(change: QuotaChange) -> dict[str, Any]:
    told_of = {"at": change.at, "of": change.kind, "name": change.name, "by": change.by}
    return {**told_of, "before": _said(change.before), "after": _said(change.after)}


def _change_row(change: QuotaChange) -> tuple[str, ...]:
    before, after = _said(change.before), _said(change.after)
    moved = [f"{name} {_word(before[name])} -> {_word(after[name])}" for name in SAID if before[name] != after[name]]
    whose = f"{change.kind} {change.name}"
    return (show.clock_time(change.at), whose, change.by or "-", ", ".join(moved) or "as it was")
