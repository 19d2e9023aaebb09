"""One long text, or one long run of bytes, in shared memory.

Reads   its segment.
Writes  nothing.
Never   all of it at once, unless `str()` or `bytes()` asks for that: a slice is an ordinary str or bytes.

A text lies there with one width for all of its characters, as Python has it, so that any one is found at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from outlive._share import segments
from outlive._share.readonly import Shared, refusing
from outlive._share.segments import Builder, Memory
from outlive.quantities import in_words

_BLOCK = 1 << 16
_SHOWN = 20


def pack_text(text: str, builder: Builder) -> tuple[int, int, str]:
    """Where it begins, how many characters it has, and its encoding."""
    try:
        return builder.add(text.encode("latin-1")), len(text), "latin-1"
    except UnicodeEncodeError:
        # Not UTF-16 for those that would fit: two lone surrogates side by side would be read as one character.
        return builder.add(text.encode("utf-32-le", "surrogatepass")), len(text), "utf-32-le"


class _Run(Shared):
    """A run of equal units: characters, or bytes."""

    __slots__ = ("_begin", "_length", "_view", "_width")

    def __init__(self, mapped: Memory, size_bytes: int, begin: int, length: int, width: int) -> None:
        super().__init__(mapped, size_bytes)
        self._begin, self._length, self._width = begin, length, width
        self._view = segments.reading(mapped)[begin : begin + length * width]

    def _piece(self, low: int, high: int) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        try:
            found = range(self._length)[index]
        except IndexError:
            raise IndexError(f"{self._name} index out of range") from None
        if not isinstance(found, range):
            return self._unit(found)
        if found.step == 1:
            return self._piece(found.start, found.stop)
        low, high = min(found, default=0), max(found, default=-1) + 1
        return self._piece(low, high)[:: found.step] if len(found) else self._piece(0, 0)

    def _unit(self, index: int) -> Any:
        return self._piece(index, index + 1)

    def __iter__(self) -> Iterator[Any]:
        for low in range(0, self._length, _BLOCK):
            yield from self._piece(low, min(low + _BLOCK, self._length))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (self._plain, type(self))):
            return NotImplemented
        if len(self) != len(other):
            return False
        blocks = range(0, self._length, _BLOCK)
        return all(self[low : low + _BLOCK] == other[low : low + _BLOCK] for low in blocks)

    def __hash__(self) -> int:
        return hash(self[:])

    def __contains__(self, piece: Any) -> bool:
        return piece in self[:]

    def __repr__(self) -> str:
        more = "…" if self._length > _SHOWN else ""
        return f"{type(self).__name__}({self[:_SHOWN]!r}{more}, len={self._length}, {in_words(self._size)})"


@refusing("__setitem__", "__delitem__")
class SharedStr(_Run, Sequence[str]):
    """A long text in shared memory: length, index, slice, iteration, `in`, equality. `str(shared)`: an ordinary one."""

    __slots__ = ("_encoding",)

    _name = "str"
    _plain = str

    def __init__(self, mapped: Memory, size_bytes: int, begin: int, length: int, encoding: str) -> None:
        super().__init__(mapped, size_bytes, begin, length, 1 if encoding == "latin-1" else 4)
        self._encoding = encoding

    def _parts(self) -> tuple[Any, ...]:
        return self._begin, self._length, self._encoding

    def _piece(self, low: int, high: int) -> str:
        return str(self._view[low * self._width : high * self._width], self._encoding, "surrogatepass")

    def __str__(self) -> str:
        return self._piece(0, self._length)


@refusing("__setitem__", "__delitem__")
class SharedBytes(_Run, Sequence[int]):
    """A long run of bytes in shared memory; `view` reads it without a copy. `bytes(shared)`: an ordinary one."""

    __slots__ = ()

    _name = "bytes"
    _plain = bytes

    def __init__(self, mapped: Memory, size_bytes: int, begin: int, length: int) -> None:
        super().__init__(mapped, size_bytes, begin, length, 1)

    @property
    def view(self) -> memoryview:
        return self._view

    def _parts(self) -> tuple[Any, ...]:
        return self._begin, self._length

    def _piece(self, low: int, high: int) -> bytes:
        return bytes(self._view[low:high])

    def _unit(self, index: int) -> int:
        return self._view[index]

    def __bytes__(self) -> bytes:
        return bytes(self._view)

    def __buffer__(self, flags: int) -> memoryview:
        return self._view
