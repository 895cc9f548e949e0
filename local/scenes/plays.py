"""What happens in each scenario, and what is claimed of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import Any

from local.node_records import agent_lines
from local.processes import NODE_MARKER, marked
from local.scenes.stage import Missed, Stage

Play = Callable[[Stage], None]

DISTURB_AT_STEP = 25
NOTICE_S = 20.0
SECOND_NOTICE_AFTER_S = 7.0
FRAMEWORK_STEPS = 500
KILLED_STEPS = 70
DATASET = "documentation"
SPENT_USD = 0.0001
"""Two machines of two vCPUs cost as much in five seconds."""

SLOW_PUT_S = 3.5
"""Shards, part and manifest follow each other: a save takes ten seconds. An agent waits five for an answer."""

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Scenario:
    """`types`: instance types of its own, so that no fault reaches another one. `by_name_only`: not part of all, but
    of `failures`, what each kind of death is answered by and when."""

    name: str
    types: tuple[str, ...]
    play: Play
    by_name_only: bool = False


def no_capacity(stage: Stage) -> None:
    """The first three pools refuse, the fourth gives."""
    for kind in stage.types[:3]:
        stage.cloud.set_capacity(kind, slots=0)
    stage.submit(steps=40)
    job = stage.finish()
    asked = _asked(stage)
    stage.check(
        "three pools refused, the fourth gave the gang",
        [given for _, given in asked] == [0, 0, 0, 2] and [kind for kind, _ in asked] == list(stage.types),
        asked,
    )
    stage.check("one attempt, none charged", job.attempt == 1 and job.charged == {}, job.charged)


def partial_fleet(stage: Stage) -> None:
    """EC2 gives one of two although both or none were asked for."""
    stage.cloud.set_capacity(stage.types[0], slots=1, partial=True)
    stage.submit(steps=40)
    job = stage.finish()
    part = [one for one in stage.instances() if one["type"] == stage.types[0]]
    stage.check("1 of 2 was given, and given back", [one["reason"] for one in part] == [_BY_US], len(part))
    lived_s = max((one["age_s"] for one in part), default=0.0)
    members = stage.members()
    stage.check("it took no part", part[0]["instance"] not in members and len(members) == 2, f"{lived_s:.0f} s ago")
    stage.check("the next pool gave 2, in the same attempt", job.attempt == 1 and job.charged == {}, _asked(stage))


def node_lost(stage: Stage) -> None:
    """A node dies without notice."""
    stage.submit()
    job = stage.train_to(DISTURB_AT_STEP)
    stage.until("a save is durable", lambda: stage.job().saved)
    survivor, victim = stage.members()
    saved, at, step = stage.job().saved, time.time(), stage.step()
    assert saved is not None
    stage.cloud.kill_node(victim)
    stage.tell(f"{victim} is lost without notice at step {step}")
    job = stage.finish()
    restored = [one["detail"]["restored"] for one in stage.history("training_started") if one["attempt"] == 2]
    newest = [one for one in _saves(stage) if one["attempt"] == 1][-1]["detail"]["pointer"]["save"]
    stage.check("resumed from the newest durable save", restored == [newest], restored)
    behind = _steps(stage, attempt=1) - int(newest[5:13])
    stage.check(f"{behind} steps lost, as many as were not durable", stage.lost_steps() == behind, stage.lost_steps())
    held = [one["detail"]["instances"] for one in stage.history("survivors_held")]
    who = "the survivor was used again" if held == [[survivor]] else "no survivor was held"
    stage.check(who, len(stage.instances()) == (3 if held else 4), held)
    stage.check(f"training again after {stage.first_step_after(at, 2):g} s", job.attempt == 2, job.attempt)


def two_interruptions(stage: Stage) -> None:
    """Both nodes are noticed, seven seconds apart, while the forced save is under way."""
    job = stage.submit()
    stage.train_to(DISTURB_AT_STEP)
    # On AWS a forced save takes a minute; here it would be over before the second notice.
    saves = f"*/{job.id}/saves/*"
    stage.cloud.slow_uploads(saves, SLOW_PUT_S)
    first, second = stage.members()
    at = stage.cloud.interrupt(second, NOTICE_S + 10)
    stage.tell(f"notice for {second}")
    stage.wait(SECOND_NOTICE_AFTER_S)
    stage.cloud.interrupt(first, NOTICE_S + 10)
    stage.tell(f"notice for {first}")
    stage.until("the forced save is committed", lambda: stage.history("attempt_closed"), within_s=30)
    stage.cloud.slow_uploads(saves, 0)
    job = stage.finish()
    finals = [one for one in _saves(stage) if one["detail"]["final"]]
    stage.check("one forced save, one recovery", len(finals) == 1 and job.attempt == 2, f"{job.attempt} attempts")
    stage.check("2 notices, 2 new machines", job.interruptions == 2 and len(stage.instances()) == 4, job.interruptions)
    lost = stage.lost_steps()
    stage.check(f"0 steps lost, training again after {stage.first_step_after(at, 2):g} s", lost == 0, lost)


def interrupted_again(stage: Stage) -> None:
    """The survivor of the first notice is noticed seven seconds later, when the next attempt has begun with it."""
    stage.submit()
    stage.train_to(DISTURB_AT_STEP)
    first, second = stage.members()
    at = stage.cloud.interrupt(second, NOTICE_S)
    stage.tell(f"notice for {second}")
    stage.wait(SECOND_NOTICE_AFTER_S)
    stage.cloud.interrupt(first, NOTICE_S)
    stage.tell(f"notice for {first}")
    job = stage.finish()
    launched = len([given for _, given in _asked(stage) if given])
    stage.check("2 notices, at most 3 fleets", job.interruptions == 2 and launched <= 3, f"{launched} fleets")
    stage.check("only preemptions charged", set(job.charged) <= {"preemption"}, job.charged)
    lost = stage.lost_steps()
    after_s = stage.first_step_after(at, job.attempt)
    stage.check(f"0 steps lost, attempt {job.attempt} trains after {after_s:g} s", lost == 0, lost)


def rebalance_only(stage: Stage) -> None:
    """Advice, told twice, and nothing after it."""
    stage.submit(interval_steps=1000)
    stage.train_to(DISTURB_AT_STEP)
    victim = stage.members()[1]
    for _ in range(2):
        stage.cloud.rebalance(victim)
    stage.tell(f"rebalance recommendation for {victim}, twice")
    job = stage.finish()
    early = [one for one in _saves(stage) if one["detail"]["pointer"]["save"][5:13] != f"{stage.steps:08d}"]
    # The door comes with another part of the product; without it nobody hears the advice.
    wanted = (1,) if (REPOSITORY / "functions" / "on_rebalance_recommendation.py").exists() else (0,)
    stage.check(f"{len(early)} early save", len(early) in wanted, f"{len(early)} of {wanted}")
    interrupted = stage.history("interruption_noticed", "fleet_lost")
    stage.check("nothing killed, one attempt", job.attempt == 1 and not interrupted, job.attempt)
    # Who ends a machine after that is open: the node that reads its release, or the call that follows.
    trained_at = max(line["at"] for line in stage.metrics())
    ends = [one["ended_at"] - trained_at for one in stage.instances()]
    stage.check("both machines worked to the end", len(ends) == 2 and min(ends) >= 0, ends)


def cancel_during_relaunch(stage: Stage) -> None:
    """A cancel comes while the second fleet boots."""
    stage.submit()
    stage.train_to(DISTURB_AT_STEP)
    stage.cloud.next_launch(stage.types[0], boot_delay_s=30.0)
    stage.cloud.interrupt(stage.members()[1], NOTICE_S)
    stage.until("the second fleet boots", lambda: [one for one in stage.history("fleet_bought") if one["attempt"] == 2])
    asked_at = stage.control("cancel")
    job = stage.finish("cancelled", within_s=60)
    stage.check(f"everything gone {time.time() - asked_at:.1f} s after the cancel", not stage.living(), "")
    started = [one for one in stage.history("all_ready") if one["attempt"] == 2]
    stage.check("the second fleet never trained", job.attempt == 2 and not started, job.attempt)
    stage.check("the save of the notice stands", job.saved is not None and job.saved.save[5:13] == f"{job.step:08d}")


def survivors_held(stage: Stage) -> None:
    """One of two nodes is interrupted: the other is kept, and one is bought. They train on a dataset of their own."""
    digest = stage.register_dataset(DATASET, [REPOSITORY / "docs", REPOSITORY / "README.md"])
    stage.submit(data={"dataset": f"{DATASET}@1"})
    stage.train_to(DISTURB_AT_STEP)
    survivor, victim = stage.members()
    at = stage.cloud.interrupt(victim, NOTICE_S)
    stage.tell(f"spot notice of {NOTICE_S:g} s for {victim}")
    job = stage.finish()
    stage.check("the survivor kept its rank in attempt 2", stage.members()[0] == survivor, stage.members())
    stage.check("1 machine bought", len(stage.instances()) == 3 and job.attempt == 2, len(stage.instances()))
    given, local = stage.provided(survivor)
    stage.check("it restored from its own disk", 0 < given == local, f"{local} of {given} files")
    brought = [line for line in agent_lines(stage.cloud.root, stage.members()) if line["event"] == "data_brought"]
    stage.check("each node brought what it read, and proved it", bool(brought), len(brought))
    kept = [line for line in brought if line["local"]]
    stage.check("the survivor had data of its own left", {line["instance"] for line in kept} == {survivor}, len(kept))
    stage.check("the save names the dataset", stage.corpus_digest() == digest, digest[:12])
    lost = stage.lost_steps()
    stage.check(f"0 steps lost, training again after {stage.first_step_after(at, 2):g} s", lost == 0, lost)


def fewer_nodes(stage: Stage) -> None:
    """Nobody sells the missing node: after the hold the job goes on with what is there."""
    stage.submit()
    stage.train_to(DISTURB_AT_STEP)
    survivor, victim = stage.members()
    stage.cloud.set_capacity(stage.types[0], slots=0)
    at = stage.cloud.interrupt(victim, NOTICE_S)
    job = stage.finish(within_s=240)
    refused = [one for one in stage.history("capacity_refused") if one["attempt"] > 1]
    stage.check(f"{len(refused)} times refused while held", len(refused) >= 1, len(refused))
    stage.check("went on with 1 node", job.gang == 1 and stage.members() == [survivor], stage.members())
    stage.check("2 machines in all", len(stage.instances()) == 2, len(stage.instances()))
    lost = stage.lost_steps()
    after_s = stage.first_step_after(at, job.attempt)
    stage.check(f"0 steps lost, attempt {job.attempt} trains after {after_s:g} s", lost == 0, lost)


def pause_resume(stage: Stage) -> None:
    """Paused by message, resumed on one node."""
    stage.submit()
    stage.train_to(DISTURB_AT_STEP)
    asked_at = stage.control("pause")
    paused = stage.until("the job is paused", lambda: _in_phase(stage, "paused"))
    stage.until("no machine is left", lambda: not stage.living(), within_s=20)
    saved = paused.saved
    stage.check(
        f"paused after {time.time() - asked_at:.1f} s: 0 machines, step {paused.step} saved",
        saved is not None and saved.save[5:13] == f"{_steps(stage, attempt=1):08d}",
        saved and saved.save,
    )
    stage.check("no result yet", not stage.theatre.results.of(stage.job_id), told=False)
    stage.control("resume", nodes=1)
    job = stage.finish()
    stage.check("resumed on 1 node", job.gang == 1 and len(stage.members()) == 1, job.gang)
    stage.check("1 machine bought", len(stage.instances()) == 3, len(stage.instances()))
    stage.check("0 steps lost", stage.lost_steps() == 0, stage.lost_steps())


def bad_gate(stage: Stage) -> None:
    """One node of the first fleet says that it is in another zone."""
    stage.cloud.next_launch(stage.types[0], zone="us-east-1f")
    stage.submit(steps=40)
    refused = stage.until("the gate refuses", lambda: stage.history("gate_refused"))[0]
    reason = refused["detail"]["reason"]
    stage.check("refused: " + reason.partition(";")[0], "us-east-1f" in reason, reason)
    first = {one["instance"] for one in stage.instances()}
    stage.until("the fleet is released", lambda: not first & set(stage.living()), within_s=30)
    job = stage.finish(within_s=240)
    members = set(stage.members())
    stage.check("the fleet went, the next passed", len(members) == 2 and not members & first, len(first))
    stage.check("charged to capacity", job.charged == {"capacity": 1}, job.charged)


def pool_warning(stage: Stage) -> None:
    """A notice for a node of one job makes the other job of that pool save and go on."""
    other = Stage(stage.theatre, stage.name, stage.types, part="-neighbour")
    try:
        other.submit(interval_steps=10_000, steps=400)
        stage.submit()
        other.train_to(1)
        stage.train_to(DISTURB_AT_STEP)
        stage.cloud.interrupt(stage.members()[1], NOTICE_S)
        stage.finish()
        job = other.finish()
        early = [one for one in _saves(other) if one["detail"]["pointer"]["save"][5:13] != f"{other.steps:08d}"]
        stage.checks += other.checks
        stage.check("the neighbour saved once more", len(early) == 1, len(early))
        stage.check("and went on", job.attempt == 1 and job.interruptions == 0, job.attempt)
    finally:
        other.keep()
        other.abandon()


def hang(stage: Stage) -> None:
    """One rank stands still while the agents beat on: its own node says which, before its peers' collective ends."""
    stage.submit()
    stage.train_to(DISTURB_AT_STEP)
    victim = stage.members()[1]
    for pid in _ranks_of(stage, victim):
        os.kill(pid, signal.SIGSTOP)
        stage.tell(f"rank process {pid} of {victim} is stopped")
    at = time.time()
    failed = stage.until("the hang is seen", lambda: stage.history("failed"), within_s=240)[0]
    seen = failed["detail"]["failure"] == "hang"
    stage.check(f"seen from step progress after {failed['at'] - at:.0f} s", seen, failed["detail"])
    reason = failed["detail"]["reason"]
    stage.check("the rank is named", victim in reason and "its process is stopped" in reason, reason)
    job = stage.finish()
    stage.check("both machines replaced", len(stage.instances()) == 4 and job.charged == {"hang": 1}, job.charged)


