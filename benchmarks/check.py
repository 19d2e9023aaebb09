"""`outlive.check` against the fastest way to have a loader, or a pool, go through the same samples.

One million plain numbers, two workers. The loader is tried with several batch sizes, the pool with several chunk sizes;
all take turns in every round, the first to go alternating. Figures are medians over rounds, from nothing to the end,
start of workers included: seconds that passed, and seconds of CPU that all processes together took (which say more on a
machine that others use). The ratios are those of check to the fastest of the others.
"""

from __future__ import annotations

import argparse
import logging
import resource
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.data import Dataset

import outlive
from machine import write

BATCHES = (256, 1024, 4096, 16384)
CHUNKS = (1000, 10_000)


class Numbers(Dataset[int]):
    """Samples that cost nothing: what is measured is all the rest."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def check(dataset: Numbers, workers: int) -> int:
    report = outlive.check(dataset, workers=workers, start_method="fork", progress=False)
    assert report.good, report
    return report.checked


def load(batch_size: int, dataset: Numbers, workers: int) -> int:
    loader = outlive.DataLoader(dataset, batch_size, num_workers=workers, multiprocessing_context="fork")
    return sum(len(batch) for batch in loader)


def pooled(chunk: int, dataset: Numbers, workers: int) -> int:
    with outlive.Pool(workers, mp_context=torch.multiprocessing.get_context("fork")) as pool:
        return sum(1 for _ in pool.map(dataset.__getitem__, range(len(dataset)), chunksize=chunk))


def measure(size: int, workers: int, rounds: int) -> dict[str, Any]:
    ways: dict[str, Callable[[Numbers, int], int]] = {"check": check}
    ways |= {f"loader, batches of {size}": partial(load, size) for size in BATCHES}
    ways |= {f"pool, chunks of {size}": partial(pooled, size) for size in CHUNKS}
    dataset = Numbers(size)
    found: dict[str, list[float]] = {name: [] for name in ways}
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way(Numbers(10_000), workers)  # what is imported once
    for turn in range(rounds):
        first = turn % len(ways)
        for name in (*ways, *ways)[first : first + len(ways)]:
            before, begun = cpu_s(), time.perf_counter()
            assert ways[name](dataset, workers) == size
            found[name].append(time.perf_counter() - begun)
            taken[name].append(cpu_s() - before)
    medians = {name: statistics.median(values) for name, values in found.items()}
    cpu = {name: statistics.median(values) for name, values in taken.items()}
    fastest = min((name for name in medians if name != "check"), key=medians.__getitem__)
    thriftiest = min((name for name in cpu if name != "check"), key=cpu.__getitem__)
    return {
        "samples": size,
        "workers": workers,
        "rounds": rounds,
        "seconds": medians,
        "fastest": fastest,
        "ratio": medians["check"] / medians[fastest],
        "cpu_seconds": cpu,
        "cpu_ratio": cpu["check"] / cpu[thriftiest],
        "values": found,
        "cpu_values": taken,
    }


def cpu_s() -> float:
    """Of this process, and of all that have ended: a loader's zygote has waited for its workers."""
    told = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in told)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    logging.getLogger("outlive").setLevel(logging.ERROR)
    row = measure(options.samples, options.workers, options.rounds)
    for name, seconds in row["seconds"].items():
        print(f"{name:<28} {seconds:6.3f} s {row['cpu_seconds'][name]:6.3f} s of CPU")
    print(f"check / {row['fastest']}: {row['ratio']:.3f}; of CPU: {row['cpu_ratio']:.3f}")
    print(write("check", row))


if __name__ == "__main__":
    main()
