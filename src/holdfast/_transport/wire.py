"""The kinds of messages, and the result message in detail.

Reads   bodies of frames.
Writes  bodies of frames.
Never   pickles what is known: counts, cells and offsets are packed integers.

    result = inline region | counts | cells made | cells dropped | buffers | side | pickle

`side` is what travels beside a batch, mostly nothing: failures that were dealt with in the worker, and
where a stream stands. It is pickled; it never holds values of samples.
"""

from __future__ import annotations

import enum
import pickle
import struct
from array import array
from typing import Any, NamedTuple

from holdfast.records import Failure


class Kind(enum.IntEnum):
    # trainer → worker
    RESTORE = 1
    TASK = 2
    EPOCH = 3
    ANSWER = 4
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


class Side(NamedTuple):
    """What travels beside a batch."""

    failures: tuple[Failure, ...] = ()
    place: bytes | None = None


NOTHING_BESIDE = Side()

_COUNTS = struct.Struct("<qqqqq")
INLINE = -1  # in place of a cell's number: the buffer is in the frame itself


class Parcel(NamedTuple):
    """A batch, packed: what the worker sends and the trainer unpacks."""

    made: list[tuple[int, int]]  # (cell, size), descriptors come in the same order
    dropped: list[int]
    buffers: list[tuple[int, int, int]]  # (cell or INLINE, offset, size)
    pickled: bytes | memoryview
    side: Side


def parcel_parts(parcel: Parcel) -> list[bytes | memoryview]:
    """Everything of a parcel but the inline region, which goes before it."""
    side = b"" if parcel.side == NOTHING_BESIDE else pickle.dumps(parcel.side, 5)
    numbers = array("q")
    for made in parcel.made:
        numbers.extend(made)
    numbers.extend(parcel.dropped)
    for buffer in parcel.buffers:
        numbers.extend(buffer)
    counts = _COUNTS.pack(len(parcel.made), len(parcel.dropped), len(parcel.buffers), len(side), len(parcel.pickled))
    return [counts, numbers.tobytes(), side, parcel.pickled]


def read_parcel(body: bytearray, at: int) -> Parcel:
    """A parcel from a frame's body; `at` is where the inline region ends."""
    made, dropped, buffers, side_size, pickled_size = _COUNTS.unpack_from(body, at)
    at += _COUNTS.size
    view = memoryview(body)
    count = 2 * made + dropped + 3 * buffers
    numbers = array("q")
    numbers.frombytes(view[at : at + 8 * count])
    at += 8 * count
    side = pickle.loads(view[at : at + side_size]) if side_size else NOTHING_BESIDE
    at += side_size
    i = 2 * made
    j = i + dropped
    return Parcel(
        made=[(numbers[k], numbers[k + 1]) for k in range(0, i, 2)],
        dropped=list(numbers[i:j]),
        buffers=[(numbers[k], numbers[k + 1], numbers[k + 2]) for k in range(j, count, 3)],
        pickled=view[at : at + pickled_size],
        side=side,
    )


def pack_numbers(numbers: list[int]) -> bytes:
    return array("q", numbers).tobytes()


def unpack_numbers(body: bytearray, count: int) -> list[int]:
    numbers = array("q")
    numbers.frombytes(memoryview(body)[: 8 * count])
    return list(numbers)


def dump(value: Any) -> bytes:
    return pickle.dumps(value, 5)


def load(body: bytes | bytearray | memoryview) -> Any:
    return pickle.loads(body)
