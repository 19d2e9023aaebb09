"""`num_workers="auto"` against every fixed number: `autosize.py`.

Five jobs whose best number differs: one that waits for a disk, one that computes, one that does both, JPEGs, and one
whose consumer sets the pace. Each runs with 1, 2, 4, … workers, as far as "auto" may go, and with "auto", in turn.
Counted is the rate of the last third of the time, in the *first* epoch of a new loader: by then "auto" should have
found its number. The best fixed number is the one with the highest median; "auto" is given as a share of its rate.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import machine
from outlive import DataLoader
from outlive.loader import pacing
from workloads import jpegs_in

FIXED = [2**power for power in range(7) if 2**power <= pacing.new_sizing().most]
MANY = 10_000_000
NEAR = 0.9


class Work(torch.utils.data.Dataset[int]):
    """So many milliseconds of computing, and so many of waiting."""

    def __init__(self, cpu_ms: float, wait_ms: float) -> None:
        self.cpu_s, self.wait_s = cpu_ms / 1000, wait_ms / 1000

    def __len__(self) -> int:
        return MANY

    def __getitem__(self, index: int) -> int:
        end = time.thread_time() + self.cpu_s
        while time.thread_time() < end:
            pass
        if self.wait_s:
            time.sleep(self.wait_s)
        return index


def jobs(folder: Path) -> dict[str, tuple[Callable[[], Any], int, float]]:
    """By name: the dataset, the size of a batch, and what the consumer takes for one, in seconds."""
    return {
        "waits": (lambda: Work(0.0, 5.0), 4, 0.0),
        "computes": (lambda: Work(2.0, 0.0), 4, 0.0),
        "both": (lambda: Work(0.5, 4.0), 4, 0.0),
        "jpegs": (lambda: jpegs_in(folder, MANY), 16, 0.0),
        "consumer": (lambda: Work(0.5, 1.0), 4, 0.02),
    }


def run(dataset: Any, batch: int, step_s: float, workers: Any, seconds: float) -> tuple[float, int]:
    """Batches per second in the last third, and how many workers there were at the end."""
    loader: Any = DataLoader(dataset, batch_size=batch, num_workers=workers, persistent_workers=True)
    begun = time.perf_counter()
    counted, since = 0, 0.0
    for _ in loader:
        now = time.perf_counter() - begun
        if now >= seconds:
            break
        if now >= seconds * 2 / 3:
            since = since or now
            counted += 1
        if step_s:
            time.sleep(step_s)
    size = loader.statistics().workers
    del loader
    return (counted - 1) / (now - since), size


def measure(make: Callable[[], Any], batch: int, step_s: float, rounds: int, seconds: float) -> dict[str, Any]:
    ways: tuple[Any, ...] = (*FIXED, "auto")
    rates: dict[Any, list[float]] = {way: [] for way in ways}
    sizes = []
    for turn in range(rounds):
        first = turn % len(ways)
        for way in (*ways, *ways)[first : first + len(ways)]:
            rate, size = run(make(), batch, step_s, way, seconds if way == "auto" else seconds / 2)
            rates[way].append(rate)
            if way == "auto":
                sizes.append(size)
    medians = {str(way): statistics.median(values) for way, values in rates.items()}
    best = max(FIXED, key=lambda way: medians[str(way)])
    shares = [auto / fixed for auto, fixed in zip(rates["auto"], rates[best])]
    return {
        "batches_per_s": medians,
        "best": best,
        "auto_sizes": sizes,
        "auto_to_best": medians["auto"] / medians[str(best)],
        "rounds": shares,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--seconds", type=float, default=12.0, help='of the first epoch with "auto"; half for the others'
    )
    parser.add_argument("--only", default="", help="one job")
    options = parser.parse_args()
    results = {}
    print(f"{'job':10}" + "".join(f"{way:>9}" for way in (*FIXED, "auto")) + f"{'auto/best':>11}  workers found")
    with tempfile.TemporaryDirectory() as folder:
        for name, (make, batch, step_s) in jobs(Path(folder)).items():
            if options.only in ("", name):
                row = results[name] = measure(make, batch, step_s, options.rounds, options.seconds)
                cells = "".join(f"{row['batches_per_s'][str(way)]:9.1f}" for way in (*FIXED, "auto"))
                print(f"{name:10}{cells}{row['auto_to_best']:10.2f}×  {row['auto_sizes']}", flush=True)
    near = all(row["auto_to_best"] >= NEAR for row in results.values())
    print(f"within {1 - NEAR:.0%} of the best fixed number: {'everywhere' if near else 'NOT everywhere'}")
    print(machine.write("autosize", {"seconds": options.seconds, "rounds": options.rounds, "jobs": results}))


if __name__ == "__main__":
    main()