def rank_killed(place: int) -> Play:
    """Return the play of one rank that is killed; both machines stay."""

    def play(stage: Stage) -> None:
        stage.submit(steps=KILLED_STEPS)
        stage.train_to(DISTURB_AT_STEP)
        victim = stage.members()[place]
        [pid] = _ranks_of(stage, victim)
        os.kill(pid, signal.SIGKILL)
        at = time.time()
        stage.tell(f"rank process {pid} of {victim} is killed")
        failed = stage.until("the end of the rank is reported", lambda: stage.history("failed"))[0]
        stage.check_within("reported", failed["at"] - at, 5.0)
        job = stage.finish()
        bought = len(stage.instances()) - 2
        again_s = stage.first_step_after(_began(stage, job.attempt), job.attempt)
        stage.check_within(f"relaunched with {bought} new machines to the first new step", again_s, 20.0)

    return play


def node_killed(place: int) -> Play:
    """Return the play of a machine that dies; its peer has to stop at once, and not by the collective's deadline."""

    def play(stage: Stage) -> None:
        stage.submit(steps=KILLED_STEPS)
        stage.train_to(DISTURB_AT_STEP)
        victim, peer = stage.members()[place], stage.members()[1 - place]
        pids = _ranks_of(stage, peer)
        stage.cloud.kill_node(victim)
        at = time.time()
        stage.tell(f"{victim} is dead")
        stage.until("the ranks of its peer have ended", lambda: not any(map(_alive, pids)), within_s=60)
        stage.check_within("ranks of the peer ended", time.time() - at, 10.0)
        told = stage.until("the loss is recorded", lambda: stage.history("failed", "fleet_lost"))[0]
        stage.check_within("recorded", told["at"] - at, 10.0)
        job = stage.finish()
        stage.check("one machine bought", len(stage.instances()) == 3, len(stage.instances()))
        again_s = stage.first_step_after(_began(stage, job.attempt), job.attempt)
        stage.check_within("relaunched, one survivor held, to the first new step", again_s, 10.0)

    return play


