"""Packs a batch into an arena and unpacks it from cells, whatever a collate function returns.

Reads   objects (worker), cells (trainer).
Writes  cells (worker), objects that are views of cells (trainer).
Never   a copy in the trainer of what is large and in a cell, unless very many cells are kept.

Pickle protocol 5 with its buffers out of band; tensors are taken apart by `tensors.py`, which
is imported only where torch is already there.
"""

from __future__ import annotations

import copyreg
import ctypes
import pickle
import sys
import threading
from collections.abc import Iterable
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outlive._system import memory
from outlive._system.address_space import NoRoomError
from outlive._transport import wire
from outlive._transport.cells import PAGE, Arena
from outlive._transport.leases import CellTable, Hold
from outlive._transport.wire import Place

if TYPE_CHECKING:
    import numpy.typing as npt


class Packed(NamedTuple):
    """A batch ready to be sent."""

    parts: list[Any]
    handles: tuple[memory.Handle, ...]
    inline: int  # size of the inline region, which comes first
    cells: set[int]  # the cells that it travels in


class _Sink:
    """Where the pickler writes: a list of pieces, which are never joined."""

    __slots__ = ("pieces", "write")

    def __init__(self) -> None:
        self.pieces: list[Any] = []
        self.write = self.pieces.append


class Packer:
    """Packs one worker's batches, one after the other. One pickler for all of them: making it costs."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self.owners: dict[int, Any] = {}  # storage → what carries it: tensors that share one go on sharing it
        self.places: list[Place] = []
        self.unsettled = False  # some places were promised and are to be filled in
        self._buffers: list[Place] = []
        self._sink = _Sink()
        self._pickler = pickle.Pickler(self._sink, 5, buffer_callback=self._place_buffer)
        self._known = (-1, -1, False)

    def pack(self, obj: Any, side: wire.Side = wire.NOTHING_BESIDE) -> Packed:
        self._know_types()
        arena = self.arena
        pieces = self._sink.pieces
        try:
            self._pickler.dump(obj)
            if self.unsettled:
                from outlive._transport import tensors

                tensors.settle(self)
            parcel = wire.Parcel(
                [(cell.number, cell.size) for cell in arena.made] if arena.made else [],
                arena.dropped,
                self._buffers,
                self.places,
                side,
            )
            region = arena.inline_region()
            # What is large and read-only comes as the buffer that it was.
            pickled = [piece.raw() if type(piece) is pickle.PickleBuffer else piece for piece in pieces]
            parts = [region, *wire.parcel_parts(parcel), *pickled]
            cells = {place[0] for place in self.places}.union(place[0] for place in self._buffers)
            return Packed(parts, tuple(cell.handle for cell in arena.made), len(region), cells)
        finally:
            # Nothing of the batch is kept, also when it could not be pickled.
            self._pickler.clear_memo()
            self.owners.clear()
            self.unsettled = False
            self.places.clear()
            self._buffers.clear()
            pieces.clear()

    def place_storage(self, storage: Any, low: int, size: int) -> int:
        """Which place bytes of a storage travel in; copied into the arena unless they lie there already."""
        address = storage.data_ptr() + low
        found = self.arena.find(address, size) if size else (wire.INLINE, 0)
        if found is None:
            cell, offset, target, _ = self.arena.allocate(size)
            ctypes.memmove(target, address, size)
        else:
            cell, offset = found
        self.places.append((cell, offset, size))
        return len(self.places) - 1

    def promise_place(self) -> int:
        """A place that is known only when everything was pickled."""
        self.places.append((wire.INLINE, 0, 0))
        return len(self.places) - 1

    def _place_buffer(self, buffer: pickle.PickleBuffer) -> bool:
        with buffer.raw() as raw:
            size = raw.nbytes
            if raw.readonly:
                return True  # in the stream: bytes objects must come back as bytes
            cell, offset, _, root = self.arena.allocate(size)
            root[offset : offset + size] = np.frombuffer(raw, np.uint8)
        self._buffers.append((cell, offset, size))
        return False

    def _know_types(self) -> None:
        """Take over what was registered for pickling, here and for multiprocessing, and add our own."""
        now = (len(copyreg.dispatch_table), len(_extra_reducers), "torch" in sys.modules)
        if now == self._known:
            return
        table: dict[type, Any] = dict(copyreg.dispatch_table)
        # Not torch's: those put every tensor into /dev/shm.
        table.update(
            {k: v for k, v in _extra_reducers.items() if not str(getattr(v, "__module__", "")).startswith("torch.")}
        )
        table[np.ndarray] = reduce_array
        if "torch" in sys.modules:
            from outlive._transport import tensors

            table.update(tensors.reducers(self))
        self._pickler.dispatch_table = table
        self._known = now


_extra_reducers: dict[type, Any] = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]


def reduce_array(array: npt.NDArray[Any]) -> Any:
    """As pickle has an array whose bytes are not beside it."""
    plain = array.dtype.names is None
    if not (array.flags.writeable and (array.dtype.isnative or not plain)):
        # What arrives is the receiver's, to write to, in the machine's byte order (fields of records keep theirs).
        order: Any = "F" if array.flags.fnc else "C"
        array = array.astype(array.dtype.newbyteorder("=") if plain else array.dtype, order=order, copy=True)
    return array.__reduce_ex__(5)


def adopt(body: bytearray, inline: int, handles: tuple[memory.Handle, ...], table: CellTable) -> wire.Parcel:
    """Take a result's cells into the table, as soon as it arrives; ValueError where it is no result of ours.

    NoRoomError where there is no room for all of it: none was taken then, and the handles are still the caller's.
    """
    waiting = list(handles)
    try:
        parcel = wire.read_parcel(body, inline)
        if waiting or parcel.made:
            if len(parcel.made) != len(waiting) or any(table.knows(number) for number, _ in parcel.made):
                raise ValueError("not valid cells")
            mapped = [memory.attach_whole(handle, size) for handle, (_, size) in zip(handles, parcel.made)]
            while waiting:
                memory.discard(waiting.pop())
            for (number, _), cell in zip(parcel.made, mapped):
                table.add(number, cell)
        if cells := wire.cells_of(parcel, inline, table.size_of):
            table.take(cells)
        table.arrived(parcel.dropped)
        return parcel
    except BaseException as error:
        if not isinstance(error, NoRoomError):
            for handle in waiting:
                memory.discard(handle)
        raise


class Opening:
    """A batch being unpacked. `hold` keeps its cells when this is interrupted and done again.

    What is kept of a batch costs what it weighs: what is small gets memory of its own, what is large a lease.
    """

    __slots__ = ("body", "crowded", "hold", "places", "storages")

    def __init__(self, places: list[Place], body: bytearray, hold: Hold) -> None:
        self.places = places
        self.body = body
        self.hold = hold
        self.crowded = hold.is_crowded
        self.storages: dict[int, Any] = {}  # of tensors that share them

    def piece(self, place: Place) -> tuple[Any, int]:
        """Memory that has the bytes of a place, and where they begin in it."""
        cell, offset, size = place
        if cell == wire.INLINE:
            body = self.body
            # Most of a message is not copied again for what little it has beside.
            return (body, offset) if 2 * size >= len(body) else (body[offset : offset + size], 0)
        lent = self.hold.cells.get(cell) or self.hold.take(cell)
        if size <= PAGE or self.crowded:
            return bytearray(lent.bytes[offset : offset + size]), 0
        return lent.lease(offset, size), 0

    def buffer(self, place: Place) -> Any:
        memory, offset = self.piece(place)
        return memoryview(memory)[offset : offset + place[2]]


class _Now(threading.local):
    """What is being unpacked in this thread: tensors name their memory by its place in it."""

    opening: Opening


now = _Now()


def unpack(parcel: wire.Parcel, body: bytearray, table: CellTable, hold: Hold | None = None) -> Any:
    """The batch, its tensors and arrays being views of the cells it came in."""
    if not parcel.buffers and not parcel.places:
        return pickle.loads(parcel.pickled)
    opening = Opening(parcel.places, body, Hold(table) if hold is None else hold)
    return load(parcel.pickled, map(opening.buffer, parcel.buffers), opening)


def load(pickled: Any, buffers: Iterable[Any], opening: Opening) -> Any:
    """Unpickle what has tensors in it, whose memory is found by `opening`."""
    before = getattr(now, "opening", None)
    now.opening = opening
    try:
        return pickle.loads(pickled, buffers=buffers)
    finally:
        # A batch may hold what loads another batch when it is unpickled.
        if before is None:
            del now.opening
        else:
            now.opening = before


def discard(parcel: wire.Parcel, table: CellTable, hold: Hold | None = None) -> None:
    """A result that nobody wants: its cells are free, when nobody looks at them any more."""
    hold = Hold(table) if hold is None else hold
    for number in {cell for cell, _, _ in (*parcel.buffers, *parcel.places)}.difference(hold.cells, wire.NO_CELLS):
        hold.take(number)
    hold.release()
