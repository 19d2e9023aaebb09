"""The arrays of a graph, and where each lies in its memory: a segment or a file.

Reads   nothing.
Writes  (while a graph is built) a fresh segment.
Never   an array that could be written to, once the graph stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlive._share import buffers
from outlive._share.segments import Builder, Memory
from outlive.graph.topology import EdgeType

# ("node", kind, name), ("edge", source, relation, destination, name), ("topology", source, relation, destination, part)
Key: TypeAlias = tuple[str, ...]
Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Extent:
    """One array: its type, its shape, and where it begins."""

    dtype: str
    shape: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """A graph without its arrays: how many nodes, which kinds of edges, and where in its memory each array lies."""

    num_nodes: dict[str, int]
    num_edges: dict[EdgeType, int]
    extents: dict[Key, Extent]

    @property
    def nbytes(self) -> int:
        return sum(extent.nbytes for extent in self.extents.values())


class Planned:
    """A segment to come: arrays are asked for one by one, then all are made at once."""

    def __init__(self) -> None:
        self._builder = Builder()
        self.extents: dict[Key, Extent] = {}

    def add(self, key: Key, dtype: Any, shape: tuple[int, ...]) -> None:
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        self.extents[key] = Extent(dtype.str, tuple(map(int, shape)), self._builder.reserve(nbytes))

    def make(self) -> tuple[Memory, dict[Key, Array]]:
        """The memory, and its arrays to be written, as long as nobody else knows of them."""
        mapped = self._builder.build()
        return mapped, {key: _view(mapped, extent) for key, extent in self.extents.items()}


def views(memory: Any, extents: dict[Key, Extent]) -> dict[Key, Array]:
    """The arrays of a graph, to be read."""
    buffers.register()  # one of them alone, in a user's dataset, travels by handle, too
    found = {key: _view(memory, extent) for key, extent in extents.items()}
    for array in found.values():
        array.flags.writeable = False
    return found


def _view(memory: Any, extent: Extent) -> Array:
    array: Array = np.ndarray(extent.shape, np.dtype(extent.dtype), memory, extent.at)
    return array
