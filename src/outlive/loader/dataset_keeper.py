"""Keep a dataset's own state from one epoch to the next, for a worker that takes over between the two.

Reads:   the dataset of a worker; in the trainer, what a worker has kept of it.
Writes:  a pickle of its values, which only goes from process to process; for a state, its changed attributes as plain
         data.
Never:   carries large arrays and tensors: those are named by number, and taken to be what they were at first.

Which array has which number follows from the dataset as every worker of a loader gets it, before its first
iter(dataset). So another worker finds the same arrays under the same numbers. A large array that is new since then
cannot be kept, nor can an object with its own way of being pickled: a worker's dataset is in use, not on its way.
"""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Iterator
from typing import Any, TypeAlias

from outlive.engines import payload
from outlive.loader import generator_states
from outlive.loader.plain_values import NotPlainError, from_plain, is_replaceable, to_plain

Attributes: TypeAlias = list[list[Any]]  # paths of names, each with a value as plain data or a generator's state

_LARGE_BYTES = 1 << 20


class DatasetKeeper:
    """One worker's. Make it before the dataset is used."""

    def __init__(self, dataset: Any) -> None:
        self._known: list[Any] = []  # kept alive, so that no other object gets one of their ids
        self._numbers: dict[int, int] = {}
        self._failure: Exception | None = None
        try:
            _dumped(_Survey, dataset, self._known, self._numbers)
        except Exception as error:
            self._failure = error

    def keep(self, dataset: Any) -> bytes:
        """Pickle what `restore` needs. Raise an exception where the state cannot be kept."""
        if self._failure is not None:
            raise self._failure
        return _dumped(_Keeping, dataset, self._known, self._numbers)

    def restore(self, kept: bytes) -> Any:
        """Return a dataset as it was when it was kept, with this worker's large arrays."""
        unpickler = _Restoring(io.BytesIO(kept))
        unpickler.known = self._known
        return unpickler.load()


class _Keeping(pickle.Pickler):
    known: list[Any]
    numbers: dict[int, int]

    def reducer_override(self, obj: Any) -> Any:
        if payload.runs_user_code(type(obj), ("__getstate__",)):
            raise TypeError(f"{type(obj).__name__} has its own way of being pickled")
        return NotImplemented

    def persistent_id(self, obj: Any) -> int | None:
        size = getattr(type(obj), "nbytes", None)
        if size is None or callable(size) or obj.nbytes <= _LARGE_BYTES:  # callable: a storage, whose tensor was asked
            return None
        return self._number(obj)

    def _number(self, obj: Any) -> int:
        try:
            return self.numbers[id(obj)]
        except KeyError:
            raise OverflowError(f"it holds a new array of {obj.nbytes} bytes") from None


class _Survey(_Keeping):
    """Gives numbers, in the order of meeting."""

    def _number(self, obj: Any) -> int:
        if id(obj) not in self.numbers:
            self.numbers[id(obj)] = len(self.known)
            self.known.append(obj)
        return self.numbers[id(obj)]


class _Restoring(pickle.Unpickler):
    known: list[Any]

    def persistent_load(self, number: Any) -> Any:
        if number >= len(self.known):
            raise pickle.UnpicklingError("the dataset is not the one whose state was kept: it has fewer large arrays")
        return self.known[number]


def _dumped(kind: type[_Keeping], dataset: Any, known: list[Any], numbers: dict[int, int]) -> bytes:
    file = io.BytesIO()
    pickler = kind(file, 5)
    pickler.known, pickler.numbers = known, numbers
    pickler.dump(dataset)
    return file.getvalue()


# ---------------------------------------------------------------- in a state


def changed_attributes(dataset: Any, kept: bytes) -> Attributes | None:
    """Return what differs in a dataset that a worker has kept from the trainer's. None: plain data cannot say it."""
    try:
        keeper = DatasetKeeper(dataset)
        here, there = keeper.restore(keeper.keep(dataset)), keeper.restore(kept)  # both went through a pickle
        return list(_differences(here, there, [], keeper))
    except Exception:  # it, or what is in it, cannot be pickled here, or is no longer what it was
        return None


def with_attributes(dataset: Any, attributes: Attributes) -> bytes:
    """Return what a worker restores: the trainer's dataset, with attributes that were told of another one. Raise an
    exception where they do not fit it.
    """
    keeper = DatasetKeeper(dataset)
    copy = keeper.restore(keeper.keep(dataset))
    for (*path, name), told in attributes:
        owner, ours = copy, dataset
        for step in path:
            owner, ours = vars(owner)[step], vars(ours)[step]
        if owner is ours or not is_replaceable(owner, name):  # a class, a function: all of the program has those
            raise ValueError(f"{'.'.join([*path, name])} is nothing that a state may set")
        if isinstance(told, dict) and "!generator" in told:
            generator_states.put(vars(owner)[name], told["!generator"])
        else:
            vars(owner)[name] = from_plain(told)
    return keeper.keep(copy)


def _differences(here: Any, there: Any, path: list[str], keeper: DatasetKeeper) -> Iterator[list[Any]]:
    before, now = vars(here), vars(there)
    if type(here) is not type(there) or before.keys() - now.keys():
        raise NotPlainError(f"{path} is of another type, or has lost an attribute")
    for name, value in now.items():
        known = before.get(name)
        if name in before and (value is known or _is_same(known, value, keeper)):
            continue
        if generator_states.is_generator(value) and type(known) is type(value):
            yield [[*path, name], {"!generator": generator_states.get(value)}]
            continue
        try:
            yield [[*path, name], to_plain(value)]
        except NotPlainError:
            if name not in before:
                raise
            yield from _differences(known, value, [*path, name], keeper)


def _is_same(known: Any, value: Any, keeper: DatasetKeeper) -> bool:
    try:
        return json.dumps(to_plain(known)) == json.dumps(to_plain(value))
    except NotPlainError:
        return keeper.keep(known) == keeper.keep(value)
