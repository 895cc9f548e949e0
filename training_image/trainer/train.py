"""The loop, top to bottom: start, throw-away warm-up, restore, step after step with saves and orders, the end."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from job_contract.node_files import (
    DAMAGED_DATA_FILE,
    WEIGHTS_FOLDER,
    ControlKind,
    DamagedData,
    JobFile,
    Outcome,
    RankProgress,
    read_message,
    write_message,
)
from job_contract.reports import FellBack
from job_contract.weights import save_of
from trainer import data
from trainer.checkpoint import Saves
from trainer.config import Config, config_of
from trainer.control import ENDS, Agreement, ControlFile, Order
from trainer.endings import Diverged, UserError
from trainer.evaluation import Evaluation
from trainer.feed import Feed
from trainer.flops import flops_per_token, mfu, peak_of
from trainer.llama import Weights, base_of_seed
from trainer.metrics import Journal
from trainer.parallel import Learner, Ranks, join, patient, shorten_timeouts
from trainer.preflight import check_network, reachable
from trainer.pulse import Lack, Pulse
from trainer.restore import Lent, OrderedMeanwhile, Restore

# DDP settles its buckets after the first backward pass; at three ranks and more a resume is exact only after that.
WARM_UP_STEPS = 2
MOST_NON_FINITE_STEPS = 3
# Seconds between looks for data that are on their way.
DATA_LOOK_S = WEIGHTS_LOOK_S = 0.1
NO_ORDER = Order(generation=0, kind=ControlKind.NONE)


@dataclass
class Run:
    """What the loop works with and where it stands. `step` counts finished optimizer steps of the whole training."""

    config: Config
    ranks: Ranks
    journal: Journal
    control: ControlFile
    agreement: Agreement
    batches: data.Batches
    feed: Feed
    evaluation: Evaluation | None
    learner: Learner
    saves: Saves
    restore: Restore
    pulse: Pulse
    per_token: float
    peak: float | None
    step: int = 0
    loss: float = 0.0
    non_finite_steps: int = 0
    new_steps: int = 0
    fell_back: tuple[FellBack, ...] = ()
    answered_generation: int = 0
    saved_at: float = 0.0
    base_sha256: str | None = None
    evaluated_step: int | None = None
    evaluation_loss: float | None = None
    step_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=10))


def train(run_dir: Path, job: JobFile) -> None:
    """The job is trained to its last step, or stopped as ordered, and the outcome is written. Raises an Ending else."""
    config = config_of(job.spec)
    with reachable():
        ranks = join()
        if ranks.world_size > 1:
            check_network(ranks, run_dir)
    run = prepare(run_dir, job, config, ranks)
    warm_up(run)
    try:
        start_or_resume(run, job)
        outcome = loop(run)
    except OrderedMeanwhile as ordered:
        outcome = end_before_the_first_step(run, job, ordered.order or run.agreement.now())
    run.saves.finish()
    dist.barrier(group=ranks.saves)
    write_message(run_dir / "outcome" / f"rank-{ranks.rank}.json", outcome)
    run.journal.event("exit", outcome=outcome.outcome, step=outcome.step, save=outcome.save)
    dist.destroy_process_group()


def prepare(run_dir: Path, job: JobFile, config: Config, ranks: Ranks) -> Run:
    """Return a run that has not trained anything yet. Raises UserError when the ranks do not agree on what to train."""
    journal = Journal(run_dir, ranks.rank, job.attempt)
    control = ControlFile(run_dir, job.attempt, journal)
    batches = data.Batches(config, ranks.rank, ranks.world_size)
    feed = Feed(
        run_dir,
        Path(job.corpus_dir),
        config.training.data.index_sha256,
        batches,
        ranks.rank,
        sharing=config.ranks_per_node,
    )
    ranks.require_same("config_hash", config.hash)
    ranks.require_same("corpus_digest", feed.digest)
    learner = Learner(config, ranks)
    return Run(
        config=config,
        ranks=ranks,
        journal=journal,
        control=control,
        agreement=Agreement(control, ranks.flags, job.nodes, job.node_rank),
        batches=batches,
        feed=feed,
        evaluation=Evaluation.of(config, run_dir, ranks),
        learner=learner,
        saves=Saves(run_dir, job, config, feed.digest, ranks, journal, learner.tensors()),
        restore=Restore(run_dir, job, config, feed.digest, ranks, control),
        pulse=Pulse(run_dir, ranks.rank),
        per_token=flops_per_token(learner.multiplying, config.model, config.training.sequence_length),
        peak=peak_of(torch.cuda.get_device_name(ranks.device)) if ranks.device.type == "cuda" else None,
    )


def warm_up(run: Run) -> None:
    """Buckets, communicators and kernels are settled; parameters, moments and the data position are as they were."""
    show(run, "warming_up")
    batch = data.warm_up_batch(run.config, run.batches.micro_batch)
    for _ in range(WARM_UP_STEPS):
        backward(run, batch, run.config.tokens_per_step, last=True)
        run.learner.clip()
        run.learner.update(0.0)
    run.learner.reset()


def start_or_resume(run: Run, job: JobFile) -> None:
    """The run stands where the save left it, or at step 0. Raises what `Restore.into` raises."""
    if job.resume_from is None or run.config.training.lora is not None:
        load_weights(run)
    if job.resume_from is None:
        return
    show(run, "restoring")
    started = time.perf_counter()
    restored = run.restore.into(run.learner.tensors())
    if restored.facts.get("base_sha256") != run.base_sha256:
        raise UserError(
            f"{restored.pointer.save} holds adapters for another base ({restored.facts.get('base_sha256')}, here "
            f"{run.base_sha256}); name the weights that it was trained on in init_from"
        )
    run.step, run.loss = restored.facts["step"], restored.facts["last_loss"]
    run.learner.set_step(run.step)
    run.saves.restored, run.fell_back = restored.pointer, restored.fell_back
    run.journal.event("restored", save=restored.pointer.save, step=run.step, seconds=time.perf_counter() - started)


def load_weights(run: Run) -> None:
    """The training starts from the weights that the spec names, if it names some.

    Raises UserError, or OrderedMeanwhile; each on every rank.
    """
    uri, config = run.config.training.init_from, run.config
    if uri is None:
        run.base_sha256 = None if config.training.lora is None else base_of_seed(config.fixed)
        return
    folder = weights_folder(run, uri)
    digest, fault, ordered = "", "", False
    try:
        if save_of(uri):
            save = Lent(folder, config)
            digest = save.digest()
            save.into({name: one for name, one in run.learner.tensors().items() if name.startswith("parameter.")})
        else:
            weights = Weights(folder, config.model, between=lambda: look_up(run))
            if run.ranks.rank % config.ranks_per_node == 0:
                digest = weights.digest()
            run.learner.start_from(weights)
    except UserError as error:
        fault = str(error)
    except OrderedMeanwhile:
        ordered = True
    with patient(run.ranks, Lack(uri, run.learner.weight_bytes).bound_s):
        told: list[Any] = run.ranks.collect((fault, digest, ordered))
    if any(ordered for _, _, ordered in told):
        raise OrderedMeanwhile
    faults, digests = (sorted({one[place] for one in told} - {""}) for place in (0, 1))
    if faults or len(digests) > 1:
        raise UserError(faults[0] if faults else f"init_from differs between the nodes: {', '.join(digests)}")
    run.base_sha256 = None if config.training.lora is None else digests[0]
    run.journal.event("weights_loaded", uri=uri, sha256=digests[0])


def look_up(run: Run) -> None:
    """This rank is seen to read on. Raises OrderedMeanwhile when it knows of an order to end, which all will know."""
    run.pulse.beat("loading_weights")
    if run.control.read().kind in ENDS:
        raise OrderedMeanwhile


def weights_folder(run: Run, uri: str) -> Path:
    """Return where the weights can be read, once the agents have brought those of a bucket to every rank.

    Raises UserError on a rank whose agent could not bring them, OrderedMeanwhile on every rank.
    """
    if not uri.startswith("s3://"):
        show(run, "loading_weights")
        return Path(unquote(urlsplit(uri).path))
    brought = run.journal.run_dir / WEIGHTS_FOLDER
    # A save has two moments beside each weight.
    lack = Lack(f"the weights in {uri}", run.learner.weight_bytes * (3 if save_of(uri) else 1))
    run.journal.event("weights_awaited", uri=uri)
    while True:
        here = brought.exists()
        if not here:
            damaged = read_message(run.journal.run_dir / DAMAGED_DATA_FILE, DamagedData)
            if damaged is not None:
                raise UserError(f"init_from: {damaged.file} in {uri}: {damaged.reason}")
        order = run.agreement.now(data_lacking=not here)
        if order is not None and order.kind in ENDS:
            raise OrderedMeanwhile(order)
        if order is not None:
            # Nothing was trained, so there is nothing to save, or the save that is there holds the step.
            run.answered_generation = order.generation
        if not run.agreement.data_lacking:
            show(run, "loading_weights")
            return brought
        show(run, "loading_weights", always=order is not None, lack=None if here else lack)
        time.sleep(WEIGHTS_LOOK_S)


def loop(run: Run) -> Outcome:
    """Return how the training ended."""
    run.saved_at = time.monotonic()
    # Where the training stands is known only now, so nobody has looked for the first step's data yet.
    run.agreement.data_lacking = run.feed.pinned is not None
    show(run, "running")
    while run.step < run.config.training.steps or evaluation_is_due(run):
        evaluating = evaluation_is_due(run)
        order = evaluate(run) if evaluating else wait_for_data(run) or one_step(run)
        if order is None:
            if not evaluating and save_is_due(run) and not run.non_finite_steps:
                save(run, NO_ORDER)
            continue
        run.answered_generation = order.generation
        if order.kind is ControlKind.STOP:
            return end(run, "aborted", save=None)
        name, existing = save_unless_there(run, order)
        if order.kind is ControlKind.CHECKPOINT_STOP:
            return end(run, "stopped", save=name, existing=existing)
        show(run, "running", always=True)
    if run.non_finite_steps:
        raise Diverged(f"the last step, {run.step}, was not finite")
    name, existing = save_unless_there(run, NO_ORDER)
    return end(run, "finished", save=name, existing=existing)


def wait_for_data(run: Run) -> Order | None:
    """Every rank has the data of the next step; or the ranks agreed on an order while one of them waited."""
    if not run.agreement.data_lacking:
        return None
    started = time.perf_counter()
    with run.learner.times.loading():
        while True:
            lack = run.feed.lack(run.step)
            order = run.agreement.now(data_lacking=lack is not None)
            if order is not None or not run.agreement.data_lacking:
                break
            show(run, "waiting_for_data", lack=lack)
            time.sleep(DATA_LOOK_S)
    run.journal.event("data_waited", step=run.step, seconds=time.perf_counter() - started)
    show(run, "running")
    return order


def evaluation_is_due(run: Run) -> bool:
    """Return whether the step just finished is to be evaluated and was not yet, in this attempt."""
    evaluation, step = run.evaluation, run.step
    if evaluation is None or step == 0 or run.evaluated_step == step:
        return False
    return step % evaluation.every_steps == 0 or step == run.config.training.steps


def evaluate(run: Run) -> Order | None:
    """The loss on the evaluation set is written down; or the ranks agreed on an order, and it will be taken anew."""
    evaluation = run.evaluation
    assert evaluation is not None
    started = time.perf_counter()
    sums = torch.zeros(2, dtype=torch.float64, device=run.ranks.device)
    run.learner.net.eval()
    try:
        number = 0
        while not evaluation.is_whole(number):
            lack = evaluation.feed.lack(number)
            show(run, "evaluating", lack=lack)
            order = run.agreement.now(data_lacking=lack is not None)
            if order is not None:
                return order
            if run.agreement.data_lacking:
                time.sleep(DATA_LOOK_S)
                continue
            for micro in range(evaluation.batches.micro_steps):
                sums += evaluation_losses(run, evaluation.batches.micro(number, micro))
            number += 1
    finally:
        run.learner.net.train()
        # What this asked of the data says nothing of the next step's.
        run.agreement.data_lacking = run.feed.pinned is not None
    dist.all_reduce(sums)
    run.evaluation_loss, run.evaluated_step = float(sums[0] / sums[1].clamp(min=1)), run.step
    run.journal.evaluation(step=run.step, loss=run.evaluation_loss, seconds=time.perf_counter() - started)
    show(run, "running", always=True)
    return None


def evaluation_losses(run: Run, batch: data.MicroBatch) -> Tensor:
    """Return the sum of this micro-batch's token losses, and of the weights of its targets."""
    weights_BT = batch.weights_BT.to(run.ranks.device)
    with torch.no_grad():
        losses_BT = token_losses(run, batch)
    return torch.stack([(losses_BT * weights_BT).sum(dtype=torch.float64), weights_BT.sum(dtype=torch.float64)])


