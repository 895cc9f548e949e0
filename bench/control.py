"""What the control plane costs and how fast it answers: `python -m bench.control` ends with a table.

Four parts, each of which also runs alone (`python -m bench.control_plane.<part>`): first_order, mass_loss, throughput,
job_day. Counted: calls, invocations, transitions, write units, on the real doors over moto. Measured on this machine:
processor time. Simulated, and called so: latencies and quotas of AWS, as published (control_plane/published.py).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from bench.control_plane import first_order, job_day, mass_loss, throughput
from bench.table import Row, report


def rows() -> Iterator[Row]:
    # Processor time first, while nothing else has filled the caches.
    yield from throughput.rows()
    yield from first_order.rows()
    yield from job_day.rows()
    yield from mass_loss.rows()


if __name__ == "__main__":
    sys.exit(report("control", rows()))
