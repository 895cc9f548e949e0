"""A request is taken in once, with its plan, or refused; nothing that AWS does loses it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from holdfast.application.intake import take_in
from holdfast.domain.catalogue import InstanceType, Offers
from holdfast.domain.errors import Rejected, Unavailable
from tests import builders as b
from tests.application.fakes import FakePorts

GIB = 1024**3
C7I = InstanceType(name="c7i.large", vcpus=2, memory_bytes=4 * GIB, network_gbps=0.781, zones=("us-east-1a",))
OFFERS = Offers(types={"c7i.large": C7I}, quotas={"L-34B43A08": 64.0}, addresses={"us-east-1a": 100})
SAMPLE = json.dumps(b.sample("job-request.json"))


def ports(offers: Offers = OFFERS) -> FakePorts:
    made = FakePorts()
    made.catalogue.known = offers
    return made


def stored(world: FakePorts) -> Any:
    [request] = world.store.requests.values()
    return request


def test_the_plan_is_kept_beside_the_request_with_its_warnings() -> None:
    world = ports()
    take_in(SAMPLE, world)
    made = stored(world)["plan"]
    assert [option["instance_type"] for option in made["options"]] == ["c7i.large"]
    assert "small_model_many_nodes" in [note["code"] for note in made["warnings"]]


def test_a_refused_plan_is_a_refusal_with_its_code_and_no_job() -> None:
    world = ports(replace(OFFERS, quotas={"L-34B43A08": 2.0}))
    with pytest.raises(Rejected) as caught:
        take_in(SAMPLE, world)
    assert caught.value.code == "gang_over_quota"
    assert world.store.rows == {}


def test_a_busy_aws_loses_nothing() -> None:
    world = ports()
    world.catalogue.busy = 1
    with pytest.raises(Unavailable):
        take_in(SAMPLE, world)
    assert take_in(SAMPLE, world).plan is not None
    assert len(world.store.rows) == 1


def test_what_was_accepted_is_not_judged_again() -> None:
    world = ports()
    take_in(SAMPLE, world)
    world.catalogue.known = replace(OFFERS, quotas={"L-34B43A08": 0.0})
    assert take_in(SAMPLE, world).plan is None


def test_another_body_under_a_used_identity_is_refused_before_any_plan() -> None:
    world = ports()
    take_in(SAMPLE, world)
    world.catalogue.busy = 1
    with pytest.raises(Rejected) as caught:
        take_in(SAMPLE.replace('"priority": 50', '"priority": 51'), world)
    assert caught.value.code == "identity_conflict"
    assert repr(json.loads(SAMPLE)["dedup_id"]) in caught.value.reason


def test_another_name_under_a_used_dedup_id_is_refused_before_any_plan() -> None:
    world = ports()
    take_in(SAMPLE, world)
    world.catalogue.busy = 1
    with pytest.raises(Rejected, match="tiny llama on the standard library"):
        take_in(json.dumps({**json.loads(SAMPLE), "name": "another"}), world)
    assert len(world.store.rows) == 1


def test_without_a_dedup_id_another_name_is_another_job() -> None:
    world = ports()
    body = {key: value for key, value in json.loads(SAMPLE).items() if key != "dedup_id"}
    for name in ("one", "two"):
        assert take_in(json.dumps({**body, "name": name}), world).plan is not None
    assert len(world.store.rows) == 2


def test_nothing_known_is_a_plan_with_warnings() -> None:
    taken = take_in(SAMPLE, ports(Offers(unread=("instance types could not be read",))))
    assert taken.plan is not None
    assert next(note.code for note in taken.plan.warnings) == "fact_unknown"


@pytest.mark.parametrize(("memory_gib", "parallel"), [(4, "ddp"), (1, "ddp")])
def test_auto_becomes_the_plans_choice_in_the_spec_of_the_nodes(memory_gib: int, parallel: str) -> None:
    world = ports(replace(OFFERS, types={"c7i.large": replace(C7I, memory_bytes=memory_gib * GIB)}))
    body = json.dumps({**json.loads(SAMPLE), "training": {**json.loads(SAMPLE)["training"], "parallel": "auto"}})
    specs: list[Any] = []
    create = world.store.create
    world.store.create = lambda job, request, spec: specs.append((job, spec)) or create(job, request, spec)  # type: ignore[method-assign]
    take_in(body, world)
    [(job, spec)] = specs
    assert spec.training.parallel == parallel
    assert job.spec_id == spec.spec_id
