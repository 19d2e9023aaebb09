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

import numpy
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from outlive import errors
from outlive.loader import generator_states
from outlive.loader.jobs import is_stateful
from outlive.loader.plain_values import is_replaceable

_SMALL = 64  # parts of a container that are looked at one by one
_COUNTERS = (bool, int, float, str, type(None))
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
    return type(_sampler_of(loader)) in _OF_TORCH


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
    """The sampler that decides: beside a batch sampler, torch gives a loader another one, which nobody asks."""
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    while type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return sampler


def _samplers_of(loader: Any) -> Iterator[tuple[str, Any]]:
    """Those of a loader, and those in their attributes, to any depth; each once, with its path."""
    waiting = [("sampler", loader.sampler), ("batch_sampler", getattr(loader, "batch_sampler", None))]
    seen: list[Any] = []
    while waiting:
        path, sampler = waiting.pop(0)
        if sampler is None or any(sampler is known for known in seen):
            continue
        seen.append(sampler)
        yield path, sampler
        for name, value in _parts_of(sampler):
            if _is_sampler(name, value):
                waiting.append((f"{path}.{name}", value))


def _is_sampler(name: str, value: Any) -> bool:
    return isinstance(value, Sampler) or (name.endswith("sampler") and hasattr(value, "__iter__"))


def _attributes_of(sampler: Any) -> list[tuple[str, Any]]:
    found = dict(getattr(sampler, "__dict__", {}))  # a list of indices, a range have none
    for kind in type(sampler).__mro__:
        names = vars(kind).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(sampler, name):
                found[name] = getattr(sampler, name)
    return list(found.items())


def _parts_of(sampler: Any) -> Iterator[tuple[str, Any]]:
    """Its attributes, and what is in those that are small containers, to any depth."""
    waiting = _attributes_of(sampler)
    seen: list[Any] = []
    while waiting:
        name, value = waiting.pop(0)
        yield name, value
        if type(value) in (list, tuple, dict) and len(value) <= _SMALL and not any(value is known for known in seen):
            seen.append(value)
            items = value.items() if isinstance(value, dict) else enumerate(value)
            waiting += [(f"{name}[{key!r}]", part) for key, part in items]


def generators_of(loader: Any) -> dict[str, Any]:
    """The random generators that a pass may draw from, each once: torch's, NumPy's and Python's."""
    found: dict[str, Any] = {}
    held = [("loader", getattr(loader, "generator", None))]
    for path, sampler in _samplers_of(loader):
        held += [(path if name == "generator" else f"{path}.{name}", value) for name, value in _parts_of(sampler)]
    for name, value in held:
        is_known = any(value is known for known in found.values())
        if generator_states.is_generator(value) and not is_known:
            found[name] = value
    return found


def counters_of(loader: Any) -> dict[str, Any]:
    """Plain values and small arrays in the attributes of samplers that do not tell their state themselves: counts of
    epochs, flags.
    """
    found = {}
    for path, sampler in _samplers_of(loader):
        if type(sampler) in (*_OF_TORCH, BatchSampler) or is_stateful(sampler):
            continue
        for name, value in _attributes_of(sampler):
            if name == "epoch" and hasattr(sampler, "set_epoch"):
                continue  # which the trainer says
            if type(value) in _COUNTERS:
                found[f"{path}.{name}"] = value
            elif _is_small(value):
                found[f"{path}.{name}"] = value.tolist()
    return found


def check_counters(loader: Any, told: dict[str, Any]) -> None:
    """Raise `ValueError` where `set_counters` would replace a sampler, a generator or what a class defines."""
    samplers = dict(_samplers_of(loader))
    for name in told:
        path, _, attribute = name.rpartition(".")
        if path not in samplers:
            continue
        known = dict(_attributes_of(samplers[path])).get(attribute)
        draws = _is_sampler(attribute, known) or generator_states.is_generator(known) or callable(known)
        if draws or not is_replaceable(samplers[path], attribute):
            raise ValueError(f"{name} is nothing that a state may set")
        if isinstance(told[name], list) and not _is_small(known):
            raise ValueError(f"{name} is no array")
        _like(known, told[name])


def _like(known: Any, value: Any) -> Any:
    """A value as a sampler has it now: an array or a tensor of the same kind, or as it is."""
    if isinstance(known, torch.Tensor):
        return torch.tensor(value, dtype=known.dtype, device=known.device)
    if isinstance(known, (numpy.ndarray, numpy.generic)):
        return numpy.array(value, dtype=known.dtype)[()]
    return value


def _is_small(value: Any) -> bool:
    """Whether this is an array or a tensor of a few numbers."""
    if isinstance(value, torch.Tensor):
        return value.numel() <= _SMALL and not value.is_complex()
    return isinstance(value, (numpy.ndarray, numpy.generic)) and value.size <= _SMALL and value.dtype.kind in "biuf"


def set_counters(loader: Any, told: dict[str, Any]) -> None:
    samplers = dict(_samplers_of(loader))
    for name, value in told.items():
        path, _, attribute = name.rpartition(".")
        if path in samplers:
            setattr(samplers[path], attribute, _like(getattr(samplers[path], attribute, None), value))


def check_can_be_told(loader: Any) -> None:
    """Raise PositionError where a sampler keeps what no state can say."""
    for path, sampler in _samplers_of(loader):
        if is_stateful(sampler):
            continue
        for name, value in _attributes_of(sampler):
            if isinstance(value, Iterator) and not is_stateful(value):
                kind = type(sampler).__name__
                raise errors.PositionError(
                    f"{path} ({kind}) keeps an iterator in its attribute {name!r}, whose place cannot be saved. "
                    f"Give {kind} the methods state_dict() and load_state_dict()"
                )


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