def token_losses(run: Run, batch: data.MicroBatch) -> Tensor:
    """Return the loss of each token."""
    with run.learner.autocast():
        logits_BTV = run.learner.net(batch.tokens_BT.to(run.ranks.device))
    targets = batch.targets_BT.to(run.ranks.device)
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


def one_step(run: Run) -> Order | None:
    """One optimizer step is finished; or the ranks agreed on an order, and the state is that of the step before."""
    started, times = time.perf_counter(), run.learner.times
    loss_sum = torch.zeros((), dtype=torch.float64, device=run.ranks.device)
    targets = targets_of_all(run)
    for micro in range(run.batches.micro_steps):
        last = micro == run.batches.micro_steps - 1
        # One step ahead, so that no step waits for an answer of its own.
        lacking = last and run.step + 1 < run.config.training.steps and run.feed.lacks(run.step + 1)
        run.agreement.start(save_due=interval_is_over(run), own_ms=times.own_ms, data_lacking=lacking)
        seed_dropout(run, micro)
        with times.loading():
            batch = run.batches.micro(run.step, micro)
        loss_sum += backward(run, batch, targets, last=last)
        times.arrived()
        with times.waiting():
            order = run.agreement.finish()
        if order is not None:
            run.learner.optimizer.zero_grad()
            return order
    norm = run.learner.clip()
    learning_rate = run.config.learning_rate(run.step)
    if run.saves.copying:
        # Pinning tens of gigabytes for the first copy may take longer than any step.
        run.pulse.beat("saving", step=run.step)
    run.saves.fence()
    run.learner.update(learning_rate)
    with times.waiting():
        dist.all_reduce(loss_sum)
    record(run, float(loss_sum) / targets, norm, learning_rate, time.perf_counter() - started)
    return None


