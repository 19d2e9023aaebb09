"""Epochs that are left early, of streams in workers that persist: replaced workers do not show in later ones.

Reads   what both loaders deliver for the same streams, epoch by epoch.
Writes  nothing.
Never   a tolerance: the reference is torch's loader, whose workers stay.

What torch's workers had been asked for when a loop was left they still fetch: that counts, too. How much that is may
depend on which of two workers is faster, once a stream has ended: then the reference is ours, undisturbed.
"""

from __future__ import annotations

import copy
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

import outlive
from equality.test_epoch_ends import KeepsPlace, TellsPlace, WithIterator, kill, worker_number
from loader_comparison import OURS, TORCH, seed_trainer

EPOCHS = 4


class Uneven(KeepsPlace):
    """One of its streams is empty."""

    def __iter__(self) -> Iterator[Any]:
        return iter(()) if worker_number() == 1 else super().__iter__()


class CleansUp(KeepsPlace):
    """Goes on two samples later when it was left."""

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from super().__iter__()
        finally:
            self.place += 2


class Draws(KeepsPlace):
    """Each sample takes random numbers, and so does each end."""

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            yield sample + random.random() + float(torch.rand(1))
        random.random()


class DrawsAtOnce(Draws):
    def __iter__(self) -> Iterator[Any]:
        random.random()
        return super().__iter__()


class DrawsAndTells(TellsPlace, Draws):
    pass


class Shuffles(KeepsPlace):
    """How far it is follows from what it was told of the epoch."""

    told = 0

    def set_epoch(self, epoch: int) -> None:
        self.told += epoch

    def __iter__(self) -> Iterator[Any]:
        for sample in super().__iter__():
            self.told += 1
            yield sample + 10_000 * self.told


class IsItsIterator(IterableDataset[int]):
    """Goes on where it was left, and can be pickled in its own way only: nothing but its word is kept of it."""

    def __init__(self, size: int = 9) -> None:
        self.size = size
        self.place = self.begun = 0

    def __iter__(self) -> IsItsIterator:
        self.begun += 1
        if self.begun % 2:
            self.place = 0
        return self

    def __next__(self) -> int:
        if self.place == self.size:
            raise StopIteration
        self.place += 1
        return 1000 * self.begun + 100 * worker_number() + self.place

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place, "begun": self.begun}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place, self.begun = state["place"], state["begun"]


class CannotBeKept(KeepsPlace):
    """Nor says where it stands: what is known is what was taken."""

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))


STREAMS: tuple[Callable[[], Any], ...] = (
    KeepsPlace,
    TellsPlace,
    WithIterator,
    Uneven,
    CleansUp,
    Draws,
    DrawsAtOnce,
    DrawsAndTells,
    Shuffles,
    IsItsIterator,
)


@dataclass(frozen=True)
class Case:
    """How a program goes about with its loader, and when its workers are replaced."""

    how: dict[str, Any]
    stops: tuple[int | None, ...]  # by epoch: after so many batches
    kills: frozenset[tuple[int, int]]  # epoch, and after how many batches; 0: when it was left
    recycle_after: int | None

    @classmethod
    def number(cls, seed: int) -> Case:
        choose = random.Random(seed)
        how: dict[str, Any] = choose.choice(
            ({"batch_size": 2}, {"batch_size": 2, "drop_last": True}, {"batch_size": None}, {"batch_size": 3})
        )
        how = {**how, "num_workers": choose.choice((1, 2)), "prefetch_factor": choose.choice((1, 2))}
        stops = tuple(choose.choice((None, 1, 2, 3)) for _ in range(EPOCHS))
        kills = frozenset((epoch, choose.choice((0, 0, 1, 2))) for epoch in range(EPOCHS) if choose.random() < 0.7)
        return cls(how, stops, kills, choose.choice((None, None, 1, 2, 3)))


def delivered(kind: type, dataset: Any, case: Case) -> list[list[Any]]:
    seed_trainer()
    ours = kind is OURS
    more = {"recycle_after": case.recycle_after} if ours else {}
    loader = kind(dataset, persistent_workers=True, multiprocessing_context="fork", **case.how, **more)
    epochs = []
    for epoch, stop in enumerate(case.stops):
        if epoch > 1 and hasattr(dataset, "set_epoch") and ours:
            dataset.set_epoch(epoch)
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch.tolist() if isinstance(batch, torch.Tensor) else batch)
            if ours and (epoch, len(epochs[-1])) in case.kills:
                kill_workers(loader)
            if len(epochs[-1]) == stop:
                break
        if ours and (epoch, 0) in case.kills:
            kill_workers(loader)
    end(loader)
    return epochs


def kill_workers(loader: Any) -> None:
    for slot in loader.statistics().slots:
        if slot.pid:
            kill(slot.pid)


