"""Batches as other libraries have them. They are imported here, when they are asked for, and nowhere else.

Reads   a batch.
Writes  nothing.
Never   copies an array: what is made looks at the batch's memory.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import numpy as np

from outlive.graph.checking import ONE_KIND, ONE_RELATION
from outlive.graph.topology import EdgeType

if TYPE_CHECKING:
    from outlive.graph.batch import Batch


def _imported(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a library that does not fit this torch may raise anything
        raise ImportError(f"{what} needs {name}, which cannot be imported here: {error}") from error


def _is_single(batch: Batch) -> bool:
    return set(batch.nodes) == {ONE_KIND} and set(batch.edges) <= {ONE_RELATION}


def to_pyg(batch: Batch) -> Any:
    """As `torch_geometric.loader.NeighborLoader` lays out what it yields."""
    made = _imported("torch_geometric.data", "as_pyg()")
    batch = batch.map(_tensor)
    if _is_single(batch):
        data = made.Data()
        _fill_nodes(data, batch, ONE_KIND)
        _fill_edges(data, batch, ONE_RELATION)
        if not batch.node_features[ONE_KIND]:
            data.num_nodes = len(batch.node_ids)
        seeds = data
    else:
        data = made.HeteroData()
        for kind in batch.nodes:
            _fill_nodes(data[kind], batch, kind)
            if not batch.node_features[kind]:
                data[kind].num_nodes = len(batch.nodes[kind])
        for relation in batch.edges:
            _fill_edges(data[relation], batch, relation)
        seeds = data[batch.kind]
    seeds.input_id = batch.input_ids
    if batch.seed_times is not None:
        seeds.seed_time = batch.seed_times
    seeds.batch_size = batch.batch_size
    return data


def _fill_nodes(store: Any, batch: Batch, kind: str) -> None:
    for name, value in batch.node_features[kind].items():
        store[name] = value
    store.n_id = batch.nodes[kind]
    store.num_sampled_nodes = list(batch.nodes_per_hop[kind])
    if batch.trees is not None:
        store.batch = batch.trees[kind]


def _fill_edges(store: Any, batch: Batch, kind: EdgeType) -> None:
    edges = batch.edges[kind]
    store.edge_index = edges.edge_index
    for name, value in batch.edge_features[kind].items():
        store[name] = value
    store.e_id = edges.edge_ids
    store.num_sampled_edges = list(edges.per_hop)


def to_dgl(batch: Batch) -> Any:
    """As DGL's samplers give them: `(input_nodes, output_nodes, blocks)`.

    A block of DGL has the edges into all nodes that are known by then, so each has the edges of its hop and of those
    nearer to the seeds; its destinations are the first of its sources.
    """
    dgl = _imported("dgl", "as_dgl()")
    batch = batch.map(_tensor)
    known = {kind: np.cumsum(counts).tolist() for kind, counts in batch.nodes_per_hop.items()}
    ends = {kind: np.cumsum(edges.per_hop).tolist() for kind, edges in batch.edges.items()}
    hops = max((len(edges.per_hop) for edges in batch.edges.values()), default=0)
    if any(len(counts) != hops + 1 for counts in batch.nodes_per_hop.values()):
        raise ValueError(
            "as_dgl() needs the edges hop by hop, and this batch has all edges between its nodes at once "
            "(sample with directed=True, or make a DGL graph of it: dgl.graph(tuple(batch.edge_index)))"
        )
    blocks = [_block(dgl, batch, known, ends, hop, hops - 1) for hop in reversed(range(hops))]
    seeds = {kind: ids[: batch.nodes_per_hop[kind][0]] for kind, ids in batch.nodes.items()}
    if _is_single(batch):
        return batch.node_ids, seeds[ONE_KIND], blocks
    return batch.nodes, seeds, blocks


def _block(
    dgl: Any, batch: Batch, known: dict[str, list[int]], ends: dict[EdgeType, list[int]], hop: int, outermost: int
) -> Any:
    """The block of one hop; features of nodes are where DGL's users look: at the inputs, and at the seeds."""
    edges = {_relation(kind): (found, _upto(ends[kind], hop)) for kind, found in batch.edges.items()}
    sources = {_kind(kind): _upto(counts, hop + 1) for kind, counts in known.items()}
    targets = {_kind(kind): _upto(counts, hop) for kind, counts in known.items()}
    block = dgl.create_block(
        {name: (found.edge_index[0, :upto], found.edge_index[1, :upto]) for name, (found, upto) in edges.items()},
        num_src_nodes=sources,
        num_dst_nodes=targets,
    )
    for kind, ids in batch.nodes.items():
        name = _kind(kind)
        block.srcnodes[name].data[dgl.NID] = ids[: sources[name]]
        block.dstnodes[name].data[dgl.NID] = ids[: targets[name]]
        for feature, value in batch.node_features[kind].items():
            if hop == outermost:
                block.srcnodes[name].data[feature] = value[: sources[name]]
            if hop == 0:
                block.dstnodes[name].data[feature] = value[: targets[name]]
    for relation, features in batch.edge_features.items():
        found, upto = edges[_relation(relation)]
        block.edges[_relation(relation)].data[dgl.EID] = found.edge_ids[:upto]
        for feature, value in features.items():
            block.edges[_relation(relation)].data[feature] = value[:upto]
    return block


def _upto(ends: list[int], place: int) -> int:
    return int(ends[min(place, len(ends) - 1)]) if ends else 0


def _kind(kind: str) -> str:
    return kind or "_N"


def _relation(kind: EdgeType) -> EdgeType:
    return ("_N", "_E", "_N") if kind == ONE_RELATION else kind


def _tensor(array: Any) -> Any:
    import torch

    return torch.from_numpy(array) if isinstance(array, np.ndarray) else array
