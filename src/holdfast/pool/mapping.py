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

from holdfast import tables
from holdfast.pool.bars import Bar
from holdfast.pool.door import shown
from holdfast.pool.work import Function, Item

_LEAST_IN_FLIGHT = 1024  # short items cost a thousandth of this; long ones are waited for, not kept
_WORDS = ("raise", "skip", "none")


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

    def __init__(self, mapping: Mapping, first: int, rows: list[tuple[Any, ...]]) -> None:
        super().__init__(mapping.function, rows)
        self.mapping = mapping
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

    def split(self) -> list[Item]:
        parts: list[Item] = [_Bunch(self.mapping, self.first + n, [row]) for n, row in enumerate(self.rows)]
        for number, part in enumerate(parts):
            part.alone, part.number = True, self.number + number
        return parts


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
        self._size = None if chunksize == "auto" else chunksize
        if manager.at_most_once:
            self._size = 1  # else what was done before a death would have to be done again, or be lost
        self._ordered = ordered
        self._faults = faults
        self._failures = failures
        self._most = in_flight or max(_LEAST_IN_FLIGHT, 16 * manager.workers * (self._size or 1))
        self._rows = (tuple(row) for row in rows) if iterables is None else zip(*iterables)
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

    def _fill(self) -> None:
        """Submit until as many are under way as may be; not for each one."""
        room = self._most - self._under_way
        if self._exhausted or room < max(1, self._most // 4):
            return
        bunches: list[Item] = []
        size = self._size or self._manager.good_size(self._most)
        while room > 0:
            rows = list(itertools.islice(self._rows, min(size, room) if self._size is None else size))
            if not rows:
                self._exhausted = True
                break
            bunches.append(_Bunch(self, self._drawn, rows))
            self._drawn += len(rows)
            room -= len(rows)
        self._under_way = self._most - room
        if bunches:
            self._manager.add(bunches)

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
                    while values:
                        yield values.pop()  # nothing here holds on to it
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
                self._failures.append(Failed(bunch.rows[number], error))
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
