"""What template.yaml says of tables, doors and what wakes them; nothing of it is said a second time here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moto.events.models import EventPattern

from local.deploy import load

ROOT = Path(__file__).resolve().parents[2]
PSEUDO = {
    "AWS::Partition": "aws",
    "AWS::Region": "us-east-1",
    "AWS::AccountId": "123456789012",
    "AWS::StackName": "holdfast",
}
TABLE_PROPERTIES = ("BillingMode", "KeySchema", "AttributeDefinitions", "GlobalSecondaryIndexes", "StreamSpecification")
LAMBDA_TIMEOUT_S = 3
PERIOD = re.compile(r"rate\((\d+) minutes?\)")


@dataclass(frozen=True)
class AnyOf:
    """The filters of one event source: a record that matches one of them is delivered."""

    patterns: tuple[EventPattern, ...]

    def matches_event(self, event: dict[str, Any]) -> bool:
        return any(pattern.matches_event(event) for pattern in self.patterns)


@dataclass(frozen=True)
class Wake:
    """One event source of a door. `pattern` filters stream records and events; `every_s` is a schedule's period."""

    kind: str
    batch: int = 1
    retries: int = 0
    pattern: EventPattern | AnyOf | None = None
    every_s: float = 0.0
    queue: str = ""


@dataclass(frozen=True)
class Door:
    """A function of the template: module, timeout, memory, and what Lambda does with a failed asynchronous call."""

    logical_id: str
    module: str
    timeout_s: float
    memory_mb: int = 128
    async_retries: int = 2
    async_age_s: float = 21600.0
    wakes: tuple[Wake, ...] = ()


@dataclass(frozen=True)
class QueueRules:
    visibility_s: float
    receives: int


@dataclass(frozen=True)
class Template:
    doors: dict[str, Door] = field(default_factory=dict)
    queues: dict[str, QueueRules] = field(default_factory=dict)
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)


def read_template(path: Path = ROOT / "template.yaml") -> Template:
    """Return what the world needs of the template."""
    raw = _plain(load(path))
    resources = raw["Resources"].items()
    common = raw["Globals"]["Function"]
    return Template(
        doors={
            name: _door(name, {**common, **body["Properties"]})
            for name, body in resources
            if body["Type"] == "AWS::Serverless::Function"
        },
        queues={
            name: _queue_rules(body["Properties"])
            for name, body in resources
            if body["Type"] == "AWS::SQS::Queue" and "RedrivePolicy" in body["Properties"]
        },
        tables={
            name: {key: body["Properties"][key] for key in TABLE_PROPERTIES if key in body["Properties"]}
            for name, body in resources
            if body["Type"] == "AWS::DynamoDB::Table"
        },
    )


def _plain(value: Any) -> Any:
    """Return the template with references as logical ids and pseudo parameters filled in."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"Ref": str(name)}:
            return PSEUDO.get(name, name)
        case {"Fn::GetAtt": [str(name), *_]}:
            return name
        case {"Fn::Sub": str(text)}:
            return re.sub(r"\$\{([^!}]+)\}", lambda found: PSEUDO.get(found[1], found[1]), text)
    return {key: _plain(item) for key, item in value.items()}


def _door(name: str, properties: dict[str, Any]) -> Door:
    config = properties.get("EventInvokeConfig", {})
    return Door(
        logical_id=name,
        module=properties["Handler"].removesuffix(".handler"),
        timeout_s=properties.get("Timeout", LAMBDA_TIMEOUT_S),
        memory_mb=properties.get("MemorySize", 128),
        async_retries=config.get("MaximumRetryAttempts", 2),
        async_age_s=config.get("MaximumEventAgeInSeconds", 21600),
        wakes=tuple(_wakes(properties.get("Events", {}))),
    )


def _wakes(events: dict[str, Any]) -> Iterator[Wake]:
    for event in events.values():
        rules = event["Properties"]
        match event["Type"]:
            case "SQS":
                yield Wake("queue", batch=rules.get("BatchSize", 10), queue=rules["Queue"])
            case "DynamoDB":
                filters = rules["FilterCriteria"]["Filters"]
                yield Wake(
                    "stream",
                    batch=rules.get("BatchSize", 100),
                    retries=rules["MaximumRetryAttempts"],
                    pattern=AnyOf(tuple(EventPattern.load(each["Pattern"]) for each in filters)),
                )
            case "EventBridgeRule":
                yield Wake("rule", pattern=EventPattern.load(json.dumps(rules["Pattern"])))
            case "Schedule":
                found = PERIOD.fullmatch(rules["Schedule"])
                if found is None:
                    raise ValueError(f"the schedule {rules['Schedule']!r} is none that this world knows")
                yield Wake("schedule", every_s=60.0 * int(found[1]))
            case other:
                raise ValueError(f"events of type {other} are not known in this world")


def _queue_rules(properties: dict[str, Any]) -> QueueRules:
    return QueueRules(properties["VisibilityTimeout"], properties["RedrivePolicy"]["maxReceiveCount"])
