"""What every EventBridge event of AWS has: a time, and fields that may grow in number at any day."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, ValidationError

from holdfast.domain.errors import Rejected

Model = TypeVar("Model", bound=BaseModel)
# Eight digits were given out until 2018, seventeen since.
INSTANCE_ID = re.compile(r"i-(?:[0-9a-f]{8}|[0-9a-f]{17})")


class AwsDetail(BaseModel):
    """Part of an event of AWS; unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True, populate_by_name=True)


class AwsEvent(AwsDetail):
    """The envelope of EventBridge; `time` is when the source saw the fact, to the second."""

    time: AwareDatetime

    @property
    def at(self) -> float:
        """The time of the fact in seconds since 1970."""
        return self.time.timestamp()


def parsed(kind: type[Model], event: Mapping[str, Any]) -> Model:
    """Return the event as `kind`. Raises Rejected when it is something else."""
    try:
        return kind.model_validate(event)
    except ValidationError as error:
        fault = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in fault["loc"]) or "the event"
        raise Rejected("bad_event", f"{kind.__name__}: {where}: {fault['msg']}") from error


def instance_id(text: str) -> str:
    """Return the bare instance id in lower case. Takes an id or an ARN, of which only the tail is read, because the
    ARNs of spot events may carry a zone and no account. Raises Rejected."""
    tail = text.strip().rsplit("/", 1)[-1].lower()
    if not INSTANCE_ID.fullmatch(tail):
        raise Rejected("bad_instance_id", f"{text!r} is no instance id (i- and 8 or 17 hex digits), nor an ARN of one")
    return tail


def instance_ids(texts: Iterable[str]) -> tuple[list[str], list[Rejected]]:
    """Return the ids among the texts, each once, and why each of the others is none: one bad id spoils no good one."""
    found: dict[str, None] = {}
    refused = []
    for text in texts:
        try:
            found[instance_id(text)] = None
        except Rejected as refusal:
            refused.append(refusal)
    return list(found), refused


InstanceId = Annotated[str, AfterValidator(instance_id)]
"""An instance id in its one spelling."""
