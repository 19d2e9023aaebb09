"""Neighbourhoods: some of the edges into the seeds, some of those into their sources, and so on.

Reads   the topologies of a graph.
Writes  nothing; answers with a `Sampled`.
Never   depends on anything but the arguments: (seed, batch) always gives the same, in any process, in C or NumPy.

    seeds ── fanouts[0] edges into each ──► new nodes ── fanouts[1] into each of them ──► new nodes ── …
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from outlive.graph.sampled import Sampled, SampledEdges
from outlive.graph.sampling import choice, compiled, keys, plain
from outlive.graph.sampling.growing import Edges, Found, Rule, Span
from outlive.graph.sampling.seeds import Graph, Seeds, by_kind, key_of, times_of
from outlive.graph.topology import EdgeType, Longs, Topology

_DOMAIN = 1  # no other sampler draws by these keys
ALL = -1


@dataclass(frozen=True)
class NeighborSampler:
    """Samples `fanouts[i]` edges into each node that hop `i` starts from; -1 takes all of them.

    For a graph of several kinds, `fanouts` holds for every kind of edge, or is a dict by kind of edge; kinds that are
    not in it are not followed. The other options:

    `replace`   an edge may be drawn more than once. Else each at most once, and all where there are no more.
    `weights`   edges are drawn by the weights that the graph has; one of weight 0 is never taken.
    `directed`  False: all edges between the nodes that were met, instead of those that led to them.
    `temporal`  only edges that are not later than the seed's time: "uniform", or "last" for the most recent ones.
    `disjoint`  each seed has a neighbourhood of its own, and nodes that several share come once for each.
    """

    fanouts: Sequence[int] | Mapping[EdgeType, Sequence[int]]
    replace: bool = field(default=False, kw_only=True)
    weights: bool | None = field(default=None, kw_only=True)
    directed: bool = field(default=True, kw_only=True)
    temporal: str | None = field(default=None, kw_only=True)
    disjoint: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        fanouts: Any = self.fanouts
        if isinstance(fanouts, Mapping):
            for kind in fanouts:
                if not (isinstance(kind, tuple) and len(kind) == 3 and all(isinstance(part, str) for part in kind)):
                    raise ValueError(
                        f"fanouts by kind of edge need keys (source, relation, destination), all texts, got {kind!r}"
                    )
            fanouts = {kind: _checked(hops, f"fanouts[{kind}]") for kind, hops in fanouts.items()}
        else:
            fanouts = _checked(fanouts, "fanouts")
        object.__setattr__(self, "fanouts", fanouts)
        if self.temporal not in (None, "uniform", "last"):
            raise ValueError(f'temporal must be None, "uniform" or "last", got {self.temporal!r}')
        if self.temporal and self.disjoint is False:
            raise ValueError(
                "temporal sampling is disjoint, because seeds have different times; leave disjoint out, or temporal"
            )
        if self.temporal == "last" and self.replace:
            raise ValueError(
                'temporal="last" takes the most recent edges, each once; for draws with replacement use '
                'temporal="uniform"'
            )
        if self.temporal == "last" and self.weights:
            raise ValueError('temporal="last" draws nothing, so weights have no meaning; use temporal="uniform"')
        if not (self.weights is None or isinstance(self.weights, bool)):
            raise ValueError(f"weights must be True or False (the graph has them, one per edge), got {self.weights!r}")

    @property
    def hops(self) -> int:
        """How far from the seeds the farthest nodes are."""
        if isinstance(self.fanouts, Mapping):
            return max(map(len, self.fanouts.values()), default=0)
        return len(self.fanouts)

    def sample(self, graph: Graph, seeds: Seeds, *, seed: int, batch: int, seed_times: Any = None) -> Sampled:
        """The neighbourhood of some seeds. `seed` and `batch` decide every draw."""
        given = by_kind(graph, seeds)
        times = self._times(given, seed_times)
        followed = self._followed(graph)
        found = _begun(graph, given, bool(self.temporal or self.disjoint))
        edges = {kind: Edges() for kind in graph.topologies}
        key = keys.derived(key_of(seed, "seed"), _DOMAIN, key_of(batch, "batch"))
        backend = compiled if choice.use_c() else plain
        begun = dict.fromkeys(found, 0)
        for hop in range(self.hops):
            ends = {kind: nodes.count for kind, nodes in found.items()}
            for number, (kind, topology) in enumerate(graph.topologies.items()):
                fanouts = followed.get(kind, ())
                before = edges[kind].count
                of = found[kind[2]]
                if hop < len(fanouts) and fanouts[hop] and begun[kind[2]] < ends[kind[2]]:
                    span = _span(of, begun[kind[2]], ends[kind[2]], times)
                    rule = Rule(
                        fanouts[hop],
                        self.replace,
                        bool(self.weights),
                        self.temporal == "last",
                        keys.derived(key, hop, number),
                    )
                    backend.expand(topology, found[kind[0]], of, span, rule, edges[kind])
                edges[kind].per_hop.append(edges[kind].count - before)
            for kind_of_node, nodes in found.items():
                nodes.per_hop.append(nodes.count - ends[kind_of_node])
            begun = ends
        if not self.directed:
            edges = {kind: Edges() for kind in graph.topologies}
            for kind in followed:
                source, of = found[kind[0]], found[kind[2]]
                span = _span(of, 0, of.count, times)
                backend.induce(graph.topologies[kind], source, of, span.times, edges[kind])
            for between in edges.values():
                between.per_hop.append(between.count)
        for nodes in found.values():
            compiled.finish(nodes)
        return _answer(found, edges)

    def _times(self, seeds: Mapping[str, Longs], seed_times: Any) -> Longs | None:
        if self.temporal is None:
            if seed_times is not None:
                raise ValueError('seed_times were given, but the sampler is not temporal; set temporal="uniform"')
            return None
        if seed_times is None:
            raise ValueError(f"temporal={self.temporal!r} needs seed_times, one per seed")
        return times_of(seeds, seed_times)

    def _followed(self, graph: Graph) -> dict[EdgeType, tuple[int, ...]]:
        """Fanouts by kind of edge, in the graph's order."""
        topologies = graph.topologies
        if not isinstance(self.fanouts, Mapping):
            fanouts = cast("tuple[int, ...]", self.fanouts)
            followed = dict.fromkeys(topologies, fanouts)
        else:
            for kind in self.fanouts:
                if kind not in topologies:
                    raise ValueError(
                        f"fanouts name edges of kind {kind}, which the graph does not have; "
                        f"its kinds are {', '.join(map(str, topologies))}"
                    )
            followed = {kind: tuple(self.fanouts[kind]) for kind in topologies if kind in self.fanouts}
        for kind in followed:
            self._check(kind, topologies[kind])
        return followed

    def _check(self, kind: EdgeType, topology: Topology) -> None:
        of = f"edges of kind {kind}" if any(kind) else "the graph's edges"
        if self.weights and topology.weights is None:
            raise ValueError(f"weights=True, but {of} have no weights; build the graph with them, or leave weights out")
        if self.temporal and topology.times is None:
            raise ValueError(
                f"temporal={self.temporal!r}, but {of} have no times; build the graph with them, or leave temporal out"
            )


