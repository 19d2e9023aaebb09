"""Layer-wise sampling: a number of nodes per hop, however many seeds there are (as LADIES does it).

Reads   the topology of a graph of one kind.
Writes  nothing; answers with a `Sampled`.
Never   depends on anything but the arguments: (seed, batch) always gives the same.

    nodes of the last hop ── all edges into them ──► sources ── sizes[i] of them by importance ──► next hop
                                                       └─ edges from these, and from nodes met before, are taken

The importance of a source is the sum of squares of what its edges contribute to the mean (by weight) at their
destinations: who reaches many, and those whose mean has few parts, is drawn sooner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outlive.graph.sampled import Sampled, SampledEdges
from outlive.graph.sampling import keys, plain
from outlive.graph.sampling.growing import Edges, Found
from outlive.graph.sampling.seeds import ONE_KIND, Graph, Seeds, by_kind, key_of, only_topology
from outlive.graph.topology import Longs, Topology

_DOMAIN = 3  # no other sampler draws by these keys


@dataclass(frozen=True)
class LayerSampler:
    """At most `sizes[i]` new nodes in hop `i`, drawn by importance, without replacement."""

    sizes: Sequence[int]
    weights: bool | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        sizes: Any = self.sizes
        if isinstance(sizes, (str, bytes)) or not isinstance(sizes, (Sequence, np.ndarray)):
            raise ValueError(f"sizes must be a list of whole numbers, one per hop, got {sizes!r}")
        for size in sizes:
            if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
                raise ValueError(f"sizes must be whole numbers from 0 on, one per hop, got {size!r}")
        object.__setattr__(self, "sizes", tuple(int(size) for size in sizes))
        if not (self.weights is None or isinstance(self.weights, bool)):
            raise ValueError(f"weights must be True or False (the graph has them, one per edge), got {self.weights!r}")

    def sample(self, graph: Graph, seeds: Seeds, *, seed: int, batch: int) -> Sampled:
        """The layers around some seeds. `seed` and `batch` decide every draw."""
        topology = only_topology(graph, "layer-wise sampling")
        if self.weights and topology.weights is None:
            raise ValueError("weights=True, but the graph's edges have no weights; build it with them")
        given = by_kind(graph, seeds)[""]
        found = Found(graph.num_nodes[""], given.copy(), None, len(given), [len(given)])
        edges = Edges()
        key = keys.derived(key_of(seed, "seed"), _DOMAIN, key_of(batch, "batch"))
        begun = 0
        for hop, size in enumerate(self.sizes):
            end, before = found.count, edges.count
            self._add_layer(topology, found, begun, size, keys.derived(key, hop), edges)
            begun = end
            found.per_hop.append(found.count - end)
            edges.per_hop.append(edges.count - before)
        return Sampled(
            nodes={"": found.taken().copy()},
            nodes_per_hop={"": tuple(found.per_hop)},
            edges={ONE_KIND: SampledEdges(edges.rows, edges.cols, edges.ids, tuple(edges.per_hop))},
        )

    def _add_layer(self, topology: Topology, found: Found, begun: int, size: int, key: int, edges: Edges) -> None:
        columns = plain.survey(topology, found.nodes[begun : found.count], None, bool(self.weights))
        positions = plain.all_positions(columns) if columns.positions is None else columns.positions
        column = np.repeat(np.arange(len(columns.eligible)), columns.eligible)
        sources = plain.sources_at(topology, positions, found.num_nodes)
        shares = plain.weights_at(topology, positions) if self.weights else np.ones(len(positions))
        shares = shares / np.bincount(column, shares, len(columns.eligible))[column]
        candidates, place = np.unique(sources, return_inverse=True)
        importance: keys.Doubles = np.bincount(place.reshape(-1), shares * shares, len(candidates)).astype(np.float64)
        new = ~np.isin(candidates, found.taken())
        chosen = _raced(candidates[new], importance[new], size, key)
        kept = np.isin(sources, chosen) | np.isin(sources, found.taken())
        plain.append(
            edges,
            plain.number(found, sources[kept], None),
            column[kept] + begun,
            plain.ids_at(topology, positions[kept]),
        )


def _raced(candidates: Longs, importance: keys.Doubles, size: int, key: int) -> Longs:
    """Weighted without replacement: of exponential variates, each divided by its weight, the smallest."""
    if len(candidates) <= size:
        return candidates
    with np.errstate(divide="ignore"):  # a weight so small that its square is none comes last
        races = keys.exponential(keys.drawn(key, candidates)) / importance
    chosen: Longs = candidates[np.lexsort((candidates, races))[:size]]
    return chosen
