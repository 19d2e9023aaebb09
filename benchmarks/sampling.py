"""What looking after workers costs: 16 of them, with the zygote's looks and the workers' own, and without.

Looks: memory, descriptors, threads, use of time (`Vitals.look`), and after a batch the worker's own at its descriptors
and threads, and its note of how long it was idle. One loader runs all the time, and a shared byte switches all of it on
and off: so nothing but the looks differs. The zygote's own processor time is counted by the kernel; as a share of what
trainer and workers used, that is the cost, without noise. What workers do themselves is too little for that, and is
timed by itself. Batches per second of processor time, with and without, say the same with more noise.
"""

from __future__ import annotations

import dataclasses
import logging
import mmap
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import outlive
from loaders import torch_options
from machine import write
from outlive._capture import blackbox
from outlive._capture.blackbox import BlackBox
from outlive._capture.vitals import Vitals
from outlive._system import nameless
from outlive._worker.creep import Creep
from workloads import workloads

WORKERS = 16
ROUNDS = 40
WINDOW_S = 4.0  # each worker's turn comes every four seconds
COUNTED_S = 120.0  # and private memory's less often than twice a minute
CALLS = 100_000
SWITCHED: tuple[tuple[Any, str, Any], ...] = (
    (Vitals, "look", False),
    (Creep, "is_too_much", False),
    (BlackBox, "note_idle", None),
)


def make_switch() -> mmap.mmap:
    """A byte that all processes share: workers are forked, what is switched here is switched there."""
    switch = mmap.mmap(-1, 1)
    for where, name, otherwise in SWITCHED:
        setattr(where, name, _switched(getattr(where, name), switch, otherwise))
    return switch


def _switched(function: Callable[..., Any], switch: mmap.mmap, otherwise: Any) -> Callable[..., Any]:
    def either(*arguments: Any) -> Any:
        return function(*arguments) if switch[0] else otherwise

    return either


def used_ns(pid: int) -> int:
    """Processor time of a process's main thread."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def window(batches: Any, zygote: int, others: list[int], lasts_s: float) -> tuple[float, float, float]:
    """Batches per second, and of each second the zygote's and the others' part."""
    before = used_ns(zygote), sum(map(used_ns, others))
    begun = now = time.perf_counter()
    count = 0
    while now - begun < lasts_s:
        next(batches)
        count += 1
        now = time.perf_counter()
    seconds = now - begun
    watching, working = used_ns(zygote) - before[0], sum(map(used_ns, others)) - before[1]
    return count / seconds, watching / 1e9 / seconds, working / 1e9 / seconds


def work(seen: tuple[float, float, float]) -> float:
    """Batches per second of processor time, the zygote's included."""
    rate, watching, working = seen
    return rate / (watching + working)


def own_cost_ns() -> float:
    """What a worker itself spends on it after each batch."""
    memory = nameless.descriptor(blackbox.SIZE, "outlive-box")
    box = BlackBox(nameless.attach(memory))
    with closing(open(memory, "rb")):
        creep = Creep(box, lambda _: None)
        begun = time.thread_time_ns()
        for _ in range(CALLS):
            box.note_idle()
            creep.is_too_much()
        took = (time.thread_time_ns() - begun) / CALLS
    box.release()
    return took


def main(rounds: int) -> None:
    logging.getLogger("outlive").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    own_ns = own_cost_ns()
    switch = make_switch()
    with tempfile.TemporaryDirectory(prefix="outlive-bench-") as folder:
        workload = next(w for w in workloads(Path(folder)) if w.name.startswith("rows"))
        workload = dataclasses.replace(workload, workers=WORKERS)
        loader: Any = outlive.DataLoader(workload.make(1 << 40), **torch_options(workload))
        batches = iter(loader)
        while any(slot.pid is None for slot in loader.statistics().slots):
            next(batches)
        zygote = batches._engine._zygote_pid
        others = [os.getpid(), *(slot.pid for slot in loader.statistics().slots)]
        seen: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
        switch[0] = True
        window(batches, zygote, others, WINDOW_S)  # each worker's first look at its memory: the next is some time away
        _, with_s, working = window(batches, zygote, others, COUNTED_S)
        for number in range(2 * rounds):
            on = bool(number % 2) != bool(number // 2 % 2)  # off on, on off, …
            switch[0] = on
            seen[on].append(window(batches, zygote, others, WINDOW_S))
        del batches, loader
    # Not per second of the clock: whatever else runs on the machine would be in it.
    ratios = sorted(work(a) / work(b) for a, b in zip(seen[True], seen[False], strict=True))
    without_s = statistics.fmean(w[1] for w in seen[False])
    looks_s = with_s - without_s
    rate = statistics.median(w[0] for w in seen[True])
    counted = looks_s / working + own_ns / 1e9 * rate / working
    result = {
        "workers": WORKERS,
        "rounds": rounds,
        "window_s": WINDOW_S,
        "counted_s": COUNTED_S,
        "batches_per_s": {"with": [w[0] for w in seen[True]], "without": [w[0] for w in seen[False]]},
        "batches_per_cpu_s": {"with": [work(w) for w in seen[True]], "without": [work(w) for w in seen[False]]},
        "cost_by_work": 1 - statistics.median(ratios),
        "zygote_s_per_s": {"with": with_s, "without": without_s},
        "zygote_us_per_worker_and_s": 1e6 * looks_s / WORKERS,
        "own_ns_per_batch": own_ns,
        "used_s_per_s": working,
        "cost_counted": counted,
    }
    print(f"{WORKERS} workers, {rate:.0f} batches/s, which take {working:.2f} CPUs")
    print(f"looks        {1e6 * looks_s / WORKERS:.0f} µs per worker and second: {looks_s / working:.3%} of that")
    print(f"workers' own {own_ns:.0f} ns per batch: {own_ns / 1e9 * rate / working:.3%}")
    print(f"together     {counted:.3%}, counted")
    print(
        f"by work      {1 - statistics.median(ratios):.2%}, half of the rounds between "
        f"{1 - ratios[-len(ratios) // 4]:.1%} and {1 - ratios[len(ratios) // 4]:.1%}"
    )
    print(f"written to {write('sampling', result)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
