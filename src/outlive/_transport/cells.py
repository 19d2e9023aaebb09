"""Cells: shared memory that holds batches, used again and again. The worker's side; the trainer's is `leases`.

Reads   nothing.
Writes  batches into cells.
Never   a descriptor longer than its journey, a cell that somebody still looks at.

    worker makes a cell ─ descriptor with the batch ─► trainer maps it, and owns it
    worker writes again ◄─ number with the next task ─ last view of it is gone (lease ended)

A cell never changes its size: a batch that does not fit takes a larger one, the smaller is dropped. A
worker's death drops its cells with it; those that a consumer still looks at live until it does not.
"""

from __future__ import annotations

import errno
import mmap
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from outlive._system import memory
from outlive._system.channel import INLINE_LIMIT
from outlive._transport import wire

if TYPE_CHECKING:
    import numpy.typing as npt

ALIGNMENT = 64
PAGE = mmap.PAGESIZE
_GRAIN = 1 << 16
_IDLE_TAKES = 64  # making one again costs a page fault per page
# Up to this size a batch goes inside its message: copying it twice costs less than a lease.
INLINE_ROOM = INLINE_LIMIT - (1 << 13)

Address = int


class WorkerCell:
    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.handle = memory.create(size, "outlive-cell")
        try:
            self.map = memory.attach(self.handle, size)
        except BaseException:
            memory.discard(self.handle)
            raise
        self.array = np.frombuffer(memoryview(self.map), np.uint8)
        self.address: Address = self.array.ctypes.data


