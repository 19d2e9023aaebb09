"""Random walks from seeds, and the neighbourhood that they meet.

Reads   the topology of a graph of one kind.
Writes  nothing; answers with the walks, or with a `Sampled`.
Never   depends on anything but the arguments: (seed, batch) always gives the same walks, in C or NumPy.

A walk goes against the direction of edges, to where messages come from; where a graph has every edge both ways, that
is no difference. `p` and `q` bias it as in node2vec: from `before` over `here`, the weight of going back is 1/p, of a
node with an edge to `before` 1, and of one farther away 1/q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from outlive.graph.sampled import Sampled, SampledEdges
from outlive.graph.sampling import choice, compiled, keys, plain
from outlive.graph.sampling.growing import Edges, Found
from outlive.graph.sampling.seeds import ONE_KIND, Graph, Seeds, by_kind, key_of, only_topology
from outlive.graph.topology import Longs

_DOMAIN = 2  # no other sampler draws by these keys
_MOST_BIAS = 100.0


@dataclass(frozen=True)
class RandomWalkSampler:
    """`walks` walks of `length` steps from each seed. One that comes to a node without edges into it stays there."""

    length: int
    walks: int = field(default=1, kw_only=True)
    p: float = field(default=1.0, kw_only=True)
    q: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        for name, least in (("length", 0), ("walks", 1)):
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be a whole number from {least} on, got {value!r}")
        for name in ("p", "q"):
            value = getattr(self, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and 1 / _MOST_BIAS <= value <= _MOST_BIAS):
                raise ValueError(
                    f"{name} must be from {1 / _MOST_BIAS:g} to {_MOST_BIAS:g} (1: no bias), got {value!r}; steps are "
                    f"tried until one is accepted, and a stronger bias would refuse nearly all"
                )

    def trace(self, graph: Graph, seeds: Seeds, *, seed: int, batch: int) -> Longs:
        """The nodes of each walk, a row of `length + 1` for each; those of a seed one after the other."""
        topology = only_topology(graph, "a random walk")
        starts = np.repeat(by_kind(graph, seeds)[""], self.walks)
        key = keys.derived(key_of(seed, "seed"), _DOMAIN, key_of(batch, "batch"))
        backend = compiled if choice.use_c() else plain
        steps = backend.walk(topology, starts, self.length, key, float(self.p), float(self.q))
        return np.ascontiguousarray(steps.T)

    def sample(self, graph: Graph, seeds: Seeds, *, seed: int, batch: int) -> Sampled:
        """The nodes that the walks met, step after step, and all edges between them."""
        topology = only_topology(graph, "a random walk")
        steps = self.trace(graph, seeds, seed=seed, batch=batch)
        given = by_kind(graph, seeds)[""]
        found = Found(graph.num_nodes[""], given.copy(), None, len(given), [len(given)])
        for step in range(1, self.length + 1):
            before = found.count
            plain.number(found, steps[:, step], None)
            found.per_hop.append(found.count - before)
        edges = Edges()
        backend = compiled if choice.use_c() else plain
        backend.induce(topology, found, found, None, edges)
        compiled.finish(found)
        return Sampled(
            nodes={"": found.taken().copy()},
            nodes_per_hop={"": tuple(found.per_hop)},
            edges={ONE_KIND: SampledEdges(edges.rows, edges.cols, edges.ids, (edges.count,))},
        )
