"""Graphs for tests of samplers, and what a sample of them must be like, worked out edge by edge.

Reads   graphs as lists of edges.
Writes  OUTLIVE_SAMPLER, for the length of a block.
Never   asks the sampler's own code what is right.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st

from outlive.graph.sampled import Sampled
from outlive.graph.sampling import choice
from outlive.graph.sampling.neighbors import NeighborSampler
from outlive.graph.topology import EdgeType, Topology

ONE: EdgeType = ("", "", "")


class Edge(NamedTuple):
    id: int
    source: int
    weight: float
    time: int


@dataclass
class PlainGraph:
    """Arrays for samplers, and the edges into each node for the reference, in the order of the arrays."""

    num_nodes: dict[str, int]
    topologies: dict[EdgeType, Topology] = field(default_factory=dict)
    into: dict[EdgeType, list[list[Edge]]] = field(default_factory=dict)

    def add(
        self,
        kind: EdgeType,
        sources: Any,
        destinations: Any,
        *,
        weights: Any = None,
        times: Any = None,
        wide: bool = False,
        ids: bool = True,
    ) -> PlainGraph:
        sources, destinations = np.asarray(sources, np.int64), np.asarray(destinations, np.int64)
        if not ids:  # edges are numbered as they lie
            order = np.lexsort((sources, destinations))
            sources, destinations = sources[order], destinations[order]
        order = np.lexsort((sources, destinations))
        index = np.int64 if wide else np.int32
        count = self.num_nodes[kind[2]]
        indptr = np.concatenate([[0], np.cumsum(np.bincount(destinations, minlength=count))]).astype(np.int64)
        topology = Topology(
            indptr,
            sources[order].astype(index),
            order.astype(index) if ids else None,
            None if weights is None else np.asarray(weights)[order],
            None if times is None else np.asarray(times, np.int64)[order],
        )
        self.topologies[kind] = topology
        self.into[kind] = [
            [
                Edge(
                    int(order[at]),
                    int(sources[order[at]]),
                    1.0 if topology.weights is None else float(topology.weights[at]),
                    0 if topology.times is None else int(topology.times[at]),
                )
                for at in range(indptr[node], indptr[node + 1])
            ]
            for node in range(count)
        ]
        return self


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Sample in C or with NumPy."""
    before = os.environ.get(choice.VARIABLE)
    os.environ[choice.VARIABLE] = backend
    try:
        yield
    finally:
        del os.environ[choice.VARIABLE]
        if before is not None:
            os.environ[choice.VARIABLE] = before


@st.composite
def graphs(draw: Any) -> PlainGraph:
    """Small graphs with one kind of node or several, with multiple edges, loops, and nodes without edges."""
    kinds = draw(st.sampled_from([[""], ["user", "item"], ["a", "b", "c"]]))
    graph = PlainGraph({kind: draw(st.integers(1, 12)) for kind in kinds})
    if kinds == [""]:
        types = [ONE]
    else:
        pairs = st.tuples(st.sampled_from(kinds), st.sampled_from(["x", "y"]), st.sampled_from(kinds))
        types = draw(st.lists(pairs, min_size=1, max_size=4, unique=True))
    for kind in types:
        nodes = st.tuples(st.integers(0, graph.num_nodes[kind[0]] - 1), st.integers(0, graph.num_nodes[kind[2]] - 1))
        pairs_of = draw(st.lists(nodes, max_size=60))
        size = len(pairs_of)
        weight_type = draw(st.sampled_from([np.float32, np.float64]))
        numbers = st.sampled_from([0.0, 0.1, 0.5, 1.0, 3.0])
        graph.add(
            kind,
            [source for source, _ in pairs_of],
            [destination for _, destination in pairs_of],
            weights=np.array(draw(st.lists(numbers, min_size=size, max_size=size)), weight_type),
            times=draw(st.lists(st.integers(-3, 3), min_size=size, max_size=size)),
            wide=draw(st.booleans()),
            ids=draw(st.booleans()),
        )
    return graph


