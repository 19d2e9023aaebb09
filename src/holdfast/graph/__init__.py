"""Graphs that live once in shared memory, and neighbourhoods sampled from them by supervised workers.

The names load late: `SharedGraph` and the samplers need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

_HOMES = {
    "Batch": "holdfast.graph.batch",
    "BatchEdges": "holdfast.graph.batch",
    "LayerSampler": "holdfast.graph.sampling.layers",
    "NeighborLoader": "holdfast.graph.loading",
    "NeighborSampler": "holdfast.graph.sampling.neighbors",
    "RandomWalkSampler": "holdfast.graph.sampling.walks",
    "Sampled": "holdfast.graph.sampled",
    "SampledEdges": "holdfast.graph.sampled",
    "SharedGraph": "holdfast.graph.shared",
    "Topology": "holdfast.graph.topology",
    "gather_rows": "holdfast.graph.sampling.gathering",
    "negative_edges": "holdfast.graph.sampling.negatives",
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
    from holdfast.graph.batch import Batch, BatchEdges
    from holdfast.graph.loading import NeighborLoader
    from holdfast.graph.sampled import Sampled, SampledEdges
    from holdfast.graph.sampling.gathering import gather_rows
    from holdfast.graph.sampling.layers import LayerSampler
    from holdfast.graph.sampling.negatives import negative_edges
    from holdfast.graph.sampling.neighbors import NeighborSampler
    from holdfast.graph.sampling.walks import RandomWalkSampler
    from holdfast.graph.shared import SharedGraph
    from holdfast.graph.topology import Topology


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast.graph' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