def agent_killed(place: int) -> Play:
    """Return the play of an agent that is killed alone: nothing of its node may go on."""

    def play(stage: Stage) -> None:
        stage.submit(steps=KILLED_STEPS)
        stage.train_to(DISTURB_AT_STEP)
        victim = stage.members()[place]
        ranks = _ranks_of(stage, victim)
        [agent] = {_parent_of(pid) for pid in ranks}
        os.kill(agent, signal.SIGKILL)
        at = time.time()
        stage.tell(f"the agent {agent} of {victim} is killed")
        stage.until("nothing of the node runs", lambda: not marked(NODE_MARKER, victim), within_s=30)
        stage.check_within("nothing of the node left", time.time() - at, 2.0)
        job = stage.finish()
        stage.check("the job recovered", job.attempt == 2, job.attempt)

    return play


def budget_spent(stage: Stage) -> None:
    """The budget is lowered below what the machines have cost already."""
    stage.submit(steps=2000)
    stage.train_to(DISTURB_AT_STEP)
    stage.control("extend", budget_usd=SPENT_USD)
    job = stage.finish("failed")
    stage.check("failed as budget_spent", job.failure == "budget_spent", job.failure)
    told = "holdfast extend" in job.reason and "limits.budget_usd" in job.reason
    stage.check(job.reason.partition(";")[0], told, job.reason)
    trained = _steps(stage, attempt=1)
    stage.check("saved before the end, 0 steps lost", job.durable_step == trained, (job.durable_step, trained))
    [result] = stage.theatre.results.of(stage.job_id)
    stage.check("the result tells the cost", result.get("cost_usd", 0.0) > SPENT_USD, result.get("cost_usd"))


