"""`holdfast plan` and `holdfast template`: what a request would run on, and what requests are made from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import boto3
import typer
from rich.text import Text

from holdfast.adapters.catalogue_ec2 import Ec2Catalogue
from holdfast.adapters.request_files_s3 import S3RequestFiles
from holdfast.application.datasets import pinned
from holdfast.application.intake import plan_for
from holdfast.application.requests import read_order
from holdfast.domain.plan import Plan
from holdfast.domain.sizing import Option, gib, length
from holdfast.messages.acceptance import Acceptance
from holdfast.messages.job_template import read_template, template_data
from holdfast.messages.plan_facts import plan_data
from holdfast_cli import show
from holdfast_cli.errors import EXIT_USER_ERROR, UserError, told
from holdfast_cli.files import text_of
from holdfast_cli.stack import CONFIG, Stack, outputs

StackName = Annotated[str, typer.Option("--stack", envvar="HOLDFAST_STACK", help="The CloudFormation stack.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
File = Annotated[str, typer.Argument(metavar="FILE|-", help="The request as JSON; - reads standard input.")]

templates = typer.Typer(help="Parts of requests under a name and a version.", no_args_is_help=True)


def add_to(app: typer.Typer) -> None:
    """The app has these verbs."""
    app.command("plan")(plan)
    app.add_typer(templates, name="template")


@told
def plan(file: File, as_json: AsJson = False, stack: StackName = "holdfast") -> None:
    """Show what a request would run on, its price, and what speaks against it; exit code 2 when it would be refused."""
    target = Stack(stack)
    order = order_of(text_of(file), target)
    made = plan_of(order, target)
    if as_json:
        show.as_json({"job": order.job.id, **plan_data(made)})
    else:
        _show(order, made)
    if made.refusal is not None:
        raise typer.Exit(EXIT_USER_ERROR)


@templates.command("put")
@told
def put(
    file: Annotated[str, typer.Argument(metavar="FILE|-", help="The template as JSON; - reads standard input.")],
    as_json: AsJson = False,
    stack: StackName = "holdfast",
) -> None:
    """Keep a template under its name and version; a version that is there never changes."""
    template = read_template(text_of(file))
    new = Stack(stack).table.put_template(template_data(template))
    if as_json:
        show.as_json({"template": template.name, "version": template.version, "new": new})
    else:
        print(f"template {template.name} version {template.version} {'is there' if new else 'was there already'}")


def order_of(text: str, target: Stack) -> Acceptance:
    """Return the request as the supervisor will read it, so that a wrong one is refused before it is sent."""
    # Which buckets requests may lie in is the door's to say; here the reader's own rights decide.
    files = S3RequestFiles(boto3.client("s3", config=CONFIG), buckets=None, owner=None)
    bucket = outputs(target.name).get("CheckpointBucketName")
    order = read_order(text, templates=target.table, files=files, now=time.time(), bucket=bucket)
    return pinned(order, registry=target.table, files=files, bucket=bucket)


def plan_of(order: Acceptance, target: Stack) -> Plan:
    """Return the plan against what AWS offers now."""
    subnets = [subnet for subnet in outputs(target.name).get("SubnetIds", "").split(",") if subnet]
    catalogue = Ec2Catalogue(
        boto3.client("ec2", config=CONFIG),
        boto3.client("service-quotas", config=CONFIG),
        subnet_ids=subnets,
        clock=time.time,
    )
    return plan_for(order, catalogue, now=time.time())


def warned(order: Acceptance, target: Stack) -> None:
    """The plan's warnings are on standard error. Raises UserError when the door would refuse the request."""
    made = plan_of(order, target)
    if made.refusal is not None:
        raise UserError(f"{made.refusal.text} ({made.refusal.code})")
    for note in made.warnings:
        typer.echo(f"warning: {show.clean(note.text)} ({note.code})", err=True)


def _show(order: Acceptance, made: Plan) -> None:
    asked = order.asked
    print(f"job        {order.job.id}")
    print(f"model      {made.parameters:,} parameters, {made.parallel} ({asked.training.parallel} asked for)")
    print(f"fleet      {asked.fleet.nodes} nodes, at least {asked.fleet.fewest_nodes}, {asked.fleet.market}")
    if made.options:
        show.table(HEADS, [_row(option) for option in made.options])
        for option in made.options:
            print(f"{option.instance_type}: {'; '.join(option.reasons)}")
    for note in made.warnings:
        print(f"warning    {show.clean(note.text)} ({note.code})")
    if made.refusal is not None:
        print(f"refused    {show.clean(made.refusal.text)} ({made.refusal.code})")


HEADS = ("TYPE", "ZONES", "$/H", "MEMORY A RANK", "HOST", "DISK", "SAVE", "EVERY", "VCPUS", "USUAL RUN", "USUAL $")


def _row(option: Option) -> Sequence[str | Text]:
    quota = f" of {option.quota_vcpus:g}" if option.quota_vcpus is not None else ""
    return (
        option.instance_type,
        ", ".join(option.zones) or "any",
        _money(option.usd_per_h),
        _of(option.memory_need_bytes, option.memory_bytes),
        _of(option.host_need_bytes, option.host_bytes),
        _of(option.disk_need_bytes, option.disk_bytes),
        _known(option.save_s, length),
        _known(option.interval_s, length),
        "?" if option.vcpus is None else f"{option.vcpus}{quota}",
        _known(option.usual_run_s, length),
        _money(option.usual_usd),
    )


def _of(need: int | None, there: int | None) -> str:
    return "?" if need is None or there is None else f"{gib(need)} of {gib(there)}"


def _known(value: float | None, words: Any) -> str:
    return "?" if value is None else str(words(value))


def _money(usd: float | None) -> str:
    return "?" if usd is None else f"{usd:,.2f}"
