"""A sequence of values as bytes, and each value made anew from them when it is asked for.

Reads   shared memory, by position.
Writes  packed columns, into a builder.
Never   an element that lives on: what a reader gets is its own, and no reference count of a shared one is touched.

    numbers   one array of the smallest type that holds them all        bool, int8 … int64, float64
    texts     UTF-8 end to end, and where each one begins               str, bytes
    mixed     a tag for each value, and its bytes                       anything else: by pickle, with its buffers
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy

from outlive._share import segments
from outlive._share.buffers import ElementPickler
from outlive._share.segments import Builder, Memory

Get = Callable[[int], Any]
Many = Callable[[int, int], list[Any]]


@dataclass(frozen=True)
class Layout:
    """Where a column lies in its segment."""

    kind: str  # "numbers", "str", "bytes" or "mixed"
    count: int
    values: tuple[int, int, str]  # begin, size, and for numbers their type as `memoryview` names it
    offsets: tuple[int, str] = (0, "")  # begin, type
    tags: int = 0


class Column(NamedTuple):
    """How values are read: one, or all from here to there."""

    get: Get
    many: Many


class Tag(IntEnum):
    NONE = 0
    FALSE = 1
    TRUE = 2
    INT = 3
    FLOAT = 4
    STR = 5
    BYTES = 6
    PICKLE = 7
    BUFFERED = 8  # a pickle whose buffers lie elsewhere in the segment


_INT = struct.Struct("<q")
_FLOAT = struct.Struct("<d")
_COUNT = struct.Struct("<I")
_EXTENT = struct.Struct("<QQ")
_INTEGERS = ("b", "h", "i", "q")
_UTF8 = ("utf-8", "surrogatepass")  # file names that are no UTF-8 have lone surrogates in them


# ---------------------------------------------------------------- packing


def pack(values: Sequence[Any], builder: Builder) -> Layout:
    """Add a column to the builder. Raises what pickling an element raises."""
    kinds = set(map(type, values))
    packer = _PACKERS.get(kinds.pop()) if len(kinds) == 1 else None
    layout = packer(values, builder) if packer is not None else None
    return layout if layout is not None else _pack_mixed(values, builder)


def _pack_numbers(values: Any, builder: Builder, code: str) -> Layout:
    array = numpy.ascontiguousarray(values, dtype=numpy.dtype(code))
    return Layout("numbers", len(values), (builder.add(array), array.nbytes, code))


def _pack_integers(values: Sequence[int], builder: Builder) -> Layout | None:
    try:
        array = numpy.array(values, numpy.int64)
    except OverflowError:
        return None
    low, high = int(array.min()), int(array.max())
    code = next(code for code in _INTEGERS if numpy.iinfo(code).min <= low and high <= numpy.iinfo(code).max)
    return _pack_numbers(array, builder, code)


def _pack_texts(values: Sequence[str], builder: Builder) -> Layout:
    joined = "".join(values)
    if joined.isascii():
        return _pack_pieces("str", joined.encode("ascii"), values, builder)
    del joined
    return _pack_bytes([value.encode(*_UTF8) for value in values], builder, "str")


def _pack_bytes(values: Sequence[bytes], builder: Builder, kind: str = "bytes") -> Layout:
    return _pack_pieces(kind, b"".join(values), values, builder)


def _pack_pieces(kind: str, joined: bytes, pieces: Sequence[Any], builder: Builder, tags: int = 0) -> Layout:
    code = "I" if len(joined) < 2**32 else "Q"
    offsets = numpy.zeros(len(pieces) + 1, numpy.dtype(code))
    numpy.cumsum(numpy.fromiter(map(len, pieces), offsets.dtype, len(pieces)), out=offsets[1:])
    at = builder.add(offsets)
    return Layout(kind, len(pieces), (builder.add(joined), len(joined), ""), (at, code), tags)


def _pack_mixed(values: Sequence[Any], builder: Builder) -> Layout:
    tags = bytearray()
    records: list[bytes] = []
    pickler = ElementPickler()
    for value in values:
        tag, record = _pack_value(value, builder, pickler)
        tags.append(tag)
        records.append(record)
    return _pack_pieces("mixed", b"".join(records), records, builder, builder.add(bytes(tags)))


def _pack_value(value: Any, builder: Builder, pickler: ElementPickler) -> tuple[Tag, bytes]:
    kind = type(value)
    if value is None:
        return Tag.NONE, b""
    if kind is bool:
        return Tag.TRUE if value else Tag.FALSE, b""
    if kind is str:
        return Tag.STR, value.encode(*_UTF8)
    if kind is bytes:
        return Tag.BYTES, value
    if kind is float:
        return Tag.FLOAT, _FLOAT.pack(value)
    if kind is int and -(2**63) <= value < 2**63:
        return Tag.INT, _INT.pack(value)
    pickled, buffers = pickler.dump(value)
    if not buffers:
        return Tag.PICKLE, pickled
    extents = b"".join(_EXTENT.pack(builder.add(buffer), buffer.nbytes) for buffer in buffers)
    return Tag.BUFFERED, _COUNT.pack(len(buffers)) + extents + pickled


_PACKERS: dict[Any, Callable[[Any, Builder], Layout | None]] = {
    bool: lambda values, builder: _pack_numbers(values, builder, "?"),
    float: lambda values, builder: _pack_numbers(values, builder, "d"),
    int: _pack_integers,
    str: _pack_texts,
    bytes: _pack_bytes,
}


# ---------------------------------------------------------------- reading


def open_column(mapped: Memory, layout: Layout) -> Column:
    """The column that lies here in a segment."""
    view = segments.reading(mapped)
    begin, size, code = layout.values
    if layout.kind == "numbers":
        numbers = view[begin : begin + size].cast(code)  # type: ignore[call-overload]
        return Column(numbers.__getitem__, lambda low, high: numbers[low:high].tolist())
    # As characters of C: a slice of these is bytes at once, in half the time that a slice of a memoryview takes.
    data = (ctypes.c_char * size).from_buffer(mapped, begin)
    at, code = layout.offsets
    offsets = view[at : at + (layout.count + 1) * numpy.dtype(code).itemsize].cast(code)  # type: ignore[call-overload]
    if layout.kind == "str":
        return _text_column(data, offsets)
    if layout.kind == "bytes":
        return _each(lambda index: data[offsets[index] : offsets[index + 1]])
    return _each(_mixed_getter(view, data, offsets, view[layout.tags : layout.tags + layout.count]))


def _each(get: Get) -> Column:
    return Column(get, lambda low, high: [get(index) for index in range(low, high)])


def _text_column(data: Any, offsets: Any) -> Column:
    def get(index: int) -> Any:
        return data[offsets[index] : offsets[index + 1]].decode("utf-8", "surrogatepass")

    def many(low: int, high: int) -> list[str]:
        ends = offsets[low : high + 1].tolist()
        first = ends[0]
        block: bytes = data[first : ends[-1]]
        if block.isascii():
            text = block.decode("ascii")
            return [text[begin - first : end - first] for begin, end in itertools.pairwise(ends)]
        return [block[begin - first : end - first].decode(*_UTF8) for begin, end in itertools.pairwise(ends)]

    return Column(get, many)


def _mixed_getter(view: memoryview, data: Any, offsets: Any, tags: memoryview) -> Get:
    plain = (None, False, True)

    def get(index: int) -> Any:
        tag = tags[index]
        if tag <= _TRUE:
            return plain[tag]
        record: bytes = data[offsets[index] : offsets[index + 1]]
        if tag == _PICKLE:
            return pickle.loads(record)
        if tag == _STR:
            return record.decode("utf-8", "surrogatepass")
        return _OPENERS[tag](view, record)

    return get


def _open_buffered(view: memoryview, record: bytes) -> Any:
    (count,) = _COUNT.unpack_from(record)
    end = _COUNT.size + count * _EXTENT.size
    extents = _EXTENT.iter_unpack(record[_COUNT.size : end])
    return pickle.loads(record[end:], buffers=[view[at : at + size] for at, size in extents])


_TRUE, _PICKLE, _STR = int(Tag.TRUE), int(Tag.PICKLE), int(Tag.STR)  # an enum's members compare slower
_OPENERS: dict[int, Callable[[memoryview, bytes], Any]] = {
    Tag.INT: lambda view, record: _INT.unpack(record)[0],
    Tag.FLOAT: lambda view, record: _FLOAT.unpack(record)[0],
    Tag.BYTES: lambda view, record: record,
    Tag.BUFFERED: _open_buffered,
}
