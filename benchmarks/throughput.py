"""Batches per second of torch's DataLoader and of holdfast's, in alternation: `throughput.py [WORD …]`.

Two workers, several rounds each, medians; the ratio is what counts, the machine may be busy. «bare» is holdfast
without supervision (no notes in the black box, no random state kept, nobody watching): what supervision costs.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from typing import Any

import torch
from machine import write
from workloads import WORKLOADS, Workload

import holdfast
from holdfast._capture.blackbox import BlackBox
from holdfast._worker.randomness import Randomness

ROUNDS = 7
WARM_UP = 6


def strip(_: int) -> None:
    """In a worker: do the work and nothing else."""
    for name in ("enter", "fetch", "finished", "was_healthy", "count_done"):
        setattr(BlackBox, name, lambda *_, **__: None)
    BlackBox.keep_random_state = lambda *_: None
    Randomness.read = lambda _: b""


def bare(*arguments: Any, **options: Any) -> holdfast.DataLoader[Any]:
    policy = holdfast.FaultPolicy(sample_timeout=None)
    return holdfast.DataLoader(*arguments, **options, worker_init_fn=strip, faults=policy)


KINDS: dict[str, Any] = {"torch": torch.utils.data.DataLoader, "holdfast": holdfast.DataLoader, "bare": bare}


def run(kind: Any, workload: Workload, method: str = "fork") -> float:
    """Batches per second over one epoch, first batches left out."""
    dataset = workload.make(workload.batch_size * (workload.batches + WARM_UP))
    loader = kind(
        dataset,
        batch_size=workload.batch_size,
        num_workers=2,
        collate_fn=workload.collate,
        multiprocessing_context=method,
    )
    torch.manual_seed(0)
    iterator = iter(loader)
    for _ in range(WARM_UP):
        next(iterator)
    begun = time.perf_counter()
    count = sum(1 for _ in iterator)
    seconds = time.perf_counter() - begun
    assert count == workload.batches, count
    del iterator, loader
    gc.collect()
    return count / seconds


def measure(workload: Workload) -> dict[str, Any]:
    rates: dict[str, list[float]] = {name: [] for name in KINDS}
    for turn in range(ROUNDS):
        names = list(KINDS)
        for name in names[turn % 3 :] + names[: turn % 3]:
            rates[name].append(run(KINDS[name], workload))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = [ours / theirs for ours, theirs in zip(rates["holdfast"], rates["torch"], strict=True)]
    return {
        "workload": workload.name,
        **medians,
        "ratio": medians["holdfast"] / medians["torch"],
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
        "supervision": 1 - medians["holdfast"] / medians["bare"],
        "rates": rates,
    }


def main(words: list[str]) -> None:
    chosen = [w for w in WORKLOADS if not words or any(word in w.name for word in words)]
    head = f"{'workload':<48} {'torch/s':>9} {'holdfast/s':>11} {'bare/s':>9} {'ratio':>7}  {'spread':<11} supervision"
    print(head, flush=True)
    rows = []
    for workload in chosen:
        row = measure(workload)
        rows.append(row)
        rates = f"{row['torch']:>9.1f} {row['holdfast']:>11.1f} {row['bare']:>9.1f}"
        spread = f"{row['ratio_least']:.2f}…{row['ratio_most']:.2f}"
        cost = f"{row['supervision']:>+10.1%}"
        print(f"{row['workload']:<48} {rates} {row['ratio']:>6.2f}×  {spread:<11} {cost}", flush=True)
    if not words:
        print(f"written to {write('throughput', {'rounds': ROUNDS, 'rows': rows})}")


if __name__ == "__main__":
    main(sys.argv[1:])
