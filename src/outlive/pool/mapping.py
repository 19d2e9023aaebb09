"""`map`: lazy, bounded, in order or as results come.

Reads   iterables, as far as there is room for their items.
Writes  items, to the manager.
Never   more than `in_flight` items at a time, however long the iterable is.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, NamedTuple

from outlive import tables
from outlive.pool.bars import Bar
from outlive.pool.door import shown
from outlive.pool.work import Function, Item

_USUAL_IN_FLIGHT = 4096  # a chunk of short items has a thousand
_WORDS = ("raise", "skip", "none")
_TOO_LATE = (
    "the pool was shut down before its map was read to the end, and map takes items up as results are read: read it "
    "inside of the with block"
)


class Failed(NamedTuple):
    """A task that `map` left out."""

    args: tuple[Any, ...]
    error: BaseException

    @property
    def incident(self) -> Any:
        return getattr(self.error, "incident", None)


class Failures(list[Failed]):
    """In the order in which they were left out; a notebook shows them as a table."""

    def _repr_html_(self) -> str:
        return tables.of_failures([(", ".join(map(shown, failed.args)), failed.error) for failed in self])


class _Bunch(Item):
    """Some items of a `map`, one after the other."""

    __slots__ = ("errors", "first", "mapping", "values")

    def __init__(self, mapping: Mapping, first: int, rows: list[Any]) -> None:
        super().__init__(mapping.function, rows)
        self.mapping = mapping
        self.single = mapping.single
        self.apart = mapping.apart
        self.first = first  # the place of the first in all that the iterable gives
        self.values: list[Any] = []
        self.errors: dict[int, BaseException] = {}

    def begin(self) -> bool:
        return not self.mapping.abandoned

    def settle(self, values: list[Any], errors: dict[int, BaseException]) -> None:
        self.values, self.errors = values, errors
        self.mapping.arrived(self)

    def drop(self) -> None:
        self.fail(CancelledError())

    def part(self, start: int, stop: int) -> Item:
        part = _Bunch(self.mapping, self.first + start, self.rows[start:stop])
        part.number = self.number + start
        part.blobs = {row - start: blob for row, blob in self.blobs.items() if start <= row < stop}
        if self.whole is not None:
            part.whole = self.whole[0], self.whole[1][start:stop]
        return part


class Mapping:
    """One call of `map`."""

    def __init__(
        self,
        manager: Any,
        fn: Callable[..., Any],
        iterables: Sequence[Iterable[Any]] | None,
        chunksize: Any,
        ordered: bool,
        faults: str,
        in_flight: int | None,
        failures: list[Failed],
        rows: Iterable[Iterable[Any]] = (),
        bar: Bar | None = None,
    ) -> None:
        if chunksize != "auto" and (isinstance(chunksize, bool) or not isinstance(chunksize, int) or chunksize < 1):
            raise ValueError(f'chunksize must be a whole number >= 1 or "auto", got {chunksize!r}')
        if faults not in _WORDS:
            raise ValueError(f'faults must be "raise", "skip" or "none" here, got {faults!r}')
        if in_flight is not None and (isinstance(in_flight, bool) or not isinstance(in_flight, int) or in_flight < 1):
            raise ValueError(f"in_flight must be a whole number >= 1, got {in_flight!r}")
        self._manager = manager
        self._bar = bar
        # One at a time means that no item waits for another; where they are short, none does.
        self._size = None if chunksize in ("auto", 1) else chunksize
        if manager.at_most_once:
            self._size = 1  # else what was done before a death would have to be done again, or be lost
        self.apart = self._size in (None, 1)
        self._ordered = ordered
        self._faults = faults
        self._failures = failures
        self._in_flight = in_flight
        self.single = iterables is not None and len(iterables) == 1
        if iterables is None:
            self._rows: Iterator[Any] = (tuple(row) for row in rows)
        else:
            self._rows = iter(iterables[0]) if self.single else zip(*iterables)
        self._news = threading.Event()
        self._arrived: deque[_Bunch] = deque()
        self._early: dict[int, _Bunch] = {}  # arrived before their turn, by the place of their first
        self._under_way = 0
        self._drawn = 0
        self._exhausted = False
        self.abandoned = False
        manager.check_open()
        self.function = Function(fn)
        self._fill()

    def arrived(self, bunch: _Bunch) -> None:
        """From the manager's thread."""
        if self._bar is not None:
            self._bar.add(len(bunch.rows), len(bunch.errors))
        self._arrived.append(bunch)
        self._news.set()

    @property
    def _most(self) -> int:
        """How many may be under way or waiting."""
        if self._in_flight is not None:
            return self._in_flight
        usual: int = max(_USUAL_IN_FLIGHT, 32 * self._manager.workers * (self._size or 1))
        return max(min(usual, int(self._manager.good_flight)), self._size or 1)

    def _fill(self) -> None:
        """Submit until as many are under way as may be; not for each one."""
        most = self._most
        room = most - self._under_way
        if self._exhausted or room < max(1, most // 4):
            return
        bunches: list[Item] = []
        size = max(self._size or 1, int(self._manager.good_size(most)))
        while room > 0:
            rows = list(itertools.islice(self._rows, min(size, room) if self._size is None else size))
            if not rows:
                self._exhausted = True
                break
            bunches.append(_Bunch(self, self._drawn, rows))
            self._drawn += len(rows)
            room -= len(rows)
        self._under_way = most - room
        if bunches:
            try:
                self._manager.add(bunches)
            except RuntimeError as error:
                if not self._manager.is_stopping:
                    raise
                raise RuntimeError(f"{_TOO_LATE} ({self._drawn} items were begun)") from error

    def results(self, timeout: float | None) -> Iterator[Any]:
        results = self._results(None if timeout is None else time.monotonic() + timeout)
        return results if self._bar is None else self._bar.around(results)

    def _results(self, end: float | None) -> Iterator[Any]:
        try:
            turn = 0
            while True:
                bunch = self._next(turn, end)
                if bunch is None:
                    return
                turn += len(bunch.rows)
                if bunch.errors:
                    yield from self._with_errors(bunch)
                else:
                    values = bunch.values
                    del bunch
                    values.reverse()
                    # Each is handed out and not kept.
                    yield from map(values.pop, range(len(values) - 1, -1, -1))
        finally:
            self.abandoned = True
            self._early.clear()

    def _with_errors(self, bunch: _Bunch) -> Iterator[Any]:
        for number in range(len(bunch.rows)):
            error = bunch.errors.get(number)
            if error is None:
                yield bunch.values[number]
                bunch.values[number] = None
            elif self._faults == "raise":
                try:
                    raise error
                finally:
                    del error, bunch  # its traceback leads here
            else:
                self._failures.append(Failed(bunch.row(number), error))
                if self._faults == "none":
                    yield None

    def _next(self, turn: int, end: float | None) -> _Bunch | None:
        """The bunch whose turn it is; None: there is none left."""
        while True:
            if self._bar is not None:
                self._bar.tick()
            if self._ordered and turn in self._early:
                bunch = self._early.pop(turn)
                self._under_way -= len(bunch.rows)
            elif self._arrived:
                bunch = self._arrived.popleft()
                if self._ordered and bunch.first != turn:
                    self._early[bunch.first] = bunch
                    continue
                self._under_way -= len(bunch.rows)
            else:
                self._fill()
                if not self._under_way and not self._arrived:
                    return None
                self._wait(end)
                continue
            self._fill()
            return bunch

    def _wait(self, end: float | None) -> None:
        self._news.clear()
        if self._arrived:
            return
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise FutureTimeoutError()
        self._news.wait(left if self._bar is None else self._bar.nap_s(left))
