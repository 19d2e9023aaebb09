"""Memory of a plain list of texts and of a shared one, after every forked worker has read it once: `sharing.py`.

Three million file names, four forked workers. A worker that reads a Python string writes to its reference count, and so
to its page, which becomes its own: with the epoch, each worker comes to have a copy of the list. Measured is PSS of all
processes (each page counted once, those of libraries not at all) after the first batch and after the epoch, each way in
a process of its own; a range of as many numbers, which are no objects, says what the processes cost by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import timeit
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

import machine
from outlive import DataLoader, share

WAYS = ("nothing", "list", "shared")
LOADERS = {"torch": torch.utils.data.DataLoader, "outlive": DataLoader}
BATCH = 2_000


def names(count: int) -> list[str]:
    return [f"/data/imagenet/train/n{number % 1000:08d}/n{number:08d}.JPEG" for number in range(count)]


class Names(torch.utils.data.Dataset[int]):
    """A sample is the length of a name: reading it is all that a worker does."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> int:
        return len(self.values[index])


class Lengths(Names):
    """As much to do, and nothing to read."""

    def __getitem__(self, index: int) -> int:
        return self.values[index] & 63


class Shuffled(torch.utils.data.Sampler[int]):
    """A random order without the list of Python numbers that torch's sampler makes: its remains would be counted."""

    def __init__(self, count: int) -> None:
        self.order = numpy.random.default_rng(0).permutation(count)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[int]:
        for begin in range(0, len(self.order), BATCH):
            yield from self.order[begin : begin + BATCH].tolist()


def pss_bytes(pid: int) -> int:
    """PSS without that of files: how many others on this machine map the same libraries changes from run to run."""
    with open(f"/proc/{pid}/smaps_rollup") as lines:
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def total_mib() -> float:
    """Of this process and all its descendants."""
    pids = [os.getpid(), *_descendants(os.getpid())]
    return sum(map(pss_bytes, pids)) / 2**20


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        for child in (thread / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


def measure(way: str, loader_name: str, count: int, workers: int) -> dict[str, float]:
    """In a process of its own: one epoch in a random order."""
    found: dict[str, float] = {}
    if way == "nothing":
        dataset: Names = Lengths(range(count))
    else:
        values: Any = names(count)
        if way == "shared":
            started = time.perf_counter()
            values = share(values)
            found["seconds_to_share"] = time.perf_counter() - started
            found["segment_mib"] = values.nbytes / 2**20
        dataset = Names(values)
        number = 200_000
        best = min(timeit.repeat(lambda: values[count // 2], number=number, repeat=7))
        found["index_ns"] = best / number * 1e9
        del values
    loader = LOADERS[loader_name](
        dataset,
        batch_size=BATCH,
        sampler=Shuffled(count),
        num_workers=workers,
        multiprocessing_context="fork",
        persistent_workers=True,
    )
    total = 0
    for position, batch in enumerate(loader):
        total += int(batch.sum())
        if position == 0:
            found["first_mib"] = total_mib()
    found["last_mib"] = total_mib()
    assert way == "nothing" or total == sum(map(len, dataset.values))
    return found


def compare(loader_name: str, count: int, workers: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way in WAYS:
        command = [sys.executable, __file__, "--one", way, loader_name, str(count), str(workers)]
        found[way] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    alone = found["nothing"]["last_mib"]
    found["plain_mib"] = found["list"]["last_mib"] - alone
    found["shared_mib"] = found["shared"]["last_mib"] - alone
    found["plain_to_shared"] = found["plain_mib"] / found["shared_mib"]
    found["shared_to_one_copy"] = found["shared_mib"] / found["shared"]["segment_mib"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3_000_000, help="texts in the list")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, name, count, workers = options.one
        print(json.dumps(measure(way, name, int(count), int(workers))))
        return
    results = {name: compare(name, options.count, options.workers) for name in LOADERS}
    print(f"{options.count:,} texts, {options.workers} forked workers; PSS of all processes in MiB")
    print(f"{'loader':10}{'list: first batch':>18}{'epoch':>8}{'shared: first':>15}{'epoch':>8}{'to one copy':>13}")
    for name, found in results.items():
        plain, shared = found["list"], found["shared"]
        print(
            f"{name:10}{plain['first_mib']:18.0f}{plain['last_mib']:8.0f}{shared['first_mib']:15.0f}"
            f"{shared['last_mib']:8.0f}{found['shared_to_one_copy']:12.2f}×"
        )
    shared = results["torch"]["shared"]
    print(
        f"shared in {shared['seconds_to_share']:.1f} s, {shared['segment_mib']:.0f} MiB; an element is read in "
        f"{shared['index_ns']:.0f} ns (plain: {results['torch']['list']['index_ns']:.0f} ns)"
    )
    print(machine.write("sharing", {"count": options.count, "workers": options.workers, "loaders": results}))


if __name__ == "__main__":
    main()
