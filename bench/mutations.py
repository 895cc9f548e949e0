"""Does a test of each public case fail when its rule is stubbed out? `python -m bench.mutations` answers with a table.

Each mutation is a small text put in place of another in one file of the product, and the tests that must then fail.
Nothing is changed here: the parts of the tree that tests need are copied to a temporary folder, once for each worker,
and a mutation is applied and taken back there. The named tests must pass undisturbed, and each must fail mutated; a
test that cannot even be collected or set up does not count. `tests/architecture/test_mutations.py` keeps the list true.

`python -m bench.mutations O-05 C5` runs those cases only.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.mutation_list import MUTATIONS, Mutation
from bench.table import Row, report

ROOT = Path(__file__).parents[1]
PARTS = (
    "bench", "cli", "docs", "events", "functions", "layers", "local", "statemachines", "tests", "training_image",
    "pyproject.toml", "requirements.txt", "template.yaml", "README.md",
)  # fmt: skip
IMPORTED_FROM = (".", "layers/holdfast", "functions", "training_image", "cli")
WORKERS = 2
LONGEST_S = 240.0
TESTS_FAILED = 1  # pytest's exit status; others are for what could not be collected or started


@dataclass(frozen=True)
class Outcome:
    """How the tests went: names of those that failed and that could not be set up; `status` is pytest's, or None when
    it had to be ended."""

    status: int | None
    failed: frozenset[str]
    broken: frozenset[str]
    seconds: float
    text: str


def copied(folder: Path) -> Path:
    """The parts of the tree are in the folder, without what running them left behind."""
    for name in PARTS:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info", "out"))
        else:
            shutil.copy2(source, folder / name)
    return folder


def run_tests(tree: Path, tests: Sequence[str]) -> Outcome:
    """Run the tests in the tree, in one process; after the first failure no other is run where there is but one."""
    begun = time.monotonic()
    first_only = ["-x"] if len(tests) == 1 else []
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rfE", "--tb=line", *first_only, *tests]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(tree / part) for part in IMPORTED_FROM),
        # A mutation may keep size and second of its file, and then an old compilation would be taken for it.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    try:
        ended = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=LONGEST_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(None, frozenset(), frozenset(), time.monotonic() - begun, "ran too long")
    return Outcome(
        ended.returncode,
        frozenset(_named("FAILED", ended.stdout)),
        frozenset(_named("ERROR", ended.stdout)),
        time.monotonic() - begun,
        ended.stdout + ended.stderr,
    )


def _named(word: str, output: str) -> Iterator[str]:
    """Tests on the lines of pytest's summary that begin with the word, without their parameters."""
    for line in output.splitlines():
        if line.startswith(f"{word} tests/"):
            yield line.removeprefix(f"{word} ").split(" - ")[0].split("[")[0].strip()


def undisturbed(tree: Path, mutations: Iterable[Mutation]) -> Row:
    """Every test that a mutation names passes as things are."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    outcome = run_tests(tree, tests)
    bad = ", ".join(sorted(outcome.failed | outcome.broken)) or outcome.text[-400:]
    ok = outcome.status == 0
    return Row(f"{len(tests)} tests, nothing stubbed", "pass" if ok else bad, "all pass", ok)


def mutated(tree: Path, mutation: Mutation) -> Row:
    """The mutation is applied, its tests are run, and it is taken back."""
    path = tree / mutation.file
    kept = path.read_text()
    if kept.count(mutation.old) != 1:
        return Row(str(mutation), f"stands {kept.count(mutation.old)} times in {mutation.file}", "once", False)
    path.write_text(kept.replace(mutation.old, mutation.new))
    try:
        outcome = run_tests(tree, mutation.tests)
    finally:
        path.write_text(kept)
    verdict = _verdict(mutation, outcome)
    return Row(str(mutation), verdict, "found", verdict.startswith("found"))


def _verdict(mutation: Mutation, outcome: Outcome) -> str:
    survived = [test for test in mutation.tests if test not in outcome.failed]
    if outcome.status is None:
        return outcome.text
    if outcome.broken or outcome.status not in (0, TESTS_FAILED):
        return f"could not be judged: pytest ended with {outcome.status}, {', '.join(sorted(outcome.broken))}"
    if survived:
        return f"survives {', '.join(test.rpartition('::')[2] for test in survived)}"
    return f"found by {len(mutation.tests)} in {outcome.seconds:.1f} s"


def rows(mutations: Sequence[Mutation]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(WORKERS) as pool:
        trees: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for number in range(WORKERS):
            (Path(folder) / str(number)).mkdir()
            trees.put(copied(Path(folder) / str(number)))

        def judged(mutation: Mutation | None) -> Row:
            tree = trees.get()
            try:
                return undisturbed(tree, mutations) if mutation is None else mutated(tree, mutation)
            finally:
                trees.put(tree)

        yield from pool.map(judged, [None, *mutations])


def main(cases: Sequence[str]) -> int:
    unknown = set(cases) - {mutation.case for mutation in MUTATIONS}
    if unknown:
        print(f"no mutation of {', '.join(sorted(unknown))}; known are "
              f"{', '.join(dict.fromkeys(mutation.case for mutation in MUTATIONS))}")  # fmt: skip
        return 2
    begun = time.monotonic()
    chosen = [mutation for mutation in MUTATIONS if not cases or mutation.case in cases]
    result = report("mutations", rows(chosen))
    print(f"{len(chosen)} mutations in {time.monotonic() - begun:.0f} s")
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
