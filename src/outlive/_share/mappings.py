"""Dicts and sets in shared memory.

Reads   columns of keys and values, and a hash table, of its segment.
Writes  nothing.
Never   a Python dict: a lookup reads the table where it lies.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Set, ValuesView
from typing import Any, TypeVar

from outlive._share import hashing, segments
from outlive._share.columns import Layout
from outlive._share.hashing import TableLayout
from outlive._share.readonly import Shared, refusing
from outlive._share.segments import Memory
from outlive._share.sequences import SharedTuple
from outlive.quantities import in_words

K = TypeVar("K")
V_co = TypeVar("V_co", covariant=True)
T_co = TypeVar("T_co", covariant=True)

_SHOWN = 3


class _Keyed(Shared):
    """Keys, in their order, and where each one is."""

    __slots__ = ("_find", "_keys", "_table")

    def __init__(self, mapped: Memory, size_bytes: int, keys: Layout, table: TableLayout) -> None:
        super().__init__(mapped, size_bytes)
        self._keys: SharedTuple[Any] = SharedTuple(mapped, 0, keys)
        self._table = table
        self._find = hashing.finder(segments.reading(mapped), table, self._keys._get)

    def _parts(self) -> tuple[Any, ...]:
        return self._keys._layout, self._table

    def _position(self, key: Any) -> int:
        try:
            return self._find(key)
        except TypeError:
            hash(key)  # raises for what is no key at all
            return hashing.search(self._keys, key)

    def __contains__(self, key: object) -> bool:
        return self._position(key) >= 0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys)

    def __reversed__(self) -> Iterator[Any]:
        return iter(self._keys[::-1])


class _Values(ValuesView[Any]):
    _mapping: Any

    def __iter__(self) -> Iterator[Any]:
        return iter(self._mapping._values)


class _Items(ItemsView[Any, Any]):
    _mapping: Any

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self._mapping._keys, self._mapping._values)


@refusing("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")
class SharedDict(_Keyed, Mapping[K, V_co]):
    """A dict in shared memory, to be read like any other. `dict(shared)` makes an ordinary one."""

    __slots__ = ("_values",)

    _name = "dict"
    _plain = dict

    def __init__(self, mapped: Memory, size_bytes: int, keys: Layout, table: TableLayout, values: Layout) -> None:
        super().__init__(mapped, size_bytes, keys, table)
        self._values: SharedTuple[Any] = SharedTuple(mapped, 0, values)

    def _parts(self) -> tuple[Any, ...]:
        return *super()._parts(), self._values._layout

    def __getitem__(self, key: K) -> V_co:
        position = self._position(key)
        if position < 0:
            raise KeyError(key)
        value: V_co = self._values._get(position)
        return value

    def get(self, key: Any, default: Any = None) -> Any:
        position = self._position(key)
        return default if position < 0 else self._values._get(position)

    def values(self) -> ValuesView[V_co]:
        return _Values(self)

    def items(self) -> ItemsView[K, V_co]:
        return _Items(self)

    def copy(self) -> dict[K, V_co]:
        return dict(self.items())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (dict, SharedDict)):
            return NotImplemented
        if len(self) != len(other):
            return False
        missing = object()
        return all(
            theirs is not missing and (mine is theirs or mine == theirs) for mine, theirs in self._pairs(other, missing)
        )

    __hash__ = None  # type: ignore[assignment]

    def _pairs(self, other: Any, missing: object) -> Iterator[tuple[Any, Any]]:
        return ((value, other.get(key, missing)) for key, value in self.items())

    def __or__(self, other: Any) -> Any:
        return dict(self.items()) | dict(other) if isinstance(other, (dict, SharedDict)) else NotImplemented

    def __ror__(self, other: Any) -> Any:
        return other | dict(self.items()) if isinstance(other, dict) else NotImplemented

    def __repr__(self) -> str:
        pairs = [f"{key!r}: {value!r}" for key, value in zip(self._keys[:_SHOWN], self._values[:_SHOWN])]
        return _shown(self, pairs)


@refusing("__ior__", "__iand__", "__isub__", "__ixor__", "add", "clear", "discard", "pop", "remove", "update")
@refusing("difference_update", "intersection_update", "symmetric_difference_update")
class SharedSet(_Keyed, Set[T_co]):
    """A set in shared memory, to be read like any other. `set(shared)` makes an ordinary one."""

    __slots__ = ()

    _name = "set"
    _plain = set

    @classmethod
    def _from_iterable(cls, it: Iterable[Any]) -> Any:
        return set(it)  # what operators of `Set` make

    def issubset(self, other: Iterable[Any]) -> bool:
        return self <= set(other)

    def issuperset(self, other: Iterable[Any]) -> bool:
        return all(item in self for item in other)

    def union(self, *others: Iterable[Any]) -> set[Any]:
        return set(self).union(*others)

    def intersection(self, *others: Iterable[Any]) -> set[Any]:
        return set(self).intersection(*others)

    def difference(self, *others: Iterable[Any]) -> set[Any]:
        return set(self).difference(*others)

    def copy(self) -> set[T_co]:
        return set(self)

    def __repr__(self) -> str:
        return _shown(self, [repr(key) for key in self._keys[:_SHOWN]])


def _shown(shared: _Keyed, pieces: list[str]) -> str:
    more = ", …" if len(shared) > _SHOWN else ""
    return f"{type(shared).__name__}({{{', '.join(pieces)}{more}}}, len={len(shared)}, {in_words(shared.nbytes)})"
