"""Both ends of the way that batches take, and arrays to send.

Reads   objects after their journey; descriptors and memory held.
Writes  objects of every kind and size.
Never   a second process: both ends are here, with separate maps of the same memory.
"""

from __future__ import annotations

import os
import pickle
from typing import Any

import numpy as np

from outlive._transport import packing, wire
from outlive._transport.cells import Arena
from outlive._transport.leases import CellTable


class Link:
    """A worker's arena, a trainer's table, and the way between them and back."""

    def __init__(self) -> None:
        self.arena = Arena()
        self.packer = packing.Packer(self.arena)
        self.table = CellTable()

    def send(self, obj: Any, side: wire.Side = wire.NOTHING_BESIDE) -> tuple[wire.Parcel, bytearray]:
        self.arena.give_back(self.table.take_freed())
        self.arena.begin()
        return self.dispatch(obj, side)

    def dispatch(self, obj: Any, side: wire.Side = wire.NOTHING_BESIDE) -> tuple[wire.Parcel, bytearray]:
        packed = self.packer.pack(obj, side)
        body = bytearray(b"".join(packed.parts))
        # What SCM_RIGHTS does; names travel as they are.
        passed = tuple(os.dup(handle) if isinstance(handle, int) else handle for handle in packed.handles)
        self.arena.finish(packed.cells)
        return packing.adopt(body, packed.inline, passed, self.table), body

    def carry(self, obj: Any) -> Any:
        parcel, body = self.send(obj)
        return packing.unpack(parcel, body, self.table)

    @property
    def cells_made(self) -> int:
        return self.arena.cells_made


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


WHEEL = np.arange(251, dtype=np.uint8)


def pattern(size: int, seed: int) -> np.ndarray:
    return np.resize(np.roll(WHEEL, -seed), size)


def expected(value: Any) -> Any:
    """Arrays become what pickle's plain copy of them is: writeable, and in the machine's byte order."""
    return pickle.loads(pickle.dumps(value, 4)) if isinstance(value, np.ndarray) else value


LARGE = 300_000


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("this does not travel")