def end(loader: Any) -> None:
    if isinstance(loader, outlive.DataLoader):
        loader.close()
    elif loader._iterator is not None:
        loader._iterator._shutdown_workers()


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.full] if n else []) for n in range(12)])
@pytest.mark.parametrize("make", STREAMS, ids=lambda make: make.__name__)
def test_replaced_workers_do_not_show_after_epochs_that_were_left(make, seed):
    case = Case.number(seed * len(STREAMS) + STREAMS.index(make))
    undisturbed = Case(case.how, case.stops, frozenset(), None)
    deterministic = case.how["num_workers"] == 1 and not hasattr(make, "set_epoch")  # torch's do not hear of that

    assert delivered(OURS, make(), case) == delivered(TORCH if deterministic else OURS, make(), undisturbed), case


def alone(stops: tuple[int | None, ...], kills: set[tuple[int, int]], batch_size: int | None = None) -> Case:
    return Case({"batch_size": batch_size, "num_workers": 1}, stops, frozenset(kills), None)


EXAMPLES = {
    "killed between epochs": (KeepsPlace, alone((2, 2, 2), {(0, 0), (1, 0)})),
    "killed in the epoch after": (CleansUp, alone((2, 2, 2), {(1, 1)})),
    "killed when the last batch, which was short, was under way": (KeepsPlace, alone((2, 2), {(0, 0)}, 2)),
    "killed when nothing but its word is kept": (IsItsIterator, alone((2, 2, 2), {(0, 0), (2, 1)})),
}


@pytest.mark.parametrize(("make", "case"), EXAMPLES.values(), ids=EXAMPLES)
def test_a_worker_that_is_killed_after_an_epoch_that_was_left_does_not_show(make, case):
    assert delivered(OURS, make(), case) == delivered(TORCH, make(), case)


def test_the_last_epoch_is_repeated_where_a_dataset_cannot_be_kept():
    how = {"batch_size": None, "num_workers": 1}
    disturbed = Case(how, (2, 3), frozenset({(0, 0), (1, 1)}), None)

    theirs = delivered(TORCH, CannotBeKept(), disturbed)
    assert delivered(OURS, CannotBeKept(), disturbed) == theirs == [[1, 2], [5, 6, 7]]


def test_it_is_said_where_more_epochs_would_have_to_be_repeated(tmp_path):
    log = logging.FileHandler(tmp_path / "log")  # workers that are forked write to it, too
    logging.getLogger("outlive").addHandler(log)
    try:
        for make in (KeepsPlace, CannotBeKept):
            assert "cannot be kept" not in (tmp_path / "log").read_text()
            delivered(OURS, make(), alone((2, 2, None), {(2, 1), (2, 2)}))
    finally:
        logging.getLogger("outlive").removeHandler(log)
        log.close()

    assert "the dataset cannot be kept from one epoch to the next" in (tmp_path / "log").read_text()


def test_a_stream_that_its_collate_function_has_ended_is_kept_as_it_is():
    """As it may in torch."""
    how = {"batch_size": 2, "num_workers": 1, "collate_fn": ends_after_four}
    disturbed = Case(how, (None,) * 3, frozenset({(0, 0), (1, 0), (2, 1)}), None)

    theirs = delivered(TORCH, KeepsPlace(), disturbed)
    assert delivered(OURS, KeepsPlace(), disturbed) == theirs == [[[1, 2], [3, 4]], [[7]], [[1001, 1002], [1003, 1004]]]


def ends_after_four(samples: list[int]) -> list[int]:
    if 5 in samples or 1005 in samples:
        raise StopIteration
    return samples


@pytest.mark.parametrize("make", [KeepsPlace, TellsPlace, DrawsAndTells, CannotBeKept, Shuffles])
def test_a_state_of_the_epoch_after_one_that_was_left(make):
    """Taken before the worker that comes for a killed one has delivered anything, and after that."""
    how = {"batch_size": 2, "num_workers": 1, "persistent_workers": True, "multiprocessing_context": "fork"}

    def in_second_epoch() -> tuple[Any, Any]:
        seed_trainer()
        loader = OURS(make(), **how)
        for _ in loader:
            break
        kill_workers(loader)
        return loader, iter(loader)

    loader, iterator = in_second_epoch()
    expected = [batch.tolist() for batch in iterator]
    loader.close()
    for taken in (0, 1):
        loader, iterator = in_second_epoch()
        for _ in range(taken):
            next(iterator)
        state = copy.deepcopy(loader.state_dict())
        loader.close()

        resumed = OURS(make(), **how)
        resumed.load_state_dict(state)
        assert [batch.tolist() for batch in resumed] == expected[taken:], f"after {taken}"
        resumed.close()
