"""Lists and tuples in shared memory.

Reads   a column of its segment.
Writes  nothing.
Never   a Python object per element: each is made when it is asked for, and is the reader's own.

A slice is a shared list over the same memory: positions are a `range`, and a slice of a range is a range.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy

from outlive._share import columns, segments
from outlive._share.columns import Layout
from outlive._share.readonly import Shared, refusing
from outlive._share.segments import Memory
from outlive.quantities import in_words

T_co = TypeVar("T_co", covariant=True)

_BLOCK = 1024  # elements read at once when all are asked for
_SHOWN = 3


class _SharedSequence(Shared, Sequence[T_co]):
    __slots__ = ("_get", "_layout", "_many", "_where", "_whole")

    def __init__(self, mapped: Memory, size_bytes: int, layout: Layout, where: range | None = None) -> None:
        super().__init__(mapped, size_bytes)
        self._layout = layout
        self._where = range(layout.count) if where is None else where
        self._whole = self._where == range(layout.count)
        self._get, self._many = columns.open_column(mapped, layout)

    def _parts(self) -> tuple[Any, ...]:
        return self._layout, self._where

    def __len__(self) -> int:
        return len(self._where)

    @overload
    def __getitem__(self, index: int) -> T_co: ...
    @overload
    def __getitem__(self, index: slice) -> _SharedSequence[T_co]: ...
    def __getitem__(self, index: Any) -> Any:
        try:
            if self._whole and type(index) is int and index >= 0:
                return self._get(index)  # by far the most
            position = self._where[index]
        except IndexError:
            raise IndexError(f"{self._name} index out of range") from None
        except TypeError:
            kind = type(index).__name__
            raise TypeError(f"{self._name} indices must be integers or slices, not {kind}") from None
        if type(position) is range:
            return type(self)(self._memory, self._size, self._layout, position)
        return self._get(position)

    def __iter__(self) -> Iterator[T_co]:
        where = self._where
        if where.step != 1:
            yield from map(self._get, where)
            return
        for low in range(where.start, where.stop, _BLOCK):
            yield from self._many(low, min(low + _BLOCK, where.stop))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (self._plain, type(self))):
            return NotImplemented
        if len(self) != len(other):
            return False
        if isinstance(other, _SharedSequence) and self._memory is other._memory and self._parts() == other._parts():
            return True
        return all(mine is theirs or mine == theirs for mine, theirs in zip(self, other))

    def __add__(self, other: Any) -> Any:
        return self._plain(self) + self._plain(other) if isinstance(other, (self._plain, Shared)) else NotImplemented

    def __radd__(self, other: Any) -> Any:
        return other + self._plain(self) if isinstance(other, self._plain) else NotImplemented

    def __mul__(self, times: int) -> Any:
        return self._plain(self) * times

    __rmul__ = __mul__

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Numbers are read as they lie there; `copy=None` gives a view of them, read-only."""
        if self._layout.kind != "numbers":
            if copy is False:
                raise ValueError(f"a shared {self._name} of anything but numbers cannot be an array without a copy")
            return numpy.array(self._plain(self), dtype)
        begin, size, code = self._layout.values
        wide = numpy.frombuffer(segments.reading(self._memory)[begin : begin + size], code)
        where = self._where
        stop = where.stop if where.stop >= 0 else None
        narrow = wide[where.start : stop : where.step] if len(where) else wide[:0]
        wanted = numpy.dtype(numpy.int64 if narrow.dtype.kind == "i" else narrow.dtype) if dtype is None else dtype
        if narrow.dtype == wanted:
            return narrow.copy() if copy else narrow
        if copy is False:
            raise ValueError(f"these numbers lie there as {narrow.dtype}: as {wanted} they are a copy")
        return narrow.astype(wanted)

    def __repr__(self) -> str:
        shown = ", ".join([repr(self[index]) for index in range(min(_SHOWN, len(self)))])
        more = ", …" if len(self) > _SHOWN else ""
        return f"{type(self).__name__}([{shown}{more}], len={len(self)}, {in_words(self._size)})"


@refusing(*("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse"))
@refusing("__setitem__", "__delitem__", "__iadd__", "__imul__")
class SharedList(_SharedSequence[T_co]):
    """A list in shared memory, to be read like any other. `list(shared)` makes an ordinary one."""

    __slots__ = ()
    __hash__ = None  # type: ignore[assignment]

    _name = "list"
    _plain = list

    def copy(self) -> list[T_co]:
        return list(self)


@refusing("__setitem__", "__delitem__")
class SharedTuple(_SharedSequence[T_co]):
    """A tuple in shared memory. `tuple(shared)` makes an ordinary one."""

    __slots__ = ()

    _name = "tuple"
    _plain = tuple

    def __hash__(self) -> int:
        return hash(tuple(self))
