"""Reads what was sent: a request, a request made from a template, or the address of either."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from holdfast.application.ports import RequestFiles
from holdfast.domain.errors import Rejected
from holdfast.messages.acceptance import Acceptance, acceptance_of
from holdfast.messages.envelope import open_envelope
from holdfast.messages.job_request import read_message
from holdfast.messages.job_template import expanded, sent_sha256, template_asked
from holdfast.messages.request_reference import LIMIT_BYTES, opened, reference_in


class Templates(Protocol):
    def template(self, name: str, version: int | None) -> Mapping[str, Any] | None: ...


def read_order(
    body: str, *, templates: Templates, files: RequestFiles, now: float, bucket: str | None = None
) -> Acceptance:
    """Return what is to be stored for a message's body, template and reference followed. Raises Rejected."""
    message = open_envelope(body)
    reference = reference_in(message)
    if reference is not None:
        message = opened(reference, files.read(*reference.place, limit_bytes=LIMIT_BYTES))
    asked = template_asked(message)
    if asked is None:
        return acceptance_of(read_message(message), now=now, bucket=bucket)
    found = _template(asked.name, asked.version, templates)
    whole = expanded(message, json.loads(found["body"]), int(found["version"]))
    order = acceptance_of(read_message(whole), now=now, bucket=bucket)
    return replace(order, request={**order.request, "body_sha256": sent_sha256(message)})


def _template(name: str, version: int | None, templates: Templates) -> Mapping[str, Any]:
    found = templates.template(name, version)
    if found is not None:
        return found
    newest = templates.template(name, None)
    if newest is None:
        raise Rejected("unknown_template", f"there is no template {name!r}; put it, or correct template.name")
    raise Rejected(
        "unknown_template_version",
        f"template {name} has no version {version}, the newest is {newest['version']}; name one that exists, or none",
    )
