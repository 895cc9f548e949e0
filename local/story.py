"""The main job, watched live: a request, a gang, training, a spot notice, a forced checkpoint, new machines, a result.

    python -m local.story [--notice all|event|metadata|none] [--victim leader|other] [--notice-s 20]
        [--nodes containers]

Everything is the product's own template, functions, state machine and image; only AWS is embedded. The raw record and
`summary.json` lie in out/run/. Exit code 1 when a demand is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from bench.table import show
from holdfast.domain.job import Job
from holdfast.messages.acceptance import read_acceptance
from holdfast.messages.result_message import REPORT_DATA, REPORT_PAGE
from job_contract.checkpoint_layout import job_prefix
from job_contract.version import plain
from local.cloud import Cloud
from local.image import Image, NoContainers, mounted
from local.node_records import rank_lines, write_lines
from local.stack import REPOSITORY, SCHEDULE_FACTOR, Stack, deploy
from local.summary import RawRecord, demands, summarize

REQUEST = REPOSITORY / "events" / "job-request.json"
DELIVERIES = 3
INTERRUPT_AT_STEP = 32
"""The sample saves every 25 steps, so the newest save is seven steps old."""

GIVE_UP_S = 240.0
LOOK_S = 0.2
PROGRESS_LINE_S = 2.0
REPORT_S = 15.0


class Story:
    """One run of the story; `folder` holds its raw record afterwards."""

    def __init__(
        self,
        folder: Path,
        *,
        notice: str,
        victim: str,
        notice_s: float,
        quiet: bool = False,
        image: Image | None = None,
    ) -> None:
        """With an image, nodes are containers of it."""
        self.image = image
        self.folder, self.notice, self.victim, self.notice_s, self.quiet = folder, notice, victim, notice_s, quiet
        self.started_at = time.time()
        self.interrupted = False
        self._told: set[str] = set()
        self._progress_at = 0.0

    def play(self) -> dict[str, Any]:
        """Run the story and return its summary, which is also in summary.json. Nothing is left running."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        nodes = (
            {
                "image_root": self.image.root,
                "node_command": self.image.command,
                "node_environment": self.image.environment,
            }
            if self.image
            else {}
        )
        cloud = Cloud(self.folder, schedule_factor=SCHEDULE_FACTOR, **nodes)
        try:
            with cloud:
                end = self._live(cloud)
        finally:
            # The list is taken after the end, whatever the end was.
            left = cloud.processes_left()
        end |= {"processes": left, "started_at": self.started_at, "ended_at": time.time()}
        (self.folder / "end.json").write_text(json.dumps(end, indent=1))
        self._gather()
        summary = summarize(RawRecord(self.folder))
        (self.folder / "summary.json").write_text(json.dumps(summary, indent=1))
        return summary

    def _live(self, cloud: Cloud) -> dict[str, Any]:
        self._tell("cloud", f"embedded cloud on {cloud.endpoint_url}, raw record in {self.folder}")
        stack = deploy(cloud)
        self._tell("stack", f"template.yaml deployed: {len(stack.outputs)} outputs")
        body = REQUEST.read_text()
        job_id = read_acceptance(body, now=0).job.id
        for _ in range(DELIVERIES):
            stack.send_request(body)
        self._tell("request", f"sent {DELIVERIES} times to the request queue: {job_id}")
        job = self._watch(stack, job_id)
        results = self._results(stack)
        self._wait_for_the_end_of_all_instances(cloud)
        self._bring_report(stack, job)
        rows = cloud.client("dynamodb").scan(TableName=stack.outputs["JobsTableName"], ConsistentRead=True)["Items"]
        return {
            "job": plain(job),
            "steps": json.loads(body)["training"]["steps"],
            "history": stack.table().history(job_id),
            "results": results,
            "jobs_created": len([row for row in rows if row["sk"]["S"] == "ROW" and row["pk"]["S"].startswith("JOB#")]),
            "instances": cloud.instances(),
        }

    def _watch(self, stack: Stack, job_id: str) -> Job:
        table = stack.table()
        give_up_at = time.monotonic() + GIVE_UP_S
        while time.monotonic() < give_up_at:
            job = table.load(job_id)
            if job is not None:
                self._tell_history(table.history(job_id))
                step = self._tell_progress()
                if not self.interrupted and job.phase == "running" and step >= INTERRUPT_AT_STEP:
                    self._interrupt(stack, job)
                if job.over:
                    self._tell_history(table.history(job_id))
                    return job
            time.sleep(LOOK_S)
        raise TimeoutError(f"{job_id} did not end within {GIVE_UP_S:g} s; see {self.folder / 'engine.log'}")

    def _interrupt(self, stack: Stack, job: Job) -> None:
        self.interrupted = True
        victim = self._victim(stack, job)
        cloud = stack.cloud
        if self.notice == "none":
            cloud.mute(state_changes=True, reports=["failed"])
            at = cloud.interrupt(victim, 0.0, event=False, metadata=False)
            what = f"{victim} ({self.victim}) is lost in silence; state changes and peer-loss reports are muted"
            self._tell("interruption", what, at=at, instance=victim, notice_s=0.0)
            return
        ways = {"event": self.notice in ("all", "event"), "metadata": self.notice in ("all", "metadata")}
        at = cloud.interrupt(victim, self.notice_s, **ways)
        by = " and ".join(name for name, on in ways.items() if on)
        what = f"spot notice of {self.notice_s:g} s (AWS gives 120) for {victim} ({self.victim}), by {by}"
        self._tell("interruption", what, at=at, instance=victim, notice_s=self.notice_s)

    def _victim(self, stack: Stack, job: Job) -> str:
        wanted = 0 if self.victim == "leader" else 1
        return next(node.instance for node in stack.members(job) if node.node_rank == wanted)

    def _results(self, stack: Stack) -> list[dict[str, Any]]:
        """The first result, and whatever follows it within two more seconds."""
        found: list[dict[str, Any]] = []
        for wait_s in (10, 2):
            for body in stack.results(wait_s):
                result = json.loads(body)
                found.append(result)
                self._tell("result", f"on the result queue: {result['id']}, {result['phase']}")
        return found

    def _bring_report(self, stack: Stack, job: Job) -> None:
        """report.json and report.html lie in the folder; they follow the end of the job, and miss where they don't."""
        s3, give_up_at = stack.cloud.client("s3"), time.monotonic() + REPORT_S
        for name in (REPORT_DATA, REPORT_PAGE):
            place = {
                "Bucket": stack.outputs["CheckpointBucketName"],
                "Key": f"{job_prefix(job.team, job.id)}/{name}",
            }
            while not (self.folder / name).exists() and time.monotonic() < give_up_at:
                try:
                    (self.folder / name).write_bytes(s3.get_object(**place)["Body"].read())
                except s3.exceptions.NoSuchKey:
                    time.sleep(LOOK_S)
        if (self.folder / REPORT_PAGE).exists():
            self._tell("report", f"the page of the run: {self.folder / REPORT_PAGE}")

    def _wait_for_the_end_of_all_instances(self, cloud: Cloud) -> None:
        give_up_at = time.monotonic() + 15
        while any(one["state"] != "terminated" for one in cloud.instances()) and time.monotonic() < give_up_at:
            time.sleep(LOOK_S)

    def _tell_history(self, history: list[dict[str, Any]]) -> None:
        for event in history:
            if event["sk"] in self._told:
                continue
            self._told.add(event["sk"])
            self._tell("event", in_words(event), of=event["kind"])

    def _tell_progress(self) -> int:
        lines = [line for line in self._metrics() if line]
        if not lines:
            return 0
        newest = max(lines, key=lambda line: line["at"])
        if time.monotonic() - self._progress_at > PROGRESS_LINE_S and f"{newest['at']}" not in self._told:
            self._progress_at = time.monotonic()
            self._told.add(f"{newest['at']}")
            speed = newest["tokens"] / newest["seconds"]
            self._print(f"step {newest['step']:>4}   loss {newest['loss']:.4f}   {speed:,.0f} tokens/s")
        return int(newest["step"])

    def _metrics(self) -> Iterator[dict[str, Any]]:
        """The last line of each node's metrics."""
        newest: dict[str, dict[str, Any]] = {}
        for line in rank_lines(self.folder, "metrics"):
            newest[line["instance"]] = line
        yield from newest.values()

    def _tell(self, what: str, text: str, *, at: float | None = None, **more: Any) -> None:
        now = at or time.time()
        line = {"at": now, "elapsed_s": round(now - self.started_at, 3), "what": what, "text": text, **more}
        with (self.folder / "timeline.jsonl").open("a") as timeline:
            timeline.write(json.dumps(line) + "\n")
        self._print(text)

    def _print(self, text: str) -> None:
        if not self.quiet:
            print(f"{time.time() - self.started_at:7.1f} s  {text}", flush=True)

    def _gather(self) -> None:
        """Bring what the ranks wrote into one file a kind."""
        write_lines(self.folder / "metrics.jsonl", rank_lines(self.folder, "metrics"))
        write_lines(self.folder / "node_events.jsonl", rank_lines(self.folder, "events"))


