"""Measures one workload with several loaders, in alternation.

Reads   workloads and loaders.
Writes  nothing; answers with a row, as it goes into the JSON.
Never   memory in a round that is timed: reading PSS stops the process that is read.

    memory round (first batch compared with the right one)  →  round 1: a b c limit  →  round 2: b c a limit  →  …
"""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from loaders import Loader
from memory import Peak, peak_memory
from workloads import DIFFERENT, Workload

WARM_UP = 6
LIMIT_S = 0.3


def measure(workload: Workload, loaders: Mapping[str, Loader], rounds: int, share: float = 1.0) -> dict[str, Any]:
    """The row of this workload; the first loader is what the others are compared to. `share`: of its batches."""
    batches = max(1, round(workload.batches * share))
    peaks: dict[str, Peak] = {}
    failed: dict[str, str] = {}
    for name, loader in loaders.items():
        try:
            peaks[name] = peak_of(loader, workload, max(1, batches // 2))
        except Exception as error:  # a peer that cannot do this workload is a result, too
            if name in ("torch", "outlive"):
                raise
            failed[name] = f"{type(error).__name__}: {error}"
    values: dict[str, list[float]] = {name: [] for name in peaks}
    limits: list[float] = []
    for turn in range(rounds):
        first = turn % len(values)
        for name in (*values, *values)[first : first + len(values)]:
            values[name].append(run(loaders[name], workload, batches))
        if workload.bulk:
            limits.append(limit_per_s(workload))
    limit = statistics.median(limits) if limits else None
    reference = next(iter(values))
    return {
        "workload": workload.name,
        "unit": "seconds to the first batch" if workload.first_batch else "batches per second",
        "workers": workload.workers,
        "start_method": workload.method,
        "limit": limit,
        "loaders": {
            name: {
                "median": statistics.median(mine),
                **_compared(mine, values[reference], workload.first_batch),
                "share_of_limit": statistics.median(mine) / limit if limit else None,
                "peak_pss_mib": peaks[name].pss_mib,
                "peak_pss_ratio": peaks[name].pss_mib / peaks[reference].pss_mib,
                "peak_with_flight_mib": peaks[name].with_flight_mib,
                "peak_with_flight_ratio": peaks[name].with_flight_mib / peaks[reference].with_flight_mib,
                "values": mine,
            }
            for name, mine in values.items()
        },
        "failed": failed,
    }


def _compared(mine: list[float], theirs: list[float], less_is_better: bool) -> dict[str, float]:
    """How many times better than the reference: of the medians, and the least and the most of any round."""
    if less_is_better:
        mine, theirs = theirs, mine
    ratios = [a / b for a, b in zip(mine, theirs, strict=True)]
    return {
        "ratio": statistics.median(mine) / statistics.median(theirs),
        "ratio_least": min(ratios),
        "ratio_most": max(ratios),
    }


def run(loader: Loader, workload: Workload, batches: int) -> float:
    """Batches per second from a running start to the last batch; or seconds from nothing to the first."""
    warm_up = 0 if workload.first_batch else WARM_UP
    dataset = make(workload, warm_up + batches)
    begun = time.perf_counter()
    with loader(dataset, workload) as iterator:
        count = 0
        if not workload.first_batch:
            count = sum(1 for _ in itertools.islice(iterator, warm_up))
            begun = time.perf_counter()
        # As in training, a batch is held until the next has come.
        for _batch in itertools.islice(iterator, batches):
            count += 1
        seconds = time.perf_counter() - begun
        del _batch, iterator
    gc.collect()
    assert count == warm_up + batches, f"{count} batches came, {warm_up + batches} were due"
    return seconds if workload.first_batch else batches / seconds


def peak_of(loader: Loader, workload: Workload, batches: int) -> Peak:
    """Peak memory of all processes over an epoch of its own; the first batch must be the right one."""
    dataset = make(workload, batches + WARM_UP)
    collate = workload.collate or default_collate
    right = collate([dataset[index] for index in range(workload.batch_size)])
    with peak_memory() as peak, loader(dataset, workload) as iterator:
        _batch = next(iterator)
        assert_same(_batch, right, values=not workload.random)
        del right
        # As in training, a batch is held until the next has come.
        for number, _batch in enumerate(iterator):
            if number == batches // 2:
                peak.sample_now()
        del _batch, iterator
    gc.collect()
    return peak


def make(workload: Workload, batches: int) -> Dataset[Any]:
    """New for every round: a loader may turn a sample's memory into shared memory, and the next would profit."""
    torch.manual_seed(0)
    return workload.make(workload.batch_size * batches)


def assert_same(batch: Any, right: Any, values: bool) -> None:
    """The batch has the structure, shapes and types of the right one, and the same values."""
    if isinstance(right, dict):
        assert batch.keys() == right.keys(), (batch.keys(), right.keys())
        for key in right:
            assert_same(batch[key], right[key], values)
    elif isinstance(right, (list, tuple)):
        assert len(batch) == len(right), (len(batch), len(right))
        for mine, its in zip(batch, right, strict=True):
            assert_same(mine, its, values)
    elif isinstance(right, (torch.Tensor, np.ndarray)):
        assert isinstance(batch, type(right)), (type(batch), type(right))
        assert (batch.shape, batch.dtype) == (right.shape, right.dtype), (batch.shape, batch.dtype)
        assert not values or np.array_equal(batch, right), "values differ"
    else:
        assert batch == right, (batch, right)


def limit_per_s(workload: Workload) -> float:
    """Batches per second if all there was to do were to copy the bytes, by one thread, into memory that is warm."""
    dataset: Any = make(workload, 1)
    # Bytes, so that one call copies a whole batch, whatever it is made of.
    sources = [leaf.reshape(-1).view(np.uint8) for index in range(DIFFERENT) for leaf in _arrays(dataset[index])]
    per_batch = len(sources) * workload.batch_size // DIFFERENT
    turns = [sources[at : at + per_batch] for at in range(0, len(sources), per_batch)]
    target = np.zeros(sum(source.nbytes for source in turns[0]), np.uint8)
    rates: list[float] = []
    end = time.perf_counter() + LIMIT_S
    while time.perf_counter() < end or len(rates) < 5:
        begun = time.perf_counter()
        for turn in turns:
            np.concatenate(turn, out=target)
        rates.append(len(turns) / (time.perf_counter() - begun))
    return statistics.median(rates)


def _arrays(sample: Any) -> list[Any]:
    if isinstance(sample, dict):
        sample = sample.values()
    elif isinstance(sample, (torch.Tensor, np.ndarray)):
        sample = (sample,)
    return [np.asarray(leaf) for leaf in sample if isinstance(leaf, (torch.Tensor, np.ndarray))]
