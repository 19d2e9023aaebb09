"""Graphs that live once in shared memory, and neighbourhoods sampled from them by supervised workers.

The names load late: `SharedGraph` and the samplers need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "Batch": "outlive.graph.batch",
    "BatchEdges": "outlive.graph.batch",
    "LayerSampler": "outlive.graph.sampling.layers",
    "NeighborLoader": "outlive.graph.loading",
    "NeighborSampler": "outlive.graph.sampling.neighbors",
    "RandomWalkSampler": "outlive.graph.sampling.walks",
    "Sampled": "outlive.graph.sampled",
    "SampledEdges": "outlive.graph.sampled",
    "SharedGraph": "outlive.graph.shared",
    "Topology": "outlive.graph.topology",
    "gather_rows": "outlive.graph.sampling.gathering",
    "negative_edges": "outlive.graph.sampling.negatives",
}

__all__ = [
    "Batch",
    "BatchEdges",
    "LayerSampler",
    "NeighborLoader",
    "NeighborSampler",
    "RandomWalkSampler",
    "Sampled",
    "SampledEdges",
    "SharedGraph",
    "Topology",
    "gather_rows",
    "negative_edges",
]

if TYPE_CHECKING:
    from outlive.graph.batch import Batch, BatchEdges
    from outlive.graph.loading import NeighborLoader
    from outlive.graph.sampled import Sampled, SampledEdges
    from outlive.graph.sampling.gathering import gather_rows
    from outlive.graph.sampling.layers import LayerSampler
    from outlive.graph.sampling.negatives import negative_edges
    from outlive.graph.sampling.neighbors import NeighborSampler
    from outlive.graph.sampling.walks import RandomWalkSampler
    from outlive.graph.shared import SharedGraph
    from outlive.graph.topology import Topology


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'outlive.graph' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
