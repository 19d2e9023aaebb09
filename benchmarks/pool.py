"""The pool against `concurrent.futures.ProcessPoolExecutor`: empty tasks, large results and arguments, start-up.

Both pools live at the same time and take turns, the first to go alternating; figures are medians over rounds, ratios
are of medians. «The same chunk size» means that both are given the same `chunksize`; ours may send more at a time than
it is told to while tasks are short, and hands back what takes long.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from outlive import Pool

KINDS: dict[str, Callable[..., Executor]] = {"stock": ProcessPoolExecutor, "outlive": Pool}
EMPTY = 100_000
CHUNKS = (1, 10, 100, 1000)
LARGE = 60  # tasks with an array of 8 MiB
NUMBERS = 1 << 20


def empty(_: int) -> None:
    pass


def make(number: int) -> Any:
    return np.full(NUMBERS, number, np.float64)


def take(array: Any) -> int:
    return int(array[-1])


def meet(folder: str, count: int) -> int:
    """Waits until `count` workers are there."""
    with open(f"{folder}/{os.getpid()}", "w"):
        pass
    while len(os.listdir(folder)) < count:
        time.sleep(0.001)  # the others are still starting
    return os.getpid()


def mapped(pool: Executor, function: Any, given: Callable[[], Any], chunk: int) -> float:
    """Seconds to map a function over what `given` makes, each result being let go of at once."""
    arguments = given()
    begun = time.perf_counter()
    for result in pool.map(function, arguments, chunksize=chunk):
        del result
    return time.perf_counter() - begun


def submitted(pool: Executor, count: int) -> float:
    begun = time.perf_counter()
    for future in [pool.submit(empty, number) for number in range(count)]:
        future.result()
    return time.perf_counter() - begun


def compare(measure: Callable[[Executor], float], rounds: int, count: int) -> dict[str, Any]:
    """Tasks per second of both."""
    context = multiprocessing.get_context("fork")
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    with ProcessPoolExecutor(2, mp_context=context) as stock, Pool(2, mp_context=context) as ours:
        pools = {"stock": stock, "outlive": ours}
        for pool in pools.values():
            list(pool.map(empty, range(200)))
        for turn in range(rounds):
            for name in list(pools)[:: 1 if turn % 2 else -1]:
                found[name].append(count / measure(pools[name]))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"tasks_per_s": medians, "ratio": medians["outlive"] / medians["stock"], "values": found}


def start(kind: str, method: str, workers: int) -> float:
    """Seconds from nothing to a pool whose workers are all at work."""
    with tempfile.TemporaryDirectory() as folder:
        begun = time.perf_counter()
        with KINDS[kind](workers, mp_context=multiprocessing.get_context(method)) as pool:
            pids = {future.result() for future in [pool.submit(meet, folder, workers) for _ in range(workers)]}
            seconds = time.perf_counter() - begun
        assert len(pids) == workers
    return seconds


def compare_starts(method: str, workers: int, rounds: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(rounds):
        for name in list(KINDS)[:: 1 if turn % 2 else -1]:
            found[name].append(start(name, method, workers))
    medians = {name: statistics.median(values) for name, values in found.items()}
    return {"seconds": medians, "ratio": medians["outlive"] / medians["stock"], "values": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows: dict[str, Any] = {}

    def tell(name: str, row: dict[str, Any]) -> None:
        rows[name] = row
        unit, digits = ("tasks_per_s", 0) if "tasks_per_s" in row else ("seconds", 2)
        stock, ours = row[unit]["stock"], row[unit]["outlive"]
        words = {"tasks_per_s": "tasks/s", "seconds": "s"}[unit]
        print(f"{name:42}{stock:13,.{digits}f}{ours:13,.{digits}f} {words:8}{row['ratio']:8.2f}×", flush=True)

    print(f"{'':42}{'stock':>13}{'outlive':>13}")
    for chunk in CHUNKS:
        count = EMPTY if chunk > 1 else EMPTY // 5  # stock does 10,000 in a second
        measure = partial(mapped, function=empty, given=partial(range, count), chunk=chunk)
        tell(f"empty tasks, chunks of {chunk}", compare(measure, rounds, count))
    tell("empty tasks, submit", compare(partial(submitted, count=EMPTY // 10), rounds, EMPTY // 10))
    results = partial(mapped, function=make, given=partial(range, LARGE), chunk=1)
    tell("results of 8 MiB", compare(results, rounds, LARGE))
    arguments = partial(mapped, function=take, given=lambda: [np.ones(NUMBERS) for _ in range(LARGE)], chunk=1)
    tell("arguments of 8 MiB", compare(arguments, rounds, LARGE))
    for method in ("spawn", "forkserver", "fork"):
        tell(f"start of 4 workers, {method}", compare_starts(method, 4, max(3, rounds // 2)))

    from machine import write  # torch: not for workers, which import this file

    print(write("pool", {"workers": 2, "rows": rows}))


if __name__ == "__main__":
    main()
