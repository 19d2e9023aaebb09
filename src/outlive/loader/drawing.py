"""Where a sampler stands: told, and found again.

Reads   the sampler, and its iterator.
Writes  nothing.
Never   calls a sampler more often than a loader does.

torch's own samplers draw once, when they begin: they are begun again from the same random state, and as many index
lists are passed over as were delivered. Any other sampler may draw as it goes; of it the position has the lists that
were drawn and not delivered, and where it stood after them: by its own word (`state_dict`), or by counting.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlive.loader.jobs import is_stateful

_OF_TORCH = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


class Batches:
    """What `BatchSampler` does, with its sampler's iterator at hand."""

    def __init__(self, sampler: Any, batch_size: int, drop_last: bool) -> None:
        self._sampler, self._batch_size, self._drop_last = sampler, batch_size, drop_last
        self.inner: Any = None  # not before the first batch is drawn: as in torch, because making it may draw
        self._batches: Iterator[list[Any]] = self._all()

    def open(self) -> Any:
        if self.inner is None:
            self.inner = iter(self._sampler)
        return self.inner

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> list[Any]:
        return next(self._batches)

    def _all(self) -> Iterator[list[Any]]:
        inner = self.open()
        while batch := list(itertools.islice(inner, self._batch_size)):
            if self._drop_last and len(batch) < self._batch_size:
                return
            yield batch


def can_be_begun_again(loader: Any) -> bool:
    """Whether the sampler draws the same once more from the same random state, whatever happens meanwhile."""
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        return True  # there is nothing to draw
    return type(loader.batch_sampler) in (type(None), BatchSampler) and type(loader.sampler) in _OF_TORCH


def iterator_of(loader: Any, made: Any, after: dict[str, Any] | None = None) -> Any:
    """The iterator to draw from; `made` is what torch has made of the sampler, and nobody has touched. `after`: the
    position between two epochs that this one begins with."""
    if can_be_begun_again(loader):
        return made
    batches = loader.batch_sampler

    def make() -> Any:
        if type(batches) is not BatchSampler:
            return iter(loader.sampler if batches is None else batches)
        return Batches(batches.sampler, batches.batch_size, batches.drop_last)

    iterator = make() if type(batches) is BatchSampler else made
    return StartsOver(iterator, make) if after is not None and "sampler" in after.get("sampler", ()) else iterator


def _sampler_of(loader: Any) -> Any:
    return loader.sampler if type(loader.batch_sampler) in (type(None), BatchSampler) else loader.batch_sampler


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The generators that a pass may draw from, each once."""
    found: dict[str, torch.Generator] = {}
    batches = getattr(loader, "batch_sampler", None)
    for name, holder in (("loader", loader), ("sampler", loader.sampler), ("batch_sampler", batches)):
        generator = getattr(holder, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found.values()):
            found[name] = generator
    return found


def tell_sampler(loader: Any) -> dict[str, Any]:
    """What is known of a sampler between two epochs."""
    sampler = _sampler_of(loader)
    if is_stateful(sampler):
        return {"sampler": copy.deepcopy(sampler.state_dict())}
    epoch = getattr(sampler, "epoch", None)
    return {"epoch": epoch} if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else {}


def tell(loader: Any, iterator: Any, drawn: int, exhausted: bool) -> dict[str, Any]:
    """Where a sampler stands in the middle of an epoch, after so many index lists."""
    told = tell_sampler(loader)
    if isinstance(iterator, StartsOver):
        iterator = iterator.iterator
    inner = iterator.inner if isinstance(iterator, Batches) else iterator
    if is_stateful(inner):
        told["iterator"] = copy.deepcopy(inner.state_dict())
    return {**told, "drawn": drawn, "exhausted": exhausted}


def begin_after(loader: Any, told: dict[str, Any]) -> None:
    """Before the iterator of the next epoch is made: have the sampler know what came before it."""
    sampler = _sampler_of(loader)
    if "sampler" not in told or not is_stateful(sampler):
        return
    epoch = getattr(sampler, "epoch", None)
    sampler.load_state_dict(copy.deepcopy(told["sampler"]))
    if isinstance(epoch, int) and hasattr(sampler, "set_epoch") and epoch > sampler.epoch:
        sampler.set_epoch(epoch)  # as the trainer has just said


class StartsOver:
    """An iterator of a sampler that was told its own end: where that brings it to its end, another one is made."""

    def __init__(self, iterator: Any, make: Callable[[], Any]) -> None:
        self.iterator = iterator
        self._make: Callable[[], Any] | None = make

    def __iter__(self) -> StartsOver:
        return self

    def __next__(self) -> Any:
        make, self._make = self._make, None
        try:
            return next(self.iterator)
        except StopIteration:
            if make is None:
                raise
        self.iterator = make()
        return next(self.iterator)


def restore_sampler(loader: Any, told: dict[str, Any]) -> None:
    """Before the iterator of an epoch is made that goes on from its middle."""
    sampler = _sampler_of(loader)
    if "sampler" in told and is_stateful(sampler):
        sampler.load_state_dict(copy.deepcopy(told["sampler"]))
    elif "epoch" in told and getattr(sampler, "epoch", None) != told["epoch"] and hasattr(sampler, "set_epoch"):
        sampler.set_epoch(told["epoch"])


def restore(loader: Any, iterator: Any, told: dict[str, Any]) -> Any:
    """An iterator that goes on where the sampler stood; `iterator` was just made."""
    if told["exhausted"]:
        return iter(())
    inner = iterator.open() if isinstance(iterator, Batches) and "iterator" in told else iterator
    if "iterator" in told and is_stateful(inner):
        inner.load_state_dict(copy.deepcopy(told["iterator"]))
        return iterator
    if "sampler" in told and is_stateful(_sampler_of(loader)):
        return iterator
    if not isinstance(loader.dataset, torch.utils.data.IterableDataset):
        next(itertools.islice(iterator, told["drawn"], told["drawn"]), None)
    return iterator
