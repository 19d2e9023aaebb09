"""Datasets, streams and functions that carry planted faults, and what an undisturbed run of them delivers.

Reads   the global generators of torch, random and NumPy: every sample, every batch and every start draws from them.
Writes  batches whose every bit depends on that randomness.
Never   anything that a spawned worker could not import by name.

A sample is (its index, three random numbers) as one tensor, and a payload: None, or what a fault returned.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

import outlive
from faults.table import Moment, PlantedFault

FaultsByIndex = Mapping[int, PlantedFault]
Sample = tuple[torch.Tensor, Any]

SIZE = 24
BATCH = 4
WORKERS = 2
SEED = 20240


@dataclass(frozen=True)
class FaultPlacement:
    """Which faults are planted where: by index of the sample, or (INIT) by slot."""

    getitem: FaultsByIndex = field(default_factory=dict)
    getitems: FaultsByIndex = field(default_factory=dict)
    next: FaultsByIndex = field(default_factory=dict)
    collate: FaultsByIndex = field(default_factory=dict)
    init: Mapping[int, Sequence[PlantedFault]] = field(default_factory=dict)
    sending: FaultsByIndex = field(default_factory=dict)

    @classmethod
    def at(cls, moment: Moment, planted_faults: FaultsByIndex) -> FaultPlacement:
        if moment is Moment.INIT:
            return cls(init={slot: (planted,) for slot, planted in planted_faults.items()})
        return cls(**{moment.name.lower(): planted_faults})


def draw(index: int, planted: PlantedFault | None, sending: PlantedFault | None) -> Sample:
    """One sample; the fault fires between two draws, so that a retry which does not rewind shows."""
    before = torch.rand((), dtype=torch.float64).item()
    payload = planted() if planted is not None else None
    values = torch.tensor([index, before, random.random(), numpy.random.random()], dtype=torch.float64)
    return values, FaultyPickle(sending) if sending is not None else payload


class FaultyPickle:
    """An object whose fault fires while it is pickled."""

    def __init__(self, planted: PlantedFault) -> None:
        self.planted = planted

    def __reduce__(self) -> Any:
        return _arrived, (self.planted(),)


def _arrived(payload: Any) -> None:
    return None


class Samples(Dataset[Sample]):
    """Map-style, one by one."""

    def __init__(self, size: int, placement: FaultPlacement) -> None:
        self.size = size
        self.placement = placement

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return draw(index, self.placement.getitem.get(index), self.placement.sending.get(index))


class ManySamples(Samples):
    """Map-style, a batch at once."""

    def __getitems__(self, indices: list[int]) -> list[Sample]:
        return [draw(index, self.placement.getitems.get(index), self.placement.sending.get(index)) for index in indices]


class Unloadable(Samples):
    """A dataset that cannot be unpickled where the workers are."""

    def __init__(self, planted: PlantedFault) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.planted = planted
        self.home = os.getpid()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.home:
            self.planted()


class Stream(IterableDataset[Sample]):
    """Iterable: worker w of n gives samples w, w+n, w+2n, … Its iterator is a class: it goes on after an exception."""

    def __init__(self, size: int, placement: FaultPlacement) -> None:
        self.size = size
        self.placement = placement

    def shard(self) -> range:
        info = get_worker_info()
        return range(info.id, self.size, info.num_workers) if info is not None else range(self.size)

    def __iter__(self) -> Iterator[Sample]:
        return Reader(self.shard(), self.placement)


class Reader:
    def __init__(self, shard: range, placement: FaultPlacement) -> None:
        self.shard = shard
        self.placement = placement
        self.place = 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Sample:
        if self.place >= len(self.shard):
            raise StopIteration
        index = self.shard[self.place]
        self.place += 1
        return draw(index, self.placement.next.get(index), self.placement.sending.get(index))


class SkippingReader(Reader):
    """An iterator that can step over samples without touching them."""

    def skip(self, count: int) -> None:
        self.place += count


class SkippingReaderStream(Stream):
    """Its iterator offers skip(n)."""

    def __iter__(self) -> Iterator[Sample]:
        return SkippingReader(self.shard(), self.placement)


class SkippingStream(Stream):
    """A dataset that is its own iterator, and offers skip(n)."""

    def __iter__(self) -> SkippingStream:
        self.reader = SkippingReader(self.shard(), self.placement)
        return self

    def __next__(self) -> Sample:
        return next(self.reader)

    def skip(self, count: int) -> None:
        self.reader.skip(count)


class GeneratorStream(Stream):
    """Its iterator is a generator, which Python ends with the first exception."""

    def __iter__(self) -> Iterator[Sample]:
        for index in self.shard():
            yield draw(index, self.placement.next.get(index), self.placement.sending.get(index))


class NotingReader(Reader):
    """Writes down every sample that it opens, and can be brought to any place at once."""

    def __init__(self, shard: range, placement: FaultPlacement, notes: Path) -> None:
        super().__init__(shard, placement)
        self.notes = notes

    def __next__(self) -> Sample:
        if self.place < len(self.shard):
            with self.notes.open("a") as file:
                file.write(f"{self.shard[self.place]}\n")
        return super().__next__()

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


class StatefulReaderStream(Stream):
    """Its iterator offers snapshots."""

    def __init__(self, size: int, placement: FaultPlacement, notes: Path) -> None:
        super().__init__(size, placement)
        self.notes = notes

    def __iter__(self) -> Iterator[Sample]:
        return NotingReader(self.shard(), self.placement, self.notes)


class StatefulStream(StatefulReaderStream):
    """The dataset itself offers snapshots; they count for the next iterator."""

    start = 0

    def __iter__(self) -> Iterator[Sample]:
        self.reader = NotingReader(self.shard(), self.placement, self.notes)
        self.reader.place, self.start = self.start, 0
        # The snapshots are the dataset's: its iterator is a plain one.
        return map(_same, self.reader)

    def state_dict(self) -> dict[str, int]:
        return self.reader.state_dict()

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["place"]


def _same(sample: Sample) -> Sample:
    return sample


@dataclass(frozen=True)
class Collate:
    """Stacks what it gets, adds noise of its own, and fires at the samples that it is told of."""

    planted_faults: FaultsByIndex = field(default_factory=dict)

    def __call__(self, samples: list[Sample]) -> dict[str, Any]:
        noise = [torch.rand((), dtype=torch.float64).item(), random.random(), numpy.random.random()]
        payload = [self._payload(values, payload) for values, payload in samples]
        return {"samples": default_collate([values for values, _ in samples]), "noise": noise, "payload": payload}

    def _payload(self, values: torch.Tensor, payload: Any) -> Any:
        planted = self.planted_faults.get(int(values[0]))
        return payload if planted is None else planted()


@dataclass(frozen=True)
class Init:
    """A worker_init_fn that draws, and fires in the slots that it is told of."""

    planted_faults: Mapping[int, Sequence[PlantedFault]] = field(default_factory=dict)

    def __call__(self, slot: int) -> None:
        torch.rand(1), random.random(), numpy.random.random()
        for planted in self.planted_faults.get(slot, ()):
            planted()


# ---------------------------------------------------------------- loaders


def arguments(placement: FaultPlacement, dataset: Any = None, size: int = SIZE, **options: Any) -> dict[str, Any]:
    """What torch's loader and ours take alike; the dataset follows from what is planted."""
    if dataset is None:
        kind = Stream if placement.next else ManySamples if placement.getitems else Samples
        dataset = kind(size, placement)
    generator = torch.Generator()
    generator.manual_seed(SEED)
    return {
        "dataset": dataset,
        "batch_size": BATCH,
        "num_workers": WORKERS,
        "collate_fn": Collate(placement.collate),
        "worker_init_fn": Init(placement.init),
        "multiprocessing_context": "fork" if options.get("num_workers") != 0 else None,
        "generator": generator,
        **options,
    }


