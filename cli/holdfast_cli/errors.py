"""What a user reads when a verb cannot be done: the thing, and the way out."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from botocore.exceptions import (
    ClientError,
    ConnectionError,
    HTTPClientError,
    NoCredentialsError,
    NoRegionError,
    ProfileNotFound,
    TokenRetrievalError,
)

from holdfast.domain.errors import Rejected

P = ParamSpec("P")
R = TypeVar("R")

EXIT_USER_ERROR = 2
DENIED = frozenset({"AccessDenied", "AccessDeniedException", "UnauthorizedOperation"})
BAD_CREDENTIALS = frozenset(
    {"ExpiredToken", "ExpiredTokenException", "InvalidClientTokenId", "UnrecognizedClientException"}
)


class UserError(Exception):
    """The user can put it right; the message says how."""


def told(verb: Callable[P, R]) -> Callable[P, R]:
    """Return the verb, with every error that its user can put right told in one line and exit code 2."""

    @functools.wraps(verb)
    def answering(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return verb(*args, **kwargs)
        except (
            UserError,
            Rejected,
            ClientError,
            ConnectionError,
            HTTPClientError,
            NoCredentialsError,
            NoRegionError,
            ProfileNotFound,
            TokenRetrievalError,
        ) as error:
            typer.echo(f"holdfast: {sentence(error)}", err=True)
            raise typer.Exit(EXIT_USER_ERROR) from error

    return answering


def sentence(error: Exception) -> str:
    """Return what happened and what to do about it."""
    if isinstance(error, Rejected):
        return error.reason
    if isinstance(error, NoRegionError):
        return "no region is set; set AWS_REGION, or run `aws configure`"
    if isinstance(error, NoCredentialsError | ProfileNotFound | TokenRetrievalError):
        return f"{error}; set AWS_PROFILE, or log in with `aws configure` or `aws sso login`"
    if isinstance(error, ConnectionError | HTTPClientError):
        where = os.environ.get("AWS_ENDPOINT_URL")
        return f"{error}; " + (
            f"AWS_ENDPOINT_URL is {where}: is it up?" if where else "is there a way to the internet?"
        )
    if isinstance(error, ClientError):
        return _answer_of_aws(error)
    return str(error)


def _answer_of_aws(error: ClientError) -> str:
    code, text = error.response["Error"]["Code"], error.response["Error"]["Message"]
    if code in DENIED:
        return f"{error.operation_name} is not allowed: {text}; ask for the permission, or use another AWS_PROFILE"
    if code in BAD_CREDENTIALS:
        return f"{error.operation_name}: {text}; log in again"
    return f"{error.operation_name}: {code}: {text}"