@st.composite
def samplers(draw: Any, graph: PlainGraph) -> NeighborSampler:
    """Every combination of options that is allowed."""
    hops = st.lists(st.integers(-1, 5), max_size=3)
    fanouts = draw(st.one_of(hops, st.dictionaries(st.sampled_from(list(graph.topologies)), hops)))
    temporal = draw(st.sampled_from([None, "uniform", "last"]))
    return NeighborSampler(
        fanouts,
        replace=draw(st.booleans()) and temporal != "last",
        weights=draw(st.sampled_from([None, False, True])) if temporal != "last" else None,
        directed=draw(st.booleans()),
        temporal=temporal,
        disjoint=True if temporal else draw(st.sampled_from([None, False, True])),
    )


@st.composite
def cases(draw: Any) -> tuple[PlainGraph, NeighborSampler, dict[str, np.ndarray], dict[str, np.ndarray] | None]:
    """A graph, a sampler for it, seeds (some of them twice) and their times."""
    graph = draw(graphs())
    sampler = draw(samplers(graph))
    kinds = draw(st.lists(st.sampled_from(list(graph.num_nodes)), min_size=1, unique=True))
    seeds = {
        kind: np.array(draw(st.lists(st.integers(0, graph.num_nodes[kind] - 1), max_size=5)), np.int64)
        for kind in kinds
    }
    times = {
        kind: np.array(draw(st.lists(st.integers(-4, 4), min_size=len(nodes), max_size=len(nodes))), np.int64)
        for kind, nodes in seeds.items()
    }
    return graph, sampler, seeds, times if sampler.temporal else None


def eligible(sampler: NeighborSampler, column: list[Edge], latest: int | None) -> list[Edge]:
    """The edges of a column that may be taken."""
    return [
        edge for edge in column if (latest is None or edge.time <= latest) and (not sampler.weights or edge.weight > 0)
    ]


