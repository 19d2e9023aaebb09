"""What a sampler found: nodes and edges around some seeds, numbered from zero.

Reads   nothing.
Writes  nothing.
Never   holds features: they are gathered for these nodes later, straight into a cell.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlive.graph.topology import EdgeType, Longs


@dataclass(frozen=True, slots=True)
class SampledEdges:
    """Edges of one kind. `rows[i] → cols[i]`: local numbers of source and destination; hop after hop."""

    rows: Longs
    cols: Longs
    edge_ids: Longs  # numbers in the user's edge list
    per_hop: tuple[int, ...]  # how many edges each hop added (one number if they are induced); sums to len(rows)


@dataclass(frozen=True, slots=True)
class Sampled:
    """A neighbourhood. Nodes of a kind: the seeds first, as they were given, then as the hops met them. A seed that was
    given twice stands there twice, each with edges into it; edges from it come from the first.

    A graph of one kind of node and edge has the keys `""` and `("", "", "")`.
    """

    nodes: dict[str, Longs]  # the graph's numbers of the nodes, by kind
    nodes_per_hop: dict[str, tuple[int, ...]]  # seeds first, then what each hop added; sums to len(nodes[kind])
    edges: dict[EdgeType, SampledEdges]
    batch: dict[str, Longs] | None = None  # for disjoint (temporal) sampling: which seed a node belongs to
