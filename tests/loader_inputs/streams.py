"""Iterable datasets.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from loader_inputs.kills import Kills, NoKills
from loader_inputs.map_datasets import draws


def shard(sizes: tuple[int, ...]) -> tuple[int, int]:
    """This worker's first number and how many it has; in the trainer's own process, all of them."""
    info = get_worker_info()
    if info is None:
        return 0, sum(sizes)
    return 100 * info.id, sizes[info.id % len(sizes)]


class Stream(IterableDataset):
    """Sharded by worker id, shards of different length, written as a class."""

    def __init__(self, *sizes: int, kills: Kills | None = None) -> None:
        self.sizes = sizes
        self.kills = kills or NoKills()

    def __iter__(self) -> Iterator[Any]:
        return StreamIterator(self.kills, *shard(self.sizes))


class StreamIterator:
    def __init__(self, kills: Kills, first: int, size: int) -> None:
        self.kills = kills
        self.at = first
        self.end = first + size
        self.begun = torch.rand(()).item()  # iter() itself draws, too

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.at >= self.end:
            raise StopIteration
        first = draws(self.at)
        self.kills.at(self.at)
        self.at += 1
        return {"index": self.at - 1, "begun": self.begun, **first}


class GeneratorStream(Stream):
    """The same, written as a generator."""

    def __iter__(self) -> Iterator[Any]:
        first, size = shard(self.sizes)
        begun = torch.rand(()).item()
        for i in range(first, first + size):
            drawn = draws(i)
            self.kills.at(i)
            yield {"index": i, "begun": begun, **drawn}


class ShuffledStream(Stream):
    """A shuffle buffer that picks with the worker's own generators: what comes next depends on all that was drawn."""

    def __iter__(self) -> Iterator[Any]:
        first, size = shard(self.sizes)
        buffer: list[int] = []
        for i in range(first, first + size):
            if len(buffer) < 5:
                buffer.append(i)
                continue
            pick = random.randrange(len(buffer))
            self.kills.at(i)
            yield {"index": buffer[pick], "noise": torch.randn(2), "numpy": float(np.random.randn())}
            buffer[pick] = i
        while buffer:
            yield {"index": buffer.pop(int(torch.randint(len(buffer), ()))), "noise": torch.randn(2), "numpy": 0.0}


class StatefulStream(Stream):
    """Offers state_dict and load_state_dict, counts how often it had to make a sample, and draws to choose.

    What a sample is depends on what was drawn since the start: a replacement that restores the place, but not the
    random state of that place, is found out. A state that takes long to make is made seldom.
    """

    def __init__(self, *sizes: int, kills: Kills | None = None, folder: Path | None = None, costs_s: float = 0) -> None:
        super().__init__(*sizes, kills=kills)
        self.folder = folder
        self.costs_s = costs_s
        self.state: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        first, size = shard(self.sizes)
        # As in torchdata: a loaded state holds for the next iterator only.
        state, self.state = self.state, {}
        self.place = int(state.get("place", 0))
        self.walk = float(state.get("walk", 0.0))
        while self.place < size:
            number = first + self.place
            self.walk += random.random()
            self.kills.at(number)
            self._count()
            self.place += 1
            yield {"index": number, "walk": self.walk, **draws(number)}

    def _count(self) -> None:
        if self.folder is not None:
            with open(self.folder / "made", "ab") as file:
                file.write(b".")

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.costs_s)
        return {"place": self.place, "walk": self.walk}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class StatefulIteratorStream(Stream):
    """Its iterator, not the dataset, has the state."""

    def __iter__(self) -> Iterator[Any]:
        return StatefulIterator(self.kills, *shard(self.sizes))


class StatefulIterator(StreamIterator):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.begun = state["at"], state["begun"]


class FailingStream(Stream):
    """Raises at some places and goes on after them."""

    def __init__(self, *sizes: int, errors: dict[int, Any], kills: Kills | None = None) -> None:
        super().__init__(*sizes, kills=kills)
        self.errors = errors

    def __iter__(self) -> Iterator[Any]:
        return FailingIterator(self.kills, self.errors, *shard(self.sizes))


class FailingIterator(StreamIterator):
    def __init__(self, kills: Kills, errors: dict[int, Any], first: int, size: int) -> None:
        super().__init__(kills, first, size)
        self.errors = errors

    def __next__(self) -> dict[str, Any]:
        sample = super().__next__()
        if sample["index"] in self.errors:
            raise self.errors[sample["index"]]()
        return sample


class FailingGenerator(FailingStream):
    """A generator ends with its first error."""

    def __iter__(self) -> Iterator[Any]:
        yield from FailingIterator(self.kills, self.errors, *shard(self.sizes))


class SizedStream(Stream):
    """Has a length, and may lie about it."""

    def __init__(self, *sizes: int, says: int) -> None:
        super().__init__(*sizes)
        self.says = says

    def __len__(self) -> int:
        return self.says
