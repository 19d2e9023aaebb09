"""Faults of many kinds in one epoch, drawn at random by a seed: nothing healthy is lost, nothing bad is missed.

Reads   what loaders deliver, and their quarantine.
Writes  nothing.
Never   a clock or a coin of its own: a seed that fails once fails always.
"""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from outlive import DataLoader, FaultPolicy
from outlive.incident import Incident


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def fail() -> None:
    raise ValueError("a bad sample")


# Where it strikes, and what it does there.
KINDS: dict[str, tuple[str, Callable[[], None]]] = {
    "raises": ("fetching", fail),
    "kills": ("fetching", kill),
    "exits": ("fetching", leave),
    "raises when collated": ("collating", fail),
    "kills when collated": ("collating", kill),
    "raises when pickled": ("pickling", fail),
    "kills when pickled": ("pickling", kill),
}

Bad = dict[int, str]


def strike(kind: str | None, moment: str) -> None:
    if kind is not None and KINDS[kind][0] == moment:
        KINDS[kind][1]()


class Sample:
    def __init__(self, index: int, kind: str | None) -> None:
        self.index = index
        self.kind = kind

    def __reduce__(self) -> Any:
        strike(self.kind, "pickling")
        return int, (self.index,)


def fetched(bad: Bad, index: int) -> Sample:
    strike(bad.get(index), "fetching")
    return Sample(index, bad.get(index))


class SampleBySample(Dataset[Sample]):
    def __init__(self, bad: Bad, size: int) -> None:
        self.bad = bad
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return fetched(self.bad, index)


class BatchAtOnce(SampleBySample):
    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [fetched(self.bad, index) for index in indices]


class SkippingIterator:
    """An iterator that can step over what kills."""

    def __init__(self, bad: Bad, indices: range) -> None:
        self.bad = bad
        self.indices = indices
        self.at = 0

    def __next__(self) -> Sample:
        if self.at >= len(self.indices):
            raise StopIteration
        self.at += 1
        return fetched(self.bad, self.indices[self.at - 1])

    def skip(self, count: int) -> None:
        self.at += count


class Stream(IterableDataset[Sample]):
    def __init__(self, bad: Bad, size: int) -> None:
        self.bad = bad
        self.size = size

    def __iter__(self) -> Any:
        info = get_worker_info()
        return SkippingIterator(self.bad, range(info.id, self.size, info.num_workers))


def collate(samples: list[Sample]) -> list[Sample]:
    for sample in samples:
        strike(sample.kind, "collating")
    return samples


def collate_one(sample: Sample) -> list[Sample]:
    return collate([sample])


class Mixture:
    """One epoch: which samples are bad in which way, of which kind of dataset, in which batches."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.size = draw.choice([12, 24])
        share = draw.choice([0.05, 0.2, 0.4])
        self.bad = {index: draw.choice(list(KINDS)) for index in range(self.size) if draw.random() < share}
        self.kind = draw.choice([SampleBySample, BatchAtOnce, Stream])
        self.batch_size = draw.choice([None, 1, 3, 4, 8])
        self.workers = draw.choice([1, 2])
        self.retries = draw.choice([0, 1])
        self.prefetch_factor = draw.choice([1, 2, 4])

    def run(self, rule: Any) -> tuple[list[list[int]], set[int]]:
        """What is delivered, batch by batch, and what is in quarantine."""
        loader = DataLoader(
            self.kind(self.bad, self.size),
            batch_size=self.batch_size,
            num_workers=self.workers,
            collate_fn=collate_one if self.batch_size is None else collate,
            prefetch_factor=self.prefetch_factor,
            multiprocessing_context="fork",
            faults=FaultPolicy(rule, retries=self.retries, max_bad=None, max_restarts=300),
        )
        batches = list(loader)
        return batches, {self._index(key) for key in loader.quarantine}

    def _index(self, key: Any) -> int:
        return key.worker + key.ordinal * self.workers if self.kind is Stream else key

    @property
    def healthy(self) -> list[int]:
        return [index for index in range(self.size) if index not in self.bad]


@pytest.mark.parametrize("asked", [False, True], ids=["plain", "asked"])
@pytest.mark.parametrize("seed", range(16))
def test_each_healthy_sample_comes_once_when_bad_ones_are_skipped(seed: int, asked: bool) -> None:
    """Whatever kills or raises, wherever, together with whatever else."""
    mixture = Mixture(seed)
    rule: Any = (lambda incident: "skip") if asked else "skip"

    batches, quarantine = mixture.run(rule)

    delivered = [index for batch in batches for index in batch]
    assert sorted(delivered) == mixture.healthy
    assert mixture.kind is Stream or delivered == sorted(delivered)
    assert quarantine == set(mixture.bad)


@pytest.mark.parametrize("seed", [*range(16), 42, 46, 1004])
def test_healthy_samples_fill_the_batches_when_bad_ones_are_replaced(seed: int) -> None:
    """What takes a bad one's place may be bad itself, in any way."""
    mixture = Mixture(seed)

    batches, quarantine = mixture.run("replace")

    delivered = Counter(index for batch in batches for index in batch)
    assert sorted(delivered) == mixture.healthy
    assert quarantine == set(mixture.bad)
    if mixture.kind is Stream:
        assert set(delivered.values()) <= {1}
    elif mixture.batch_size is not None:
        whole = mixture.size // mixture.batch_size
        assert {len(batch) for batch in batches[:whole]} <= {mixture.batch_size}


@pytest.mark.parametrize("seed", range(8))
def test_nothing_is_lost_when_a_callable_says_something_else_for_each_sample(seed: int) -> None:
    """One is tried again first, then each is skipped or replaced, as the callable has it."""
    mixture = Mixture(seed)
    retried = set()

    def decide(incident: Incident) -> str:
        if len(retried) < 3 and incident.index not in retried:
            retried.add(incident.index)
            return "retry"
        return "skip" if incident.index is None or hash(incident.index) % 2 else "replace"

    batches, quarantine = mixture.run(decide)

    assert {index for batch in batches for index in batch} == set(mixture.healthy)
    assert quarantine == set(mixture.bad)


def test_a_killer_that_takes_a_bad_sample_s_place_in_a_stream_is_found() -> None:
    """It is behind the batch's own samples, where a search must look, too."""
    mixture = Mixture(0)
    mixture.size, mixture.kind, mixture.batch_size, mixture.workers, mixture.retries = 12, Stream, 4, 1, 0
    mixture.bad = {2: "raises when collated", 4: "kills when collated"}

    batches, quarantine = mixture.run("replace")

    assert [index for batch in batches for index in batch] == mixture.healthy
    assert quarantine == {2, 4}


def test_no_sample_is_lost_when_what_replaced_it_kills() -> None:
    """With this seed a sample raises, and its stand-in takes the worker along that knew of it."""
    torch.manual_seed(9)

    _, quarantined = Mixture(0).run("replace")

    assert {0, 8, 21} <= quarantined
