"""What being watched costs: `watching.py [rounds]`.

Three ways take turns: nothing is published (HOLDFAST_BOARD=0), a job publishes and nobody looks, and two viewers look:
one as `holdfast top` does, twice a second, one as a Prometheus scrape does, once a second. Batches per second, and
processor time per batch, of the trainer with its workers (viewers are not counted): the latter says more where other
programs run beside. The median of the rounds' ratios counts.
"""

from __future__ import annotations

import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from loaders import supervised
from machine import write
from workloads import workloads

from measuring import run

ROUNDS = 25
WORDS = ("rows", "tokens")
WAYS = ("off", "published", "watched")
REPEATS = 2  # epochs per round and way: a short one says little
VIEWER = """
import sys, time
from holdfast._metrics import viewing
after = {}
while True:
    for job in viewing.jobs():
        job.snapshot()
        _, after[job.key] = job.events(after.get(job.key, 0))
    time.sleep(float(sys.argv[1]))
"""


@contextmanager
def watched(way: str) -> Iterator[None]:
    os.environ["HOLDFAST_BOARD"] = "0" if way == "off" else "1"
    viewers = [
        subprocess.Popen([sys.executable, "-c", VIEWER, interval])
        for interval in (("0.5", "1.0") if way == "watched" else ())
    ]
    try:
        yield
    finally:
        for viewer in viewers:
            viewer.kill()
            viewer.wait()


def processor_s() -> float:
    """Of this process, and of those that it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def main(rounds: int) -> None:
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": rounds, "rows": {}}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        os.environ["HOLDFAST_RUNTIME"] = str(Path(folder, "runtime"))
        for workload in workloads(Path(folder)):
            name = workload.name.partition(":")[0]
            if name not in WORDS:
                continue
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            costs: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds):
                turn = number % len(WAYS)
                for way in (*WAYS, *WAYS)[turn : turn + len(WAYS)]:
                    with watched(way):
                        before = processor_s()
                        took = [run(supervised, workload, workload.batches) for _ in range(REPEATS)]
                        own = processor_s() - before
                    rates[way].append(statistics.median(took))
                    costs[way].append(own / (REPEATS * workload.batches))
            result["rows"][name] = {"rates": rates, "processor_s_per_batch": costs, "cost": {}}
            for way in WAYS[1:]:
                slower = 1 - statistics.median(a / b for a, b in zip(rates[way], rates["off"], strict=True))
                more = statistics.median(a / b for a, b in zip(costs[way], costs["off"], strict=True)) - 1
                result["rows"][name]["cost"][way] = {"rate": slower, "processor": more}
                print(
                    f"{name:<7} {way:<9} {statistics.median(rates[way]):8.1f}/s against "
                    f"{statistics.median(rates['off']):8.1f}/s: costs {slower:+.2%} of the rate, {more:+.2%} of the "
                    f"processor time ({1e6 * statistics.median(costs['off']):.1f} µs a batch)"
                )
    print(f"written to {write('watching', result)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