def targets_of_all(run: Run) -> float:
    """Return the targets that count in the next step, of all ranks together; 1 where a mask leaves none."""
    if not run.feed.masked:
        return run.config.tokens_per_step
    targets = torch.tensor(run.batches.targets(run.step), dtype=torch.float64)
    dist.all_reduce(targets, group=run.ranks.flags)
    return max(1.0, float(targets))


def backward(run: Run, batch: data.MicroBatch, targets: float, *, last: bool) -> Tensor:
    """Return the sum of this micro-batch's token losses; its gradient, per target of the global batch, is added up."""
    with run.learner.accumulate(last=last):
        weighted_BT = token_losses(run, batch) * batch.weights_BT.to(run.ranks.device)
        (weighted_BT.sum() / targets).backward()
    return weighted_BT.detach().sum(dtype=torch.float64)


def seed_dropout(run: Run, micro: int) -> None:
    """Dropout draws from a generator seeded by where the training stands, so no generator has to be saved."""
    if run.config.model.dropout > 0:
        torch.manual_seed(data.mixed(run.config.training.seed, run.step, micro, run.ranks.rank))


def record(run: Run, loss: float, norm: float, learning_rate: float, seconds: float) -> None:
    """The finished step is counted and written down. Raises Diverged after too many non-finite ones in a row."""
    run.step += 1
    run.new_steps += 1
    run.step_seconds.append(seconds)
    run.learner.times.finish(seconds)
    finite = isfinite(loss) and isfinite(norm)
    run.non_finite_steps = 0 if finite else run.non_finite_steps + 1
    run.loss = loss if finite else run.loss
    run.journal.step(
        step=run.step,
        loss=loss,
        lr=learning_rate,
        tokens=run.config.tokens_per_step,
        seconds=seconds,
        data_wait_ms=run.learner.times.last_data_wait_ms,
    )
    if run.new_steps == 1:
        run.journal.event("first_step", step=run.step, loss=loss)
        shorten_timeouts(run.ranks)
    if run.non_finite_steps >= MOST_NON_FINITE_STEPS:
        raise Diverged(
            f"{MOST_NON_FINITE_STEPS} steps in a row were not finite, the last is {run.step}: loss {loss}, norm {norm}"
        )
    show(run, "running")


