"""How fast does an agent upload a save? `python -m bench.upload` sets it against s3transfer alone, in one run.

Both put the same files into the S3 of the embedded cloud, with as many files at a time and the same parts; the agent
hashes each file as well and keeps what it uploaded. The server on this machine is the limit of both, so only the ratio
says anything. Recorders on the agent's client then count calls in flight and the bytes of each part, and refuse some.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from botocore.awsrequest import AWSResponse

from agent import cloud as agent_cloud
from agent.cloud import Bucket
from agent.journal import Journal
from agent.ranks import Seats
from agent.saves import Saves
from agent.settings import Pace
from bench.table import Row, report
from job_contract.node_files import Control
from local.cloud import Cloud

FILES, FILE_BYTES, ROUNDS = 4, 80 << 20, 5
REFUSED = 3
LEAST_RATIO = 0.9
SAVE = "step-00000001.a0001.s01"
SEATS = Seats(
    job="job-1", attempt=1, node_rank=0, nodes=1, ranks_per_node=1, leader_ip="", leader_port=0, interface="lo"
)  # fmt: skip


class Recorder:
    """Watches the parts that a client puts; the first `refuse` of them are answered with SlowDown."""

    def __init__(self, client: Any, refuse: int) -> None:
        self.sizes: list[int] = []
        self.most, self._now, self._left, self.refused = 0, 0, refuse, 0
        self._lock = threading.Lock()
        client.meta.events.register("before-send.s3.UploadPart", self._begins)
        client.meta.events.register("response-received.s3.UploadPart", self._ends)

    def _begins(self, request: Any, **_: Any) -> AWSResponse | None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            if self._left:
                self._left, self.refused = self._left - 1, self.refused + 1
                return AWSResponse(request.url, 503, {}, _Body(b"<Error><Code>SlowDown</Code></Error>"))
            self.sizes.append(int(request.headers.get("X-Amz-Decoded-Content-Length") or _length(request.headers)))
        return None

    def _ends(self, **_: Any) -> None:
        with self._lock:
            self._now -= 1


class _Body:
    def __init__(self, text: bytes) -> None:
        self._text = text

    def stream(self, **_: Any) -> Any:
        yield self._text

    def read(self, *_: Any) -> bytes:
        return self._text


def _length(headers: Any) -> int:
    return int(headers["Content-Length"])


def agents_saves(client: Any, bucket: str, run_dir: Path, prefix: str) -> Saves:
    """Return the agent's own uploader over the run directory."""
    return Saves(
        SEATS,
        roster_id="roster-1",
        prefix=prefix,
        run_dir=run_dir,
        bucket=Bucket(client, bucket),
        committer=None,  # type: ignore[arg-type]  # nothing is committed here
        control=lambda: Control(attempt=1, generation=0),
        pace=Pace(),
        journal=Journal(run_dir / "events.jsonl"),
    )


def transfer_alone(client: Any, bucket: str, folder: Path, names: list[str], prefix: str) -> None:
    """The files are in the bucket, by s3transfer with the agent's configuration."""

    def put(name: str) -> None:
        client.upload_file(str(folder / name), bucket, f"{prefix}/{name}", Config=agent_cloud._TRANSFER)

    with ThreadPoolExecutor(Pace().uploads) as pool:
        list(pool.map(put, names))


def seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> int:
    with tempfile.TemporaryDirectory() as place, Cloud(Path(place) / "cloud") as cloud:
        folder = Path(place) / "run" / "saves" / SAVE
        folder.mkdir(parents=True)
        names = [f"__0_{number}.distcp" for number in range(FILES)]
        for name in names:
            (folder / name).write_bytes(os.urandom(FILE_BYTES))
        client = cloud.client("s3", config=agent_cloud._CONFIG.merge(patient()))
        client.create_bucket(Bucket="saves")
        ours, alone = [], []
        for number in range(ROUNDS):
            saves = agents_saves(client, "saves", folder.parents[1], f"ours-{number}")
            ours.append(seconds(lambda saves=saves: saves._upload_all(folder, names)))  # type: ignore[misc]
            alone.append(
                seconds(lambda number=number: transfer_alone(client, "saves", folder, names, f"alone-{number}"))  # type: ignore[misc]
            )
        watched = cloud.client("s3", config=agent_cloud._CONFIG.merge(patient()))
        recorder = Recorder(watched, REFUSED)
        stored = agents_saves(watched, "saves", folder.parents[1], "watched")._upload_all(folder, names)
    ratio = statistics.median(alone[1:]) / statistics.median(ours[1:])
    megabytes = FILES * FILE_BYTES / 1e6
    chunk = agent_cloud._TRANSFER.multipart_chunksize
    return report(
        "upload",
        [
            Row("files of a save (MB)", megabytes, "reported", True),
            Row("s3transfer alone (MB/s)", megabytes / statistics.median(alone[1:]), "reported", True),
            Row("the agent, digests included (MB/s)", megabytes / statistics.median(ours[1:]), "reported", True),
            Row("speed of the agent / s3transfer", ratio, f">= {LEAST_RATIO}", ratio >= LEAST_RATIO),
            Row("parts in flight at most", recorder.most, f"> {Pace().uploads}", recorder.most > Pace().uploads),
            Row("largest part (bytes)", max(recorder.sizes), f"= {chunk}", max(recorder.sizes) == chunk),
            Row("bytes that reached the bucket", sum(recorder.sizes), f"= {FILES * FILE_BYTES}",
                sum(recorder.sizes) == FILES * FILE_BYTES),
            Row("parts refused and sent again", recorder.refused, f"= {REFUSED}", recorder.refused == REFUSED),
            Row("files uploaded all the same", len(stored), f"= {FILES}", len(stored) == FILES),
        ],
    )  # fmt: skip


def patient() -> Any:
    # The server of the embedded cloud answers a part of 32 MB late; on AWS five seconds are many.
    return agent_cloud.Config(read_timeout=60)


if __name__ == "__main__":
    sys.exit(main())
