"""A worker that is replaced near the end of its stream, or between two epochs, does not show in what is delivered.

Reads   what both loaders deliver for the same streams.
Writes  nothing.
Never   a tolerance: the reference is torch's loader, whose workers stay.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

import outlive
from loader_comparison import OURS, TORCH, differences, run

SIZE = 7  # of each worker's stream: its last batch of two is half a one


def worker_number() -> int:
    info = get_worker_info()
    return 0 if info is None else info.id


class KeepsPlace(IterableDataset[int]):
    """A generator that keeps its place in the dataset, and begins again once it has ended."""

    def __init__(self, size: int = SIZE, beside: Any = None) -> None:
        self.size = size
        self.place = 0
        self.epochs = 0
        self.beside = beside

    def __iter__(self) -> Iterator[int]:
        while self.place < self.size:
            self.place += 1
            yield 1000 * self.epochs + 100 * worker_number() + self.place
        self.place = 0
        self.epochs += 1


class TellsPlace(KeepsPlace):
    """As torchdata's examples: after its end, the state is that of the beginning."""

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "epochs": self.epochs}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.epochs = state["place"], state["epochs"]


class WithIterator(IterableDataset[int]):
    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> TellingIterator:
        return TellingIterator(self.size)


class TellingIterator:
    """An iterator whose state is that of the beginning once it has ended."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.place = 0

    def __iter__(self) -> TellingIterator:
        return self

    def __next__(self) -> int:
        if self.place == self.size:
            self.place = 0
            raise StopIteration
        self.place += 1
        return 100 * worker_number() + self.place

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


STREAMS = {
    "generator that keeps its place in the dataset": KeepsPlace,
    "the same, with whole batches": lambda: KeepsPlace(SIZE + 1),
    "the same, beside a large tensor": lambda: KeepsPlace(beside=torch.zeros(1 << 19)),
    "dataset with a state": TellsPlace,
    "dataset with a state, with whole batches": lambda: TellsPlace(SIZE + 1),
    "iterator with a state": WithIterator,
    "iterator with a state, with whole batches": lambda: WithIterator(SIZE + 1),
}
streams = pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS)


class KillsAfterEachBatch(outlive.DataLoader[int]):
    """Kills a worker after each batch, and all of them after each epoch."""

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            pids = [slot.pid for slot in self.statistics().slots if slot.pid]
            if pids:
                kill(pids[number % len(pids)])
            yield batch
        for slot in self.statistics().slots:
            if slot.pid and self.persistent_workers:
                kill(slot.pid)


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # it had ended by itself, as workers of ended streams may


@pytest.mark.parametrize("persistent", [False, True], ids=["workers for an epoch", "workers that persist"])
@streams
def test_recycled_workers_do_not_show(make, persistent):
    """Whenever they are recycled: after each batch, or after some, or with the last one of the epoch."""
    how = {"batch_size": 2, "num_workers": 2, "epochs": 2, "persistent_workers": persistent}
    theirs = run(TORCH, lambda: {"dataset": make()}, **how)

    for batches in (1, 4):
        ours = run(OURS, lambda: {"dataset": make()}, recycle_after=batches, **how)
        assert differences(ours, theirs) == [], f"recycled after {batches}"
        assert ours.loader.statistics().recycled > 0


@pytest.mark.parametrize("persistent", [pytest.param(False, marks=pytest.mark.full), True])
@streams
def test_killed_workers_do_not_show(make, persistent):
    """After each batch, and between two epochs."""
    how = {"batch_size": 2, "num_workers": 1, "epochs": 2, "persistent_workers": persistent}
    theirs = run(TORCH, lambda: {"dataset": make()}, **how)
    ours = run(KillsAfterEachBatch, lambda: {"dataset": make()}, **how)

    assert differences(ours, theirs) == []
    assert ours.loader.statistics().restarts > 0
