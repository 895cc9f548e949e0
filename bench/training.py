"""What does the trainer cost beside a plain loop? `python -m bench.training` answers with a table of ratios.

On two ranks of this machine, everything that is compared interleaved in the same processes, medians. The plain loop is
`bench/plain_loop.py`: the same model, optimizer and parallel mode, without data, agreement, progress and saves.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.table import Row, report
from job_contract.spec import JobSpec
from tests.training_image.trainer.folder_agent import started, tiny_spec

RANKS = 2
MOST_LOOP, MOST_HOOKS = 1.05, 0.005
LEAST_OF_RAW, LEAST_OF_DCP = 0.5, 0.9
MODEL = {"dim": 256, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_dim": 768}
# 40 million parameters, so 0.5 GB of state: planning a save no longer counts.
LARGE = {"dim": 512, "layers": 4, "heads": 8, "kv_heads": 4, "ffn_dim": 1536, "vocab": 28_000}


def measured(root: Path, spec: JobSpec) -> list[dict[str, Any]]:
    """Return what each rank has timed."""
    with started(root, root / "corpus", spec, RANKS, command=("-m", "bench.training_rank")) as ranks:
        codes = ranks.finish()
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}: {ranks.log(0)[-2000:]}")
        return [json.loads((ranks.run_dir(rank) / "timed.json").read_text()) for rank in ranks.ranks]


def loop(root: Path, parallel: str) -> Iterator[Row]:
    """Yield the price of the loop, and of what it does beside training."""
    spec = tiny_spec(parallel=parallel, steps=10_000, global_batch=8, sequence_length=128, model=MODEL)
    ranks = measured(root, spec)
    ours, plain = (median(seconds for rank in ranks for seconds in rank[name]) for name in ("loop", "plain"))
    ratio = ours / plain
    yield Row(f"{parallel}: step, plain loop (ms)", plain * 1e3, "reported", True)
    yield Row(f"{parallel}: step, ours / plain loop", ratio, f"<= {MOST_LOOP}", ratio <= MOST_LOOP)
    share = max(rank["hooks_s"] / sum(rank["loop"]) for rank in ranks)
    yield Row(f"{parallel}: share of a step inside hooks", share, f"<= {MOST_HOOKS}", share <= MOST_HOOKS)
    worked = max(rank["hooks_processor_s"] / sum(rank["loop"]) for rank in ranks)
    yield Row(f"{parallel}: the same, processor time alone", worked, "reported", True)


def save(root: Path) -> Iterator[Row]:
    """Yield the speed of a synchronous save with its digests."""
    spec = tiny_spec(steps=1, warmup_steps=0, global_batch=2, sequence_length=8, model=LARGE)
    ranks = measured(root, spec)
    seconds = {name: median(max(times) for times in zip(*(rank[name] for rank in ranks), strict=True))
               for name in ("ours", "dcp", "raw")}  # fmt: skip
    size_mb = sum(rank["size_bytes"] for rank in ranks) / 1e6
    yield Row("save: state (MB)", size_mb, "reported", True)
    for name, told in {"ours": "ours with digests", "dcp": "plain DCP", "raw": "raw write"}.items():
        yield Row(f"save: {told} (MB/s)", size_mb / seconds[name], "reported", True)
    for name, least in {"raw": LEAST_OF_RAW, "dcp": LEAST_OF_DCP}.items():
        ratio = seconds[name] / seconds["ours"]
        yield Row(f"save: speed of ours / {name}", ratio, f">= {least}", ratio >= least)


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory(prefix="holdfast-training-") as folder:
        root = Path(folder)
        for parallel in ("fsdp", "ddp"):
            yield from loop(root, parallel)
        yield from save(root)


if __name__ == "__main__":
    sys.exit(report("training", rows()))
