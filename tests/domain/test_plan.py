"""A request against what AWS offers: what is refused, what is warned of, what a plan says."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from holdfast.domain import estimate
from holdfast.domain.catalogue import InstanceType, Offers, quota_code
from holdfast.domain.plan import Plan, plan
from holdfast.domain.refusals import REFUSALS, WARNINGS
from holdfast.domain.sizing import PlanRequest
from holdfast.messages.job_request import PRESETS
from job_contract.spec import LoraSpec

NOW = 1_800_000_000.0
GIB = 1024**3
GB = 10**9
ZONES = ("us-east-1a", "us-east-1b")

MODEL_70B = PRESETS["70b"]

P5 = InstanceType(
    name="p5.48xlarge",
    vcpus=192,
    memory_bytes=2048 * GIB,
    accelerator="nvidia",
    gpus=8,
    gpu_name="H100",
    gpu_memory_bytes=80 * GIB,
    instance_store_bytes=8 * 3800 * GB,
    efa_max=32,
    network_gbps=100.0,
    network_peak_gbps=100.0,
    zones=ZONES,
    spot_usd={"us-east-1a": 30.0, "us-east-1b": 20.0},
    on_demand_usd=55.04,
)
P4D = replace(
    P5, name="p4d.24xlarge", vcpus=96, memory_bytes=1152 * GIB, gpu_name="A100", gpu_memory_bytes=40 * GIB,
    instance_store_bytes=8 * 1000 * GB, efa_max=4, spot_usd={"us-east-1a": 10.0}, on_demand_usd=21.957642,
)  # fmt: skip
G5 = replace(
    P5, name="g5.xlarge", vcpus=4, memory_bytes=16 * GIB, gpus=1, gpu_name="A10G", gpu_memory_bytes=22_888 * 1024**2,
    instance_store_bytes=250 * GB, efa_max=0, network_gbps=2.5, network_peak_gbps=10.0, spot_usd={"us-east-1a": 0.5},
)  # fmt: skip
C7I = InstanceType(
    name="c7i.large", vcpus=2, memory_bytes=4 * GIB, network_gbps=0.781, network_peak_gbps=12.5, zones=ZONES,
    spot_usd={"us-east-1a": 0.04},
)  # fmt: skip
KINDS = {kind.name: kind for kind in (P5, P4D, G5, C7I)}
OFFERS = Offers(types=KINDS, addresses={"us-east-1a": 200, "us-east-1b": 200})


def asked(**changes: Any) -> PlanRequest:
    """A 7B model on two p5, which nothing speaks against."""
    request = PlanRequest(
        nodes=2,
        min_nodes=2,
        instance_types=("p5.48xlarge",),
        market="spot",
        zones=(),
        model=PRESETS["7b"],
        steps=10_000,
        global_batch=256,
        sequence_length=2048,
        micro_batch=1,
        parallel="auto",
        precision="auto",
        interval_steps=None,
        interval_s=900.0,
        attempts=5,
        run_s=30 * 86_400,
    )
    return replace(request, **changes)


def offering(kind: InstanceType | None = None, *, quotas: dict[str, float] | None = None, **changes: Any) -> Offers:
    """The offers with one type changed."""
    types = {**KINDS, **({kind.name: kind} if kind else {})}
    return replace(OFFERS, types=types, quotas=quotas or {}, **changes)


def planned(offers: Offers = OFFERS, **changes: Any) -> Plan:
    return plan(asked(**changes), offers, now=NOW)


ONE_G5 = {"nodes": 1, "min_nodes": 1, "instance_types": ("g5.xlarge",), "model": PRESETS["125m"], "global_batch": 8}
SMALL_CPU = {"instance_types": ("c7i.large",), "model": PRESETS["tiny"], "sequence_length": 128, "global_batch": 16}

FAULTS: dict[str, tuple[Offers, dict[str, Any], tuple[str, ...]]] = {
    "unknown_instance_type": (OFFERS, {"instance_types": ("p5.48xlarge", "p5.47xlarge")}, ("p5.47xlarge",)),
    "mixed_accelerators": (OFFERS, {"instance_types": ("p5.48xlarge", "c7i.large")}, ("nvidia", "one kind")),
    "no_subnet_in_zone": (OFFERS, {"zones": ("us-east-1f",)}, ("us-east-1f", "us-east-1a, us-east-1b")),
    "accelerator_not_supported": (offering(replace(P5, accelerator="aws neuron")), {}, ("aws neuron", "NVIDIA")),
    "arm_without_image": (offering(replace(C7I, arch="arm64")), SMALL_CPU, ("arm64", "image.uri")),
    "precision_not_on_gpu": (offering(replace(G5, gpu_name="T4")), ONE_G5, ("T4", "fp32")),
    "market_not_offered": (offering(replace(P5, markets=("on_demand",))), {}, ("spot", "it is on on_demand")),
    "type_not_offered": (offering(replace(P5, zones=("us-east-1f",))), {}, ("us-east-1a, us-east-1b", "us-east-1f")),
    "no_efa": (OFFERS, {**ONE_G5, "nodes": 2, "min_nodes": 2}, ("2 x g5.xlarge", "fleet.nodes 1")),
    "zero_quota": (offering(quotas={"L-C4BD4855": 0.0}), {}, ("0 vCPUs", "384", "L-C4BD4855")),
    "gang_over_quota": (offering(quotas={"L-C4BD4855": 192.0}), {}, ("384", "192", "lower fleet.nodes to 1")),
    "too_few_addresses": (
        offering(addresses={"us-east-1a": 1, "us-east-1b": 0}), {}, ("needs 2", "has 1 free", "EFA interfaces"),
    ),
    "batch_too_small": (OFFERS, {"global_batch": 15}, ("15", "16 ranks", "at least 16", "fleet.nodes to 1")),
    "ddp_does_not_fit": (OFFERS, {"parallel": "ddp"}, ("80.0 GiB", "training.parallel to fsdp")),
    "hsdp_does_not_fit": (OFFERS, {"model": MODEL_70B, "parallel": "hsdp"}, ("8 ranks", "fsdp")),
    "model_does_not_fit": (OFFERS, {"model": MODEL_70B, "nodes": 1, "min_nodes": 1}, ("at least 2 nodes",)),
    "min_nodes_do_not_fit": (OFFERS, {"model": MODEL_70B, "nodes": 8, "min_nodes": 1}, ("min_nodes is 1", "to 2")),
    "sequence_does_not_fit": (OFFERS, {"sequence_length": 1_000_000}, ("1000000 tokens", "shorten")),
    "micro_batch_does_not_fit": (OFFERS, {"micro_batch": None}, ("is not set", "whole share", "or less")),
    "checkpoint_over_disk": (offering(replace(P5, instance_store_bytes=100 * GB)), {}, ("3 saves", "instance store")),
    "save_slower_than_interval": (OFFERS, {"interval_s": 2.0}, ("interval is 2.0 s", "interval_s to at least 4")),
    "no_save_within_run_limit": (OFFERS, {"run_s": 600}, ("limits.run_s = 600", "begin anew")),
    "no_save_on_spot": (OFFERS, {"interval_s": None, "interval_steps": 10_000}, ("10000 of 10000 steps", "auto")),
    "run_limit_too_short": (OFFERS, {"run_s": 1000, "attempts": 2, "interval_s": 300.0}, ("2 attempts", "run_s")),
    "deadline_cannot_be_met": (OFFERS, {"finish_by_at": NOW + 3600}, ("60.0 min are left", "finish_by")),
    "budget_below_estimate": (OFFERS, {"budget_usd": 50.0}, ("$40.00 an hour", "limits.budget_usd is 50.00")),
}  # fmt: skip


def test_the_model_request_is_planned_without_a_word_against_it() -> None:
    made = planned(budget_usd=1000.0)
    assert made.refusal is None
    assert made.warnings == ()
    [option] = made.options
    assert (option.instance_type, option.zones, option.usd_per_h, option.ranks) == (
        "p5.48xlarge", ("us-east-1b", "us-east-1a"), 40.0, 16,
    )  # fmt: skip
    assert option.reasons


@pytest.mark.parametrize("code", FAULTS)
def test_what_cannot_work_is_refused_with_its_own_code_and_the_values(code: str) -> None:
    offers, changes, words = FAULTS[code]
    made = planned(offers, **changes)
    assert made.refusal is not None
    assert made.refusal.code == code
    assert [word for word in words if word not in made.refusal.text] == []
    assert made.options == ()


def test_there_are_at_least_25_faults_each_in_the_table_of_refusals() -> None:
    assert len(FAULTS) >= 25
    assert set(FAULTS) <= set(REFUSALS)


@pytest.mark.parametrize("code", sorted(FAULTS))
def test_a_refusal_without_its_fault_is_none(code: str) -> None:
    """The request beside each fault passes, so it is this fault that is refused."""
    fixed: dict[str, dict[str, Any]] = {
        "batch_too_small": {"global_batch": 16},
        "micro_batch_does_not_fit": {"micro_batch": 5},
        "min_nodes_do_not_fit": {"model": MODEL_70B, "nodes": 8, "min_nodes": 2},
        "save_slower_than_interval": {"interval_s": 4.0},
        "budget_below_estimate": {"budget_usd": 260.0},
        "gang_over_quota": {"nodes": 1, "min_nodes": 1},
    }
    offers = FAULTS[code][0] if code == "gang_over_quota" else OFFERS
    assert planned(offers, **fixed.get(code, {})).refusal is None


WARNED: dict[str, tuple[Offers, dict[str, Any]]] = {
    "save_exceeds_notice": (offering(replace(P5, network_gbps=5.0)), {}),
    "saves_stop_the_training": (offering(replace(P5, memory_bytes=16 * GIB)), {}),
    "save_may_exceed_interval": (OFFERS, {"interval_s": 5.0}),
    "small_model_many_nodes": (OFFERS, SMALL_CPU),
    "bf16_on_cpu": (OFFERS, {**SMALL_CPU, "precision": "bf16"}),
    "uneven_batch": (OFFERS, {"global_batch": 255}),
    "memory_tight": (OFFERS, {"micro_batch": 7}),
    "several_gpu_models": (OFFERS, {"instance_types": ("p5.48xlarge", "p4d.24xlarge")}),
    "candidate_dropped": (offering(replace(P4D, zones=())), {"instance_types": ("p5.48xlarge", "p4d.24xlarge")}),
    "budget_tight": (OFFERS, {"budget_usd": 300.0}),
    "budget_not_checked": (offering(replace(P5, spot_usd={})), {"budget_usd": 5.0}),
    "deadline_tight": (OFFERS, {"finish_by_at": NOW + 8 * 3600}),
    "one_attempt": (OFFERS, {"attempts": 1}),
    "long_interval": (OFFERS, {"interval_s": 7200.0}),
    "fact_unknown": (replace(OFFERS, unread=("the quota could not be read",)), {}),
}


@pytest.mark.parametrize("code", WARNED)
def test_what_is_likely_to_go_wrong_is_a_warning_and_no_refusal(code: str) -> None:
    offers, changes = WARNED[code]
    made = planned(offers, **changes)
    assert made.refusal is None
    assert code in [note.code for note in made.warnings]
    assert planned().warnings == ()


def test_every_warning_of_the_table_is_given_somewhere() -> None:
    assert set(WARNED) == set(WARNINGS)


def test_a_forced_save_that_does_not_fit_the_notice_tells_the_minutes_at_risk() -> None:
    made = planned(offering(replace(P5, network_gbps=5.0)))
    [text] = [note.text for note in made.warnings if note.code == "save_exceeds_notice"]
    assert "up to 17 minutes" in text


def test_on_demand_has_no_notice_to_fit() -> None:
    assert planned(offering(replace(P5, network_gbps=5.0)), market="on_demand").warnings == ()


def test_types_are_tried_in_the_order_of_the_request_and_zones_by_price() -> None:
    made = planned(instance_types=("p4d.24xlarge", "p5.48xlarge"))
    assert [option.instance_type for option in made.options] == ["p4d.24xlarge", "p5.48xlarge"]
    assert [option.zones[0] for option in made.options] == ["us-east-1a", "us-east-1b"]


def test_one_type_that_cannot_work_leaves_the_others() -> None:
    made = planned(offering(quotas={"L-C4BD4855": 0.0}), instance_types=("p5.48xlarge", "p4d.24xlarge"))
    assert [option.instance_type for option in made.options] == ["p4d.24xlarge"]
    assert any("p5.48xlarge is left out" in note.text for note in made.warnings)


def test_when_no_type_works_the_first_ones_code_and_everybodys_reason_are_told() -> None:
    made = planned(
        offering(replace(P4D, zones=()), quotas={"L-C4BD4855": 0.0}), instance_types=("p5.48xlarge", "p4d.24xlarge")
    )
    assert made.refusal is not None
    assert made.refusal.code == "zero_quota"
    assert "p4d.24xlarge is not offered" in made.refusal.text


def test_nothing_known_refuses_nothing() -> None:
    made = plan(asked(budget_usd=0.01, finish_by_at=NOW + 1), Offers(unread=("all",)), now=NOW)
    assert made.refusal is None
    assert [option.instance_type for option in made.options] == ["p5.48xlarge"]


UNKNOWN: dict[str, Callable[[], Offers]] = {
    "zones": lambda: offering(replace(P5, zones=None)),
    "prices": lambda: offering(replace(P5, spot_usd={}, on_demand_usd=None)),
    "addresses": lambda: replace(OFFERS, addresses=None),
    "rate of the GPU": lambda: offering(replace(P5, gpu_name="X9000")),
    "network": lambda: offering(replace(P5, network_gbps=0.0, network_peak_gbps=0.0)),
}


@pytest.mark.parametrize("fact", UNKNOWN)
def test_a_fact_that_is_not_known_is_not_judged(fact: str) -> None:
    assert planned(UNKNOWN[fact](), budget_usd=1000.0, finish_by_at=NOW + 40 * 86_400).refusal is None


@pytest.mark.parametrize(
    ("preset", "kind", "expected"),
    [
        ("125m", "p5.48xlarge", "ddp"),
        ("1b", "p5.48xlarge", "ddp"),
        ("7b", "p5.48xlarge", "fsdp"),
        ("1b", "g5.xlarge", "fsdp"),
    ],
)
def test_auto_is_ddp_where_a_replica_fits_easily_and_fsdp_otherwise(preset: str, kind: str, expected: str) -> None:
    made = planned(model=PRESETS[preset], instance_types=(kind,), nodes=1, min_nodes=1, interval_s=900.0)
    assert made.parallel == expected


def test_auto_is_one_choice_for_all_types_of_a_request() -> None:
    both = {"model": PRESETS["1b"], "nodes": 1, "min_nodes": 1, "instance_types": ("p5.48xlarge", "g5.xlarge")}
    assert planned(**both).parallel == "fsdp"


def test_a_70b_model_takes_fsdp_on_80_gb_gpus() -> None:
    made = planned(model=MODEL_70B, nodes=8, min_nodes=8)
    assert (made.refusal, made.parallel) == (None, "fsdp")


def test_auto_is_hsdp_over_nodes_where_a_replica_fits_one_and_its_copy_fits_the_host() -> None:
    small_host = offering(replace(P5, memory_bytes=64 * GIB))
    small_disk = offering(replace(P5, instance_store_bytes=200 * GB))
    assert planned().parallel == "hsdp"
    assert planned(nodes=1, min_nodes=1).parallel == "fsdp"
    assert planned(small_host).parallel == planned(small_disk).parallel == "fsdp"
    assert planned(parallel="fsdp").parallel == "fsdp"


def test_the_data_that_a_node_keeps_count_beside_its_saves() -> None:
    """A node writes 41 GB of a save."""
    tight = offering(replace(P5, instance_store_bytes=200 * GB))
    assert planned(tight, brought_bytes=70 * GB).refusal is None
    refusal = planned(tight, brought_bytes=90 * GB).refusal
    assert refusal is not None and refusal.code == "checkpoint_over_disk"
    assert "and 83.8 GiB of data on its disk" in refusal.text and "smaller shards" in refusal.text
    roomy = offering(replace(P5, instance_store_bytes=250 * GB))
    assert [planned(roomy, brought_bytes=size).parallel for size in (0, 10 * GB)] == ["hsdp", "fsdp"]


def test_a_70b_model_on_4_nodes_is_staged_in_207_gb_or_saved_while_the_training_stands() -> None:
    large = {"model": MODEL_70B, "nodes": 4, "min_nodes": 4, "global_batch": 64, "steps": 1000, "checkpointing": "full"}
    [option] = planned(**large).options
    assert option.host_need_bytes == pytest.approx(207e9 + 2 * GIB, rel=1e-3)
    assert "saves_stop_the_training" not in [note.code for note in planned(**large).warnings]
    small = planned(offering(replace(P5, memory_bytes=128 * GIB)), **large)
    told = next(note for note in small.warnings if note.code == "saves_stop_the_training")
    assert small.refusal is None
    assert "192.7 GiB of host memory" in told.text
    assert "stands still" in told.text


def test_activation_checkpointing_is_a_way_out_and_counts() -> None:
    long = {"sequence_length": 32_768, "global_batch": 16}
    refused = planned(**long).refusal
    assert refused is not None
    assert "training.activation_checkpointing full" in refused.text
    assert planned(**long, checkpointing="full").refusal is None


def test_adapters_alone_need_neither_the_memory_nor_the_saves_of_the_whole_model() -> None:
    lora = LoraSpec(rank=16, alpha=16.0, targets=("q_proj", "v_proj"))
    small = {"model": MODEL_70B, "nodes": 1, "min_nodes": 1, "steps": 100, "checkpointing": "full"}
    refused = planned(**small).refusal
    assert refused is not None and refused.code == "model_does_not_fit"
    [option] = planned(**small, trained=estimate.trained_parameters(MODEL_70B, lora)).options
    # 80 layers, 16 x (8192 + 8192) beside the queries and 16 x (8192 + 1024) beside the values, 12 bytes each.
    assert option.save_bytes == 80 * 16 * (16_384 + 9_216) * 12


def test_parameters_are_counted_as_published() -> None:
    # TinyLlama 1.1B; Llama 2 7B, 13B and 70B.
    counts = [estimate.parameters(PRESETS[preset]) for preset in ("1b", "7b", "13b", "70b")]
    assert counts == [1_100_048_384, 6_738_415_616, 13_015_864_320, 68_976_648_192]


@pytest.mark.parametrize(
    ("kind", "market", "code"),
    [
        ("c7i.large", "spot", "L-34B43A08"),
        ("m7g.large", "on_demand", "L-1216C47A"),
        ("im4gn.large", "spot", "L-34B43A08"),
        ("g6e.48xlarge", "spot", "L-3819A6DF"),
        ("gr6.8xlarge", "on_demand", "L-DB2E81BA"),
        ("p4d.24xlarge", "spot", "L-7212CCBC"),
        ("p5en.48xlarge", "spot", "L-C4BD4855"),
        ("p5en.48xlarge", "on_demand", "L-417A185B"),
        ("p6-b200.48xlarge", "on_demand", "L-417A185B"),
        ("p6-b200.48xlarge", "spot", None),
        ("trn1.32xlarge", "spot", None),
        ("inf2.xlarge", "on_demand", None),
        ("hpc7a.96xlarge", "on_demand", None),
    ],
)
def test_a_type_counts_against_its_familys_quota(kind: str, market: str, code: str | None) -> None:
    assert quota_code(kind, market) == code


def test_a_plan_is_the_same_for_the_same_arguments() -> None:
    assert planned() == planned()


def test_a_mixed_gang_needs_a_type_that_is_sold_on_both_markets() -> None:
    assert planned(market="mixed").refusal is None
    refusal = planned(offering(replace(P5, markets=("spot",))), market="mixed").refusal
    assert refusal is not None
    assert refusal.code == "market_not_offered"
