"""Going on from `state_dict()`: the batches that follow are those of the run that was not interrupted, bit for bit.

Reads   what loaders deliver after each number of batches, with and without deaths.
Writes  marker files that make a worker die at a chosen moment.
Never   a tolerance.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import loader_inputs as inputs
import outlive
from loader_comparison import differences, seed_trainer

Arguments = Callable[[], dict[str, Any]]


class StatefulSampler:
    """Draws by a generator of its own that nobody else can begin again, and says where it is."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.left = random.Random().sample(range(size), size)
        self.epoch = 0

    def __iter__(self) -> Any:
        while self.left:
            yield self.left.pop()
        self.left = list(range(self.size))
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left), "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left, self.epoch = list(state["left"]), state["epoch"]


class StaysAtItsEnd:
    """As torchdata's sampler for distributed jobs: what it tells after its last index leads to that end."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.at = 0
        self.begin_at: int | None = None

    def __iter__(self) -> Any:
        self.at, self.begin_at = self.begin_at or 0, None
        while self.at < self.size:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begin_at = state["at"]


class StatefulSamplerIterator:
    """Only its iterator has the state."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        return _Counting(random.Random().sample(range(self.size), self.size))


class _Counting:
    def __init__(self, left: list[int]) -> None:
        self.left = left

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


class CountedNoisy(inputs.Noisy):
    """A map-style dataset whose samples depend on how many it has made, and that can say so."""

    def __init__(self, size: int = 23) -> None:
        super().__init__(size)
        self.made = 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.made += 1
        return {**super().__getitem__(index), "made": self.made}

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.made = state["made"]


class EpochStream(inputs.Stream):
    """Counts its epochs in itself, and shows it: what persists from one to the next."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.epoch = 0

    def __iter__(self) -> Any:
        epoch, self.epoch = self.epoch, self.epoch + 1
        for sample in super().__iter__():
            yield {**sample, "epoch": epoch}
        self.epoch += 10


class Kept:
    """What a dataset may have in it, beside plain values."""

    def __init__(self) -> None:
        self.draw = inputs.generator()
        self.seen: tuple[Any, ...] = ()


class KeepingStream(EpochStream):
    """Keeps a generator and a tuple in an object of its own, from one epoch to the next."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.kept = Kept()

    def __iter__(self) -> Any:
        kept = self.kept
        for sample in super().__iter__():
            drawn = torch.rand(1, generator=kept.draw)
            kept.seen = (*kept.seen, sample["index"])[-3:]
            yield {**sample, "drawn": drawn, "seen": len(kept.seen) if type(kept.seen) is tuple else None}


def trainer_randomness() -> list[Any]:
    return [torch.get_rng_state(), random.getstate(), np.random.get_state()]