def make_loader(placement: FaultPlacement, faults: Any = "raise", **options: Any) -> outlive.DataLoader[Any]:
    return outlive.DataLoader(**arguments(placement, **options), faults=faults)


def values_of(batch: dict[str, Any]) -> Any:
    """A batch as plain numbers: equal if and only if every bit is."""
    return batch["samples"].tolist(), batch["noise"]


def indices_of(batch: dict[str, Any]) -> list[int]:
    return [int(row[0]) for row in batch["samples"].tolist()]


def all_values(loader: Any) -> list[Any]:
    return [values_of(batch) for batch in loader]


def all_indices(loader: Any) -> list[list[int]]:
    return [indices_of(batch) for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def outcomes_of(loader: Any) -> list[Any]:
    """Batches (as indices) and errors in the order in which a consumer that catches every error meets them."""
    found: list[Any] = []
    iterator = iter(loader)
    for _ in range(1000):
        try:
            found.append(indices_of(next(iterator)))
        except StopIteration:
            return found
        except Exception as error:
            found.append(error)
    raise AssertionError(f"no end after 1000 calls of next(); the last outcome: {found[-1]!r}")


@functools.cache
def undisturbed(kind: type = Samples, size: int = SIZE, workers: int = WORKERS) -> list[Any]:
    """What torch's own loader delivers from the same seed when nothing is planted."""
    options = arguments(FaultPlacement(), kind(size, FaultPlacement()), num_workers=workers)
    return all_values(torch.utils.data.DataLoader(**options))
