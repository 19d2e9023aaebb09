"""Keep a dataset's own state from one epoch to the next, for a worker that takes over between the two.

Reads:   the dataset of a worker.
Writes:  a pickle of its plain values.
Never:   carries large arrays and tensors: those are named by number, and taken to be what they were at first.

Which array has which number follows from the dataset as every worker of a loader gets it, before its first
iter(dataset). So another worker finds the same arrays under the same numbers. A large array that is new since then
cannot be kept, nor can an object with its own way of being pickled: a worker's dataset is in use, not on its way.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

from outlive.engines import payload

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
        if getattr(type(obj), "nbytes", None) is None or obj.nbytes <= _LARGE_BYTES:
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