class Arena:
    """Where a worker writes one batch: inside the message while it is small, else in cells."""

    def __init__(self) -> None:
        self._new_scratch()
        self.scratch_used = 0
        self._cells: dict[int, WorkerCell] = {}
        self._free: list[WorkerCell] = []
        self.cells_made = 0
        self._idle = 0  # how many batches in a row found more cells than they took
        self._hint = 0  # what the last large batches needed
        self._current: WorkerCell | None = None
        self.current_used = 0
        self.large_used = 0
        self.news: Callable[[], list[int]] = list  # asked for cells that came back, before another is made
        self.used: list[WorkerCell] = []
        self.made: list[WorkerCell] = []
        self.dropped: list[int] = []  # below zero: it was sent, and user code here goes on looking at it
        self._sent: list[WorkerCell] = []  # with the last batch

    def begin(self) -> None:
        """Start a batch; cells of an unfinished one are free again.

        Memory of an earlier batch that somebody in this process still looks at (a dataset that keeps what it
        collated) is left to him and not used again.
        """
        if self.scratch_used and _is_looked_at(self._scratch):
            self._new_scratch()
        if self._sent:
            self.dropped.extend(-cell.number for cell in self._sent if _is_looked_at(cell.array))
            self._sent.clear()
        self._free.extend(self.used)
        self.used.clear()
        self.scratch_used = 0
        self._current = None
        self.current_used = 0
        self.large_used = 0

    def _new_scratch(self) -> None:
        self._scratch_map = mmap.mmap(-1, INLINE_LIMIT)
        self._scratch = np.frombuffer(self._scratch_map, np.uint8)
        self._scratch_address: Address = self._scratch.ctypes.data

    def give_back(self, numbers: list[int]) -> None:
        """The trainer looks at these cells no longer."""
        for number in numbers:
            cell = self._cells.get(abs(number))
            if cell is None:
                continue
            if number > 0:
                self._free.append(cell)
            else:  # a fork of the trainer may still look at it
                self._drop(cell)

    def forget(self) -> None:
        """The epoch is over: keep no cell. What the next batches need is still known."""
        self.begin()
        for cell in self.made:
            memory.discard(cell.handle)
        self.made.clear()
        self.dropped.clear()
        self._free.clear()
        self._cells.clear()

    def allocate(self, size: int) -> tuple[int, int, Address, npt.NDArray[np.uint8]]:
        """Room for `size` bytes: cell (-1: inline), offset in it, address, and the cell's bytes."""
        at = -(-self.scratch_used // ALIGNMENT) * ALIGNMENT
        if self._current is None and at + size <= INLINE_ROOM:
            self.scratch_used = at + size
            return -1, at, self._scratch_address + at, self._scratch
        cell = self._current
        # What is large has its pages for itself: the trainer gives them back when nobody looks at it any more.
        alignment = PAGE if size > PAGE else ALIGNMENT
        at = -(-self.current_used // alignment) * alignment
        if cell is None or at + size > cell.size:
            cell = self._current = self._take(size)
            self.used.append(cell)
            at = 0
        self.current_used = at + size
        self.large_used += size + alignment
        return cell.number, at, cell.address + at, cell.array

    def find(self, address: Address, size: int) -> tuple[int, int] | None:
        """Where in this batch's memory an address lies, if it does."""
        offset = address - self._scratch_address
        if 0 <= offset and offset + size <= self.scratch_used:
            return -1, offset
        for cell in self.used:
            offset = address - cell.address
            if 0 <= offset and offset + size <= cell.size:
                return cell.number, offset
        return None

    def inline_region(self) -> memoryview:
        return memoryview(self._scratch_map)[: self.scratch_used]

    def finish(self, sent: set[int]) -> None:
        """The batch was sent: the cells it travels in are the trainer's until it gives them back."""
        for cell in self.made:
            memory.let_go(cell.handle)
        self.made.clear()
        self.dropped.clear()
        self._sent = [cell for cell in self.used if cell.number in sent]
        self.used = [cell for cell in self.used if cell.number not in sent]
        if self.large_used:
            self._hint = max(self.large_used, self._hint * 15 // 16)

    def _take(self, size: int) -> WorkerCell:
        wanted = max(size + ALIGNMENT, self._hint if not self.used else 2 * self.large_used)
        if not self._free:
            self.give_back(self.news())
        self._free.sort(key=lambda cell: cell.size)
        keep = []
        found = None
        for cell in self._free:
            if _is_looked_at(cell.array) or not wanted // 2 <= cell.size <= max(4 * wanted, _GRAIN):
                self._drop(cell)
            elif found is None and cell.size >= size and cell.size >= wanted * 3 // 4:
                found = cell
            else:
                keep.append(cell)
        self._free = keep
        if found is not None:
            self._idle = self._idle + 1 if keep else 0
            if self._idle >= _IDLE_TAKES:  # so many batches did without it
                self._idle = 0
                self._drop(keep.pop())
            return found
        self._idle = 0
        if self._free:
            # One goes for one that comes: sizes that grow little by little would pile them up.
            self._drop(self._free.pop(0))
        try:
            cell = WorkerCell(self.cells_made + 1, -(-wanted // _GRAIN) * _GRAIN)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # other errors may be for the size of a sample
                raise wire.SendingFailedError from error
            raise
        self.cells_made += 1
        self._cells[cell.number] = cell
        self.made.append(cell)
        return cell

    def _drop(self, cell: WorkerCell) -> None:
        del self._cells[cell.number]
        if cell in self.made:
            self.made.remove(cell)
            memory.discard(cell.handle)
        else:
            self.dropped.append(cell.number)


def _references(root: npt.NDArray[np.uint8]) -> int:
    return sys.getrefcount(root)


class _Unseen:
    """An array that nobody looks at: how many references that takes differs between versions of Python."""

    def __init__(self) -> None:
        self.array = np.empty(1, np.uint8)


_unseen = _Unseen()
_ALONE = _references(_unseen.array)


def _is_looked_at(root: npt.NDArray[np.uint8]) -> bool:
    """Whether views of an array are alive: each holds a reference to it."""
    return sys.getrefcount(root) > _ALONE  # counted one call deep, as `_references` does