def scheduled_event(stage: Stage) -> None:
    """A retirement that only the instance's status shows, and then AWS Health too."""
    stage.submit(steps=150)
    stage.train_to(DISTURB_AT_STEP)
    victim, starts_at = stage.members()[1], float(round(time.time()) + 2400)
    stage.cloud.schedule_event(victim, "instance-retirement", starts_at)
    stage.tell(f"instance-retirement of {victim} in 40 minutes, in its status only")
    stage.until("the job leaves", lambda: stage.history("move_due"))
    stage.cloud.emit("aws.health", "AWS Health Event", _retirement(victim, starts_at))
    job = stage.finish()
    moves = stage.history("move_due")
    stage.check("one move, 2 attempts", (len(moves), job.attempt) == (1, 2), (len(moves), job.attempt))
    stage.check("0 steps lost", stage.lost_steps() == 0, stage.lost_steps())
    stage.check("no attempt charged", not job.charged, job.charged)


def _retirement(instance: str, starts_at: float) -> dict[str, Any]:
    return {
        "eventArn": f"arn:aws:health:us-east-1::event/EC2/AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED/{instance}",
        "service": "EC2",
        "eventTypeCode": "AWS_EC2_INSTANCE_RETIREMENT_SCHEDULED",
        "eventTypeCategory": "scheduledChange",
        "startTime": formatdate(starts_at, usegmt=True),
        "affectedEntities": [{"entityValue": instance}],
    }


