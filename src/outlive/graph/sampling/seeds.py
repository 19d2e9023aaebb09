"""Where sampling starts: seeds as people give them, as arrays by kind; and the graph as samplers see it.

Reads   arrays, or whatever NumPy makes arrays of.
Writes  nothing.
Never   lets a node through that the graph does not have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outlive.graph.topology import EdgeType, Longs, Topology

Seeds: TypeAlias = "NDArray[Any] | tuple[str, NDArray[Any]] | Mapping[str, NDArray[Any]]"

ONE_KIND: EdgeType = ("", "", "")


class Graph(Protocol):
    """What samplers ask of a graph."""

    @property
    def topologies(self) -> Mapping[EdgeType, Topology]: ...

    @property
    def num_nodes(self) -> Mapping[str, int]: ...


def by_kind(graph: Graph, seeds: Seeds) -> dict[str, Longs]:
    """Seeds as arrays, by the kind of their nodes."""
    given: Mapping[str, Any]
    if isinstance(seeds, Mapping):
        given = seeds
    elif isinstance(seeds, tuple) and len(seeds) == 2 and isinstance(seeds[0], str):
        given = {seeds[0]: seeds[1]}
    elif list(graph.num_nodes) == [""]:
        given = {"": seeds}
    else:
        raise ValueError(
            f"seeds of a graph with several kinds of nodes need their kind: give (kind, seeds) or a dict by kind; "
            f"the kinds are {_named(graph.num_nodes)}"
        )
    return {kind: _nodes(graph, kind, nodes) for kind, nodes in given.items()}


def times_of(seeds: Mapping[str, Longs], seed_times: Any) -> Longs:
    """The time of each seed, kind after kind."""
    given = seed_times if isinstance(seed_times, Mapping) else {next(iter(seeds), ""): seed_times}
    if set(given) != set(seeds):
        raise ValueError(f"seed_times must be for the seeds' kinds {_named(seeds)}, got {_named(given)}")
    parts = []
    for kind, nodes in seeds.items():
        times = np.asarray(given[kind])
        if times.dtype.kind not in "iu" or times.shape != nodes.shape:
            raise ValueError(
                f"seed_times must be one whole number per seed, {len(nodes)} in all, "
                f"got {times.dtype} of shape {times.shape}"
            )
        parts.append(times.astype(np.int64))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def key_of(value: Any, name: str) -> int:
    """A seed or the number of a batch."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    return int(value)


def only_topology(graph: Graph, what: str) -> Topology:
    """The edges of a graph of one kind."""
    if list(graph.topologies) != [ONE_KIND]:
        raise ValueError(
            f"{what} needs a graph of one kind of node and edge, this one has "
            f"{', '.join(map(str, graph.topologies)) or 'no edges'}; sample one kind of it as a graph of its own"
        )
    return graph.topologies[ONE_KIND]


def _nodes(graph: Graph, kind: str, nodes: Any) -> Longs:
    count = graph.num_nodes.get(kind)
    if count is None:
        raise ValueError(f"the graph has no nodes of kind {kind!r}; its kinds are {_named(graph.num_nodes)}")
    array = np.asarray(nodes)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"seeds must be a list of whole numbers, got {array.dtype} of shape {array.shape}")
    array = np.ascontiguousarray(array, np.int64)
    if len(array) and not (0 <= array.min() and array.max() < count):
        wrong = array[(array < 0) | (array >= count)][0]
        raise ValueError(f"seed {wrong} is not a node of the graph: {_of(kind)} are numbered 0 to {count - 1}")
    return array


def _of(kind: str) -> str:
    return f"nodes of kind {kind!r}" if kind else "nodes"


def _named(kinds: Any) -> str:
    return ", ".join(repr(kind) for kind in kinds) or "none"