def interval_is_over(run: Run) -> bool:
    """Return whether rank 0's clock asks for a save; the other ranks follow it."""
    interval_s = run.config.checkpoint.interval_s
    return run.ranks.rank == 0 and interval_s is not None and time.monotonic() - run.saved_at >= interval_s


def save_is_due(run: Run) -> bool:
    """Return whether the step just finished is to be saved by the interval; the last one is saved after the loop."""
    if run.step >= run.config.training.steps:
        return False
    interval = run.config.checkpoint.interval_steps
    return run.step % interval == 0 if interval else run.agreement.save_due


def save_unless_there(run: Run, order: Order) -> tuple[str | None, bool]:
    """Return the save of the last finished step, or the newest finite one, and whether it had been there before.

    A save in flight is finished first: there is never a second writer.
    """
    # A save that is still being written may be waited for, which is no step.
    run.pulse.beat("saving", step=run.step)
    run.saves.finish()
    existing = run.saves.existing(run.step)
    if existing or not run.step or run.non_finite_steps:
        newest = existing or run.saves.newest_name
        return newest, newest is not None
    return save(run, order), False


def save(run: Run, order: Order) -> str:
    """Return the name of a new save of the last finished step, which was finite.

    It is complete where the training ends with it; else the training goes on while it is written.
    """
    ends = order.kind is ControlKind.CHECKPOINT_STOP or run.step >= run.config.training.steps
    show(run, "saving")
    facts = {
        "step": run.step,
        "samples_seen": run.step * run.config.training.global_batch,
        "seed": run.config.training.seed,
        "schedule": {"next_learning_rate": run.config.learning_rate(run.step), "steps": run.config.training.steps},
        "last_loss": run.loss,
        "finite": True,
        "config": run.config.fixed,
    }
    if run.base_sha256 is not None:
        facts["base_sha256"] = run.base_sha256
    write = run.saves.write if ends else run.saves.begin
    name = write(run.learner.tensors(), facts, generation=order.generation, doomed=order.doomed)
    run.saved_at = time.monotonic()
    show(run, "running")
    return name


