"""`set_epoch` reaches workers that persist: a call in the trainer is noted, and repeated in every worker.

Reads   the dataset, and the datasets in it, for objects that have the method.
Writes  their classes: `set_epoch` notes its arguments after it has done what it does.
Never   sends a dataset again, however large it is; a call is a few bytes.

The rule: of each such object the last call counts. It is repeated when the next epoch begins, before iter(dataset),
and in a replacement before it goes on. Random numbers that it draws in a worker are put back.
"""

from __future__ import annotations

import functools
import logging
import pickle
import types
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from outlive.loader.plain_values import NotPlainError, from_plain, to_plain

log = logging.getLogger("outlive")

_METHOD = "set_epoch"
_MOST_OBJECTS = 1000
_MOST_ELEMENTS = 1000  # of a list or dict that is looked through: a list of samples is none


class Call(NamedTuple):
    path: tuple[Any, ...]  # attributes, positions and keys that lead from the dataset to the object
    args: tuple[Any, ...]
    named: dict[str, Any]


def to_plain_calls(calls: tuple[Call, ...]) -> list[Any]:
    """What a state has of calls: those whose arguments are plain data."""
    told = []
    for call in calls:
        try:
            told.append([to_plain(list(call.path)), to_plain(list(call.args)), to_plain(call.named)])
        except NotPlainError as error:
            _complain_once(f"a call of set_epoch is left out of the loader's state: {error}")
    return told


def from_plain_calls(told: Any) -> tuple[Call, ...]:
    return tuple(
        Call(tuple(from_plain(path)), tuple(from_plain(args)), from_plain(named)) for path, args, named in told
    )


def check_calls(calls: tuple[Call, ...], dataset: Any) -> None:
    """Raise `ValueError` where a call leads to nothing in the dataset that has the method."""
    known = [path for path, _ in _targets(dataset)] if calls else []
    for call in calls:
        if call.path not in known or not isinstance(call.named, dict):
            raise ValueError(f"the dataset has no set_epoch at {call.path!r}")


@functools.cache
def _complain_once(words: str) -> None:
    log.warning("%s", words)


class Note(NamedTuple):
    """What workers are told about an epoch."""

    shared_seed: int | None = None
    calls: tuple[Call, ...] = ()

    def repeat_calls(self, dataset: Any) -> None:
        for call in self.calls:
            target = dataset
            for step in call.path:
                target = target[step] if isinstance(target, (list, tuple, dict)) else vars(target)[step]
            getattr(target, _METHOD)(*call.args, **call.named)


def is_settable(dataset: Any) -> bool:
    """Whether the trainer may tell this dataset, or one in it, which epoch comes."""
    return next(_targets(dataset), None) is not None


class Calls:
    """Those that the trainer has made since this was made, to a dataset and what is in it."""

    def __init__(self, dataset: Any) -> None:
        self._heard: list[tuple[tuple[Any, ...], _Heard]] = []
        for path, target in _targets(dataset):
            if _listen_to(type(target)):
                self._heard.append((path, _hear(target)))
        self._complained = False

    def all(self) -> tuple[Call, ...]:
        found = (Call(path, *heard.call) for path, heard in self._heard if heard.call is not None)
        return tuple(call for call in found if self._travels(call))

    def _travels(self, call: Call) -> bool:
        try:
            pickle.dumps(call)
        except Exception as error:
            if not self._complained:
                self._complained = True
                log.warning("a call of set_epoch does not reach the workers, for it cannot be pickled: %r", error)
            return False
        return True


class _Heard:
    """The last call of an object, which is kept so that its id stays its own."""

    def __init__(self, target: Any) -> None:
        self.target = target
        self.call: tuple[tuple[Any, ...], dict[str, Any]] | None = None


_listening: weakref.WeakValueDictionary[int, _Heard] = weakref.WeakValueDictionary()


def is_listening(target: Any) -> bool:
    """Whether calls of this object's `set_epoch` are noted, for a loader that lives."""
    return id(target) in _listening


def _hear(target: Any) -> _Heard:
    heard = _listening.get(id(target))
    if heard is None:
        heard = _listening[id(target)] = _Heard(target)
    return heard


def _listen_to(kind: type) -> bool:
    """Have calls noted of objects of this class that somebody listens to."""
    owner = next(owner for owner in kind.__mro__ if _METHOD in vars(owner))
    theirs = vars(owner)[_METHOD]
    if hasattr(theirs, "_notes_calls"):
        return True
    if not isinstance(theirs, types.FunctionType):
        return False

    @functools.wraps(theirs)
    def set_epoch(self: Any, *args: Any, **named: Any) -> Any:
        answer = theirs(self, *args, **named)
        heard = _listening.get(id(self))
        if heard is not None:
            heard.call = args, named
        return answer

    set_epoch._notes_calls = True  # type: ignore[attr-defined]
    setattr(owner, _METHOD, set_epoch)
    return True


def _targets(dataset: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Objects with the method: the dataset, what it has in attributes, and the datasets among those, to any depth."""
    waiting: list[tuple[tuple[Any, ...], Any]] = [((), dataset)]
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_OBJECTS:
        path, obj = waiting.pop(0)
        if id(obj) in seen:
            continue
        seen.add(id(obj))
        if hasattr(type(obj), _METHOD):
            yield path, obj
        try:
            attributes = list(vars(obj).items())
        except TypeError:
            continue  # nothing of Python's, or with __slots__
        for name, value in attributes:
            if _is_carrier(value):
                waiting.append(((*path, name), value))
            elif isinstance(value, (list, tuple, dict)) and len(value) <= _MOST_ELEMENTS:
                elements = value.items() if isinstance(value, dict) else enumerate(value)
                waiting += [((*path, name, key), element) for key, element in elements if _is_carrier(element)]


def _is_carrier(value: Any) -> bool:
    return isinstance(value, Dataset) or hasattr(type(value), _METHOD)
