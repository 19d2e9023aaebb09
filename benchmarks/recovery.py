"""From a worker's SIGKILL to its batch, redone: `python benchmarks/recovery.py [KILLS]`, under fork and under spawn.

The worker is killed while it fetches; the clock starts right before the kill and stops when next() returns the batch
that was in hand. The epoch must be bit for bit that of an undisturbed run: checked here, too.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import statistics
import sys
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from machine import write
from outlive import DataLoader, FaultPolicy

BATCHES = 2000
SAMPLE_S = 0.0005


class Slow(Dataset):
    """Samples that take half a millisecond and use random numbers, so that kills find a worker at work."""

    def __len__(self) -> int:
        return BATCHES * 4

    def __getitem__(self, index: int) -> Any:
        until = time.perf_counter() + SAMPLE_S
        while time.perf_counter() < until:
            pass
        return torch.rand(8) + index, random.random()


def loader(method: str) -> DataLoader[Any]:
    policy = FaultPolicy(retries=5, max_restarts=10_000)
    return DataLoader(Slow(), batch_size=4, num_workers=2, multiprocessing_context=method, faults=policy)


def epoch(method: str, kills: set[int]) -> tuple[list[Any], int]:
    """All batches, with a worker killed before each of these; and how many workers were replaced."""
    torch.manual_seed(0)
    mine = loader(method)
    iterator = iter(mine)
    batches = []
    due = 0
    for number, batch in enumerate(iterator):
        batches.append(batch)
        due += number in kills
        pid = mine.statistics().slots[number % 2].pid if due else None
        if pid is not None:  # None: the last victim's successor is on its way; its turn comes with the next batch
            os.kill(pid, signal.SIGKILL)
            due -= 1
    return batches, mine.statistics().restarts


def recovery_times(method: str, kills: int) -> list[float]:
    """Seconds from a kill to the first batch that the replacement made."""
    torch.manual_seed(0)
    mine = loader(method)
    iterator = iter(mine)
    next(iterator)
    next(iterator)
    times: list[float] = []
    number = 2
    while len(times) < kills and number < BATCHES - 8:
        victim = mine.statistics().slots[number % 2]
        if victim.pid is None:
            next(iterator)
            number += 1
            continue
        incarnation = victim.incarnation
        begun = time.perf_counter()
        os.kill(victim.pid, signal.SIGKILL)
        while True:
            next(iterator)
            number += 1
            now = mine.statistics().slots[victim.slot]
            # The first batch of this slot after a new incarnation came: that one was redone.
            if now.incarnation > incarnation and (number - 1) % 2 == victim.slot and now.state == "ready":
                times.append(time.perf_counter() - begun)
                break
    return times


def same(ones: list[Any], others: list[Any]) -> bool:
    return len(ones) == len(others) and all(
        torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in zip(ones, others, strict=True)
    )


def main(kills: int) -> None:
    logging.getLogger("outlive").setLevel(logging.ERROR)
    result: dict[str, Any] = {"kills": kills, "batches": BATCHES}
    for method in ("fork", "spawn"):
        undisturbed, _ = epoch(method, set())
        disturbed, restarts = epoch(method, set(random.Random(1).sample(range(10, BATCHES - 50), kills)))
        equal = same(undisturbed, disturbed) and restarts == kills
        times = sorted(recovery_times(method, kills))
        median = statistics.median(times)
        result[method] = {"equal": equal, "median_s": median, "worst_s": times[-1], "times_s": times}
        print(
            f"{method:<6} {kills} kills over {BATCHES} batches: {'not one bit differs' if equal else 'BATCHES DIFFER'}"
        )
        deciles = "  ".join(f"{times[min(len(times) - 1, len(times) * d // 10)] * 1000:.0f}" for d in range(0, 11, 2))
        print(f"       kill → redone batch: median {median * 1000:.0f} ms, worst {times[-1] * 1000:.0f} ms")
        print(f"       0/20/40/60/80/100 %: {deciles} ms", flush=True)
        if not equal:
            sys.exit(1)
    print(f"written to {write('recovery', result)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 30)
