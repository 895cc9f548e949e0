"""What others have published of AWS's latencies and quotas; nothing of it was measured here.

A latency is drawn from the lognormal distribution through its median and its 99th percentile.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

Z99 = 2.3263
"""The standard normal distribution's 99th percentile."""


@dataclass(frozen=True)
class Latency:
    """Milliseconds at the median and the 99th percentile, and who says so."""

    p50_ms: float
    p99_ms: float
    source: str

    def draw_s(self, chance: random.Random) -> float:
        spread = math.log(self.p99_ms / self.p50_ms) / Z99
        return chance.lognormvariate(math.log(self.p50_ms / 1000), spread)


HOPS_2022 = "bitesizedserverless 2022, 1,024 warm sends, eu-west-1"
ASSUMED = "assumed: AWS promises single-digit milliseconds and publishes no percentiles"

SQS_TO_LAMBDA = Latency(16, 105, HOPS_2022)
EVENTBRIDGE_TO_LAMBDA = Latency(148, 387, HOPS_2022)
STREAM_TO_LAMBDA = Latency(213, 552, HOPS_2022)
STEP_TO_LAMBDA = Latency(142, 313, HOPS_2022)
COLD_START = Latency(800, 2800, "blogs: Python 200 ms lean, 800 to 2,800 ms with Pydantic")
TABLE_READ = Latency(5, 20, ASSUMED)
TABLE_WRITE = Latency(6, 25, ASSUMED)
TRANSACTION = Latency(12, 50, ASSUMED)
EC2_CALL = Latency(200, 1000, "assumed: EC2 publishes none")
STEP_FUNCTIONS_CALL = Latency(20, 100, "assumed: Step Functions publishes none")


@dataclass(frozen=True)
class Quota:
    """A token bucket: so much at once, and so much a second from then on."""

    burst: float
    per_s: float


LAMBDA_CONCURRENCY = 1000
LAMBDA_CONCURRENCY_NEW_ACCOUNT = 10
LAMBDA_MB_PER_CPU = 1769
SQS_POLLERS, SQS_POLLERS_PER_S, SQS_POLLERS_MOST = 5, 5.0, 1250
EVENTBRIDGE_INVOCATIONS = Quota(18_750, 18_750)
TABLE_WRITES = Quota(4000, 4000)
"""A new on-demand table."""

PARTITION_WRITES = Quota(1000, 1000)
"""All items of one partition key live on one partition, at most."""

PARTITION_READS = Quota(3000, 3000)
EC2_DESCRIBE = Quota(100, 20)
EC2_MUTATE = Quota(50, 5)
START_EXECUTION = Quota(1300, 300)
SEND_TASK_SUCCESS = Quota(3000, 500)
ASYNC_RETRIES_AFTER_S = (60.0, 120.0)
"""Lambda tries an asynchronous call that failed again after one minute, and after two more."""

THROTTLED_FIRST_S, THROTTLED_LONGEST_S = 1.0, 300.0
"""A throttled asynchronous call comes again after a second, then after twice as long each time."""
