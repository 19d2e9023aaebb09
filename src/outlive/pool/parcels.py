"""Values on their way between pool and worker: pickled, with their large buffers beside, which nothing copies twice.

Reads   values; bodies of messages.
Writes  parts of messages.
Never   lets two values that were given apart share an object on the other side.

    body = size of the head | head | one pickle after the other | buffers, each at a multiple of 64

What is defined in `__main__`, a notebook or a REPL, and lambdas and closures, travel by value (cloudpickle): no worker
need be able to import them. Everything else travels by name, which is faster.
"""

from __future__ import annotations

import copyreg
import pickle
import struct
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle
import numpy as np

from outlive._share import buffers, segments
from outlive._transport import packing
from outlive._transport.wire import Place

if TYPE_CHECKING:
    from outlive.pool.tensors import TensorBuffers

# Shared or not: nobody can tell. A tuple is as plain as what is in it.
PLAIN = frozenset(
    {int, float, complex, bool, str, bytes, type(None), np.float64, np.float32, np.int64, np.int32, np.bool_}
)

_MAIN = b"__main__"
_FRAME = 1 << 17  # a piece above this is no frame of the pickle but the bytes of one object in it
_LARGE = 1 << 16
_ALIGNMENT = 64
_HEAD = struct.Struct("<q")


class Blob(NamedTuple):
    """A pickle, in pieces that are never joined, and the buffers that belong to it."""

    pieces: list[Any]
    size: int
    buffers: list[memoryview]
    places: Sequence[Place] = ()  # of tensors in the buffers


class Apart:
    """A value among others that has nothing in common with them."""

    __slots__ = ("buffers", "pickled", "places")

    def __init__(self, blob: Blob) -> None:
        self.pickled = b"".join(blob.pieces)
        self.buffers: list[Any] = [pickle.PickleBuffer(buffer) for buffer in blob.buffers]
        self.places = blob.places

    @classmethod
    def of(cls, value: Any) -> Apart:
        return cls(_blob(value, by_name=True))

    def __getstate__(self) -> tuple[bytes, list[Any], Sequence[Place]]:
        return self.pickled, self.buffers, self.places

    def __setstate__(self, state: tuple[bytes, list[Any], Sequence[Place]]) -> None:
        self.pickled, self.buffers, self.places = state

    def open(self) -> Any:
        return _loads(self.pickled, self.buffers, self.places)


class _Beside(packing.Opening):
    """Finds tensors in the buffers beside a pickle."""

    __slots__ = ("buffers",)

    def __init__(self, buffers: Sequence[Any], places: Sequence[Place]) -> None:
        self.buffers = buffers
        self.places = places  # type: ignore[assignment]
        self.storages = {}

    def piece(self, place: Place) -> tuple[Any, int]:
        return self.buffers[place[0]], 0


def _loads(pickled: Any, buffers: Sequence[Any], places: Sequence[Place]) -> Any:
    return (
        packing.load(pickled, buffers, _Beside(buffers, places)) if places else pickle.loads(pickled, buffers=buffers)
    )


def are_plain(values: Sequence[Any]) -> bool:
    kinds = set(map(type, values))
    if tuple in kinds:
        kinds.remove(tuple)
        kinds.update(*(map(type, value) for value in values if type(value) is tuple))
    return kinds <= PLAIN


def dumps(value: Any) -> bytes:
    """Everything in one, to a worker."""
    blob = _blob(value, by_name=False, apart=False)
    return pickle.dumps(_Whole(Apart(blob)), 5) if blob.places else b"".join(blob.pieces)


class _Whole:
    """Pickles to what opening it gives."""

    def __init__(self, inside: Apart) -> None:
        self._inside = inside

    def __reduce__(self) -> Any:
        return Apart.open, (self._inside,)


def blob_of(value: Any, *, plain: bool = False, keep: bool = False) -> Blob:
    """To a worker. `plain`: it is made of nothing but plain values. `keep`: it can be sent again, and is then as it was
    now, whatever the caller does with the value meanwhile."""
    if plain:
        pickled = pickle.dumps(value, 5)
        return Blob([pickled], len(pickled), [])
    return _blob(value, by_name=False, keep=keep)


