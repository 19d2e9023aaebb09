"""What being watched costs: `watching.py [rounds]`.

Two questions, two ways to answer each.

A job publishes, and nobody looks. Rounds with and without (OUTLIVE_BOARD=0) take turns: batches per second, processor
time per batch of the trainer and of its workers; the median of the rounds' ratios counts. Where other programs run
beside, rounds cannot tell half a per cent. So the cost is also counted: in a run of its own, what the trainer spends in
publishing is timed call by call (less what the clock takes), and what a worker spends on timing its batches is timed
alone.

It is watched by `outlive top`, `outlive dash` with a page open, and a scrape of its metrics per second (viewers.py).
One job runs on and on while the viewers are stopped and continued every two seconds, so that neighbours can be
compared: batches per second while they look, against those just before and after. Processors that are shared with other
machines swing by far more than a viewer takes, so that is counted, too: for how long the trainer had work and no
processor, as the kernel tells, while they look and while they do not; and what the viewers use, of one processor, where
nobody stops them.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import logging
import math
import os
import resource
import signal
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

from loaders import supervised
from machine import write
from measuring import WARM_UP, make
from outlive._capture.blackbox import SIZE, BlackBox
from outlive._transport.cells import Arena
from outlive._worker.loop import Desk
from outlive.loader.metered import LoaderMetered
from workloads import Workload, workloads

ROUNDS = 15
WAYS = ("off", "published")
BATCHES = {"rows": 20_000, "tokens": 15_000}  # some seconds each
VIEWERS = Path(__file__).with_name("viewers.py")
SPAN_S, SETTLING_S, SPANS = 2.0, 0.5, 41  # of which every second one is watched, the first and the last are not
WARMING_S, STEADY_S = 3.0, 30.0


def watched(workload: Workload, dataset: Any) -> dict[str, Any]:
    """`rates`: batches per second while viewers look, against those just before and after. `kept`: how much of its time
    the trainer was kept waiting for a processor, more than before and after. `viewers`: what they use of one."""
    os.environ["OUTLIVE_BOARD"] = "1"
    rates, kept = [], []
    with supervised(dataset, workload) as iterator, viewers() as pid:
        pass_time(iterator, WARMING_S)
        before, began = used_s(pid), time.perf_counter()
        pass_time(iterator, STEADY_S)
        used = (used_s(pid) - before) / (time.perf_counter() - began)
        for number in range(SPANS):
            os.killpg(pid, signal.SIGCONT if number % 2 else signal.SIGSTOP)
            pass_time(iterator, SETTLING_S)
            before = kept_s()
            rates.append(pass_time(iterator, SPAN_S))
            kept.append((kept_s() - before) / SPAN_S)
        os.killpg(pid, signal.SIGCONT)
        del iterator
    gc.collect()
    return {
        # Geometrically, so that a swing counts alike whether it falls on a span or on its neighbour.
        "rates": [rates[at] / math.sqrt(rates[at - 1] * rates[at + 1]) for at in range(1, SPANS - 1, 2)],
        "kept": [kept[at] - (kept[at - 1] + kept[at + 1]) / 2 for at in range(1, SPANS - 1, 2)],
        "viewers": used,
    }


def kept_s() -> float:
    """For how long this thread has had work and no processor."""
    return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9


def pass_time(iterator: Iterator[Any], seconds: float) -> float:
    """Take batches for so long; how many a second."""
    begun, count = time.perf_counter(), 0
    while (took := time.perf_counter() - begun) < seconds:
        next(iterator)
        count += 1
    return count / took


@contextmanager
def viewers() -> Iterator[int]:
    """Their process group."""
    command = [sys.executable, str(VIEWERS)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as process:  # type: ignore[call-overload]
        assert process.stdout.readline() == "ready\n"
        yield process.pid
        process.stdin.close()
        looks = json.loads(process.stdout.read())
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
    os.environ["OUTLIVE_BOARD"] = "1"
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
    logging.getLogger("outlive").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": rounds, "rows": {}}
    with tempfile.TemporaryDirectory(prefix="outlive-bench-") as folder:
        os.environ["OUTLIVE_RUNTIME"] = str(Path(folder, "runtime"))
        for workload in workloads(Path(folder)):
            name = workload.name.partition(":")[0]
            if name not in BATCHES:
                continue
            dataset = make(workload, WARM_UP + BATCHES[name])
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for number in range(rounds):
                turn = number % len(WAYS)
                for way in (*WAYS, *WAYS)[turn : turn + len(WAYS)]:
                    os.environ["OUTLIVE_BOARD"] = "0" if way == "off" else "1"
                    found[way].append(measured(workload, dataset, BATCHES[name]))
            row = result["rows"][name] = {"values": found, "ratios": {}}
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
            print(f"{name:<7} off       {usual}", flush=True)
            looked_at = row["watched"] = watched(workload, make(workload, 10_000_000))
            rate, error = mean_of([math.log(ratio) for ratio in looked_at["rates"]])
            kept, kept_error = mean_of(looked_at["kept"])
            print(
                f"{name:<7} watched   against not: rate {math.exp(rate):.3f} ± {error:.3f}; the trainer is kept "
                f"waiting {kept:.2%} ± {kept_error:.2%} more; viewers use {looked_at['viewers']:.2%} of a processor",
                flush=True,
            )
            where = write("watching", result)
    print(f"written to {where}")


def mean_of(values: list[float]) -> tuple[float, float]:
    """With its standard error."""
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


def spread(mine: list[dict[str, float]], off: list[dict[str, float]], what: str) -> tuple[float, float, float]:
    """Quartiles of the rounds' ratios."""
    low, middle, high = statistics.quantiles((a[what] / b[what] for a, b in zip(mine, off, strict=True)), n=4)
    return low, middle, high


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
