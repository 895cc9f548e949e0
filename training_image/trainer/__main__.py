"""Entry point of a rank: `python -m trainer <run_dir>`, with torchrun's variables in the environment."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path

from job_contract.node_files import JobFile, read_message
from trainer.parent import die_with_parent, parent_is


def main(arguments: list[str]) -> int:
    """Train as `<run_dir>/job.json` says; return the exit code that the agent reads."""
    die_with_parent()
    # The agent asks a rank that hangs for its stacks; they go to the rank's log.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    if len(arguments) != 1:
        print("usage: python -m trainer <run_dir>", file=sys.stderr)
        return 2
    run_dir = Path(arguments[0])
    job = read_message(run_dir / "job.json", JobFile)
    if job is None:
        print(f"{run_dir} holds no job.json", file=sys.stderr)
        return 2
    if not parent_is(job.agent_pid):
        print(f"the agent {job.agent_pid} is gone, the parent is {os.getppid()}", file=sys.stderr)
        return 1
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return _train(run_dir, job)


def _train(run_dir: Path, job: JobFile) -> int:
    # torch takes seconds to import; the signal above must be set before, and OMP_NUM_THREADS is read at its import.
    from trainer.pulse import Pulse

    Pulse(run_dir, int(os.environ["RANK"])).beat("starting")
    from trainer.endings import WAYS_OUT, Ending, exit_code_of, out_of_memory
    from trainer.train import train

    try:
        train(run_dir, job)
    except Ending as ending:
        print(f"{ending.name}: {ending}", file=sys.stderr)
        return exit_code_of(ending)
    except (RuntimeError, MemoryError) as error:
        traceback.print_exc()
        if out_of_memory(error):
            print(f"out_of_memory: {WAYS_OUT}", file=sys.stderr)
        return exit_code_of(error)
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # With a broken collective the interpreter's own exit can wait for the peer that is gone, so it is skipped.
    os._exit(code)
