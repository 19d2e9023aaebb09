"""Tasks on their way to a worker: one by one, or several in a chunk.

Reads   functions and arguments.
Writes  bytes.
Never   lets one task that cannot be pickled take others along.

What is defined in `__main__`, a notebook or a REPL, and lambdas and closures, travel by value (cloudpickle): no worker
need be able to import them. Everything else travels by name, which is faster.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple

import cloudpickle

_MAIN = b"__main__"


class Item:
    """Tasks with one function that are sent together: `submit` has one, `map` as many as it likes.

    Subclasses say what becomes of the outcome.
    """

    __slots__ = ("alone", "function", "kwargs", "number", "rows")

    def __init__(self, function: Any, rows: list[tuple[Any, ...]], kwargs: dict[str, Any] | None = None) -> None:
        self.function = function
        self.rows = rows  # the arguments of each
        self.kwargs = kwargs or {}
        self.number = -1  # of the first, in the order of submission
        self.alone = len(rows) > 1  # not to be put together with others

    def begin(self) -> bool:
        """It is sent to a worker; False: nobody wants it any more."""
        raise NotImplementedError

    def settle(self, values: list[Any], errors: dict[int, BaseException]) -> None:
        """What came of each row: a value, unless there is an error. Called once."""
        raise NotImplementedError

    def drop(self) -> None:
        """It was not begun, and will not be."""
        raise NotImplementedError

    def split(self) -> list[Item]:
        """Each row by itself."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        self.settle([None] * len(self.rows), dict.fromkeys(range(len(self.rows)), error))


class Function:
    """What a whole `map` calls: pickled once."""

    __slots__ = ("call", "pickled")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.pickled = dumps(call)


class Segment(NamedTuple):
    """The part of a chunk that has one function."""

    function: int
    positions: range | list[int]
    pickled: bytes  # (rows, kwargs)


class Chunk:
    """What is sent at a time. A *position* counts the rows of all its items."""

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = list(items)
        self.firsts: list[int] = []  # the position of each item's first row
        self.unsendable: dict[int, BaseException] = {}  # by position
        self.size = 0
        self._functions: dict[bytes, int] = {}
        self._segments: list[tuple[Item, Segment]] = []
        for item in self.items:
            self.firsts.append(self.size)
            self._add(item, self.size)
            self.size += len(item.rows)

    def _add(self, item: Item, first: int) -> None:
        positions: range | list[int] = range(first, first + len(item.rows))
        try:
            function = item.function.pickled if type(item.function) is Function else dumps(item.function)
        except Exception as error:
            self.unsendable.update(dict.fromkeys(positions, error))
            return
        try:
            pickled = dumps((item.rows, item.kwargs))
        except Exception:  # a lock, a socket, a generator …: that row alone fails
            positions = [p for p in positions if self._can_be_sent(item, p, first)]
            if not positions:
                return
            pickled = dumps(([item.rows[p - first] for p in positions], item.kwargs))
        number = self._functions.setdefault(function, len(self._functions))
        self._segments.append((item, Segment(number, positions, pickled)))

    def _can_be_sent(self, item: Item, position: int, first: int) -> bool:
        try:
            dumps((item.rows[position - first], item.kwargs))
        except Exception as error:
            self.unsendable[position] = error
            return False
        return True

    @property
    def sendable(self) -> bool:
        return bool(self._segments)

    def item_at(self, position: int) -> tuple[Item, int]:
        """The item that a position belongs to, and which of its rows."""
        for item, first in zip(self.items, self.firsts):
            if position < first + len(item.rows):
                return item, position - first
        raise IndexError(position)

    def encode(self, excluded: frozenset[int], probe: tuple[int, ...] | None) -> bytes:
        segments = [segment for _, segment in self._segments]
        if excluded or probe is not None:
            segments = [s for item, segment in self._segments if (s := self._part(item, segment, excluded, probe))]
        return pickle.dumps((list(self._functions), [tuple(segment) for segment in segments]), 5)

    def _part(
        self, item: Item, segment: Segment, excluded: frozenset[int], probe: tuple[int, ...] | None
    ) -> Segment | None:
        live = [p for p in segment.positions if p not in excluded and (probe is None or p in probe)]
        if not live:
            return None
        first = self.firsts[self.items.index(item)]
        rows = [item.rows[p - first] for p in live]
        return segment._replace(positions=live, pickled=dumps((rows, item.kwargs)))


def dumps(value: Any) -> bytes:
    """By name where a worker can import what it names, else by value."""
    try:
        pickled = pickle.dumps(value, 5)
        if _MAIN not in pickled:
            return pickled
    except Exception:  # a lambda, something defined inside of a function: cloudpickle may know how
        pass
    return cloudpickle.dumps(value, 5)  # type: ignore[no-any-return]
