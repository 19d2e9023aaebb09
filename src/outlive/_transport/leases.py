"""Leases: which parts of a cell the trainer still looks at, and what becomes of the others.

Reads   nothing.
Writes  nothing; gives pages of cells back to the kernel that nothing looks at.
Never   gives back a page that anything may look at: here, in a fork of this process, or in the worker.

    lent ─ last lease ends ─► free: the worker writes there again
      └ some leases ended a while ago ─► thinned: the pages between are given back, the worker drops the cell

Each large tensor of a batch has a lease of its own, so that a tensor which is kept costs only itself.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from outlive._system import memory

if TYPE_CHECKING:
    import numpy.typing as npt

PAGE = mmap.PAGESIZE
# How many times the worker is sent something before the free parts of a cell are given back: most batches are let go of
# as a whole, tensor by tensor, and faulting pages in again costs more than filling them.
_PATIENCE = 8
_SHARE = 4  # given back is what has become a quarter of what is kept


def _most_maps() -> int:
    """How many cells may be mapped before batches are copied out of them: a quarter of the maps that Linux allows."""
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as file:
            return int(file.read()) // 4
    except (OSError, ValueError):
        return 1 << 14


MOST_MAPS = _most_maps()

# How often this process was forked; one more in the fork.
_forks = [0]


def _count_fork() -> None:
    _forks[0] += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_count_fork, after_in_child=_count_fork)


class Lease(weakref.ref["npt.NDArray[np.uint8]"]):
    """Ends with the array that every view of some bytes holds on to, in whatever thread drops the last of them."""

    __slots__ = ("cell", "span")
    cell: LentCell
    span: tuple[int, int]


def _end(lease: Any) -> None:
    cell = lease.cell
    leases = cell.leases
    leases.pop(id(lease), None)
    if not leases or not cell.is_due:
        cell.look_again()


class Returns:
    """What a worker is to be told of its cells, and what it told."""

    __slots__ = ("freed", "is_over", "partly", "results", "turn", "watched")

    def __init__(self) -> None:
        # Finalizers run in whatever thread drops the last view; append and popleft are atomic.
        self.freed: deque[int] = deque()  # below zero: not to be used again
        self.partly: deque[tuple[int, int, int]] = deque()  # to be thinned: in which turn, which cell, of which result
        self.turn = 0
        self.results = 0  # that came
        self.watched: set[int] = set()  # cells that user code in the worker looks at
        self.is_over = False  # the worker is gone


class LentCell:
    """A cell as the trainer has it. All that finalizers do here is atomic: append, pop, a single store."""

    __slots__ = (
        *("_forks", "_given_back", "_lent", "_returns", "_tally"),
        *("born", "bytes", "held", "is_due", "is_the_workers", "leases", "memory", "number"),
    )

    def __init__(
        self, number: int, mapped: ctypes.Array[ctypes.c_ubyte], returns: Returns, tally: dict[int, int]
    ) -> None:
        self.number = number
        self.memory = mapped
        self.bytes = memoryview(mapped).cast("B")
        self.is_the_workers = True  # to use again
        self.held = False  # a result in it is still to be opened
        self.born = 0  # as which of the worker's results
        self._returns = returns
        self._tally = tally
        self.leases: dict[int, Lease] = {}
        self._lent: list[bool] = []  # one item while it is lent: whoever pops it ends that
        self._given_back = 0  # bytes
        self.is_due = False  # is on the list of those to be thinned
        self._forks = 0

    def lend(self, born: int) -> None:
        """To a result that is being opened."""
        self.held = True
        if not self._lent:
            self._lent.append(True)
            self._forks = _forks[0]
            self.born = born
            self.is_due = False
            _looked_at[id(self)] = self

    def lease(self, low: int, size: int) -> npt.NDArray[np.uint8]:
        # Not a memoryview: views of it hold on to what it is of, and not to itself.
        root = np.frombuffer(self.bytes, np.uint8, size, low)
        lease = Lease(root, _end)
        lease.cell = self
        lease.span = (low, low + size)
        self.leases[id(lease)] = lease
        return root

    def look_again(self) -> None:
        """A lease has ended."""
        returns = self._returns
        if not self.leases:
            if not self.held:
                self._free()
        elif not self.is_the_workers or returns.is_over:
            self.thin()
        else:
            self.is_due = True
            returns.partly.append((returns.turn + _PATIENCE, self.number, self.born))

    def let_go(self) -> None:
        """The result in it was opened, or is not wanted."""
        self.held = False
        if not self.leases:
            self._free()

    def _free(self) -> None:
        _looked_at.pop(id(self), None)
        try:
            self._lent.pop()
        except IndexError:  # another thread was faster
            return
        # Not where this process was forked meanwhile: the copy may still look at it, and is never heard of again.
        self._give_back(self.number if self._forks == _forks[0] else -self.number)

    def _give_back(self, number: int) -> None:
        self._returns.watched.discard(self.number)
        if self.is_the_workers and not self._returns.is_over:
            self._returns.freed.append(number)

    @property
    def _is_settled(self) -> bool:
        """Whether nothing in the worker looks at it: what a result leaves there is told with the next."""
        returns = self._returns
        return returns.is_over or (self.born < returns.results and self.number not in returns.watched)

    def thin(self) -> None:
        """Give back the pages that nothing looks at, if they are many beside those that something does."""
        self.is_due = False
        if self.held or not self._is_settled:
            return
        leases = self.leases.copy()
        # In this order: what a fork has a lease of had one here when it was forked.
        kept = sum(high - low for low, high in (lease.span for lease in leases.values()))
        if not kept or self._forks != _forks[0] or (len(self.bytes) - self._given_back - kept) * _SHARE < kept:
            return
        if self.is_the_workers and not self._returns.is_over:
            try:
                self._lent.pop()  # from here on nothing makes it free, for the worker to write there
            except IndexError:
                return
            self._give_back(-self.number)
            self.is_the_workers = False
        at = self._given_back = 0
        for low, high in [*sorted(lease.span for lease in leases.values()), (len(self.bytes), 0)]:
            low, high = low // PAGE * PAGE, -(-high // PAGE) * PAGE
            if low > at:
                self._given_back += memory.punch(self.memory, at, low - at)
            at = max(at, high)
        self._tally[id(self.memory)] = len(self.bytes) - self._given_back


# What is lent: a lease needs its cell, also when the worker's table is gone.
_looked_at: dict[int, LentCell] = {}


class Hold:
    """The cells of one result until it was opened: an opening that is interrupted is done again, and must find them
    as they were.
    """

    __slots__ = ("_born", "_table", "cells")

    def __init__(self, table: CellTable) -> None:
        self._table = table
        self._born = table.results
        self.cells: dict[int, LentCell] = {}

    def take(self, number: int) -> LentCell:
        """A cell that is not in `cells` yet."""
        cell = self.cells[number] = self._table.cell(number)
        cell.lend(self._born)
        return cell

    @property
    def is_crowded(self) -> bool:
        """Whether so many cells are kept that no more should be: a process may have a limited number of maps."""
        return self._table.maps > MOST_MAPS

    def release(self) -> None:
        cells, self.cells = self.cells, {}
        for cell in cells.values():
            cell.let_go()

    __del__ = release


class CellTable:
    """The cells of one worker, mapped in the trainer."""

    def __init__(self, tally: dict[int, int] | None = None) -> None:
        self._cells: dict[int, LentCell] = {}
        self._tally = {} if tally is None else tally  # sizes of all cells that are mapped, this worker's and others'
        self._returns = Returns()
        self._taken: set[int] = set()  # cells that came with a result, and were not given back since

    def add(self, number: int, mapped: ctypes.Array[ctypes.c_ubyte]) -> None:
        self._cells[number] = LentCell(number, mapped, self._returns, self._tally)
        self._tally[id(mapped)] = len(mapped)
        weakref.finalize(mapped, self._tally.pop, id(mapped), None).atexit = False

    def knows(self, number: int) -> bool:
        return number in self._cells

    def size_of(self, number: int) -> int:
        """Of a cell that is here; KeyError for any other."""
        return len(self._cells[number].bytes)

    def take(self, numbers: set[int]) -> None:
        """A result has come in these cells: until they are given back, no other one may be in them."""
        if not self._taken.isdisjoint(numbers):
            raise ValueError("a cell that the worker was not given back")
        self._taken.update(numbers)

    def arrived(self, dropped: list[int]) -> None:
        """Another result has come. `dropped`: cells that the worker has no more; below zero such as were sent before
        and user code there still looks at.
        """
        self._returns.results += 1
        for number in dropped:
            if number in self._taken:
                raise ValueError("a cell that the worker was not given back")
            if number > 0:
                self.drop(number)
            else:
                self._returns.watched.add(-number)

    def drop(self, number: int) -> None:
        cell = self._cells.pop(number, None)
        if cell is not None:
            cell.is_the_workers = False

    def forget(self) -> bool:
        """Keep no cell, as the worker will not either; whether there was any. Leases last as long as their views."""
        cells, self._cells = self._cells, {}
        self._taken.clear()
        returns = self._returns
        # Nothing will be told of user code in the worker that goes on looking at the last result.
        returns.watched.update(cell.number for cell in cells.values() if cell.born >= returns.results)
        returns.partly.clear()
        returns.freed.clear()
        for cell in cells.values():
            cell.is_the_workers = False
            cell.thin()
        return bool(cells)

    def abandon(self) -> None:
        """The worker is gone; results that came from it may still be opened."""
        self._returns.is_over = True
        self._returns.freed.clear()
        for cell in list(self._cells.values()):
            cell.thin()

    def cell(self, number: int) -> LentCell:
        return self._cells[number]

    @property
    def results(self) -> int:
        """How many came from this worker."""
        return self._returns.results

    @property
    def has_freed(self) -> bool:
        return bool(self._returns.freed)

    def take_freed(self) -> list[int]:
        """Cells that nobody looks at any more; below zero those that the worker is not to use again."""
        returns = self._returns
        returns.turn += 1
        while returns.partly and returns.partly[0][0] <= returns.turn:
            _, number, born = returns.partly.popleft()
            cell = self._cells.get(number)
            if cell is not None and cell.born == born:
                cell.thin()
        numbers = []
        while returns.freed:
            number = returns.freed.popleft()
            self._taken.discard(abs(number))
            if number < 0:
                self.drop(-number)
            numbers.append(number)
        return numbers

    @property
    def maps(self) -> int:
        """How many cells are mapped, this worker's and others'."""
        return len(self._tally)

    @property
    def bytes_mapped(self) -> int:
        """Of all cells that are mapped, this worker's and others'."""
        return sum(list(self._tally.values()))

    @property
    def bytes_held(self) -> int:
        return sum(len(cell.bytes) for cell in self._cells.values())