def in_words(event: dict[str, Any]) -> str:
    """One line for one event of a job's history."""
    step = f", {event['before']} -> {event['after']}" if event["before"] != event["after"] else ""
    cause = f" ({event['cause']})" if event["cause"] else ""
    return f"attempt {event['attempt']}: {event['kind']}{cause}{step}{_shown(event['detail'])}"


def _shown(detail: dict[str, Any]) -> str:
    known = ("pointer", "instance", "instances", "step", "zone", "failure", "reason", "restored")
    parts = [f"{name} {_value(detail[name])}" for name in known if detail.get(name)]
    return f": {', '.join(parts)}" if parts else ""


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("save", value))
    return ", ".join(value) if isinstance(value, list) else str(value)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make run", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--notice", choices=["all", "event", "metadata", "none"], default="all")
    parser.add_argument("--victim", choices=["leader", "other"], default="other")
    parser.add_argument("--notice-s", type=float, default=20.0, help="length of the notice, seconds (AWS gives 120)")
    parser.add_argument(
        "--nodes",
        choices=["processes", "containers"],
        default="processes",
        help="containers: nodes run the image built from the shipped Dockerfile, each with an address of its own",
    )
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "run")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with mounted() if options.nodes == "containers" else nullcontext() as image:
            summary = Story(
                options.out, notice=options.notice, victim=options.victim, notice_s=options.notice_s, image=image
            ).play()
    except KeyboardInterrupt:
        print("\nstopped: nothing is left running")
        return 130
    except NoContainers as error:
        print(error, file=sys.stderr)
        return 3
    print()
    return show(demands(summary, options.notice))


if __name__ == "__main__":
    sys.exit(main())