def _checked(fanouts: Any, name: str) -> tuple[int, ...]:
    if isinstance(fanouts, (str, bytes)) or not isinstance(fanouts, (Sequence, np.ndarray)):
        raise ValueError(f"{name} must be a list of whole numbers, one per hop, got {fanouts!r}")
    for fanout in fanouts:
        if isinstance(fanout, bool) or not isinstance(fanout, (int, np.integer)):
            raise ValueError(f"{name} must be whole numbers, one per hop, got {fanout!r}")
        if not ALL <= fanout <= 0xFFFFFFFF:
            raise ValueError(f"{name} must be from 0 on, or -1 for all neighbours, got {fanout}")
    return tuple(int(fanout) for fanout in fanouts)


def _begun(graph: Graph, seeds: Mapping[str, Longs], disjoint: bool) -> dict[str, Found]:
    found = {}
    owner = 0
    for kind, count in graph.num_nodes.items():
        found[kind] = Found(count, np.empty(0, np.int64), np.empty(0, np.int64) if disjoint else None, 0, [0])
    for kind, nodes in seeds.items():
        owners = np.arange(owner, owner + len(nodes), dtype=np.int64) if disjoint else None
        found[kind] = Found(graph.num_nodes[kind], nodes.copy(), owners, len(nodes), [len(nodes)])
        owner += len(nodes)
    largest = max(graph.num_nodes.values(), default=0)
    if disjoint and owner * largest > np.iinfo(np.int64).max:
        raise ValueError(f"{owner} disjoint neighbourhoods in {largest} nodes are too many; use smaller batches")
    return found


def _span(of: Found, first: int, end: int, times: Longs | None) -> Span:
    if times is None or of.owners is None:
        return Span(first, end, None)
    return Span(first, end, np.ascontiguousarray(times[of.owners[first:end]]))


def _answer(found: Mapping[str, Found], edges: Mapping[EdgeType, Edges]) -> Sampled:
    disjoint = any(nodes.owners is not None for nodes in found.values())
    return Sampled(
        nodes={kind: nodes.taken().copy() for kind, nodes in found.items()},
        nodes_per_hop={kind: tuple(nodes.per_hop) for kind, nodes in found.items()},
        edges={
            kind: SampledEdges(
                some.rows[: some.count], some.cols[: some.count], some.ids[: some.count], tuple(some.per_hop)
            )
            for kind, some in edges.items()
        },
        batch={kind: nodes.owners[: nodes.count].copy() for kind, nodes in found.items() if nodes.owners is not None}
        if disjoint
        else None,
    )
