"""The kinds of messages, and the result message in detail.

Reads   bodies of frames.
Writes  bodies of frames.
Never   pickles what is known: counts, cells and offsets are packed integers.

    result = inline region | counts | cells made | cells dropped | buffers | places of storages | side | pickle

`side` is what travels beside a batch, mostly nothing: failures that were dealt with in the worker, and
where a stream stands. It is pickled; it never holds values of samples.
"""

from __future__ import annotations

import enum
import pickle
import struct
import sys
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

from outlive._system.address_space import need_of, require_room
from outlive.incident import Failure


class Kind(enum.IntEnum):
    # trainer → worker
    RESTORE = 1
    TASK = 2
    EPOCH = 3
    ANSWER = 4
    ASSIGN = 5
    REST = 6
    FREED = 7
    DISMISS = 8
    SOURCE = 9
    # worker → trainer
    READY = 16
    RESULT = 17
    ERROR = 18
    ASK = 19
    UNPREPARED = 20
    EPOCH_BEGUN = 21
    SURVIVED = 22
    ENDED = 23
    EMPTY = 24
    CREPT = 25
    DOUBT = 26
    PROBED = 27
    RETRIED = 28
    UNSENT = 29
    # trainer → zygote
    FORK = 32
    KILL = 33
    LEAVE = 34
    HELLO = 35
    # zygote → trainer
    LOADED = 48
    FORKED = 49
    EXITED = 50
    SUSPECTED = 51
    UNLOADABLE = 52
    UNFORKED = 53
    GREW = 54
    MEMORY = 55


class SendingFailedError(BaseException):
    """This process could not send what it made: its own failure, which its cause tells, and no fault of what it sent.

    No `Exception`: whoever deals with errors of samples must not take this for one.
    """


class Side(NamedTuple):
    """What travels beside a batch."""

    failures: tuple[Failure, ...] = ()
    place: bytes | None = None


NOTHING_BESIDE = Side()

_COUNTS = struct.Struct("<qqqqq")
_NO_COUNTS = (0, 0, 0, 0, 0)
_NO_COUNTS_BYTES = _COUNTS.pack(*_NO_COUNTS)
# In place of a cell's number:
INLINE = -1  # the bytes are in the frame itself
WITHIN = -2  # in the place numbered so, which begins at this byte of the storage: (WITHIN, place, byte)
DENSE = -3  # in the place numbered so, without the gaps between: (DENSE, place, 0)
NO_CELLS = (INLINE, WITHIN, DENSE)


Place = tuple[int, int, int]  # (cell or INLINE, offset, size)


class Parcel(NamedTuple):
    """A batch, packed: what the worker sends and the trainer unpacks."""

    made: list[tuple[int, int]]  # (cell, size), descriptors come in the same order
    dropped: list[int]
    buffers: list[Place]  # out-of-band buffers, in the pickle's order
    places: list[Place]  # storages of tensors, which name them by number
    side: Side
    pickled: bytes | memoryview = b""


def parcel_parts(parcel: Parcel) -> list[bytes | memoryview]:
    """What goes between the inline region and the pickle."""
    made, dropped, buffers, places, nothing, _ = parcel
    if not buffers and not places and nothing is NOTHING_BESIDE and not made and not dropped:
        return [_NO_COUNTS_BYTES]
    side = b"" if parcel.side == NOTHING_BESIDE else pickle.dumps(parcel.side, 5)
    numbers = array("q")
    for pair in made:
        numbers.extend(pair)
    numbers.extend(dropped)
    for place in buffers:
        numbers.extend(place)
    for place in places:
        numbers.extend(place)
    counts = _COUNTS.pack(len(made), len(dropped), len(buffers), len(places), len(side))
    return [counts, numbers.tobytes(), side]


def read_parcel(body: bytearray, at: int) -> Parcel:
    """A parcel from a frame's body; `at` is where the inline region ends."""
    if not 0 <= at <= len(body) - _COUNTS.size:
        raise ValueError("not a valid parcel")
    counts = _COUNTS.unpack_from(body, at)
    at += _COUNTS.size
    view = memoryview(body)
    if counts == _NO_COUNTS:
        return Parcel([], [], [], [], NOTHING_BESIDE, view[at:])
    made, dropped, buffers, places, side_size = counts
    k, m = 2 * made + dropped, 2 * made + dropped + 3 * buffers
    count = m + 3 * places
    if min(counts) < 0 or 8 * count + side_size > len(body) - at:
        raise ValueError("not a valid parcel")
    numbers = array("q")
    numbers.frombytes(view[at : at + 8 * count])
    at += 8 * count
    side = load(view[at : at + side_size]) if side_size else NOTHING_BESIDE
    triples = zip(numbers[k::3], numbers[k + 1 :: 3], numbers[k + 2 :: 3], strict=True)
    everything = list(triples)
    return Parcel(
        list(zip(numbers[0 : 2 * made : 2], numbers[1 : 2 * made : 2], strict=True)),
        list(numbers[2 * made : k]),
        everything[:buffers],
        everything[buffers:],
        side,
        view[at + side_size :],
    )


def cells_of(parcel: Parcel, inline: int, size_of: Callable[[int], int]) -> set[int]:
    """The cells that a parcel is in; raises where a place of it lies outside of them, or of the inline region."""
    cells: set[int] = set()
    _, _, buffers, places, _, _ = parcel
    if buffers and min(buffers)[0] < INLINE:
        raise ValueError("not a valid buffer")
    for cell, offset, size in buffers + places if buffers else places:
        if cell == INLINE:
            room = inline
        elif cell >= 0:
            cells.add(cell)
            room = size_of(cell)
        elif cell in NO_CELLS and 0 <= offset < len(places) and places[offset][0] >= INLINE:
            room = sys.maxsize  # a part of another place: whoever opens it sees no more than there is
        else:
            raise ValueError("not a valid place")
        if offset < 0 or size < 0 or offset + size > room:
            raise ValueError("not a valid place")
    return cells


def pack_numbers(numbers: list[int]) -> bytes:
    return array("q", numbers).tobytes()


def unpack_numbers(body: bytearray | memoryview, count: int) -> list[int]:
    numbers = array("q")
    numbers.frombytes(memoryview(body)[: 8 * count])
    return list(numbers)


def dump(value: Any) -> bytes:
    return pickle.dumps(value, 5)


def load(body: bytes | bytearray | memoryview) -> Any:
    """What was dumped; NoRoomError where this process has too little memory for it, whatever it is."""
    try:
        return pickle.loads(body)
    except MemoryError:
        require_room(need_of(len(body)))
        raise
