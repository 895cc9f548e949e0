"""What the verbs have in common: their options, and the look-up of a job by its id."""

from __future__ import annotations

from typing import Annotated

import typer

from holdfast.domain.errors import UnknownJob
from holdfast_cli.stack import Sight, Stack

StackName = Annotated[str, typer.Option("--stack", envvar="HOLDFAST_STACK", help="The CloudFormation stack.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
JobId = Annotated[str, typer.Argument(metavar="JOB", help="The job's id, as submit printed it.")]
By = Annotated[str | None, typer.Option("--by", envvar="USER", help="Who asks; stands in the history.")]


def known(target: Stack, job: str) -> Sight:
    """Return the job as it is now. Raises UnknownJob."""
    sight = target.see(job)
    if sight is None:
        raise UnknownJob(job)
    return sight
