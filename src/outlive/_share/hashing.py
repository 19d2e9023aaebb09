"""Finds a key among shared ones without a Python dict: a hash table in shared memory.

Reads   keys; the table.
Writes  the table, into a builder.
Never   Python's own hash of a text: each process has another.

Open addressing with linear probing that does not wrap around: behind the last home there is room for those that were
pushed on, and one empty place, where every search ends. Keys are placed in the order of their homes, which needs no
loop: each lies at its home, or just behind the one before it.
"""

from __future__ import annotations

import numbers
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import numpy

from outlive._share.segments import Builder

_SPREAD = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbours land far apart
_ALL = 2**64 - 1
_WORD = struct.Struct("<Q")
_PLAIN = frozenset({str, int, bytes})  # two of one of these need no look at their hashes: they compare quickly


@dataclass(frozen=True)
class TableLayout:
    """Where a hash table lies in its segment."""

    begin: int
    count: int
    shift: int


def steady_hash(key: Any) -> int:
    """A hash that is the same in every process, and for keys that are equal. Raises TypeError for other kinds of keys.

    Numbers have Python's, which is the same everywhere. So has NumPy's bool, which is not registered as a number.
    """
    if isinstance(key, str) and hash(key) == str.__hash__(key):
        return crc32(key.encode("utf-8", "surrogatepass"))
    if isinstance(key, (numbers.Number, numpy.bool_)):
        return hash(key) & _ALL
    if isinstance(key, bytes) and hash(key) == bytes.__hash__(key):
        return crc32(key, 1)
    if isinstance(key, tuple):
        return crc32(b"".join(_WORD.pack(steady_hash(part)) for part in key), 2)
    if key is None:
        return 3
    if isinstance(key, frozenset):
        return sum(map(steady_hash, key)) & _ALL
    hash(key)  # raises for what is no key at all, in Python's words
    raise TypeError(f"keys of a shared dict or set are str, bytes, numbers, None or tuples of these, not {type(key)}")


def pack(keys: Sequence[Any], builder: Builder) -> TableLayout:
    """Add a table for these keys, all different, to the builder."""
    count = len(keys)
    bits = max(1, (2 * count - 1).bit_length()) if count else 1
    shift = 64 - bits
    with numpy.errstate(over="ignore"):
        hashes = numpy.fromiter(_hashes(keys), numpy.uint64, count)
        homes = ((hashes * numpy.uint64(_SPREAD)) >> numpy.uint64(shift)).astype(numpy.int64)
    order = numpy.argsort(homes, kind="stable")
    steps = numpy.arange(count)
    places = numpy.maximum.accumulate(homes[order] - steps) + steps if count else steps
    table = numpy.zeros(max(1 << bits, int(places[-1]) + 1 if count else 0) + 1, numpy.uint32)
    table[places] = order + 1
    return TableLayout(builder.add(table), len(table), shift)


def _hashes(keys: Sequence[Any]) -> Any:
    kinds = set(map(type, keys))
    if kinds == {str}:
        return (crc32(key.encode("utf-8", "surrogatepass")) for key in keys)
    return map(steady_hash, keys)


def finder(view: memoryview, layout: TableLayout, get: Callable[[int], Any]) -> Callable[[Any], int]:
    """Return a function that finds a key's position, or -1. `get` reads the key at a position.

    The function compares as a dict does: keys whose hashes differ are never asked whether they are equal. NumPy's
    scalars answer that for each element of a tuple.
    """
    table = view[layout.begin : layout.begin + 4 * layout.count].cast("I")
    shift = layout.shift

    def find(key: Any) -> int:
        kind = type(key)
        number = crc32(key.encode("utf-8", "surrogatepass")) if kind is str else steady_hash(key)
        place = (number * _SPREAD & _ALL) >> shift
        while entry := table[place]:
            found = get(entry - 1)
            if found == key if kind in _PLAIN and type(found) is kind else _is_same(found, key):
                return entry - 1
            place += 1
        return -1

    return find


def search(keys: Iterable[Any], key: Any) -> int:
    """Find a key of a kind that has no steady hash: -1, unless its class says that it is equal to one of the keys."""
    return next((position for position, found in enumerate(keys) if _is_same(found, key)), -1)


def _is_same(found: Any, key: Any) -> bool:
    return bool(hash(found) == hash(key) and (found is key or found == key))
