"""The shared memory that holds what was shared: one segment per call of share(), known by a mark in its first bytes.

Reads   marks; tickets in pickles.
Writes  a segment once, before anybody else knows of it.
Never   keeps one alive: it goes with the last object that looks at it, in each process, and with its last process.

A pickle carries a segment by handle: its mark, and a ticket for it. Whoever unpickles looks first among the segments
that it has already, inherited by a fork or attached before, and only then redeems the ticket.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy

from outlive._system import memory

Memory: TypeAlias = Any  # a ctypes array, which lives as long as anything looks at it

MARK_BYTES = 16
_ALIGNMENT = 64
_segments: dict[bytes, Segment] = {}


class Segment:
    """What this process knows of a segment; of its memory no more than where it is, so that it may go."""

    __slots__ = ("_memory", "address", "handle", "mark", "size")

    def __init__(self, mark: bytes, handle: memory.Handle, size: int, mapped: Memory) -> None:
        self.mark = mark
        self.handle = handle
        self.size = size
        self.address = ctypes.addressof(mapped)
        self._memory = weakref.ref(mapped)
        _segments[mark] = self
        weakref.finalize(mapped, _forget, self)

    @property
    def memory(self) -> Memory | None:
        return self._memory()

    def __reduce__(self) -> tuple[Any, ...]:
        # What is unpickled is the memory, not the segment: nothing else would keep it until it is looked at.
        return _arrive, (self.mark, self.size, memory.ticket(self.handle))


def _forget(segment: Segment) -> None:
    if _segments.get(segment.mark) is segment:
        del _segments[segment.mark]
    memory.withdraw(segment.handle)


def _arrive(mark: bytes, size: int, ticket: Any) -> Memory:
    """The memory of a segment that was pickled by handle."""
    known = _segments.get(mark)
    mapped = known.memory if known is not None else None
    if mapped is not None:
        return mapped
    handle = memory.redeem(ticket, mark, size)
    if handle is None:
        raise pickle.UnpicklingError(
            "this was pickled by handle, and the process that pickled it is gone, or on another machine, or it has let "
            "go of the data since: a shared thing travels between living processes of one machine (to store it or to "
            "send it further, pickle a copy: list(shared), dict(shared))"
        )
    mapped = memory.attach(handle, size)
    Segment(mark, handle, size, mapped)
    return mapped


def of(mapped: Memory) -> Segment:
    """The segment of a memory, to be pickled."""
    found = find(ctypes.addressof(mapped), 1)
    assert found is not None
    return found[0]


def find(address: int, size: int) -> tuple[Segment, Memory] | None:
    """The segment that these bytes lie in, if they lie in one."""
    for segment in list(_segments.values()):
        if segment.address <= address and address + size <= segment.address + segment.size:
            mapped = segment.memory
            if mapped is not None:
                return segment, mapped
    return None


def any_here() -> bool:
    return bool(_segments)


def reading(mapped: Memory) -> memoryview:
    """All of a memory, to be read."""
    return memoryview(mapped).cast("B").toreadonly()


class Builder:
    """Collects what is to lie in a segment, and then makes it; says at once where each piece will lie."""

    def __init__(self) -> None:
        self.size = MARK_BYTES
        self._parts: list[tuple[int, Any]] = []

    def add(self, part: Any) -> int:
        """A place for the bytes of `part`, which must not change until `build`."""
        at = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self._parts.append((at, part))
        self.size = at + memoryview(part).nbytes
        return at

    def reserve(self, nbytes: int) -> int:
        """Room that whoever called `build` fills afterwards, before anybody else knows of the segment."""
        at = -(-self.size // _ALIGNMENT) * _ALIGNMENT
        self.size = at + nbytes
        return at

    def state(self) -> tuple[int, int]:
        return self.size, len(self._parts)

    def go_back(self, state: tuple[int, int]) -> None:
        """Forget what was added since: it turned out that it cannot be shared."""
        self.size = state[0]
        del self._parts[state[1] :]

    def build(self) -> Memory:
        handle = memory.create(self.size, "outlive-share")
        memory.publish(handle, self.size)
        try:
            mapped = memory.attach(handle, self.size)
        except BaseException:
            memory.withdraw(handle)
            raise
        mark = os.urandom(MARK_BYTES)
        Segment(mark, handle, self.size, mapped)
        room: Any = numpy.frombuffer(mapped, numpy.uint8)  # type: ignore[call-overload]
        for at, piece in self._emptying():
            room[at : at + piece.nbytes] = piece
        room[:MARK_BYTES] = numpy.frombuffer(mark, numpy.uint8)
        return mapped

    def _emptying(self) -> Iterator[tuple[int, numpy.ndarray[Any, Any]]]:
        """Each part is let go of when it was copied: packed data is not there twice."""
        self._parts.reverse()
        while self._parts:
            at, part = self._parts.pop()
            yield at, numpy.frombuffer(memoryview(part).cast("B"), numpy.uint8) if memoryview(part).nbytes else _NOTHING


_NOTHING = numpy.empty(0, numpy.uint8)
