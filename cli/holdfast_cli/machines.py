"""Verbs about machines: those that a job ever had, those that are set aside, cold pools, and machines of nobody."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

import boto3
import typer
from botocore.exceptions import ClientError

from holdfast.domain.ownership import FleetIntent, Node
from holdfast.messages.aws_event import instance_id
from holdfast_cli import show
from holdfast_cli.errors import UserError, told
from holdfast_cli.explain import history_of
from holdfast_cli.options import AsJson, By, JobId, StackName
from holdfast_cli.stack import CONFIG, Stack

QUARANTINE = "QUARANTINE"
"""Partition of machines that are set aside, by the host that AWS told of them, else by instance id."""

POOL = "POOL#"
MARKETS, GROUPS = ("spot", "on_demand"), ("", "cluster")
HOURS_A_MONTH = 730

What = Annotated[str, typer.Argument(metavar="NODE|ZONE/TYPE", help="An instance id, or us-east-1a/p5.48xlarge.")]


@told
def nodes(job: JobId, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show every machine that a job ever had: type, zone, market, image, account, attempt, and what became of it."""
    target = Stack(stack)
    found = list(_every_node(target, history_of(target, job)))
    if as_json:
        show.as_json(found)
    elif not found:
        print(f"{job} has never had a machine")
    else:
        heads = ("NODE", "ATTEMPT", "TYPE", "ZONE", "MARKET", "IMAGE", "ACCOUNT", "STATE", "SINCE (UTC)")
        show.table(heads, [_node_row(node) for node in found])


