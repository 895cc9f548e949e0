"""EC2 requests and answers as the dicts of boto3: parsed and rendered by botocore's own description of the API."""

import functools
from xml.sax.saxutils import escape

import botocore.session
from botocore.model import OperationModel, Shape

NAMESPACE = "http://ec2.amazonaws.com/doc/2016-11-15/"


@functools.cache
def operation(name: str) -> OperationModel:
    return _service().operation_model(name)


@functools.cache
def _service():
    return botocore.session.get_session().get_service_model("ec2")


def parse(name: str, flat: dict[str, list[str] | str]) -> dict:
    """The request of operation `name` as boto3 takes it; `flat` holds query parameters such as Filter.1.Value.2."""
    parameters = {key: value[0] if isinstance(value, list) else value for key, value in flat.items()}
    return _parse(operation(name).input_shape, "", parameters) or {}


def render(name: str, answer: dict, request_id: str) -> bytes:
    """The XML that boto3 reads back as `answer`; keys with the value None are left out."""
    shape = operation(name).output_shape
    inner = _render_members(shape, answer) if shape else ""
    return (
        f'<?xml version="1.0" encoding="UTF-8"?>\n<{name}Response xmlns="{NAMESPACE}">{inner}'
        f"<requestId>{request_id}</requestId></{name}Response>"
    ).encode()


def _parse(shape: Shape, prefix: str, parameters: dict[str, str]):
    if shape.type_name == "structure":
        found = {}
        for name, member in shape.members.items():
            wire = _wire_name(name, member)
            value = _parse(member, f"{prefix}.{wire}" if prefix else wire, parameters)
            if value is not None:
                found[name] = value
        return found or None
    if shape.type_name == "list":
        items = []
        while (item := _parse(shape.member, f"{prefix}.{len(items) + 1}", parameters)) is not None:
            items.append(item)
        return items or None
    text = parameters.get(prefix)
    return None if text is None else _value(shape, text)


def _value(shape: Shape, text: str):
    if shape.type_name == "boolean":
        return text == "true"
    if shape.type_name in ("integer", "long"):
        return int(text)
    return text


def _wire_name(name: str, member: Shape) -> str:
    if "queryName" in member.serialization:
        return member.serialization["queryName"]
    wire = member.serialization.get("name", name)
    return wire[0].upper() + wire[1:]


def _render(shape: Shape, value) -> str:
    if shape.type_name == "structure":
        return _render_members(shape, value)
    if shape.type_name == "list":
        return "".join(f"<item>{_render(shape.member, item)}</item>" for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    return escape(str(value))


def _render_members(shape: Shape, answer: dict) -> str:
    text = ""
    for name, member in shape.members.items():
        if answer.get(name) is not None:
            tag = member.serialization.get("name", name)
            text += f"<{tag}>{_render(member, answer[name])}</{tag}>"
    return text
