"""Packs a batch into an arena and unpacks it from cells, whatever a collate function returns.

Reads   objects (worker), cells (trainer).
Writes  cells (worker), objects that are views of cells (trainer).
Never   a copy in the trainer of what is in a cell.

Pickle protocol 5 with its buffers out of band; tensors are taken apart by `tensors.py`, which
is imported only where torch is already there.
"""

from __future__ import annotations

import ctypes
import io
import pickle
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from holdfast._transport import wire
from holdfast._transport.cells import Arena, CellTable

Reducer = Callable[["Placer", Any], Any]


class Placer:
    """Puts one batch's buffers into the arena, and notes where each lies."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.placed: list[tuple[int, int, int]] = []
        self.storages: dict[int, Any] = {}  # a storage that several tensors share travels once
        self._known: dict[int, tuple[int, int, int]] = {}
        self._alive: list[Any] = []

    def place_memory(self, address: int, size: int) -> pickle.PickleBuffer:
        """Out-of-band bytes at an address, copied into the arena unless they lie there already."""
        found = self.arena.find(address, size)
        if found is None:
            cell, offset, target, _ = self.arena.allocate(size)
            ctypes.memmove(target, address, size)
        else:
            cell, offset = found
        buffer = pickle.PickleBuffer(bytearray())  # writable, so that it is so when it arrives
        self._alive.append(buffer)
        self._known[id(buffer)] = (cell, offset, size)
        return buffer

    def place_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        known = self._known.get(id(buffer))
        if known is None:
            with buffer.raw() as raw:
                size = raw.nbytes
                if raw.readonly:
                    return True  # in the stream: bytes objects must come back as bytes
                cell, offset, _, target = self.arena.allocate(size)
                target[:] = np.frombuffer(raw, np.uint8)
            known = (cell, offset, size)
        self.placed.append(known)
        return False


class BatchPickler(pickle.Pickler):
    """One batch's pickler. Its callback is not its own method: a cycle would keep the batch's memory in use until the
    collector comes, and make it come often.
    """

    def __init__(self, file: io.BytesIO, placer: Placer, reducer: Reducer | None) -> None:
        super().__init__(file, 5, buffer_callback=placer.place_buffer)
        self._placer = placer
        self._reducer = reducer

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and not (obj.flags.writeable and obj.dtype.isnative):
            # As torch's own loader has it: what arrives is the consumer's, to write to, in the machine's byte order.
            order: Any = "F" if obj.flags.fnc else "C"
            return obj.astype(obj.dtype.newbyteorder("="), order=order, copy=True).__reduce_ex__(5)
        return NotImplemented if self._reducer is None else self._reducer(self._placer, obj)


class Packed(NamedTuple):
    """A batch ready to be sent."""

    parts: list[Any]
    descriptors: tuple[int, ...]
    inline: int  # size of the inline region, which comes first
    cells: set[int]  # the cells that it travels in


def pack(obj: Any, arena: Arena, side: wire.Side) -> Packed:
    file = io.BytesIO()
    placer = Placer(arena)
    BatchPickler(file, placer, _reducer()).dump(obj)
    parcel = wire.Parcel(
        made=[(cell.number, cell.size) for cell in arena.made],
        dropped=list(arena.dropped),
        buffers=placer.placed,
        pickled=file.getbuffer(),
        side=side,
    )
    region = arena.inline_region()
    descriptors = tuple(cell.fd for cell in arena.made)
    cells = {cell for cell, _, _ in placer.placed}
    return Packed([region, *wire.parcel_parts(parcel)], descriptors, len(region), cells)


def adopt(body: bytearray, inline: int, descriptors: tuple[int, ...], table: CellTable) -> wire.Parcel:
    """Take a result's cells into the table, as soon as it arrives."""
    parcel = wire.read_parcel(body, inline)
    for (number, size), fd in zip(parcel.made, descriptors, strict=True):
        table.add(number, size, fd)
    for number in parcel.dropped:
        table.drop(number)
    return parcel


def unpack(parcel: wire.Parcel, body: bytearray, table: CellTable, roots: dict[int, Any] | None = None) -> Any:
    """The batch, its tensors and arrays being views of the cells it came in.

    `roots` keeps the leases when this is interrupted and called again.
    """
    if not parcel.buffers:
        return pickle.loads(parcel.pickled)
    roots = {} if roots is None else roots
    roots.setdefault(wire.INLINE, np.frombuffer(body, np.uint8))
    buffers = []
    for cell, offset, size in parcel.buffers:
        root = roots.get(cell)
        if root is None:
            root = roots[cell] = table.lease(cell)
        buffers.append(root[offset : offset + size])
    return pickle.loads(parcel.pickled, buffers=buffers)


def discard(parcel: wire.Parcel, table: CellTable) -> None:
    """A result that nobody wants: its cells are free at once."""
    for number in {cell for cell, _, _ in parcel.buffers if cell != wire.INLINE}:
        table.release(number)


def _reducer() -> Reducer | None:
    if "torch" not in sys.modules:
        return None
    from holdfast._transport import tensors

    return tensors.reduce
