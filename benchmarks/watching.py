"""What being watched costs: `watching.py [rounds]`.

Three ways take turns: nothing is published (HOLDFAST_BOARD=0), a job publishes and nobody looks, and it is watched by
`holdfast top`, `holdfast dash` with a page open, and a Prometheus scrape per second (viewers.py). Batches per second,
and processor time per batch of the trainer and of its workers, which viewers are not part of; beside them, what the
viewers use themselves, of one processor. Where all processors are busy, as here, viewers take theirs from the job: that
is in the batches per second, not in the processor time. The median of the rounds' ratios counts.

Where other programs run beside, ratios of rounds cannot tell half a per cent. So the cost is also counted: in a run of
its own, what the trainer spends in publishing is timed call by call (less what the clock takes), and what a worker
spends on timing its batches is timed alone.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import logging
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

from holdfast._capture.blackbox import SIZE, BlackBox
from holdfast._transport.cells import Arena
from holdfast._worker.loop import Desk
from holdfast.loader.metered import LoaderMetered
from loaders import supervised
from machine import write
from measuring import WARM_UP, make
from workloads import Workload, workloads

ROUNDS = 15
WAYS = ("off", "published", "watched")
BATCHES = {"rows": 20_000, "tokens": 15_000}  # some seconds each
VIEWERS = Path(__file__).with_name("viewers.py")


@contextmanager
def watched(way: str, shares: list[float]) -> Iterator[None]:
    """In this way; how much of a processor the viewers use is added to `shares`."""
    os.environ["HOLDFAST_BOARD"] = "0" if way == "off" else "1"
    if way != "watched":
        yield
        return
    with subprocess.Popen(
        [sys.executable, str(VIEWERS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as viewers:
        assert viewers.stdout is not None
        assert viewers.stdin is not None
        assert viewers.stdout.readline() == "ready\n"
        before, began = used_s(viewers.pid), time.perf_counter()
        yield
        shares.append((used_s(viewers.pid) - before) / (time.perf_counter() - began))
        viewers.stdin.close()
        looks = json.loads(viewers.stdout.read())
        assert all(looks.values()), f"somebody did not look: {looks}"


def used_s(pid: int) -> float:
    """Processor time of a process and of its children."""
    first = psutil.Process(pid)
    return sum(sum(each.cpu_times()[:2]) for each in (first, *first.children(recursive=True)))


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


def counted(workload: Workload, dataset: Any, batches: int) -> float:
    """The share of the processor time of a job, trainer and workers, that goes into publishing."""
    os.environ["HOLDFAST_BOARD"] = "1"
    _, nothing = spent_in({"waited": lambda self, since: None}, workload, dataset, batches)
    clock = nothing[0] / nothing[1]  # what looking at it takes in this place, where nothing is in a cache
    published = {name: getattr(LoaderMetered, name) for name in ("gave", "flush", "waited", "saw")}
    seen, (took, calls) = spent_in(published, workload, dataset, batches)
    stores = each_s(memoryview(array("q", [1 << 40]))) - each_s([1 << 40])
    each = (took - calls * clock) / batches + stores + timing_s()
    return each / (seen["trainer_s"] + seen["workers_s"] - calls * clock / batches)


def spent_in(
    methods: dict[str, Callable[..., Any]], workload: Workload, dataset: Any, batches: int
) -> tuple[dict[str, float], list[float]]:
    """A run in which calls of these are timed: the seconds spent in them, and how many they were."""
    spent = [0.0, 0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            begun = time.thread_time()
            try:
                return method(*arguments)
            finally:
                spent[0] += time.thread_time() - begun
                spent[1] += 1

        return call

    before = {name: getattr(LoaderMetered, name) for name in methods}
    try:
        for name, method in methods.items():
            setattr(LoaderMetered, name, timed(method))
        return measured(workload, dataset, batches), spent
    finally:
        for name, method in before.items():
            setattr(LoaderMetered, name, method)


def each_s(words: Any) -> float:
    """What counting a batch takes: on the board, or in a list where nothing is published."""

    def count() -> None:
        left = words[0] = words[0] - 1
        assert left > 0

    return min(timeit.repeat(count, number=100_000, repeat=5)) / 100_000


def timing_s() -> float:
    """What a worker's looks at the clock take, for each batch, beyond deciding that there is none."""
    desk = Desk(None, BlackBox((ctypes.c_ubyte * SIZE)()), Arena())  # type: ignore[arg-type]

    def task() -> None:
        begun_ns = desk.begin_task()
        if begun_ns:
            desk.end_task(begun_ns)

    with_looks = min(timeit.repeat(task, number=100_000, repeat=5))
    desk._untimed = sys.maxsize
    return (with_looks - min(timeit.repeat(task, number=100_000, repeat=5))) / 100_000


def main(rounds: int) -> None:
    logging.getLogger("holdfast").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": rounds, "rows": {}}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as folder:
        os.environ["HOLDFAST_RUNTIME"] = str(Path(folder, "runtime"))
        for workload in workloads(Path(folder)):
            name = workload.name.partition(":")[0]
            if name not in BATCHES:
                continue
            dataset = make(workload, WARM_UP + BATCHES[name])
            shares: list[float] = []
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(rounds):
                turn = number % len(WAYS)
                for way in (*WAYS, *WAYS)[turn : turn + len(WAYS)]:
                    with watched(way, shares):
                        found[way].append(measured(workload, dataset, BATCHES[name]))
            row = result["rows"][name] = {"values": found, "viewers": shares, "ratios": {}}
            by_count = row["by_count"] = [counted(workload, dataset, BATCHES[name]) for _ in range(5)]
            print(
                f"{name:<7} published, by count: {statistics.median(by_count):.2%} of the job's processor time",
                flush=True,
            )
            for way in WAYS[1:]:
                row["ratios"][way] = {what: spread(found[way], found["off"], what) for what in found[way][0]}
                told = [f"{what} {' … '.join(map('{:.3f}'.format, it))}" for what, it in row["ratios"][way].items()]
                print(f"{name:<7} {way:<9} against off, quartiles of ratios: {', '.join(told)}", flush=True)
            usual = {what: statistics.median(each[what] for each in found["off"]) for what in found["off"][0]}
            print(f"{name:<7} off       {usual}, viewers {statistics.median(shares):.3f} of a processor", flush=True)
            where = write("watching", result)
    print(f"written to {where}")


def spread(mine: list[dict[str, float]], off: list[dict[str, float]], what: str) -> tuple[float, float, float]:
    """Quartiles of the rounds' ratios."""
    low, middle, high = statistics.quantiles((a[what] / b[what] for a, b in zip(mine, off, strict=True)), n=4)
    return low, middle, high


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
