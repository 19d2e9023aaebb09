"""A loader goes on with the same batches in another process, whatever its sampler is made of.

Reads   the batches of an undisturbed loader, and those of one that takes up its state.
Writes  nothing.
Never   lets the second loader have anything but the state, and samplers made in the same way.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, Dataset, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

import outlive
from outlive import PositionError

SIZE = 20
EPOCHS = 3


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        return index


def generator(seed: int = 1) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


class OwnGenerator(Sampler[int]):
    """Shuffles with a generator of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __iter__(self) -> Iterator[int]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(SIZE, generator=self.rng).tolist())
        order = list(range(SIZE))
        self.rng.shuffle(order)
        return iter(order)

    def __len__(self) -> int:
        return SIZE


class CountsEpochs(OwnGenerator):
    """Another order in each epoch, of which it keeps count itself."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(random.Random(self.epochs).sample(range(SIZE), SIZE))


class Counts(CountsEpochs):
    """The same, with a count that is no plain number."""

    def __init__(self, count: Any) -> None:
        self.epochs = count

    def __iter__(self) -> Iterator[int]:
        self.epochs = self.epochs + 1
        return iter(random.Random(int(self.epochs)).sample(range(SIZE), SIZE))


class Several(Sampler[int]):
    """Takes from samplers that are in a container."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[int]:
        parts = self.parts.values() if isinstance(self.parts, dict) else self.parts
        return iter([index for part in parts for index in part])


class Slots(Sampler[int]):
    """Has no `__dict__` for its generator, where torch's class has none."""

    __slots__ = ("rng",)
    __iter__ = OwnGenerator.__iter__

    def __init__(self, rng: Any) -> None:
        self.rng = rng


class Wrapper(Sampler[Any]):
    """What people put around a sampler of torch's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Iterator[Any]:
        return iter([*self.inner])


SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomSampler(Numbers(), generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, generator=generator()),
    "subset": lambda: SubsetRandomSampler(range(SIZE), generator=generator()),
    "torch generator of its own": lambda: OwnGenerator(generator(5)),
    "Python generator of its own": lambda: OwnGenerator(random.Random(3)),
    "NumPy generator of its own": lambda: OwnGenerator(np.random.default_rng(3)),
    "NumPy's old generator": lambda: OwnGenerator(np.random.RandomState(3)),
    "counts epochs": CountsEpochs,
    "counts epochs with NumPy": lambda: Counts(np.int64(0)),
    "counts epochs in a tensor": lambda: Counts(torch.zeros(1, dtype=torch.int64)),
    "several in a list": lambda: Several([OwnGenerator(generator(seed)) for seed in (1, 2)]),
    "several by name": lambda: Several({"a": OwnGenerator(random.Random(3))}),
    "slots": lambda: Slots(random.Random(3)),
    "wrapper": lambda: Wrapper(RandomSampler(Numbers(), generator=generator())),
    "wrapper of one with a generator": lambda: Wrapper(OwnGenerator(np.random.default_rng(3))),
}
WAYS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sampler": lambda sampler: {"sampler": sampler, "batch_size": 3},
    "batch sampler": lambda sampler: {"batch_sampler": BatchSampler(sampler, 3, False)},
    "batch sampler of its own": lambda sampler: {"batch_sampler": Wrapper(BatchSampler(sampler, 3, False))},
}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_no_sample_is_repeated_or_left_out(make, way, num_workers):
    """From the middle of each epoch, and between two, through JSON."""

    def loader() -> Any:
        return outlive.DataLoader(Numbers(), **way(make()), num_workers=num_workers)

    whole = loader()
    expected = [batch.tolist() for _ in range(EPOCHS) for batch in whole]
    per_epoch = len(expected) // EPOCHS

    for count in (0, 2, per_epoch, per_epoch + 1):
        first = loader()
        taken: list[Any] = []
        while len(taken) < count:
            taken += [batch.tolist() for batch in itertools.islice(first, count - len(taken))]
        state = json.loads(json.dumps(first.state_dict()))
        second = loader()
        second.load_state_dict(state)
        while len(taken) < len(expected):
            taken += [batch.tolist() for batch in second]
        assert taken == expected, f"after {count} batches"


class Forgets(OwnGenerator):
    """Has a list that it gives up in its first epoch, and knows by that which epoch it is in."""

    def __init__(self) -> None:
        self.first: list[int] | None = list(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        first, self.first = self.first, None
        return iter(first or range(SIZE - 1, -1, -1))


def test_a_plain_value_may_take_the_place_of_another_thing():
    """What a sampler was made with is not what it has after an epoch."""
    first = outlive.DataLoader(Numbers(), sampler=Forgets())
    list(first)
    second = outlive.DataLoader(Numbers(), sampler=Forgets())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))

    assert [batch.item() for batch in second] == list(range(SIZE - 1, -1, -1))


@pytest.mark.parametrize(
    "name", ["sampler.generator", "batch_sampler.sampler", "sampler.__class__", "sampler.__iter__"]
)
def test_a_state_replaces_no_sampler_no_generator_and_no_method(name):
    """Only plain values of samplers are in a state."""
    loader = outlive.DataLoader(Numbers(), sampler=RandomSampler(Numbers(), generator=generator()), batch_size=3)
    state = loader.state_dict()
    state["counters"][name] = "x"

    with pytest.raises(PositionError, match="is nothing that a state may set"):
        loader.load_state_dict(state)


class KeepsIterator(OwnGenerator):
    def __init__(self) -> None:
        self.stream = itertools.cycle(range(SIZE))

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(self.stream, SIZE // 2)


def test_a_state_that_cannot_be_told_is_an_error_at_once():
    """Not wrong data after it is loaded."""
    loader = outlive.DataLoader(Numbers(), batch_sampler=BatchSampler(KeepsIterator(), 3, False))

    with pytest.raises(PositionError, match=r"batch_sampler\.sampler \(KeepsIterator\) keeps an iterator.*'stream'"):
        loader.state_dict()
