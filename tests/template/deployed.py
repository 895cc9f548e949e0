"""The template as CloudFormation gets it: SAM's transform applied, short tags written out."""

import copy
import json
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from samtranslator.translator.transform import transform

from local.deploy import load

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "template.yaml"
DOORS = [
    "accept_request",
    "control_job",
    "dispatch_queue",
    "launch_fleet",
    "leave_token",
    "release_fleet",
    "close_attempt",
    "on_node_report",
    "on_spot_interruption",
    "on_rebalance_recommendation",
    "on_health_event",
    "on_capacity_block_event",
    "on_bid_evicted",
    "on_instance_state_change",
    "on_attempt_ended",
    "publish_changes",
    "write_report",
    "retire_saves",
    "sweep",
]


class _NoManagedPolicies:
    """SAM asks IAM for the ARNs of managed policies that are given by name; ours never are."""

    def load(self) -> dict:
        return {}


@cache
def written() -> dict:
    """The template as it is in the file."""
    return load(TEMPLATE)


@cache
def expanded() -> dict:
    """The template after SAM's transform, with sources that lie in a bucket."""
    template = copy.deepcopy(written())
    properties = [
        template["Globals"]["Function"],
        *(one.get("Properties", {}) for one in template["Resources"].values()),
    ]
    for one in properties:
        for name in ("CodeUri", "ContentUri", "DefinitionUri"):
            if name in one:
                one[name] = {"Bucket": "sources", "Key": str(one[name])}
    os.environ.setdefault("AWS_DEFAULT_REGION", "us-east-1")
    return transform(template, {}, _NoManagedPolicies())


def resources(kind: str) -> dict[str, dict]:
    """Logical id -> properties of every resource of a type, after the transform."""
    return {name: one.get("Properties", {}) for name, one in expanded()["Resources"].items() if one["Type"] == kind}


def named(reference) -> str:
    """The logical id that a Ref, a GetAtt or a Sub names."""
    if "Ref" in reference:
        return reference["Ref"]
    if "Fn::GetAtt" in reference:
        return reference["Fn::GetAtt"][0]
    return reference["Fn::Sub"].removeprefix("${").split(".")[0].rstrip("}")


def function_of(door: str) -> str:
    """accept_request -> AcceptRequest."""
    return "".join(part.capitalize() for part in door.split("_"))


def door_of(function: str) -> str:
    """AcceptRequest -> accept_request, by the handler."""
    return resources("AWS::Lambda::Function")[function]["Handler"].removesuffix(".handler")


def as_list(value) -> list:
    return value if isinstance(value, list) else [value]


def _documents(role: dict) -> Iterator[dict]:
    for policy in role.get("Policies", []):
        yield policy["PolicyDocument"]
    own = resources("AWS::IAM::ManagedPolicy")
    for arn in as_list(role.get("ManagedPolicyArns", [])):
        if isinstance(arn, dict) and arn.get("Ref") in own:
            yield own[arn["Ref"]]["PolicyDocument"]


def statements(role: str) -> list[dict]:
    """Every statement of a role's own policies, attached ones included; an optional one counts as given."""
    found = []
    for document in _documents(resources("AWS::IAM::Role")[role]):
        for statement in as_list(document["Statement"]):
            found.append(statement["Fn::If"][1] if "Fn::If" in statement else statement)
    return found


def grants(role: str) -> set[tuple[str, str]]:
    """(action, resource as JSON) pairs that a role is allowed."""
    return {
        (action, json.dumps(resource, sort_keys=True))
        for statement in statements(role)
        for action in as_list(statement["Action"])
        for resource in as_list(statement["Resource"])
    }


def doors_that_may(action: str) -> set[str]:
    """Doors whose role allows an action."""
    return {door for door in DOORS if action in {granted for granted, _ in grants(f"{function_of(door)}Role")}}
