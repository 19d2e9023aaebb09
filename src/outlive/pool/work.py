"""Tasks on their way to a worker: one by one, or several in a chunk.

Reads   functions and arguments.
Writes  parts of messages.
Never   lets one task that cannot be pickled take others along.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from outlive._share.sharing import share
from outlive.pool import parcels
from outlive.pool.parcels import Blob, are_plain, blob_of, dumps

_LARGE_FUNCTION = 1 << 16


class Item:
    """Tasks with one function that are sent together: `submit` has one, `map` as many as it likes.

    Subclasses say what becomes of the outcome.
    """

    __slots__ = ("alone", "apart", "blobs", "function", "kwargs", "number", "rows", "single", "whole")

    def __init__(self, function: Any, rows: list[Any], kwargs: dict[str, Any] | None = None) -> None:
        self.function = function
        self.rows = rows  # a tuple of arguments for each,
        self.single = False  # or the one argument of each
        self.kwargs = kwargs or {}
        self.number = -1  # of the first, in the order of submission
        self.alone = False  # not to be put together with others
        self.apart = True  # rows have no object in common, on the other side
        self.blobs: dict[int, Blob] = {}  # rows that were pickled already: another attempt is given what the first was
        self.whole: tuple[Blob, Sequence[int]] | None = None  # or the one pickle of all, and where in it its rows are

    def row(self, number: int) -> tuple[Any, ...]:
        return (self.rows[number],) if self.single else self.rows[number]

    def begin(self) -> bool:
        """It is sent to a worker; False: nobody wants it any more."""
        raise NotImplementedError

    def settle(self, values: list[Any], errors: dict[int, BaseException]) -> None:
        """What came of each row: a value, unless there is an error. Called once."""
        raise NotImplementedError

    def drop(self) -> None:
        """It was not begun, and will not be."""
        raise NotImplementedError

    def part(self, start: int, stop: int) -> Item:
        """Some of its rows by themselves; all parts together take its place."""
        raise NotImplementedError

    def fail(self, error: BaseException) -> None:
        self.settle([None] * len(self.rows), dict.fromkeys(range(len(self.rows)), error))


class Function:
    """What a whole `map` calls: pickled once, and sent once where it is large."""

    __slots__ = ("_shared", "call", "pickled")

    def __init__(self, call: Any) -> None:
        self.call = call
        self.pickled = dumps(call)
        self._shared: Any = None
        if len(self.pickled) > _LARGE_FUNCTION:  # a closure over data, a method of a large object
            self._shared = Shared(share(np.frombuffer(self.pickled, np.uint8)))
            self.pickled = dumps(self._shared)


class Shared:
    """A pickle in shared memory: what travels is where it lies."""

    def __init__(self, pickled: Any) -> None:
        self.pickled = pickled


class Sent(NamedTuple):
    """A function on its way: a whole `map`'s, or one task's."""

    pickled: bytes
    mapped: bool


class Segment(NamedTuple):
    """The part of a chunk that has one function."""

    function: int
    positions: range | list[int]
    apart: bool  # a pickle (row, kwargs) for each; else one (columns, kwargs) for all
    blobs: list[Blob]
    rows: list[int] | None = None  # those of the one pickle that are wanted; None: all


class Chunk:
    """What is sent at a time. A *position* counts the rows of all its items."""

    def __init__(self, items: Sequence[Item], *, keep: bool = True) -> None:
        self.items = list(items)
        self._keep = keep  # it may be sent again
        self.firsts: list[int] = []  # the position of each item's first row
        self.unsendable: dict[int, BaseException] = {}  # by position
        self.size = 0
        self._functions: dict[Sent, int] = {}
        self._segments: list[Segment] = []
        self._was_sent = False
        for run in _runs(self.items):
            first = self.size
            for item in run:
                self.firsts.append(self.size)
                self.size += len(item.rows)
            self._add(run, range(first, self.size))

    def _add(self, run: list[Item], positions: range) -> None:
        item = run[0]
        try:
            mapped = type(item.function) is Function
            sent = Sent(item.function.pickled if mapped else dumps(item.function), mapped)
        except Exception as error:
            self.unsendable.update(dict.fromkeys(positions, error))
            return
        function = self._functions.setdefault(sent, len(self._functions))
        rows = item.rows if len(run) == 1 else [row for item in run for row in item.rows]
        columns = [rows] if item.single else list(zip(*rows))
        even = item.single or len(set(map(len, rows))) == 1
        if not item.kwargs and even and all(map(are_plain, columns)):
            self._segments.append(Segment(function, positions, False, [blob_of((columns, None), plain=True)]))
        elif item.apart:
            self._add_apart(function, positions, run)
        else:
            self._add_whole(function, positions, columns, run)

    def _add_apart(self, function: int, positions: range, run: list[Item]) -> None:
        live, blobs = [], []
        places = ((item, row) for item in run for row in range(len(item.rows)))
        for position, (item, row) in zip(positions, places):
            try:
                if row not in item.blobs:
                    item.blobs[row] = blob_of((item.row(row), item.kwargs), keep=self._keep)
                blobs.append(item.blobs[row])
                live.append(position)
            except Exception as error:  # a lock, a socket, a generator …: that row alone fails
                self.unsendable[position] = error
        if live:
            self._segments.append(Segment(function, live, True, blobs))

    def _add_whole(self, function: int, positions: range, columns: list[Any], run: list[Item]) -> None:
        item = run[0]
        try:
            if item.whole is not None:
                blob, rows = item.whole
                self._segments.append(Segment(function, positions, False, [blob], list(rows)))
                return
            blob = blob_of((columns, None), keep=self._keep)
            self._segments.append(Segment(function, positions, False, [blob]))
            if self._keep:
                item.whole = blob, range(len(item.rows))
        except Exception:
            self._add_apart(function, positions, run)

    @property
    def sendable(self) -> bool:
        return bool(self._segments)

    @property
    def nbytes(self) -> int:
        """Of the arguments, pickled."""
        return sum(
            blob.size + sum(buffer.nbytes for buffer in blob.buffers) for s in self._segments for blob in s.blobs
        )

    def item_at(self, position: int) -> tuple[Item, int]:
        """The item that a position belongs to, and which of its rows."""
        for item, first in zip(self.items, self.firsts):
            if position < first + len(item.rows):
                return item, position - first
        raise IndexError(position)

    def encode(self, excluded: frozenset[int], probe: tuple[int, ...] | None) -> list[Any]:
        segments = self._segments
        if excluded or probe is not None:
            segments = [part for s in segments if (part := self._part(s, excluded, probe)).positions]
        blobs = [blob for segment in segments for blob in segment.blobs]
        together = not any(item.apart for item in self.items)
        # Sent again, one of them may have killed a worker: how often is counted for as long as they are together.
        hands_back, self._was_sent = not self._was_sent, True
        told = [(s.function, s.positions, s.apart, s.rows) for s in segments]
        head = (list(map(tuple, self._functions)), told, together, hands_back)
        return parcels.message(head, blobs)

    def _part(self, segment: Segment, excluded: frozenset[int], probe: tuple[int, ...] | None) -> Segment:
        """What is left of a segment. It is not pickled again: the caller may have changed the arguments meanwhile."""
        rows = [
            row
            for row, position in enumerate(segment.positions)
            if position not in excluded and (probe is None or position in probe)
        ]
        live = [segment.positions[row] for row in rows]
        if segment.apart:
            return Segment(segment.function, live, True, [segment.blobs[row] for row in rows])
        if segment.rows is not None:
            rows = [segment.rows[row] for row in rows]
        return Segment(segment.function, live, False, segment.blobs, rows)


def _runs(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Items that can be sent as if they were one: of one function."""
    for _, group in itertools.groupby(items, lambda item: (id(item.function), item.apart and not item.kwargs)):
        run = list(group)
        if run[0].apart and not run[0].kwargs:
            yield run
        else:
            yield from ([item] for item in run)
