"""A graph that lives once, for all processes: in shared memory, or in a file that all of them map.

Reads   what it is built from.
Writes  one segment, while it is built; a file, when it is saved.
Never   changes: whoever has it reads the same bytes. A pickle of it carries a handle, or a path.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlive._share import segments
from outlive.graph import building, checking, file, foreign
from outlive.graph.arrays import Array, Key, Layout, Planned, views
from outlive.graph.checking import ONE_KIND, ONE_RELATION, Given, Relation
from outlive.graph.sampled import Sampled, SampledEdges
from outlive.graph.topology import EdgeType, Longs, Topology

_PARTS = ("indptr", "indices", "edge_ids", "weights", "times")


class SharedGraph:
    """A graph in shared memory: topology, features of nodes and edges, weights, times. Made by `from_…` or `open`.

    num_nodes, num_edges   how many there are, by kind
    topologies             the edges of each kind, sorted by destination: what samplers read
    node_features          arrays by kind of node and name: features, labels, masks, anything with a row for each node
    edge_features          arrays by kind of edge and name, a row for each edge as it was given

    A graph of one kind of nodes and edges has the keys "" and ("", "", ""); `graph["x"]` is then the node feature x.
    Everything is read-only. Workers get it by handle, in microseconds, under fork, spawn and forkserver.
    """

    def __init__(self, layout: Layout, memory: Any, origin: file.Origin | None = None) -> None:
        self._layout = layout
        self._memory = memory
        self._origin = origin
        self._arrays = views(memory, layout.extents)
        self.num_nodes: dict[str, int] = dict(layout.num_nodes)
        self.num_edges: dict[EdgeType, int] = dict(layout.num_edges)
        self.topologies: dict[EdgeType, Topology] = {
            kind: Topology(*(self._arrays.get(("topology", *kind, part)) for part in _PARTS))  # type: ignore[arg-type]
            for kind in layout.num_edges
        }
        self.node_features: dict[str, dict[str, Array]] = {kind: {} for kind in self.num_nodes}
        self.edge_features: dict[EdgeType, dict[str, Array]] = {kind: {} for kind in self.num_edges}
        for key, array in self._arrays.items():
            if key[0] == "node":
                self.node_features[key[1]][key[2]] = array
            elif key[0] == "edge":
                self.edge_features[(key[1], key[2], key[3])][key[4]] = array

    # ------------------------------------------------------------ making one

    @classmethod
    def from_edge_index(
        cls,
        edge_index: Any,
        num_nodes: Any = None,
        *,
        node_features: Mapping[Any, Any] | None = None,
        edge_features: Mapping[Any, Any] | None = None,
        weights: Any = None,
        times: Any = None,
        threads: int | None = None,
    ) -> SharedGraph:
        """A graph from its edges: `edge_index[0][i] → edge_index[1][i]` is edge i.

        edge_index     an array or tensor of shape (2, edges), or a pair of flat ones. For several kinds of nodes or
                   edges, a dict of these by (kind of source, relation, kind of target); all other arguments are then
                   dicts by kind as well
        num_nodes      None: as many as there are rows of features, else up to the highest number in an edge
        node_features  arrays by name, a row for each node: features, labels, masks
        edge_features  arrays by name, a row for each edge
        weights        how likely each edge is drawn, relative to the others into its target
        times          when each edge came to be, for temporal sampling; whole numbers
        threads        how many build it; None: as many CPUs as this process may use
        """
        check = checking.many_kinds if isinstance(edge_index, Mapping) else checking.one_kind
        return cls._of(check(edge_index, num_nodes, node_features, edge_features, weights, times), threads)

    @classmethod
    def from_scipy(
        cls,
        matrix: Any,
        *,
        weights: Any = None,
        node_features: Mapping[str, Any] | None = None,
        edge_features: Mapping[str, Any] | None = None,
        times: Any = None,
        threads: int | None = None,
    ) -> SharedGraph:
        """A graph from a square sparse matrix: what is stored at [i, j] is an edge i → j.

        Edge n is the n-th element of `matrix.data`, as the matrix has it. `weights="values"` takes the stored values as
        weights.
        """
        edges, count = foreign.edges_of_matrix(matrix)
        if isinstance(weights, str):
            if weights != "values":
                raise ValueError(f'weights must be "values", an array or None, got {weights!r}')
            weights = edges.values
        given = checking.one_kind((edges.rows, edges.cols), count, node_features, edge_features, weights, times)
        return cls._of(given, threads)

    @classmethod
    def from_networkx(
        cls,
        graph: Any,
        *,
        node_features: tuple[str, ...] | list[str] = (),
        edge_features: tuple[str, ...] | list[str] = (),
        weights: str | None = None,
        times: str | None = None,
        threads: int | None = None,
    ) -> SharedGraph:
        """A graph from NetworkX: nodes are numbered as `list(graph)` has them; of an undirected edge each way is one.

        The other arguments name attributes of nodes and edges, which all of them must have.
        """
        return cls._of(foreign.of_networkx(graph, node_features, edge_features, weights, times), threads)

    @classmethod
    def from_pyg(
        cls,
        data: Any,
        *,
        weights: str | None = None,
        times: str | None = None,
        threads: int | None = None,
    ) -> SharedGraph:
        """A graph from PyG's `Data` or `HeteroData`, with all tensors that belong to nodes or to edges.

        `weights` and `times` name attributes of edges; kinds of edges without them have none.
        """
        return cls._of(foreign.of_pyg(data, weights, times), threads)

    @classmethod
    def from_dgl(
        cls,
        graph: Any,
        *,
        weights: str | None = None,
        times: str | None = None,
        threads: int | None = None,
    ) -> SharedGraph:
        """A graph from DGL, with all data of nodes and edges, through DGL's own methods: outlive does not import it.

        `weights` and `times` name data of edges; kinds of edges without them have none.
        """
        return cls._of(foreign.of_dgl(graph, weights, times), threads)

    @classmethod
    def _of(cls, given: Given, threads: int | None) -> SharedGraph:
        team = building.Threads(threads)
        planned = Planned()
        for kind, relation in given.relations.items():
            _plan_topology(planned, kind, relation, given.num_nodes)
            for name, array in relation.features.items():
                planned.add(("edge", *kind, name), array.dtype.newbyteorder("="), array.shape)
        for node_kind, features in given.node_features.items():
            for name, array in features.items():
                planned.add(("node", node_kind, name), array.dtype.newbyteorder("="), array.shape)
        memory, arrays = planned.make()
        steps = []
        for kind, relation in given.relations.items():
            room = building.Room(*(arrays.get(("topology", *kind, part)) for part in _PARTS))  # type: ignore[arg-type]
            building.build(relation, given.num_nodes[kind[0]], room, team)
            for name, array in relation.features.items():
                key: Key = ("edge", *kind, name)
                steps += building.copying(arrays[key], array)
        for node_kind, features in given.node_features.items():
            for name, array in features.items():
                steps += building.copying(arrays["node", node_kind, name], array)
        team.do(steps)
        num_edges = {kind: len(relation.sources) for kind, relation in given.relations.items()}
        return cls(Layout(given.num_nodes, num_edges, planned.extents), memory)

    # ------------------------------------------------------------ files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file for `open`. One that others have opened under this name stays what it is for them."""
        file.save(Path(path), self._layout, self._arrays)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> SharedGraph:
        """A graph that was saved: mapped, not read. All processes that open it share the system's one copy of it."""
        opened = file.open_file(os.path.abspath(path))
        return cls(opened.layout, opened.memory, opened.origin)

    @property
    def path(self) -> str | None:
        """The file that it lies in; None for one in shared memory."""
        return self._origin.path if self._origin is not None else None

    @property
    def nbytes(self) -> int:
        """How much memory it takes: once, for all processes."""
        return self._layout.nbytes

    def __reduce__(self) -> tuple[Any, ...]:
        if self._origin is not None:
            return _reopened, (self._origin.path, self._origin.id)
        return SharedGraph, (self._layout, segments.of(self._memory))

    def __copy__(self) -> SharedGraph:
        return self

    def __deepcopy__(self, memo: Any) -> SharedGraph:
        return self

    # ------------------------------------------------------------ looking at it

    @property
    def is_heterogeneous(self) -> bool:
        """Whether it was made with kinds of nodes and edges."""
        return list(self.num_nodes) != [ONE_KIND] or list(self.num_edges) != [ONE_RELATION]

    def __getitem__(self, name: str) -> Array:
        if self.is_heterogeneous:
            raise TypeError(f"this graph has several kinds of nodes: graph.node_features[kind][{name!r}]")
        found = self.node_features[ONE_KIND]
        if name not in found:
            raise KeyError(f"no node feature {name!r}, but {list(found)}")
        return found[name]

    def neighbors(self, node: int, kind: EdgeType = ONE_RELATION) -> tuple[NDArray[Any], NDArray[Any]]:
        """The sources of all edges into a node, and the numbers of these edges."""
        topology = self.topologies[kind]
        if not 0 <= node < self.num_nodes[kind[2]]:
            raise IndexError(f"there is no node {node} among the {self.num_nodes[kind[2]]} of kind {kind[2]!r}")
        begin, end = int(topology.indptr[node]), int(topology.indptr[node + 1])
        ids = np.arange(begin, end) if topology.edge_ids is None else topology.edge_ids[begin:end]
        return topology.indices[begin:end], ids

    def subgraph(self, nodes: Any) -> Sampled:
        """These nodes and all edges between them; `nodes`: an array of numbers, or a dict of such by kind."""
        by_kind = {ONE_KIND: nodes} if not isinstance(nodes, Mapping) else nodes
        chosen = {kind: np.asarray(by_kind.get(kind, ()), np.int64) for kind in self.num_nodes}
        for kind, numbers in chosen.items():
            outside = numbers[(numbers < 0) | (numbers >= self.num_nodes[kind])]
            if outside.size:
                raise IndexError(f"there is no node {outside[0]} among the {self.num_nodes[kind]} of kind {kind!r}")
            if len(np.unique(numbers)) != len(numbers):
                raise ValueError("a node of a subgraph is named twice (np.unique leaves each once)")
        edges = {kind: self._between(kind, chosen[kind[0]], chosen[kind[2]]) for kind in self.topologies}
        return Sampled(chosen, {kind: (len(numbers),) for kind, numbers in chosen.items()}, edges)

    def _between(self, kind: EdgeType, sources: Longs, targets: Longs) -> SampledEdges:
        topology = self.topologies[kind]
        begins = topology.indptr[targets]
        degrees = topology.indptr[targets + 1] - begins
        cols = np.repeat(np.arange(len(targets)), degrees)
        places = np.repeat(begins - np.cumsum(degrees) + degrees, degrees) + np.arange(int(degrees.sum()))
        found = topology.indices[places].astype(np.int64)
        order = np.argsort(sources)
        at = np.searchsorted(sources[order], found).clip(max=max(0, len(sources) - 1))
        rows = order[at] if len(sources) else at
        inside = sources[rows] == found if len(sources) else np.zeros(len(found), bool)
        places = places[inside]
        ids = places if topology.edge_ids is None else topology.edge_ids[places].astype(np.int64)
        return SampledEdges(rows[inside], cols[inside], ids, (len(places),))

    def __repr__(self) -> str:
        nodes = ", ".join(f"{count:,} {kind}".rstrip() for kind, count in self.num_nodes.items())
        edges = ", ".join(f"{count:,} {'-'.join(kind).strip('-')}".rstrip() for kind, count in self.num_edges.items())
        where = f" in {self.path}" if self.path else ""
        return f"SharedGraph(nodes: {nodes}; edges: {edges}; {self.nbytes / 2**20:.1f} MiB{where})"


def _reopened(path: str, number: str) -> SharedGraph:
    opened = file.open_file(path, number)
    return SharedGraph(opened.layout, opened.memory, opened.origin)


def _plan_topology(planned: Planned, kind: EdgeType, relation: Relation, num_nodes: Mapping[str, int]) -> None:
    count = len(relation.sources)
    key: Key = ("topology", *kind)
    planned.add((*key, "indptr"), np.int64, (num_nodes[kind[2]] + 1,))
    planned.add((*key, "indices"), np.int32 if num_nodes[kind[0]] < 2**31 else np.int64, (count,))
    if not building.is_sorted(relation):
        planned.add((*key, "edge_ids"), np.int32 if count < 2**31 else np.int64, (count,))
    if relation.weights is not None:
        planned.add((*key, "weights"), relation.weights.dtype, (count,))
    if relation.times is not None:
        planned.add((*key, "times"), np.int64, (count,))
