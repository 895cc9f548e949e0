"""What cannot work on one instance type, and what is likely to go wrong there: one function a code."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.domain.catalogue import ADDRESSES_PER_NODE, NO_ACCELERATOR, NVIDIA, quota_code
from holdfast.domain.estimate import LARGE_PARAMETERS, NOTICE_USABLE_S, SAVES_ON_DISK, parameters
from holdfast.domain.sizing import Note, Sized, gib, length

WITHOUT_BF16 = frozenset({"K80", "M60", "P100", "V100", "T4", "T4g"})
"""GPUs older than Ampere: they have no bf16, and the trainer takes bf16 on a GPU unless told otherwise."""

TIGHT_SHARE = 0.9
LONG_JOB_S = 1800.0
LONG_INTERVAL_S = 3600.0


def _accelerator(on: Sized) -> Note | None:
    kind = on.kind.accelerator
    if kind in (NO_ACCELERATOR, NVIDIA):
        return None
    return Note(
        "accelerator_not_supported",
        f"{on.kind.name} has accelerators of {kind}; choose a type with NVIDIA GPUs, or one without accelerators",
    )


def _architecture(on: Sized) -> Note | None:
    if on.kind.arch == "x86_64" or on.asked.own_image:
        return None
    return Note(
        "arm_without_image",
        f"{on.kind.name} is {on.kind.arch}, the bundled image x86_64; "
        "name an image of your own in image.uri, or choose an x86_64 type",
    )


def _precision(on: Sized) -> Note | None:
    if not on.half or on.kind.gpu_name not in WITHOUT_BF16:
        return None
    return Note(
        "precision_not_on_gpu",
        f"{on.kind.name} has {on.kind.gpu_name}, which has no bf16, and training.precision is "
        f"{on.asked.precision}; set it to fp32, or choose a newer GPU",
    )


def _market(on: Sized) -> Note | None:
    wanted = {"spot", "on_demand"} if on.asked.market == "mixed" else {on.asked.market}
    if wanted <= set(on.kind.markets):
        return None
    sold = ", ".join(on.kind.markets) or "no market that Holdfast buys on"
    return Note(
        "market_not_offered",
        f"{on.kind.name} is not sold as {on.asked.market}; it is on {sold}: change fleet.market or the type",
    )


def _offered(on: Sized) -> Note | None:
    if on.kind.zones is None or on.zones:
        return None
    asked = ", ".join(on.asked.zones or sorted(on.offers.addresses or ())) or "this region"
    return Note(
        "type_not_offered",
        f"{on.kind.name} is not offered in {asked}, but in {', '.join(sorted(on.kind.zones)) or 'no zone here'}; "
        "allow such a zone (with a subnet of the stack), or choose another type",
    )


def _efa(on: Sized) -> Note | None:
    if on.asked.nodes == 1 or not on.kind.gpus or on.kind.efa_max:
        return None
    return Note(
        "no_efa",
        f"{on.gang} is a gang of GPU nodes, and {on.kind.name} has no EFA; "
        "choose a type with EFA (a larger size of the family has it), or fleet.nodes 1",
    )


def _quota_is_not_zero(on: Sized) -> Note | None:
    if on.quota is None or on.quota > 0:
        return None
    code = quota_code(on.kind.name, on.asked.market)
    return Note(
        "zero_quota",
        f"the account's quota for {on.kind.name} ({on.asked.market}) is 0 vCPUs; "
        f"ask for {on.vcpus} (Service Quotas, EC2, {code}), or choose another family or market",
    )


def _quota_holds_the_gang(on: Sized) -> Note | None:
    if on.quota is None or on.vcpus <= on.quota:
        return None
    code, fit = quota_code(on.kind.name, on.asked.market), int(on.quota // on.kind.vcpus)
    return Note(
        "gang_over_quota",
        f"{on.gang} has {on.vcpus} vCPUs, the account's quota ({on.asked.market}) is {on.quota:g}; "
        f"ask for more (Service Quotas, EC2, {code}), or lower fleet.nodes to {fit}"
        if fit
        else f"{on.gang} has {on.vcpus} vCPUs, the account's quota ({on.asked.market}) is {on.quota:g}, less than one "
        f"node; ask for more (Service Quotas, EC2, {code}), or choose a smaller type",
    )


def _addresses(on: Sized) -> Note | None:
    known = on.offers.addresses
    if known is None:
        return None
    zones = on.zones or tuple(known)
    most = max((known.get(zone, 0) for zone in zones), default=0)
    need = on.asked.nodes * ADDRESSES_PER_NODE
    if most >= need:
        return None
    return Note(
        "too_few_addresses",
        f"{on.gang} needs {need} addresses in one zone (EFA interfaces take none), the fullest of "
        f"{', '.join(zones)} has {most} free; free some, add a larger subnet, or lower fleet.nodes to {most}",
    )


def _batch(on: Sized) -> Note | None:
    if on.asked.global_batch >= on.ranks:
        return None
    return Note(
        "batch_too_small",
        f"training.global_batch is {on.asked.global_batch}, and {on.gang} has {on.ranks} ranks; "
        f"raise it to at least {on.ranks}, or lower fleet.nodes to {on.asked.global_batch // on.kind.ranks or 1}",
    )


def _state_fits(on: Sized) -> Note | None:
    need = on.state_bytes(on.asked.nodes)
    if need <= on.memory_bytes:
        return None
    sharded = on.shared_state_bytes("fsdp", on.ranks)
    told = f"{gib(need)} of state a rank, {on.kind.name} has {gib(on.memory_bytes)}"
    if on.parallel == "hsdp" and sharded <= on.memory_bytes:
        return Note(
            "hsdp_does_not_fit",
            f"a replica over the {on.kind.ranks} ranks of a node takes {told}; over all ranks it is {gib(sharded)}: "
            "set training.parallel to fsdp",
        )
    if on.parallel == "ddp" and sharded <= on.memory_bytes:
        return Note(
            "ddp_does_not_fit", f"a replica takes {told}; sharded it is {gib(sharded)}: set training.parallel to fsdp"
        )
    enough = _nodes_that_hold(on)
    more = f"use at least {enough} nodes, " if enough else "use "
    return Note(
        "model_does_not_fit",
        f"even sharded over {on.ranks} ranks the model takes {gib(sharded)} of state a rank, {on.kind.name} has "
        f"{gib(on.memory_bytes)}; {more}a type with more memory, or a smaller model",
    )


def _nodes_that_hold(on: Sized) -> int | None:
    sizes = (2**power for power in range(11))
    return next((nodes for nodes in sizes if _sharded_fits(on, nodes)), None)


def _sharded_fits(on: Sized, nodes: int) -> bool:
    return on.shared_state_bytes("fsdp", nodes * on.kind.ranks) <= on.memory_bytes


def _fewest_fit(on: Sized) -> Note | None:
    if on.asked.min_nodes >= on.asked.nodes or on.state_bytes(on.asked.min_nodes) <= on.memory_bytes:
        return None
    fit = next(
        nodes for nodes in range(on.asked.min_nodes, on.asked.nodes + 1) if on.state_bytes(nodes) <= on.memory_bytes
    )
    return Note(
        "min_nodes_do_not_fit",
        f"fleet.min_nodes is {on.asked.min_nodes}, and so few {on.kind.name} cannot hold the model; raise it to {fit}",
    )


def _sequence_fits(on: Sized) -> Note | None:
    state, one = on.state_bytes(on.asked.nodes), on.activation_bytes(1)
    if state + one <= on.memory_bytes:
        return None
    return Note(
        "sequence_does_not_fit",
        f"one sequence of {on.asked.sequence_length} tokens keeps {gib(one)} beside {gib(state)} of state, "
        f"{on.kind.name} has {gib(on.memory_bytes)} a rank; shorten training.sequence_length to about "
        f"{max(2, int(on.asked.sequence_length * (on.memory_bytes - state) / one))}, or use more nodes{_recompute(on)}",
    )


def _micro_batch_fits(on: Sized) -> Note | None:
    if on.memory_need_bytes <= on.memory_bytes:
        return None
    room = on.memory_bytes - on.state_bytes(on.asked.nodes)
    given = "is" if on.asked.micro_batch else "is not set, so it is the rank's whole share,"
    return Note(
        "micro_batch_does_not_fit",
        f"training.micro_batch {given} {on.micro_batch}: it keeps {gib(on.activation_bytes(on.micro_batch))}, and "
        f"{on.kind.name} has {gib(room)} beside the state; set it to {max(1, room // on.activation_bytes(1))} or less"
        f"{_recompute(on)}",
    )


def _recompute(on: Sized) -> str:
    """Return what activation checkpointing would do for a request that does not ask for the most of it."""
    if on.asked.checkpointing == "full":
        return ""
    kept = gib(on.activation_bytes(1, "full"))
    return f"; training.activation_checkpointing full keeps {kept} a sequence instead of {gib(on.activation_bytes(1))}"


def _disk(on: Sized) -> Note | None:
    if on.disk_need_bytes <= on.disk_bytes:
        return None
    what = "instance store" if on.kind.instance_store_bytes else "root volume"
    data = on.asked.brought_bytes
    return Note(
        "checkpoint_over_disk",
        f"a node keeps {SAVES_ON_DISK} saves of {gib(on.save_bytes)} each{f' and {gib(data)} of data' if data else ''} "
        f"on its disk, the {what} of {on.kind.name} has {gib(on.disk_bytes)}; use more nodes, or a type with more "
        f"instance store{', or prepare the data with smaller shards' if data else ''}",
    )


def _save_is_durable_in_time(on: Sized) -> Note | None:
    save_s = on.shortest_save_s
    surely = on.asked.interval_steps is None or (on.kind.gpus and parameters(on.asked.model) >= LARGE_PARAMETERS)
    interval_s = on.interval_s(lambda pace: pace.slow) if surely else None
    if save_s is None or interval_s is None or save_s <= interval_s:
        return None
    field = "interval_s" if on.asked.interval_steps is None else "interval_steps"
    longest = save_s / interval_s
    least = (on.asked.interval_steps or on.asked.interval_s or 0) * longest
    return Note(
        "save_slower_than_interval",
        f"each node writes {gib(on.save_bytes)} a save, at best in {length(save_s)}, and the interval is "
        f"{length(interval_s)}; set checkpoint.{field} to at least {int(least) + 1}, or use more nodes",
    )


def _save_before_run_limit(on: Sized) -> Note | None:
    interval_s, run_s = on.interval_s(lambda pace: pace.best), on.shortest_run_s
    if interval_s is None or run_s is None or run_s <= on.asked.run_s or interval_s < on.asked.run_s:
        return None
    return Note(
        "no_save_within_run_limit",
        f"an attempt ends after limits.run_s = {on.asked.run_s}, and the first save comes after {length(interval_s)}: "
        "every attempt would begin anew; shorten the checkpoint interval, or raise limits.run_s",
    )


def _save_on_spot(on: Sized) -> Note | None:
    asked, run_s = on.asked, on.shortest_run_s
    if asked.market != "spot" or asked.interval_steps is None or run_s is None or run_s <= LONG_JOB_S:
        return None
    if asked.interval_steps < asked.steps:
        return None
    return Note(
        "no_save_on_spot",
        f"checkpoint.interval_steps is {asked.interval_steps} of {asked.steps} steps, so nothing is saved before the "
        f"end of at least {length(run_s)} on spot; set it lower, or to auto",
    )


def _run_limit(on: Sized) -> Note | None:
    run_s, limit_s = on.shortest_run_s, on.asked.run_s * on.asked.attempts
    if run_s is None or run_s <= limit_s:
        return None
    return Note(
        "run_limit_too_short",
        f"{on.gang} needs at least {length(run_s)}, and {on.asked.attempts} attempts of limits.run_s = "
        f"{on.asked.run_s} are {length(limit_s)}; raise run_s to at least "
        f"{int(run_s / on.asked.attempts) + 1}, or use more nodes",
    )


def _deadline(on: Sized) -> Note | None:
    run_s, finish_by = on.shortest_run_s, on.asked.finish_by_at
    if finish_by is None or (finish_by > on.now and run_s is None):
        return None
    left_s = finish_by - on.now
    if left_s > 0 and run_s is not None and run_s <= left_s:
        return None
    need = f"{on.gang} needs at least {length(run_s)}, and " if run_s is not None else ""
    left = f"{length(left_s)} are left" if left_s > 0 else "the time has passed"
    return Note(
        "deadline_cannot_be_met",
        f"{need}limits.finish_by leaves too little: {left}; move it, train fewer steps, or use more nodes",
    )


def _budget(on: Sized) -> Note | None:
    usd, budget = on.usd(on.shortest_run_s), on.asked.budget_usd
    if usd is None or budget is None or usd <= budget:
        return None
    return Note(
        "budget_below_estimate",
        f"{on.gang} ({on.asked.market}, ${on.usd_per_h or 0:,.2f} an hour) costs at least ${usd:,.2f}, "
        f"limits.budget_usd is {budget:,.2f}; raise it, train fewer steps, or choose another type or market",
    )


CHECKS: tuple[Callable[[Sized], Note | None], ...] = (
    _accelerator,
    _architecture,
    _precision,
    _market,
    _offered,
    _efa,
    _quota_is_not_zero,
    _quota_holds_the_gang,
    _addresses,
    _batch,
    _state_fits,
    _fewest_fit,
    _sequence_fits,
    _micro_batch_fits,
    _disk,
    _save_is_durable_in_time,
    _save_before_run_limit,
    _save_on_spot,
    _run_limit,
    _deadline,
    _budget,
)


def _warn_notice(on: Sized) -> Note | None:
    save_s = on.save_s
    if on.asked.market != "spot" or save_s is None or save_s <= NOTICE_USABLE_S:
        return None
    interval_s = on.interval_s(lambda pace: pace.usual)
    risk = "the whole interval" if interval_s is None else f"up to {(interval_s + save_s) / 60:,.0f} minutes"
    return Note(
        "save_exceeds_notice",
        f"on {on.gang} a forced save takes about {length(save_s)}, and {NOTICE_USABLE_S:.0f} s of a spot notice can be "
        f"used: {risk} of training are at risk at each interruption; more nodes or a shorter interval lower it",
    )


def _warn_host(on: Sized) -> Note | None:
    if on.host_need_bytes <= on.kind.memory_bytes:
        return None
    return Note(
        "saves_stop_the_training",
        f"on {on.gang} a save is staged in {gib(on.staged_bytes)} of host memory; that takes {gib(on.host_need_bytes)} "
        f"with the rest, and {on.kind.name} has {gib(on.kind.memory_bytes)}: the training stands still during each "
        "save; use more nodes, or a type with more memory",
    )


def _warn_interval(on: Sized) -> Note | None:
    save_s, interval_s = on.save_s, on.interval_s(lambda pace: pace.usual)
    if save_s is None or interval_s is None or save_s <= interval_s:
        return None
    return Note(
        "save_may_exceed_interval",
        f"on {on.gang} a save takes about {length(save_s)} and is due every {length(interval_s)}: a save waits for the "
        "one before it; lengthen the checkpoint interval",
    )


def _warn_long_interval(on: Sized) -> Note | None:
    interval_s = on.interval_s(lambda pace: pace.usual)
    if interval_s is None or interval_s <= LONG_INTERVAL_S:
        return None
    return Note("long_interval", f"on {on.gang} saves are {length(interval_s)} apart; a lost node costs up to as much")


def _warn_precision(on: Sized) -> Note | None:
    if on.kind.gpus or on.asked.precision != "bf16":
        return None
    return Note("bf16_on_cpu", f"{on.kind.name} has no GPU, and bf16 is slow there; set training.precision to fp32")


def _warn_batch(on: Sized) -> Note | None:
    if on.asked.global_batch % on.ranks == 0:
        return None
    better = on.share * on.ranks
    return Note(
        "uneven_batch",
        f"training.global_batch {on.asked.global_batch} does not divide by the {on.ranks} ranks of {on.gang}; "
        f"{better} takes no longer",
    )


def _warn_memory(on: Sized) -> Note | None:
    if on.memory_need_bytes <= TIGHT_SHARE * on.memory_bytes:
        return None
    need, there = gib(on.memory_need_bytes), gib(on.memory_bytes)
    return Note("memory_tight", f"on {on.gang} a rank takes about {need} of {there}; lower training.micro_batch")


def _warn_budget(on: Sized) -> Note | None:
    budget, usd = on.asked.budget_usd, on.usd(on.usual_run_s)
    if budget is None:
        return None
    if usd is None:
        return Note(
            "budget_not_checked",
            f"no {on.asked.market} price or rate of {on.kind.name} is known: limits.budget_usd was not checked",
        )
    if usd <= budget:
        return None
    return Note("budget_tight", f"{on.gang} usually costs about ${usd:,.2f}, limits.budget_usd is {budget:,.2f}")


def _warn_deadline(on: Sized) -> Note | None:
    run_s, finish_by = on.usual_run_s, on.asked.finish_by_at
    if run_s is None or finish_by is None or on.now + run_s <= finish_by:
        return None
    return Note(
        "deadline_tight",
        f"{on.gang} usually takes {length(run_s)}, limits.finish_by leaves {length(finish_by - on.now)}",
    )


LOOKS: tuple[Callable[[Sized], Note | None], ...] = (
    _warn_notice,
    _warn_host,
    _warn_interval,
    _warn_long_interval,
    _warn_precision,
    _warn_batch,
    _warn_memory,
    _warn_budget,
    _warn_deadline,
)
