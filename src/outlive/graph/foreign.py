"""Graphs of other libraries, taken apart by their own methods.

Reads   SciPy matrices, NetworkX graphs, PyG's data, DGL's graphs.
Writes  nothing.
Never   imports any of these libraries: whoever has such an object has imported its library.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlive.graph import checking
from outlive.graph.checking import ONE_KIND, ONE_RELATION, Given
from outlive.graph.topology import EdgeType


class Stored(NamedTuple):
    rows: NDArray[Any]
    cols: NDArray[Any]
    values: NDArray[Any]


def edges_of_matrix(matrix: Any) -> tuple[Stored, int]:
    """What a sparse matrix stores, in the order of its `data`, and its size."""
    if not hasattr(matrix, "tocoo"):
        raise TypeError(
            f"from_scipy takes a sparse matrix of SciPy, got {type(matrix).__name__} "
            f"(of a dense one: scipy.sparse.coo_array(matrix))"
        )
    if len(matrix.shape) != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(
            f"an adjacency matrix has a row and a column for each node, and this one has shape {matrix.shape} "
            f"(edges between two kinds of nodes: from_edge_index({{('user', 'buys', 'item'): (rows, cols)}}))"
        )
    listed = matrix.tocoo(copy=False)
    return Stored(listed.row, listed.col, listed.data), int(matrix.shape[0])


def of_networkx(
    graph: Any, node_features: Iterable[str], edge_features: Iterable[str], weights: str | None, times: str | None
) -> Given:
    if not hasattr(graph, "adjacency") or not hasattr(graph, "is_multigraph"):
        raise TypeError(f"from_networkx takes a graph of NetworkX, got {type(graph).__name__}")
    for name, value in (("node_features", node_features), ("edge_features", edge_features)):
        if isinstance(value, str):
            raise TypeError(f"{name} must be a list of attribute names, got the str {value!r} (write [{value!r}])")
    numbers = {node: number for number, node in enumerate(graph)}
    sources: list[int] = []
    targets: list[int] = []
    found: list[dict[str, Any]] = []
    for node, neighbors in graph.adjacency():
        for neighbor, attributes in neighbors.items():
            for each in attributes.values() if graph.is_multigraph() else (attributes,):
                sources.append(numbers[node])
                targets.append(numbers[neighbor])
                found.append(each)
    ends = list(zip(sources, targets))
    nodes = [attributes for _, attributes in graph.nodes(data=True)]
    of_nodes = {name: _column(nodes, name, "node", list(graph)) for name in node_features}
    of_edges = {name: _column(found, name, "edge", ends) for name in edge_features}
    return checking.one_kind(
        (np.array(sources, np.int64), np.array(targets, np.int64)),
        len(numbers),
        of_nodes,
        of_edges,
        None if weights is None else _column(found, weights, "edge", ends),
        None if times is None else _column(found, times, "edge", ends),
    )


def _column(rows: list[dict[str, Any]], name: str, of: str, names: list[Any]) -> NDArray[Any]:
    for row, which in zip(rows, names):
        if name not in row:
            raise ValueError(f"{of} {which!r} has no attribute {name!r}, and each needs one (it has {list(row)})")
    return np.array([row[name] for row in rows])


def of_pyg(data: Any, weights: str | None, times: str | None) -> Given:
    if hasattr(data, "node_types") and hasattr(data, "edge_types"):
        nodes = {kind: data[kind] for kind in data.node_types}
        edges = {tuple(kind): data[kind] for kind in data.edge_types}
    elif hasattr(data, "is_node_attr") and hasattr(data, "num_nodes"):
        nodes, edges = {ONE_KIND: data}, {ONE_RELATION: data}
    else:
        raise TypeError(f"from_pyg takes a Data or HeteroData of PyG, got {type(data).__name__}")
    for kind, store in edges.items():
        if "edge_index" not in store:
            raise ValueError(
                f"{_where(kind)} has no edge_index, but {list(store.keys())} "
                f"(an adj_t becomes one: row, col, _ = data.adj_t.t().coo())"
            )
    return _of_parts(
        {kind: store["edge_index"] for kind, store in edges.items()},
        {kind: int(store.num_nodes) for kind, store in nodes.items()},
        {kind: _arrays_of(store, store.is_node_attr, ()) for kind, store in nodes.items()},
        {kind: _arrays_of(store, store.is_edge_attr, ("edge_index",)) for kind, store in edges.items()},
        weights,
        times,
    )


def _arrays_of(store: Any, belongs: Any, without: tuple[str, ...]) -> dict[str, Any]:
    """The arrays and tensors of a store that have a row for each of its nodes, or edges."""
    chosen = [key for key in list(store.keys()) if key not in without and belongs(key)]
    return {key: store[key] for key in chosen if hasattr(store[key], "dtype")}


def of_dgl(graph: Any, weights: str | None, times: str | None) -> Given:
    if not (hasattr(graph, "canonical_etypes") and hasattr(graph, "ntypes")):
        raise TypeError(f"from_dgl takes a graph of DGL, got {type(graph).__name__}")
    single = list(graph.ntypes) == ["_N"] and [tuple(kind) for kind in graph.canonical_etypes] == [("_N", "_E", "_N")]

    def node_kind(kind: str) -> str:
        return ONE_KIND if single else kind

    def edge_kind(kind: Any) -> EdgeType:
        return ONE_RELATION if single else tuple(kind)

    return _of_parts(
        {edge_kind(kind): tuple(graph.edges(form="uv", order="eid", etype=kind)) for kind in graph.canonical_etypes},
        {node_kind(kind): int(graph.num_nodes(kind)) for kind in graph.ntypes},
        {node_kind(kind): dict(graph.nodes[kind].data) for kind in graph.ntypes},
        {edge_kind(kind): dict(graph.edges[kind].data) for kind in graph.canonical_etypes},
        weights,
        times,
    )


def _of_parts(
    edge_index: dict[EdgeType, Any],
    num_nodes: dict[str, int],
    node_features: dict[str, dict[str, Any]],
    edge_features: dict[EdgeType, dict[str, Any]],
    weights: str | None,
    times: str | None,
) -> Given:
    columns = {}
    for argument, name in (("weights", weights), ("times", times)):
        found = {kind: features[name] for kind, features in edge_features.items() if name in features}
        if name is not None and not found:
            there = sorted({name for features in edge_features.values() for name in features})
            raise ValueError(f"{argument}={name!r}: no edges have data of this name, but {there}")
        columns[argument] = found
    return checking.many_kinds(
        edge_index, num_nodes, node_features, edge_features, columns["weights"], columns["times"]
    )


def _where(kind: EdgeType) -> str:
    return "this Data" if kind == ONE_RELATION else f"the edge type {kind!r}"
