"""holdfast.job-template/1 -> a part of a request under a name and a version, and requests made from it.

A version never changes once it is put, so a request that names one always means the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from holdfast.domain.errors import Rejected
from holdfast.messages.envelope import open_envelope
from holdfast.messages.job_request import TEMPLATE_NAME, JobRequest, TemplateRef
from holdfast.messages.refusal import validated
from job_contract.version import canonical_json

SCHEMA = "holdfast.job-template/1"
ABOUT = ("schema", "template", "dedup_id")
"""Fields that belong to a single request and never to a template."""


class JobTemplate(BaseModel):
    """Fields of a request that many requests share; a request's own fields win over them, part by part."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    schema_: Literal["holdfast.job-template/1"] = Field(alias="schema", description=f'"{SCHEMA}"')
    name: str = Field(pattern=TEMPLATE_NAME, description="1 to 63 characters a-z, 0-9 and -, the first no dash")
    version: int = Field(ge=1, le=1_000_000, description="a whole number of at least 1; a version is put once")
    request: dict[str, Any] = Field(description="fields of a holdfast.job-request/1, as many as you like")


def read_template(body: str) -> JobTemplate:
    """Return the template in a file or message. Raises Rejected."""
    message = open_envelope(body)
    if message.get("schema") != SCHEMA:
        raise Rejected("bad_template", f"schema is {message.get('schema')!r}; a template has {SCHEMA!r}")
    template = validated(JobTemplate, message)
    known = {field.alias or name for name, field in JobRequest.model_fields.items()} - set(ABOUT)
    strange = sorted(set(template.request) - known)
    if strange:
        raise Rejected(
            "bad_template", f"request has {', '.join(strange)[:200]}; a template may give {', '.join(sorted(known))}"
        )
    try:
        canonical_json(template.request)
    except ValueError as error:
        raise Rejected("bad_template", f"request: {error}; NaN and Infinity are no JSON") from error
    return template


def template_data(template: JobTemplate) -> Mapping[str, Any]:
    """Return the template as it is stored: its request in one spelling, so that equal ones are equal."""
    return {
        "name": template.name,
        "version": template.version,
        "body": canonical_json(template.request).decode(),
    }


def template_asked(message: Mapping[str, Any]) -> TemplateRef | None:
    """Return the template that a request is made from, None where it names none. Raises Rejected."""
    asked = message.get("template")
    return None if asked is None else validated(_Asking, {"template": asked}).template


class _Asking(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    template: TemplateRef = Field(description="name, version")


def expanded(message: Mapping[str, Any], template: Mapping[str, Any], version: int) -> dict[str, Any]:
    """Return the whole request: the template's fields with the message's own over them, and the version it was made of.

    Objects are joined field by field, everything else is replaced. Without a dedup_id the message itself is the
    identity: a newer version of the template must not turn a second delivery into a second job.
    """
    whole = _joined(template, message)
    whole["template"] = {"name": message["template"]["name"], "version": version}
    if whole.get("dedup_id") is None:
        whole["dedup_id"] = f"template-{sent_sha256(message)[:32]}"
    return whole


def sent_sha256(message: Mapping[str, Any]) -> str:
    """Return the digest of a message as it was sent, by which a second one under its dedup_id is told apart."""
    return hashlib.sha256(json.dumps(message, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def _joined(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _joined(under[key], over[key]) for key in under if _both_objects(under[key], over.get(key))}
    return {**under, **over, **both}


def _both_objects(one: Any, other: Any) -> bool:
    return isinstance(one, Mapping) and isinstance(other, Mapping)