class Expected:
    """Follows a sample hop by hop, and numbers nodes as they must be numbered."""

    def __init__(self, graph: PlainGraph, sampler: NeighborSampler, seeds: dict[str, Any], times: Any) -> None:
        self.graph, self.sampler = graph, sampler
        self.disjoint = bool(sampler.temporal or sampler.disjoint)
        self.nodes: dict[str, list[tuple[int, int]]] = {kind: [] for kind in graph.num_nodes}  # (owner, node)
        self.latest: list[int] = []
        for kind, nodes in seeds.items():
            for place, node in enumerate(nodes):
                self.nodes[kind].append((len(self.latest) if self.disjoint else 0, int(node)))
                self.latest.append(int(times[kind][place]) if times is not None else 0)
        self.seeds = {kind: len(nodes) for kind, nodes in self.nodes.items()}

    def latest_of(self, owner: int) -> int | None:
        return self.latest[owner] if self.sampler.temporal else None

    def fanouts(self, kind: EdgeType) -> tuple[int, ...]:
        fanouts: Any = self.sampler.fanouts
        return fanouts.get(kind, ()) if isinstance(fanouts, dict) else fanouts

    def check_hops(self, sampled: Sampled) -> None:
        """Of a directed sample: edges, their order, and the nodes that they bring."""
        begun = dict.fromkeys(self.nodes, 0)
        cursor = dict.fromkeys(self.graph.topologies, 0)
        per_hop = {kind: [count] for kind, count in self.seeds.items()}
        for hop in range(self.sampler.hops):
            ends = {kind: len(nodes) for kind, nodes in self.nodes.items()}
            for kind in self.graph.topologies:
                end = cursor[kind] + sampled.edges[kind].per_hop[hop]
                fanouts = self.fanouts(kind)
                for col in range(begun[kind[2]], ends[kind[2]]) if hop < len(fanouts) else ():
                    cursor[kind] = self.check_column(sampled, kind, col, cursor[kind], fanouts[hop])
                assert cursor[kind] == end
            begun = ends
            for kind_of_node, nodes in self.nodes.items():
                per_hop[kind_of_node].append(len(nodes) - ends[kind_of_node])
        assert {kind: list(counts) for kind, counts in sampled.nodes_per_hop.items()} == per_hop
        for kind, end in cursor.items():
            assert end == len(sampled.edges[kind].rows) == sum(sampled.edges[kind].per_hop)

    def check_column(self, sampled: Sampled, kind: EdgeType, col: int, start: int, fanout: int) -> int:
        owner, node = self.nodes[kind[2]][col]
        column = eligible(self.sampler, self.graph.into[kind][node], self.latest_of(owner))
        take_all = fanout < 0 or (not self.sampler.replace and len(column) <= fanout)
        count = len(column) if take_all else fanout if column else 0
        edges = sampled.edges[kind]
        ids = edges.edge_ids[start : start + count].tolist()
        assert edges.cols[start : start + count].tolist() == [col] * count
        if take_all:
            assert ids == [edge.id for edge in column]
        elif self.sampler.temporal == "last":
            latest = (
                sorted(range(len(column)), key=lambda place: (column[place].time, place))[-fanout:] if fanout else []
            )
            assert ids == [column[place].id for place in sorted(latest)]
        elif not self.sampler.replace:
            assert len(set(ids)) == count
        by_id = {edge.id: edge for edge in column}
        for place, edge_id in enumerate(ids, start):
            source = (owner, by_id[edge_id].source)
            if source not in self.nodes[kind[0]]:
                self.nodes[kind[0]].append(source)
            assert edges.rows[place] == self.nodes[kind[0]].index(source)
        return start + count

    def check_nodes(self, sampled: Sampled) -> None:
        for kind, nodes in self.nodes.items():
            assert sampled.nodes[kind].tolist() == [node for _, node in nodes]
            if self.disjoint:
                assert sampled.batch is not None
                assert sampled.batch[kind].tolist() == [owner for owner, _ in nodes]
        assert (sampled.batch is not None) == self.disjoint

    def check_induced(self, sampled: Sampled, directed: Sampled) -> None:
        """Of one that is not directed: the same nodes, and all edges between them."""
        for kind, nodes in directed.nodes.items():
            assert sampled.nodes[kind].tolist() == nodes.tolist()
        assert sampled.nodes_per_hop == directed.nodes_per_hop
        followed = self.sampler.fanouts if isinstance(self.sampler.fanouts, dict) else self.graph.topologies
        for kind, edges in sampled.edges.items():
            sources = self.nodes[kind[0]]
            wanted = [
                (sources.index((owner, edge.source)), col, edge.id)
                for col, (owner, node) in enumerate(self.nodes[kind[2]])
                for edge in self.graph.into[kind][node]
                if (owner, edge.source) in sources
                and (not self.sampler.temporal or edge.time <= self.latest[owner])
                and kind in followed
            ]
            assert list(zip(edges.rows.tolist(), edges.cols.tolist(), edges.edge_ids.tolist())) == wanted
            assert edges.per_hop == (len(wanted),)


def assert_same(one: Sampled, other: Sampled) -> None:
    """Bit for bit."""
    assert one.nodes_per_hop == other.nodes_per_hop
    for kind, nodes in one.nodes.items():
        assert nodes.dtype == other.nodes[kind].dtype == np.int64
        assert nodes.tolist() == other.nodes[kind].tolist()
    assert list(one.edges) == list(other.edges)
    for kind, edges in one.edges.items():
        theirs = other.edges[kind]
        assert edges.per_hop == theirs.per_hop
        for name in ("rows", "cols", "edge_ids"):
            mine, its = getattr(edges, name), getattr(theirs, name)
            assert mine.dtype == its.dtype == np.int64
            assert mine.tolist() == its.tolist()
    assert (one.batch is None) == (other.batch is None)
    for kind, owners in (one.batch or {}).items():
        assert other.batch is not None
        assert owners.tolist() == other.batch[kind].tolist()