def _blob(value: Any, *, by_name: bool, keep: bool = False, apart: bool = True) -> Blob:
    """`apart`: large buffers beside the pickle; else only those of tensors are."""
    found: list[memoryview] = []
    tensors = None
    if "torch" in sys.modules:
        from outlive.pool.tensors import TensorBuffers

        tensors = TensorBuffers()

    def beside(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.readonly and raw.nbytes < _LARGE:
            return True  # in the stream
        found.append(raw)
        return False

    def again() -> None:
        found.clear()
        if tensors is not None:
            tensors.clear()

    reducers = _reducers(tensors, to_worker=not by_name)
    pieces = _pickled(value, reducers, by_name=by_name, beside=beside if apart else None, again=again)
    places: Sequence[Place] = ()
    if tensors is not None and tensors.places:
        found, places = tensors.settle(found)
    if keep:
        pieces, found = [_own(piece) for piece in pieces], [_own(buffer) for buffer in found]
    return Blob(pieces, sum(map(len, pieces)), found, places)


def _own(memory: Any) -> Any:
    """The bytes in memory that only this pool has; a copy, unless they can never change."""
    view = memoryview(memory)
    if type(view.obj) is bytes:
        return memory
    return memoryview(bytes(view) if view.readonly else bytearray(view))


def _pickled(
    value: Any, reducers: dict[type, Any], *, by_name: bool, beside: Any, again: Callable[[], None]
) -> list[Any]:
    """By name where whoever unpickles it can import what it names, else by value.

    `by_name`: to the pool, which has in its `__main__` what is in ours, unless pickle says otherwise. To a worker goes
    by handle what lies in shared memory; what comes from one is the pool's own.
    """
    try:
        pieces = _dump(value, _by_name, beside, reducers)
        if by_name or not any(_MAIN in piece for piece in pieces if len(piece) <= _FRAME):
            return pieces
    except Exception:  # a lambda, something defined inside of a function: cloudpickle may know how
        pass
    again()
    return _dump(value, _ByValue, beside, reducers)


def _dump(value: Any, kind: Any, beside: Any, reducers: dict[type, Any]) -> list[Any]:
    pieces = _Pieces()
    kind(pieces, beside, reducers).dump(value)
    # What is large and read-only comes as the buffer that it was.
    return [piece.raw() if type(piece) is pickle.PickleBuffer else piece for piece in pieces]


def _by_name(file: Any, beside: Any, reducers: dict[type, Any]) -> pickle.Pickler:
    pickler = pickle.Pickler(file, 5, buffer_callback=beside)
    if reducers:
        pickler.dispatch_table = {**copyreg.dispatch_table, **reducers}
    return pickler


class _ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: Any, beside: Any, reducers: dict[type, Any]) -> None:
        self._reducers = reducers  # first: the table is looked up once, in what follows
        super().__init__(file, 5, buffer_callback=beside)

    @property
    def dispatch_table(self) -> Any:
        return ChainMap(self._reducers, cloudpickle.Pickler.dispatch_table)


class _Pieces(list[Any]):
    """A file to a pickler."""

    write = list.append


def _reducers(tensors: TensorBuffers | None, *, to_worker: bool) -> dict[type, Any]:
    found: dict[type, Any] = {np.ndarray: packing.reduce_array}
    if tensors is not None:
        found |= tensors.reducers()
    if to_worker and segments.any_here():
        for kind, place in buffers.places().items():
            found[kind] = _placed(place, found.get(kind, lambda obj: obj.__reduce_ex__(5)))
    return found


def _placed(place: Callable[[Any], Any], otherwise: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda obj: place(obj) or otherwise(obj)


# ---------------------------------------------------------------- messages


def message(head: Any, blobs: Sequence[Blob]) -> list[Any]:
    """The parts of a body."""
    table = [(blob.size, tuple((b.nbytes, b.readonly) for b in blob.buffers), blob.places) for blob in blobs]
    first = pickle.dumps((head, table), 5)
    parts: list[Any] = [_HEAD.pack(len(first)), first]
    at = _HEAD.size + len(first)
    for blob in blobs:
        parts += blob.pieces
        at += blob.size
    for blob in blobs:
        for buffer in blob.buffers:
            parts += (bytes(-at % _ALIGNMENT), buffer.cast("B") if buffer.format != "B" else buffer)
            at += -at % _ALIGNMENT + buffer.nbytes
    return parts


class Message:
    """A body that has come: its pickles are loaded one by one."""

    __slots__ = ("_blobs", "_body", "head")

    def __init__(self, body: memoryview) -> None:
        self._body = body
        at = _HEAD.size + _HEAD.unpack_from(body)[0]
        self.head, table = pickle.loads(body[_HEAD.size : at])
        self._blobs: list[tuple[int, int, list[memoryview], Sequence[Place]]] = []
        for size, _, places in table:
            self._blobs.append((at, size, [], places))
            at += size
        for (_, sizes, _), (_, _, apart, _) in zip(table, self._blobs):
            for size, readonly in sizes:
                at += -at % _ALIGNMENT
                buffer = body[at : at + size]
                apart.append(buffer.toreadonly() if readonly else buffer)
                at += size

    def load(self, number: int, *, keep: bool = False) -> Any:
        """`keep`: it is as good as new when it is loaded again, whatever was done to what is returned here."""
        at, size, apart, places = self._blobs[number]
        if keep:
            apart = [buffer if buffer.readonly else memoryview(bytearray(buffer)) for buffer in apart]
        return _loads(self._body[at : at + size], apart, places)