def end_before_the_first_step(run: Run, job: JobFile, order: Order | None) -> Outcome:
    """Return the outcome of an order that came before the first step: a save to be restored still holds the step."""
    run.answered_generation = order.generation if order else 0
    if order is None or order.kind is ControlKind.STOP:
        return end(run, "aborted", save=None)
    if job.resume_from is None:
        return end(run, "stopped", save=None)
    run.step = job.resume_from.step
    return end(run, "stopped", save=job.resume_from.save, existing=True)


def end(run: Run, outcome: str, *, save: str | None, existing: bool = False) -> Outcome:
    """Return the outcome; the progress shows where it ended."""
    show(run, outcome if outcome == "finished" else "running", always=True)
    run.pulse.beat("ending", step=run.step)
    return Outcome(
        outcome=outcome,
        step=run.step,
        loss=run.loss,
        answers_generation=run.answered_generation,
        save=save,
        existing=existing,
        fell_back=run.fell_back,
    )


def show(run: Run, state: str, *, always: bool = False, lack: Lack | None = None) -> None:
    """progress.json says where the run stands, and this rank's pulse what it is at, and what it lacks."""
    run.pulse.beat(state, step=run.step, slowest_s=max(run.step_seconds, default=None), lack=lack)
    if not (run.journal.progress_is_due(state, run.new_steps > 0) or (always and run.ranks.rank == 0)):
        return
    seconds = sum(run.step_seconds)
    tokens = run.config.tokens_per_step * len(run.step_seconds)
    tokens_per_s = tokens / seconds if seconds else 0.0
    times = run.learner.times
    run.journal.progress(
        RankProgress(
            step=run.step,
            loss=run.loss,
            tokens_per_s=tokens_per_s,
            state=state,
            world_size=run.ranks.world_size,
            started=run.new_steps > 0,
            restored=run.saves.restored.save if run.saves.restored else None,
            fell_back=run.fell_back,
            answered_generation=run.answered_generation or None,
            newest_save=run.saves.newest_name,
            evaluation_loss=run.evaluation_loss,
            step_ms=times.step_ms,
            data_wait_ms=times.data_wait_ms,
            comm_ms=times.comm_ms,
            node_ms=run.agreement.node_ms if all(run.agreement.node_ms) else None,
            mfu=mfu(tokens_per_s, run.per_token, run.ranks.world_size, run.peak),
        )
    )
