"""What being watched costs: `watching.py [rounds]`.

Three ways take turns: nothing is published (HOLDFAST_BOARD=0), a job publishes and nobody looks, and two viewers look:
one as `holdfast top` does, twice a second, one as a Prometheus scrape does, once a second. Batches per second, and
processor time per batch of the trainer and of its workers (viewers are not counted): that says more where other
programs run beside. The median of the rounds' ratios counts.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from loaders import supervised
from machine import write
from measuring import WARM_UP, make
from workloads import Workload, workloads

ROUNDS = 25
WORDS = ("rows", "tokens")
WAYS = ("off", "published", "watched")
BATCHES = 2000
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


def children_s() -> float:
    """Processor time of those that this process has waited for: the zygote, with its workers."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measured(workload: Workload, dataset: Any, batches: int) -> dict[str, float]:
    before = children_s()
    with supervised(dataset, workload) as iterator:
        sum(1 for _ in itertools.islice(iterator, WARM_UP))
        begun, began = time.perf_counter(), time.thread_time()
        for _batch in itertools.islice(iterator, batches):
            pass
        took, own = time.perf_counter() - begun, time.thread_time() - began
        del _batch, iterator
    gc.collect()
    return {"rate": batches / took, "trainer_s": own / batches, "workers_s": (children_s() - before) / batches}


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
            dataset = make(workload, WARM_UP + BATCHES)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(rounds):
                turn = number % len(WAYS)
                for way in (*WAYS, *WAYS)[turn : turn + len(WAYS)]:
                    with watched(way):
                        found[way].append(measured(workload, dataset, BATCHES))
            row = result["rows"][name] = {"values": found, "ratios": {}}
            for way in WAYS[1:]:
                row["ratios"][way] = {what: spread(found[way], found["off"], what) for what in found[way][0]}
                told = [f"{what} {' … '.join(map('{:.3f}'.format, it))}" for what, it in row["ratios"][way].items()]
                print(f"{name:<7} {way:<9} against off, quartiles of ratios: {', '.join(told)}", flush=True)
            usual = {what: statistics.median(each[what] for each in found["off"]) for what in found["off"][0]}
            print(f"{name:<7} off       {usual}", flush=True)
            where = write("watching", result)
    print(f"written to {where}")


def spread(mine: list[dict[str, float]], off: list[dict[str, float]], what: str) -> tuple[float, float, float]:
    """Quartiles of the rounds' ratios."""
    low, middle, high = statistics.quantiles((a[what] / b[what] for a, b in zip(mine, off, strict=True)), n=4)
    return low, middle, high


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
