"""The capacity model, without any cloud."""

import itertools

import pytest

from local.engine.capacity import (
    Candidate,
    Capacity,
    FleetRequest,
    IdempotentParameterMismatch,
    InstanceNotFound,
)

A = Candidate(instance_type="p5.48xlarge", zone="us-east-1a", subnet_id="subnet-a")
B = Candidate(instance_type="p5.48xlarge", zone="us-east-1b", subnet_id="subnet-b")
C = Candidate(instance_type="p4d.24xlarge", zone="us-east-1b", subnet_id="subnet-b")


def capacity(**options):
    numbers = itertools.count(1)
    return Capacity(new_instance_id=lambda: f"i-{next(numbers):017x}", **options)


def gang(*candidates, target=4, minimum=4, token="", **options):
    return FleetRequest(
        candidates=candidates,
        market="spot",
        target=target,
        minimum=minimum,
        single_type=True,
        single_zone=True,
        client_token=token,
        **options,
    )


def slots(model, candidate, count, code=""):
    model.set_pool(instance_type=candidate.instance_type, zone=candidate.zone, market="spot", slots=count, code=code)


def test_plenty_is_the_default():
    answer = capacity().create_fleet(gang(A), now=0)
    assert len(answer.instance_ids) == 4
    assert answer.refused == ()


def test_a_gang_is_bought_whole_or_not_at_all():
    model = capacity()
    slots(model, A, 3)
    answer = model.create_fleet(gang(A), now=0)
    assert answer.instance_ids == ()
    assert [one.code for one in answer.refused] == ["InsufficientInstanceCapacity"]
    assert "us-east-1a" in answer.refused[0].message
    assert len(model.create_fleet(gang(A, target=3, minimum=3), now=0).instance_ids) == 3


def test_a_partial_pool_gives_what_it_has_although_a_minimum_was_asked():
    model = capacity()
    model.set_pool(instance_type=A.instance_type, zone=A.zone, market="spot", slots=3, partial=True)
    answer = model.create_fleet(gang(A), now=0)
    assert len(answer.instance_ids) == 3
    assert [one.code for one in answer.refused] == ["InsufficientInstanceCapacity"]


def test_the_slot_of_a_machine_that_aws_has_claimed_is_not_free_when_its_owner_ends_it():
    model = capacity()
    slots(model, A, 1)
    [first] = model.create_fleet(gang(A, target=1, minimum=1), now=0).instance_ids
    model.claim(first)
    model.shut_down(first, "Client.UserInitiatedShutdown", now=1)
    model.terminate(first)
    assert model.create_fleet(gang(A, target=1, minimum=1), now=2).instance_ids == ()


def test_the_next_candidate_is_taken_when_the_first_is_cold():
    model = capacity()
    slots(model, A, 2)
    answer = model.create_fleet(gang(A, B), now=0)
    assert [part.candidate for part in answer.filled] == [B]


def test_a_gang_never_mixes_zones_or_types():
    model = capacity()
    for candidate in (A, B, C):
        slots(model, candidate, 3)
    assert model.create_fleet(gang(A, B, C), now=0).instance_ids == ()


def test_without_the_single_options_a_fleet_is_spread_over_its_candidates():
    model = capacity()
    for candidate in (A, B, C):
        slots(model, candidate, 2)
    request = FleetRequest(candidates=(A, B, C), market="spot", target=4, minimum=0)
    assert [part.candidate for part in model.create_fleet(request, now=0).filled] == [A, B]


def test_without_a_minimum_the_answer_is_partial_and_says_why():
    model = capacity()
    slots(model, A, 2)
    answer = model.create_fleet(gang(A, minimum=0), now=0)
    assert len(answer.instance_ids) == 2
    assert [one.code for one in answer.refused] == ["InsufficientInstanceCapacity"]


def test_a_partial_answer_takes_the_fullest_group_and_leaves_the_others_alone():
    model = capacity()
    slots(model, A, 1)
    slots(model, B, 3)
    answer = model.create_fleet(gang(A, B, minimum=0), now=0)
    assert [(part.candidate, len(part.instance_ids)) for part in answer.filled] == [(B, 3)]
    assert len(model.create_fleet(gang(A, target=1, minimum=1), now=0).instance_ids) == 1


@pytest.mark.parametrize("code", ["MaxSpotInstanceCountExceeded", "VcpuLimitExceeded", "UnfulfillableCapacity"])
def test_a_pool_refuses_with_the_code_it_was_given(code):
    model = capacity()
    slots(model, A, None, code)
    assert [one.code for one in model.create_fleet(gang(A), now=0).refused] == [code]


def test_a_pool_may_be_named_for_every_zone_and_market():
    model = capacity()
    model.set_pool(instance_type="p5.48xlarge", slots=4)
    assert model.create_fleet(gang(A), now=0).instance_ids
    assert model.create_fleet(gang(B), now=0).instance_ids == ()


def test_the_same_token_gives_the_same_answer_even_when_capacity_changed():
    model = capacity()
    slots(model, A, 0)
    first = model.create_fleet(gang(A, token="t"), now=0)
    slots(model, A, None)
    assert model.create_fleet(gang(A, token="t"), now=1) is first
    assert model.instances == {}


def test_the_same_token_with_other_parameters_is_refused():
    model = capacity()
    model.create_fleet(gang(A, token="t"), now=0)
    with pytest.raises(IdempotentParameterMismatch):
        model.create_fleet(gang(B, token="t"), now=0)


def test_life_goes_one_way_and_the_dead_stay_visible():
    model = capacity()
    [one] = model.create_fleet(gang(A, target=1, minimum=1), now=0).instance_ids
    assert model.boot(one)
    assert not model.boot(one)
    assert not model.terminate(one)
    assert model.shut_down(one, "Client.UserInitiatedShutdown", now=5)
    assert not model.shut_down(one, "Server.SpotInstanceTermination", now=6)
    assert model.terminate(one)
    [shown] = model.describe([one], now=7)
    assert (shown.state, shown.reason, shown.ended_at) == ("terminated", "Client.UserInitiatedShutdown", 5)


def test_a_slot_comes_back_from_a_user_but_not_from_an_interruption():
    model = capacity()
    slots(model, A, 1)
    for reason, free in (("Client.UserInitiatedShutdown", 1), ("Server.SpotInstanceTermination", 0)):
        [one] = model.create_fleet(gang(A, target=1, minimum=1), now=0).instance_ids
        model.shut_down(one, reason, now=0)
        model.terminate(one)
        assert model.pools[("p5.48xlarge", "us-east-1a", "spot")].slots == free


def test_a_young_instance_is_not_found_until_it_is_seen():
    model = capacity(visible_delay_s=2)
    ids = model.create_fleet(gang(A, target=1, minimum=1), now=10).instance_ids
    with pytest.raises(InstanceNotFound):
        model.describe(ids, now=11)
    assert model.describe(now=11) == []
    assert len(model.describe(ids, now=12)) == 1


def test_instances_carry_the_tags_of_the_request_and_of_their_fleet():
    model = capacity()
    answer = model.create_fleet(gang(A, instance_tags=(("holdfast:job", "j"),)), now=0)
    tags = model.instances[answer.instance_ids[0]].tags
    assert tags == {"holdfast:job": "j", "aws:ec2:fleet-id": answer.fleet_id}