def set_trainer_randomness(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    random.setstate(state[1])
    np.random.set_state(state[2])


def take_checkpoint(loader: Any) -> tuple[bytes, list[Any]]:
    """What a checkpoint has: the loader's state, as it is on disk, and the trainer's own randomness."""
    return pickle.dumps(loader.state_dict()), trainer_randomness()


def train(steps: Any) -> list[Any]:
    """Take batches as a trainer does that draws random numbers itself."""
    return [(batch, torch.rand(1), random.random()) for batch in steps]


def resumed(arguments: Arguments, checkpoint: tuple[bytes, list[Any]], **more: Any) -> Any:
    """A loader in another life of the trainer, which restores its own random state."""
    seed_trainer(991)
    loader = outlive.DataLoader(**arguments(), **more)
    loader.load_state_dict(pickle.loads(checkpoint[0]))
    set_trainer_randomness(checkpoint[1])
    return loader


BETWEEN = 1000  # the number of the checkpoint between two epochs; those of the second come after it


def assert_goes_on(arguments: Arguments, after: Any = None, later: Arguments | None = None, **more: Any) -> None:
    """Resume after batches of two epochs and compare all that follows in that epoch, once also in the next.

    `after`: numbers of checkpoints; there is one before all, one after each batch, and one more after each epoch.
    None: all of the first epoch, and of the second the first.
    """
    seed_trainer()
    loader = outlive.DataLoader(**arguments(), **more)
    checkpoints, steps, ends = [take_checkpoint(loader)], [], [0]
    places = [0]
    for _ in range(2):
        for batch in loader:
            steps.append((batch, torch.rand(1), random.random()))
            checkpoints.append(take_checkpoint(loader))
            places.append(len(steps))
        ends.append(len(steps))
        checkpoints.append(take_checkpoint(loader))
        places.append(len(steps))
    del loader
    next_epoch = ends[1] + 1  # the checkpoint between the epochs
    assert 0 < ends[1] < ends[2]
    for number in range(next_epoch + 2) if after is None else after:
        number = number if number < BETWEEN else next_epoch + number - BETWEEN
        begun, end = places[number], ends[1] if number < next_epoch else ends[2]
        again = resumed(later or arguments, checkpoints[number], **more)
        got = train(again)

        assert differences(got, steps[begun:end]) == [], f"resumed at {number}"
        if number == 2:
            assert differences(train(again), steps[end:]) == [], "the epoch after"


WAYS: dict[str, Arguments] = {
    "shuffled": lambda: {"dataset": inputs.Noisy(13), "batch_size": 2, "shuffle": True},
    "stream": lambda: {"dataset": inputs.Stream(9, 1, 7), "batch_size": 3},
    "stream with a state": lambda: {"dataset": inputs.StatefulStream(7, 0, 5), "batch_size": 2},
}


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize("arguments", WAYS.values(), ids=WAYS)
def test_batches_go_on_bit_for_bit_after_any_batch(arguments, num_workers):
    """Before the first, after each and after the last; shuffling, augmentation and the trainer's own draws included."""
    assert_goes_on(arguments, num_workers=num_workers)


RARER: dict[str, tuple[Arguments, dict[str, Any]]] = {
    "a generator": (
        lambda: {"dataset": inputs.Noisy(9), "batch_size": 2, "shuffle": True, "generator": inputs.generator()},
        {"num_workers": 1},
    ),
    "a sampler that draws in portions from a generator": (
        lambda: {
            "dataset": inputs.Noisy(40),
            "batch_size": 9,
            "sampler": torch.utils.data.RandomSampler(range(40), True, num_samples=50, generator=inputs.generator()),
        },
        {"num_workers": 2},
    ),
    "a sampler with a state": (
        lambda: {"dataset": inputs.Noisy(12), "batch_size": 2, "sampler": StatefulSampler(12)},
        {"num_workers": 2},
    ),
    "a sampler that draws as it goes": (
        lambda: {"dataset": inputs.Noisy(12), "batch_size": 2, "sampler": inputs.FreshGenerator(12)},
        {"num_workers": 2},
    ),
    "a sampler that is at its end after its epoch": (
        lambda: {"dataset": inputs.Noisy(12), "batch_size": 2, "sampler": StaysAtItsEnd(12)},
        {"num_workers": 2},
    ),
    "the same, here": (
        lambda: {"dataset": inputs.Noisy(12), "batch_size": 2, "sampler": StaysAtItsEnd(12)},
        {"num_workers": 0},
    ),
    "a dataset with a state, here": (lambda: {"dataset": CountedNoisy(), "batch_size": 4}, {"num_workers": 0}),
    "a dataset with a state": (
        lambda: {"dataset": CountedNoisy(), "batch_size": 4, "persistent_workers": True},
        {"num_workers": 2},
    ),
    "a policy without workers": (
        lambda: {"dataset": inputs.Noisy(12), "batch_size": 3, "shuffle": True, "faults": "skip"},
        {"num_workers": 0},
    ),
    "a stream and a policy without workers": (
        lambda: {"dataset": inputs.Stream(13), "batch_size": 3, "faults": "skip"},
        {"num_workers": 0},
    ),
    "the number of workers is auto": (
        lambda: {"dataset": inputs.Noisy(12), "batch_size": 2, "shuffle": True},
        {"num_workers": "auto"},
    ),
    "workers that persist": (
        lambda: {"dataset": inputs.Noisy(13), "batch_size": 2, "shuffle": True, "persistent_workers": True},
        {"num_workers": 3},
    ),
    "streams of workers that persist": (
        lambda: {"dataset": EpochStream(5, 2, 7), "batch_size": 2, "persistent_workers": True},
        {"num_workers": 3},
    ),
    "streams of workers that persist and keep a generator": (
        lambda: {"dataset": KeepingStream(5, 2, 7), "batch_size": 2, "persistent_workers": True},
        {"num_workers": 3},
    ),
    "streams with a state of workers that persist": (
        lambda: {"dataset": inputs.StatefulStream(5, 2, 7), "batch_size": 2, "persistent_workers": True},
        {"num_workers": 2},
    ),
    "many batches ahead": (
        lambda: {"dataset": inputs.Noisy(60), "batch_size": 1, "prefetch_factor": 25},
        {"num_workers": 2},
    ),
    "one stream is far ahead": (
        lambda: {"dataset": inputs.Stream(40, 0, 0), "batch_size": 1, "prefetch_factor": 8},
        {"num_workers": 3},
    ),
}


@pytest.mark.parametrize(("arguments", "more"), RARER.values(), ids=RARER)
def test_batches_go_on_whatever_the_loader_is_made_of(arguments, more):
    """In the first epoch, between two, and in the second."""
    assert_goes_on(arguments, after=[2, BETWEEN, BETWEEN + 2], **more)


def test_an_iterator_with_a_state_goes_on_where_it_was():
    """Also one that could not be begun again: its order is known to nobody else."""
    arguments = lambda: {"dataset": inputs.Noisy(12), "batch_size": 2, "sampler": StatefulSamplerIterator(12)}  # noqa: E731
    assert_goes_on(arguments, after=[1, 3], num_workers=2)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_batches_go_on_under_every_start_method(method):
    """What is restored travels with the worker's first message, not with its memory."""
    arguments = lambda: {"dataset": inputs.StatefulStream(5, 5), "batch_size": 2, "persistent_workers": True}  # noqa: E731
    assert_goes_on(arguments, after=[3], num_workers=2, multiprocessing_context=method)
