"""Rules of docs/rules.md that a user could stumble over and that no other test claims."""

from __future__ import annotations

import json
from typing import Any

import pytest

from holdfast.application.intake import accept
from holdfast.domain.errors import Rejected
from holdfast.domain.keys import KEEP_S
from holdfast.domain.notices import ORDERED_STOP_S
from holdfast.domain.ownership import GONE, ORPHAN_GRACE_S
from holdfast.messages.acceptance import acceptance_of, read_acceptance
from holdfast.messages.control_request import control_identity, read_control
from holdfast.messages.instance_state_change import read_instance_state_change
from holdfast.messages.job_request import body_sha256, job_id, node_spec, read_request, request_identity
from holdfast.messages.spot_interruption import read_spot_interruption
from tests import builders as b
from tests.application.fakes import FakeStore

SAMPLE = b.sample("job-request.json")


def read(**changes: Any) -> Any:
    return read_request(json.dumps({**SAMPLE, **changes}))


def test_a_key_may_occur_twice_in_two_objects_but_not_in_one() -> None:
    body = json.dumps(SAMPLE)
    assert read_request(body.replace('"seed": 1234', '"seed": 1234 ')) == read()
    with pytest.raises(Rejected, match="doubled_key"):
        read_request(body.replace('"seed": 1234', '"seed": 1234, "seed": 1234'))


@pytest.mark.parametrize("number", ["1e2", "100.0", '"100"', "true"])
def test_a_whole_number_is_written_without_point_exponent_or_quotes(number: str) -> None:
    body = json.dumps(SAMPLE).replace('"steps": 120', f'"steps": {number}')
    with pytest.raises(Rejected, match=r"training\.steps"):
        read_request(body)


def test_a_dedup_id_is_text_and_its_case_counts() -> None:
    with pytest.raises(Rejected, match="dedup_id"):
        read(dedup_id=1)
    assert request_identity(read(dedup_id="Demo-1")) != request_identity(read(dedup_id="demo-1"))
    assert request_identity(read(dedup_id="1")) != request_identity(read(dedup_id="01"))


def test_names_that_differ_in_case_or_accents_have_one_slug_and_are_still_two_jobs() -> None:
    first, second = (read(name=name, dedup_id=None) for name in ("Tiny Llama", "tiny-Llàma"))
    assert job_id(first)[:10] == job_id(second)[:10] == "tiny-llama"
    assert job_id(first) != job_id(second)


def test_another_name_under_one_dedup_id_is_refused_with_the_first_name() -> None:
    store = FakeStore()
    first, second = (read_acceptance(json.dumps({**SAMPLE, "name": name}), now=b.NOW) for name in ("one", "two"))
    assert accept(first.job, first.request, first.spec, store=store)
    with pytest.raises(Rejected, match=rf"identity_conflict.*{first.job.id}.*'one'"):
        accept(second.job, second.request, second.spec, store=store)
    assert list(store.rows) == [first.job.id]
    assert not accept(first.job, first.request, first.spec, store=store)


def test_one_dedup_id_of_two_teams_is_two_jobs_under_any_names() -> None:
    store = FakeStore()
    for team, name in (("research", "one"), ("vision", "two"), ("audio", "one")):
        order = read_acceptance(json.dumps({**SAMPLE, "team": team, "name": name}), now=b.NOW)
        assert accept(order.job, order.request, order.spec, store=store)
    assert len(store.rows) == 3


def test_a_whole_number_and_the_same_number_with_a_point_are_one_body_where_both_are_allowed() -> None:
    assert body_sha256(read(report_s=2)) == body_sha256(read(report_s=2.0))


def test_an_old_message_that_is_redriven_does_not_start_its_job_again() -> None:
    store, order = FakeStore(), read_acceptance(json.dumps(SAMPLE), now=b.NOW)
    assert accept(order.job, order.request, order.spec, store=store)
    store.rows[order.job.id] = b.after(order.job, b.cancelled())
    again = read_acceptance(json.dumps(SAMPLE), now=b.NOW + 14 * 86_400)
    assert not accept(again.job, again.request, again.spec, store=store)
    assert store.rows[order.job.id].over


def test_a_message_that_is_redriven_after_its_identity_is_forgotten_is_a_new_job() -> None:
    store, order = FakeStore(), read_acceptance(json.dumps(SAMPLE), now=b.NOW)
    assert accept(order.job, order.request, order.spec, store=store)
    del store.rows[order.job.id], store.requests[order.job.id]
    assert accept(order.job, order.request, order.spec, store=store)
    assert KEEP_S == 35 * 86_400


def spot(action: str) -> Any:
    event = b.sample("ec2-spot-interruption-warning.json")
    return read_spot_interruption({**event, "detail": {**event["detail"], "instance-action": action}})


@pytest.mark.parametrize(
    ("action", "left_s"), [("terminate", 120), ("stop", 120), ("a-word-of-2030", 120), ("hibernate", 0)]
)
def test_every_spot_action_takes_the_machine_and_hibernation_at_once(action: str, left_s: int) -> None:
    assert spot(action).deadline_at - spot(action).at == left_s


def state(word: str) -> bool:
    event = b.sample("ec2-instance-state-change-running.json")
    return bool(read_instance_state_change({**event, "detail": {**event["detail"], "state": word}}).is_going)


def test_an_instance_is_gone_from_the_moment_it_begins_to_stop_or_to_end() -> None:
    assert {word for word in ("pending", "running", *GONE) if state(word)} == GONE
    assert {"shutting-down", "terminated", "stopping", "stopped"} == GONE


def test_a_state_that_this_release_does_not_know_takes_nothing_away() -> None:
    assert not state("a-word-of-2030")


def test_a_wish_without_a_dedup_id_is_asked_once_in_the_life_of_a_job() -> None:
    def wish(**more: Any) -> str:
        body = {"schema": "holdfast.control/1", "job": "j", "action": "priority", "priority": 9, **more}
        return control_identity(read_control(json.dumps(body)))  # type: ignore[arg-type]

    assert wish() == wish(requested_by="ada")
    assert wish() != wish(priority=10)
    assert wish(dedup_id="a") != wish(dedup_id="b")


def test_batch_and_learning_rate_are_of_the_whole_job_whatever_its_number_of_nodes() -> None:
    def trained(nodes: int) -> tuple[int, float]:
        request = read(fleet={**SAMPLE["fleet"], "nodes": nodes})
        training = node_spec(request, "j", ranks_per_node=0).training
        return training.global_batch, training.learning_rate

    assert trained(1) == trained(2) == trained(16) == (16, 0.001)


def test_keep_is_passed_on() -> None:
    request = read(checkpoint={"interval_steps": 25, "keep": 1})
    assert node_spec(request, "j", ranks_per_node=0).checkpoint.keep == 1
    assert acceptance_of(request, now=b.NOW).job.keep == 1
    assert not [path.name for path in (b.ROOT / "training_image").rglob("*.py") if "delete_object" in path.read_text()]


def test_the_grace_times_of_the_sweep_are_the_documented_ones() -> None:
    text = (b.ROOT / "docs" / "rules.md").read_text()
    assert ORPHAN_GRACE_S == 600
    assert ORDERED_STOP_S == 600
    assert text.count("ten minutes") >= 2


def test_o10_a_request_of_900_kib_is_refused_with_the_limit_named() -> None:
    body = json.dumps({**SAMPLE, "environment": {"NOTE": "é" * 450 * 1024}}, ensure_ascii=False)
    with pytest.raises(Rejected, match="the limit is 262144"):
        read_request(body)
