"""Scenarios by name on one embedded cloud, one line each at the end.

    python -m local.scenarios all | failures | NAME... [--lanes 2] [--loud]

The raw record of each lies in out/scenarios/<name>/, that of the cloud in out/scenarios/cloud/. Exit code 1 when one
is missed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

from local.cloud import Cloud
from local.scenes.plays import SCENARIOS, Scenario
from local.scenes.stage import Missed, Results, Skipped, Stage, Theatre
from local.stack import REPOSITORY, SCHEDULE_FACTOR, deploy

LANES = 2
"""Scenarios that run at the same time: most of one is waiting and starting."""


@dataclass(frozen=True)
class Verdict:
    """How a scenario ended: ok, MISSED or skipped."""

    name: str
    word: str
    seconds: float
    checked: str

    def __str__(self) -> str:
        return f"{self.name:<23} {self.word:<8} {self.seconds:6.1f} s  {self.checked}"


def perform(scenario: Scenario, theatre: Theatre) -> Verdict:
    """The scenario has been played and its record written; return how it ended."""
    stage, word, why = Stage(theatre, scenario.name, scenario.types), "ok", ""
    try:
        scenario.play(stage)
    except Missed as miss:
        word, why = "MISSED", str(miss)
    except Skipped as skip:
        word, why = "skipped", str(skip)
    finally:
        stage.keep()
        stage.abandon()
    missed = [f"{check.claim} ({check.found})" for check in stage.checks if not check.ok]
    if missed:
        word, why = "MISSED", "; ".join(filter(None, [*missed, why]))
    seconds = round(time.time() - stage.began_at, 1)
    verdict = Verdict(
        scenario.name, word, seconds, why or "; ".join(check.claim for check in stage.checks if check.claim)
    )
    (stage.folder / "verdict.json").write_text(json.dumps(asdict(verdict), indent=1))
    return verdict


def broken(name: str, error: BaseException, folder: Path) -> Verdict:
    """The traceback is in the scenario's record; return the verdict on a scenario that could not be judged."""
    (folder / name / "error.txt").write_text("".join(traceback.format_exception(error)))
    return Verdict(name, "MISSED", 0.0, f"{error!r}; see {folder / name / 'error.txt'}")


def perform_all(
    scenarios: Sequence[Scenario], folder: Path, *, lanes: int = LANES, loud: bool = False
) -> Iterator[Verdict]:
    """Yield each verdict as it comes. Nothing is left running, whatever the end."""
    for name in ("cloud", *(scenario.name for scenario in scenarios)):
        shutil.rmtree(folder / name, ignore_errors=True)
    with Cloud(folder / "cloud", schedule_factor=SCHEDULE_FACTOR) as cloud:
        stack = deploy(cloud)
        theatre = Theatre(stack, Results(stack), folder, loud)
        with ThreadPoolExecutor(lanes, thread_name_prefix="lane") as pool:
            try:
                playing = {pool.submit(perform, scenario, theatre): scenario.name for scenario in scenarios}
                for played in as_completed(playing):
                    error = played.exception()
                    yield played.result() if error is None else broken(playing[played], error, folder)
            finally:
                theatre.closing.set()
                pool.shutdown(cancel_futures=True)


def chosen(names: Sequence[str]) -> list[Scenario]:
    """Return the scenarios of these names. Raises SystemExit, with what there is, for an unknown one."""
    if list(names) in (["all"], ["failures"]):
        return [scenario for scenario in SCENARIOS if scenario.by_name_only == (names[0] == "failures")]
    known = {scenario.name: scenario for scenario in SCENARIOS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no such scenario: {', '.join(unknown)}; there are all, failures, {', '.join(known)}")
    return [known[name] for name in names]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make run SCENARIO=", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="+", help=f"all, failures, or of {', '.join(one.name for one in SCENARIOS)}")
    parser.add_argument("--lanes", type=int, default=LANES)
    parser.add_argument("--loud", action="store_true", help="tell what happens; so it is for one scenario anyway")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "out" / "scenarios")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    scenarios = chosen(options.names)
    began, verdicts = time.monotonic(), []
    try:
        for verdict in perform_all(
            scenarios, options.out, lanes=options.lanes, loud=options.loud or len(scenarios) == 1
        ):
            verdicts.append(verdict)
            print(verdict, flush=True)
    except KeyboardInterrupt:
        print("\nstopped: nothing is left running")
        return 130
    missed = [verdict for verdict in verdicts if verdict.word == "MISSED"]
    print(f"{len(verdicts)} scenarios, {len(missed)} missed, {time.monotonic() - began:.0f} s")
    return 1 if missed or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
