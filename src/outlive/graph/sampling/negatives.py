"""Pairs of nodes without an edge between them, for link prediction.

Reads   the topologies of a graph, whose columns are searched by halving.
Writes  nothing.
Never   gives a pair that is an edge, or a node paired with itself unless that is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from outlive.graph.sampling import keys, plain
from outlive.graph.sampling.seeds import ONE_KIND, Graph, by_kind, key_of
from outlive.graph.topology import EdgeType, Longs, Topology

_DOMAIN = 4  # no other sampler draws by these keys
_MOST_ATTEMPTS = 64


def negative_edges(
    graph: Graph,
    count: int,
    *,
    seed: int,
    batch: int = 0,
    sources: Any = None,
    kind: EdgeType = ONE_KIND,
    loops: bool = False,
) -> Longs:
    """`count` pairs (source, destination), as two rows, drawn uniformly from those that are no edge of this kind.

    With `sources`, `count` destinations for each of them instead, one source after the other. Pairs may come twice.
    """
    topology = graph.topologies.get(kind)
    if topology is None:
        raise ValueError(
            f"the graph has no edges of kind {kind}; its kinds are {', '.join(map(str, graph.topologies)) or 'none'}"
        )
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 0:
        raise ValueError(f"count must be a whole number from 0 on, got {count!r}")
    num_sources, num_destinations = graph.num_nodes[kind[0]], graph.num_nodes[kind[2]]
    if max(num_sources, num_destinations) > keys.MOST:
        raise ValueError(f"negative edges are drawn from at most {keys.MOST} nodes of a kind")
    key = keys.derived(key_of(seed, "seed"), _DOMAIN, key_of(batch, "batch"))
    loops = loops or kind[0] != kind[2]
    fixed = None
    if sources is not None:
        fixed = np.repeat(by_kind(graph, {kind[0]: sources})[kind[0]], count)
    pairs = np.empty((2, count if fixed is None else len(fixed)), np.int64)
    waiting = np.arange(pairs.shape[1])
    if len(waiting) and not (num_sources and num_destinations):
        raise ValueError(f"the graph has no nodes to pair: {num_sources} sources, {num_destinations} destinations")
    bases = keys.drawn(key, waiting)
    for attempt in range(_MOST_ATTEMPTS):
        if not len(waiting):
            break
        limits = np.full(len(waiting), num_sources), np.full(len(waiting), num_destinations)
        from_ = keys.below(keys.drawn(bases[waiting], 2 * attempt), limits[0]) if fixed is None else fixed[waiting]
        to = keys.below(keys.drawn(bases[waiting], 2 * attempt + 1), limits[1])
        pairs[:, waiting] = from_, to
        refused = plain.leads(topology, from_, to)
        if not loops:
            refused |= from_ == to
        waiting = waiting[refused]
    if len(waiting) and fixed is None:
        raise ValueError(
            f"{len(waiting)} of {count} pairs were edges at each of {_MOST_ATTEMPTS} attempts: nearly all pairs of "
            f"nodes are edges of kind {kind}; ask for negatives of given sources (sources=), which are searched for"
        )
    for place in waiting:  # a source with edges to nearly all: its others are listed
        others = _others(topology, int(pairs[0, place]), num_destinations, loops)
        pairs[1, place] = others[keys.below(keys.drawn(bases[[place]], 2 * _MOST_ATTEMPTS), np.array([len(others)]))[0]]
    return pairs


def _others(topology: Topology, source: int, num_destinations: int, loops: bool) -> Longs:
    """Nodes that no edge leads to from this one."""
    every = np.arange(num_destinations)
    free = ~plain.leads(topology, np.full(num_destinations, source), every)
    if not loops:
        free[source] = False
    if not free.any():
        raise ValueError(f"node {source} has an edge to every node: it has no negatives; leave it out of sources")
    return np.flatnonzero(free)
