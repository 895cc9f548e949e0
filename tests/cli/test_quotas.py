"""`holdfast quota`: what is shown, what is asked for, and what is refused before it is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import pytest

from holdfast.application.account import set_quota
from holdfast.application.control import obey
from holdfast.domain.events import AttemptStarted
from holdfast.domain.ledger import Reserved
from holdfast.messages.control_request import read_control
from tests.application.fakes import FakePorts
from tests.cli.cloud import AT, JOB, Cloud, holdfast


def told(*words: str) -> Any:
    """The JSON that a verb prints."""
    ran = holdfast("quota", *words, "--json")
    assert ran.exit_code == 0, ran.stderr
    return json.loads(ran.stdout)


def supervisor(cloud: Cloud) -> FakePorts:
    """The supervisor behind the stack's tables."""
    ports = FakePorts()
    ports.store = cloud.store  # type: ignore[assignment]
    return ports


def done(cloud: Cloud) -> None:
    """What was asked for is obeyed."""
    for message in cloud.sent("ControlQueueUrl"):
        obey(read_control(json.dumps(message)), supervisor(cloud))


def starts(cloud: Cloud) -> None:
    reserved = Reserved(vcpus=4, gpus=0, nodes=2, market="spot")
    cloud.happens(JOB, AttemptStarted(at=AT + 1, attempt=1, reserved=reserved))


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (("--team", "research", "--gpus", "64"), {"team": "research", "gpus": 64}),
        (("--team", "research", "--gpus", "none", "--nodes", "0"), {"team": "research", "gpus": "none", "nodes": 0}),
        (("--market", "spot", "--vcpus", "768"), {"market": "spot", "vcpus": 768}),
        (
            ("--team", "research", "--weight", "2.5", "--preempt-from", "90", "--no-preemptible"),
            {"team": "research", "weight": 2.5, "preempt_from": 90, "preemptible": False},
        ),
        (
            ("--team", "research", "--preempt-from", "none", "--preemptible"),
            {"team": "research", "preempt_from": "none", "preemptible": True},
        ),
    ],
)
def test_setting_a_quota_is_one_message_that_the_supervisor_can_read(
    cloud: Cloud, words: tuple[str, ...], values: dict[str, Any]
) -> None:
    told("set", *words)
    [sent] = cloud.sent("ControlQueueUrl")
    known = {"schema": "holdfast.control/1", "action": "quota", "requested_by": "ops", "dedup_id": ANY}
    assert sent == {**known, **values}
    assert read_control(json.dumps(sent)).action == "quota"


def test_a_quota_is_shown_with_what_is_in_flight_and_what_is_allowed(cloud: Cloud) -> None:
    cloud.accept()
    starts(cloud)
    told("set", "--team", "research", "--nodes", "8", "--weight", "2")
    told("set", "--market", "spot", "--vcpus", "768")
    done(cloud)
    team, market = told()
    assert (team["of"], team["name"], team["nodes"]) == ("team", "research", {"in_flight": 2, "limit": 8})
    assert (team["weight"], team["preempt_from"], team["preemptible"]) == (2.0, None, True)
    assert (market["of"], market["name"], market["vcpus"]) == ("market", "spot", {"in_flight": 4, "limit": 768})
    assert team["used_gpu_hours"] > 0
    shown = holdfast("quota").stdout
    assert "2 of 8" in shown
    assert "4 of 768" in shown


def test_a_team_without_a_quota_is_shown_with_what_it_has(cloud: Cloud) -> None:
    assert "no quota is set" in holdfast("quota").stdout
    cloud.accept()
    starts(cloud)
    assert [(one["name"], one["nodes"]) for one in told()] == [
        ("research", {"in_flight": 2, "limit": None}),
        ("spot", {"in_flight": 2, "limit": None}),
    ]


def test_setting_says_what_is_changed_from_what_to_what_and_warns_of_an_unknown_team(cloud: Cloud) -> None:
    set_quota("team", "reserch", lambda known: replace(known, gpus=8), supervisor(cloud))
    ran = holdfast("quota", "set", "--team", "reserch", "--gpus", "64", "--weight", "2")
    assert "gpus 8 -> 64, weight 1 -> 2" in ran.stdout
    assert "is it spelled so?" in ran.stderr
    cloud.accept()
    assert holdfast("quota", "set", "--team", "research", "--gpus", "64").stderr == ""


def test_a_cleared_quota_is_gone(cloud: Cloud) -> None:
    told("set", "--market", "spot", "--gpus", "64")
    done(cloud)
    assert told("clear", "--market", "spot")["market"] == "spot"
    done(cloud)
    assert told() == []
    ran = holdfast("quota", "clear", "--market", "spot")
    assert ran.exit_code == 2
    assert "market spot has no quota" in ran.stderr


def test_the_history_says_who_set_what_from_what_to_what(cloud: Cloud) -> None:
    told("set", "--team", "research", "--gpus", "64")
    done(cloud)
    told("set", "--team", "research", "--gpus", "none", "--weight", "2", "--by", "ann")
    done(cloud)
    told("set", "--market", "spot", "--nodes", "4")
    done(cloud)
    first, second = told("history", "--team", "research")
    assert (first["by"], first["before"]["gpus"], first["after"]["gpus"]) == ("ops", None, 64)
    assert (second["by"], second["before"]["gpus"], second["after"]["gpus"]) == ("ann", 64, None)
    assert "gpus 64 -> none, weight 1 -> 2" in holdfast("quota", "history", "--team", "research").stdout
    assert len(told("history")) == 3


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("set", "--gpus", "64"), "--team TEAM"),
        (("set", "--team", "research", "--market", "spot", "--gpus", "64"), "one of --team TEAM"),
        (("set", "--team", "research"), "nothing is to be set"),
        (("set", "--team", "research", "--gpus", "many"), "--gpus is 'many'"),
        (("set", "--team", "research", "--gpus", "-1"), "whole number from 0 up"),
        (("set", "--team", "research", "--preempt-from", "101"), "preempt_from is 101"),
        (("set", "--team", "research", "--weight", "0"), "weight is 0"),
        (("set", "--team", "No Such", "--gpus", "1"), "team is"),
        (("set", "--market", "sopt", "--gpus", "1"), "spot, on_demand or mixed"),
        (("set", "--market", "spot", "--weight", "2"), "of teams only"),
        (("clear", "--team", "research"), "team research has no quota"),
        (("--stack", "mine", "set", "--team", "research", "--gpus", "1"), "behind the verb"),
    ],
)
def test_what_makes_no_sense_is_refused_before_it_is_sent(cloud: Cloud, words: tuple[str, ...], sentence: str) -> None:
    ran = holdfast("quota", *words)
    assert ran.exit_code == 2
    assert sentence in ran.stderr
    assert cloud.sent("ControlQueueUrl") == []