def adapters(stage: Stage) -> None:
    """Adapters are trained on weights that lie in the bucket, and one of two nodes is interrupted."""
    weights = stage.put_weights("tiny-llama")
    stage.submit(init_from=weights, trainable="lora", lora={"rank": 4, "alpha": 8})
    stage.train_to(DISTURB_AT_STEP)
    at = stage.cloud.interrupt(stage.members()[1], NOTICE_S)
    stage.tell(f"spot notice of {NOTICE_S:g} s for {stage.members()[1]}")
    job = stage.finish()
    brought = [line for line in agent_lines(stage.cloud.root, stage.members()) if line["event"] == "weights_brought"]
    stage.check("each node brought and proved the base", len(brought) >= 2 and job.attempt == 2, len(brought))
    lost = stage.lost_steps()
    stage.check(f"0 steps lost, training again after {stage.first_step_after(at, 2):g} s", lost == 0, lost)


def framework(program: str) -> Play:
    """Return the play of a job that another framework trains: one of its two nodes is interrupted."""

    def play(stage: Stage) -> None:
        stage.submit(program=program, steps=FRAMEWORK_STEPS, interval_steps=10_000)
        stage.train_to(DISTURB_AT_STEP)
        at = stage.cloud.interrupt(stage.members()[1], NOTICE_S)
        stage.tell(f"spot notice of {NOTICE_S:g} s for {stage.members()[1]}")
        job = stage.finish(within_s=240)
        # Two nodes may report one save, and one of them before it knows that it was the last.
        forced = {one["detail"]["pointer"]["save"] for one in _saves(stage) if one["attempt"] == 1}
        stage.check("one forced save, one recovery", len(forced) == 1 and job.attempt == 2, job.attempt)
        restored = [one["detail"]["restored"] for one in stage.history("training_started") if one["attempt"] == 2]
        stage.check("resumed from it", set(restored) == forced, restored)
        lost = stage.lost_steps()
        stage.check(f"0 steps lost, training again after {stage.first_step_after(at, 2):g} s", lost == 0, lost)

    return play


