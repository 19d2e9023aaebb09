"""What evidence costs: batches per second, and milliseconds per death, with capture and without: `capture.py`.

Without: no recorder of fatal signals, no list of recent batches, standard error untouched, nobody samples memory, no
autopsy. Both ways take turns; the median of the rounds' ratios counts. Deaths are segmentation faults in __getitem__:
the clock runs from the last batch before to the batch that was redone.
"""

from __future__ import annotations

import ctypes
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

import outlive
from loaders import supervised
from machine import write
from measuring import run
from outlive._capture import crash, last_words, vitals
from outlive._capture.blackbox import BlackBox
from outlive._forensics import autopsy
from workloads import workloads

ROUNDS = 25
DEATHS = 24
WORDS = ("rows", "tokens", "jpegs")


STRIPPED: dict[tuple[Any, str], Any] = {
    (crash, "install"): lambda mapped: None,
    (crash, "reinstall"): lambda: None,
    (BlackBox, "take_up"): lambda self, batch: None,
    (last_words.Echo, "usable"): False,
    (vitals.Vitals, "look"): lambda *_: False,
    (autopsy, "perform"): lambda incident: incident,
}


@contextmanager
def without_capture() -> Iterator[None]:
    """Workers are forked: what is missing here is missing there."""
    kept = {(where, name): vars(where)[name] for where, name in STRIPPED}
    for (where, name), instead in STRIPPED.items():
        setattr(where, name, instead)
    try:
        yield
    finally:
        for (where, name), value in kept.items():
            setattr(where, name, value)


WAYS: dict[str, Callable[[], Any]] = {"with": nullcontext, "without": without_capture}


class Dying(Dataset):
    """Every tenth sample kills its worker, once."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def __len__(self) -> int:
        return 10 * DEATHS

    def __getitem__(self, index: int) -> int:
        mark = self.folder / str(index)
        if index % 10 == 9 and not mark.exists():
            mark.touch()
            ctypes.string_at(0)
        return index


def death_times() -> list[float]:
    """Seconds that each batch with a death in it took."""
    with tempfile.TemporaryDirectory() as folder:
        policy = outlive.FaultPolicy(max_restarts=10 * DEATHS)
        loader: Any = outlive.DataLoader(Dying(folder), num_workers=1, prefetch_factor=1, faults=policy)
        times = []
        last = time.perf_counter()
        for index in loader:
            now = time.perf_counter()
            if int(index) % 10 == 9:
                times.append(now - last)
            last = time.perf_counter()
    return times


def main(rounds: int) -> None:
    logging.getLogger("outlive").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"rounds": rounds, "rates": {}, "deaths": {}}
    with tempfile.TemporaryDirectory(prefix="outlive-bench-") as folder:
        for workload in workloads(Path(folder)):
            name = workload.name.partition(":")[0]
            if name not in WORDS:
                continue
            rates: dict[str, list[float]] = {way: [] for way in WAYS}
            for number in range(rounds):
                for way in sorted(WAYS, reverse=bool(number % 2)):
                    with WAYS[way]():
                        rates[way].append(run(supervised, workload, workload.batches))
            medians = {way: statistics.median(values) for way, values in rates.items()}
            ratios = sorted(a / b for a, b in zip(rates["with"], rates["without"], strict=True))
            cost = 1 - statistics.median(ratios)
            result["rates"][name] = {"values": rates, "cost": cost}
            print(
                f"{name:<8} {medians['with']:8.1f}/s with, {medians['without']:8.1f}/s without: costs {cost:.1%}, "
                f"half of the rounds between {1 - ratios[-len(ratios) // 4]:.1%} and {1 - ratios[len(ratios) // 4]:.1%}"
            )
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(4):
        for way in sorted(WAYS, reverse=bool(number % 2)):
            with WAYS[way]():
                times[way] += death_times()
    medians = {way: 1000 * statistics.median(values) for way, values in times.items()}
    result["deaths"] = {"values_s": times, "cost_ms": medians["with"] - medians["without"]}
    print(
        f"a death  {medians['with']:.1f} ms with, {medians['without']:.1f} ms without: "
        f"costs {medians['with'] - medians['without']:.1f} ms"
    )
    print(f"written to {write('capture', result)}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