@told
def quarantine(
    what: What,
    hours: Annotated[float, typer.Option(min=0.1, help="For how long.")] = 24.0,
    why: Annotated[str, typer.Option(help="Stands in the list.")] = "set aside by hand",
    by: By = None,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Set a machine, or a type in a zone, aside: nothing new is placed on it until then; what runs goes on."""
    target, now = Stack(stack), time.time()
    until = now + 3600 * hours
    said = {"what": what, "reason": why, "by": by, "at": now, "until": until}
    for item in _items(target, what, f"set aside: {why}"):
        target.put({**said, **item, "expires_at": round(until)})
    if as_json:
        show.as_json(said)
    else:
        print(f"{what} is set aside until {show.clock_time(until)} UTC; `holdfast release {what}` ends it")


@told
def release(what: What, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Take back what is set aside."""
    target = Stack(stack)
    known = [target.delete(item["pk"], item["sk"]) for item in _items(target, what, "")]
    if not any(known):
        raise UserError(f"{what} is not set aside; `holdfast capacity` lists what is")
    if as_json:
        show.as_json({"what": what, "released": True})
    else:
        print(f"{what} may be used again")


@told
def capacity(
    everything: Annotated[bool, typer.Option("--all", help="Also those whose time is over.")] = False,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Show the pools that refused, until when each is left alone, and what is set aside.

    Reads the whole jobs table: pools have no index, because no function ever lists them.
    """
    now = time.time()
    found = [_closed(item) for prefix in (POOL, QUARANTINE) for item in Stack(stack).scan(prefix)]
    closed = sorted((one for one in found if everything or one["until"] > now), key=lambda one: one["until"])
    if as_json:
        show.as_json(closed)
    elif not closed:
        print("no pool is cold, nothing is set aside")
    else:
        show.table(("WHAT", "STATE", "UNTIL (UTC)", "REFUSALS", "WHY"), [_closed_row(one) for one in closed])


@told
def sweep_orphans(
    apply: Annotated[bool, typer.Option("--apply", help="Act; without it nothing is changed.")] = False,
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """List what a sweep would set right, machines of nobody first; with --apply, sweep now.

    A machine is ended by the second sweep that finds it without an owner, so --apply may leave it to the next minute.
    """
    answer = Stack(stack).invoke("SweepFunctionName", {"dry_run": not apply})
    findings = sorted(answer["listed"], key=lambda one: -one.get("age_s", 0))
    prices = _spot_prices(findings)
    for finding in findings:
        price = prices.get((finding.get("instance_type"), finding.get("zone")))
        if price is not None:
            finding["usd_a_month_spot"] = round(price * HOURS_A_MONTH, 2)
    if as_json:
        show.as_json({"applied": apply, "findings": answer["findings"], "listed": findings})
    elif not findings:
        print("nothing to set right")
    else:
        heads = ("WHO", "WHAT", "AGE", "TYPE", "USD A MONTH (SPOT)", "DONE" if apply else "WOULD BE")
        show.table(heads, [_finding_row(finding) for finding in findings])


def _every_node(target: Stack, history: Iterable[Mapping[str, Any]]) -> Iterable[dict[str, Any]]:
    """Return the machines of each fleet that the history names, in the order they were asked for."""
    items = list(history)
    bought = {item["detail"]["fleet"]: item["detail"] for item in items if item["kind"] == "fleet_bought"}
    fleets = dict.fromkeys(item["detail"]["fleet"] for item in items if item["kind"] == "fleet_intended")
    account = (target.output("StateMachineArn").split(":") + [""] * 5)[4]
    seen: set[str] = set()
    for fleet in fleets:
        intent = target.table.intent(fleet)
        if intent is None:
            continue
        known = {node.instance: node for node in target.table.nodes(intent.instances)}
        images = _images(intent.instances)
        for instance in intent.instances:
            if instance not in seen:
                seen.add(instance)
                place = bought.get(fleet, {})
                yield {**_node(instance, intent, known.get(instance), place, images), "account": account}


def _node(
    instance: str, intent: FleetIntent, node: Node | None, place: Mapping[str, Any], images: Mapping[str, str]
) -> dict[str, Any]:
    ready = node.ready if node else None
    return {
        "instance": instance,
        "attempt": intent.attempt,
        "fleet": intent.fleet,
        "instance_type": ready.instance_type if ready else place.get("instance_type", ""),
        "zone": ready.zone if ready else place.get("zone", ""),
        "market": place.get("market", ""),
        "image": images.get(instance, ""),
        "state": node.state.value if node else "unknown",
        "last_attempt": node.attempt if node else intent.attempt,
        "since_at": node.since_at if node else intent.opened_at,
    }


def _images(instances: Iterable[str]) -> dict[str, str]:
    """Return the image of each machine that EC2 still knows; it forgets an ended one within the hour."""
    ids = list(instances)
    client = boto3.client("ec2", config=CONFIG)
    try:
        pages = [
            client.describe_instances(Filters=[{"Name": "instance-id", "Values": ids[start : start + 200]}])
            for start in range(0, len(ids), 200)
        ]
    except ClientError as error:
        if error.response["Error"]["Code"] == "UnauthorizedOperation":
            return {}
        raise
    found = [one for page in pages for reservation in page["Reservations"] for one in reservation["Instances"]]
    return {one["InstanceId"]: one.get("ImageId", "") for one in found}


def _node_row(node: Mapping[str, Any]) -> tuple[str, ...]:
    names = ("instance", "attempt", "instance_type", "zone", "market", "image", "account", "state")
    return (*(str(node[name]) or "-" for name in names), show.clock_time(node["since_at"]))


def _items(target: Stack, what: str, code: str) -> list[dict[str, Any]]:
    """Return the items that set this aside: one of a machine, or those of every pool of a type in a zone."""
    zone, slash, kind = what.partition("/")
    if not slash:
        instance = instance_id(what)
        ready = (target.item(f"NODE#{instance}", "NODE") or {}).get("ready") or {}
        host = ready.get("host") or instance
        return [{"pk": QUARANTINE, "sk": host, "host": host}]
    if not zone or not kind:
        raise UserError(f"{what} names no pool; write it as us-east-1a/p5.48xlarge")
    return [
        {
            "pk": f"{POOL}{kind}#{zone}#{market}#{group or '-'}",
            "sk": "COLD",
            "pool": {"instance_type": kind, "zone": zone, "market": market, "group": group},
            "misses": 0,
            "code": code,
        }
        for market in MARKETS
        for group in GROUPS
    ]


def _closed(item: Mapping[str, Any]) -> dict[str, Any]:
    by = f" ({item['by']})" if item.get("by") else ""
    cold = item["pk"].startswith(POOL)
    return {
        "what": item["pk"].removeprefix(POOL) if cold else item.get("what", item["sk"]),
        "state": "set aside" if item.get("reason") else "cold",
        "until": item.get("until", 0.0),
        "refusals": item.get("misses", 0),
        "why": f"{item.get('reason') or item.get('code', '')}{by}",
    }


def _closed_row(one: Mapping[str, Any]) -> tuple[str, ...]:
    return (one["what"], one["state"], show.clock_time(one["until"]), str(one["refusals"] or "-"), one["why"] or "-")


def _spot_prices(findings: Iterable[Mapping[str, Any]]) -> dict[tuple[Any, Any], float]:
    """Return US dollars an hour by type and zone, as spot; nothing where EC2 does not tell."""
    pools = {(one["instance_type"], one["zone"]) for one in findings if one.get("instance_type")}
    prices = {}
    for kind, zone in sorted(pools):
        try:
            answer = boto3.client("ec2", config=CONFIG).describe_spot_price_history(
                InstanceTypes=[kind], AvailabilityZone=zone, ProductDescriptions=["Linux/UNIX"], MaxResults=1
            )
        except ClientError:
            continue
        for told_price in answer["SpotPriceHistory"][:1]:
            prices[(kind, zone)] = float(told_price["SpotPrice"])
    return prices


def _finding_row(finding: Mapping[str, Any]) -> tuple[str, ...]:
    cost = finding.get("usd_a_month_spot")
    return (
        finding["who"],
        finding["what"],
        show.age(finding["age_s"]) if "age_s" in finding else "-",
        finding.get("instance_type", "-"),
        f"{cost:,.2f}" if cost is not None else "not known",
        finding["done"],
    )