_BY_US = "Client.UserInitiatedShutdown"

SCENARIOS = (
    Scenario("bad-gate", ("m6i.large", "m5a.large"), bad_gate),
    Scenario("fewer-nodes", ("c5a.large",), fewer_nodes),
    Scenario("survivors-held", ("c7i.large",), survivors_held),
    Scenario("pause-resume", ("c6a.large",), pause_resume),
    Scenario("no-capacity", ("c5.large", "m5.large", "r5.large", "c6i.large"), no_capacity),
    Scenario("partial-fleet", ("m6a.large", "r6i.large"), partial_fleet),
    Scenario("node-lost", ("m7i.large",), node_lost),
    Scenario("two-interruptions", ("r7i.large",), two_interruptions),
    Scenario("interrupted-again", ("c5n.large",), interrupted_again),
    Scenario("rebalance-only", ("m5n.large",), rebalance_only),
    Scenario("cancel-during-relaunch", ("c5d.large",), cancel_during_relaunch),
    Scenario("pool-warning", ("r5a.large",), pool_warning),
    Scenario("budget-spent", ("m5dn.large",), budget_spent),
    Scenario("scheduled-event", ("r5d.large",), scheduled_event),
    Scenario("adapters", ("c7a.large",), adapters),
    Scenario("hugging-face", ("r6a.large",), framework("examples.hugging_face")),
    Scenario("lightning", ("r5n.large",), framework("examples.lightning")),
    Scenario("hang", ("m5d.large",), hang, by_name_only=True),
    *(
        Scenario(f"{what}-killed-{who}", (kind,), play(place), by_name_only=True)
        for what, play, kinds in (
            ("rank", rank_killed, ("m6id.large", "m6in.large")),
            ("node", node_killed, ("m7a.large", "r6id.large")),
            ("agent", agent_killed, ("c6id.large", "c6in.large")),
        )
        for place, (who, kind) in enumerate(zip(("leader", "other"), kinds, strict=True))
    ),
)
"""Those that wait long come first, so that others run beside them."""


def _asked(stage: Stage) -> list[tuple[str, int]]:
    """Return for each CreateFleet the type that was asked for, and how many machines came."""
    answers = []
    for call in stage.fleets():
        overrides = call["request"]["LaunchTemplateConfigs"][0]["Overrides"]
        given = sum(len(part["InstanceIds"]) for part in call["response"].get("Instances", []))
        answers.append((overrides[0]["InstanceType"], given))
    return answers


def _saves(stage: Stage) -> list[dict[str, Any]]:
    return stage.history("checkpoint_saved")


def _steps(stage: Stage, *, attempt: int) -> int:
    return max((line["step"] for line in stage.metrics() if line["attempt"] == attempt), default=0)


def _in_phase(stage: Stage, phase: str) -> Any:
    job = stage.alive()
    return job if job.phase == phase else None


def _ranks_of(stage: Stage, instance: str) -> list[int]:
    started = [line for line in agent_lines(stage.cloud.root, [instance]) if line["event"] == "ranks_started"]
    if not started:
        raise Missed(f"{instance} has started no ranks")
    return list(started[-1]["pids"].values())


def _began(stage: Stage, attempt: int) -> float:
    return next(float(one["at"]) for one in stage.history("attempt_started") if one["attempt"] == attempt)


def _parent_of(pid: int) -> int:
    # proc_pid_stat(5): the parent is the second field after the name, which may hold anything, in brackets.
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
