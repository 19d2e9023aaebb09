"""What a user gives for a graph, as arrays, or an error that says what is wrong with it.

Reads   edge lists, features, weights and times: NumPy arrays, torch tensors, lists.
Writes  nothing.
Never   a copy of what is an array of the right kind already; imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlive.graph.topology import EdgeType

ONE_KIND = ""
ONE_RELATION: EdgeType = ("", "", "")
CHUNK = 1 << 18  # rows looked at at a time, so that no check needs memory of the size of the graph


@dataclass
class Relation:
    """The edges of one kind, as they were given: edge i is `sources[i] → targets[i]`."""

    sources: NDArray[Any]
    targets: NDArray[Any]
    features: dict[str, NDArray[Any]] = field(default_factory=dict)
    weights: NDArray[Any] | None = None
    times: NDArray[Any] | None = None


@dataclass
class Given:
    """All of a graph, checked, before anything is shared."""

    num_nodes: dict[str, int]
    node_features: dict[str, dict[str, NDArray[Any]]]
    relations: dict[EdgeType, Relation]


def as_array(value: Any, what: str) -> NDArray[Any]:
    """An array over the same memory where there is one; a tensor is taken to main memory."""
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = value.detach().cpu()
        try:
            value = value.numpy()
        except TypeError as error:  # bfloat16 and such
            raise TypeError(
                f"{what} is a tensor of {value.dtype}, which NumPy has not (convert it: .float())"
            ) from error
    array = np.asarray(value)
    if array.dtype.kind not in "biufc" or array.dtype.itemsize > 16:
        raise TypeError(
            f"{what} has dtype {array.dtype}: a graph holds numbers and booleans "
            f"(keep other values in a list of your own, by node number)"
        )
    return array


def named_arrays(values: Mapping[str, Any] | None, rows: int, what: str, of: str) -> dict[str, NDArray[Any]]:
    """Features by name, each with one row for each node, or edge."""
    arrays = {}
    for name, value in (values or {}).items():
        array = as_array(value, f"{what}[{name!r}]")
        if array.ndim == 0 or len(array) != rows:
            found = "no rows, it is a single number" if array.ndim == 0 else f"{len(array)} rows"
            raise ValueError(f"{what}[{name!r}] has {found} for {rows} {of}: it needs one row for each, in their order")
        arrays[name] = array
    return arrays


def _check_named(values: Any, what: str) -> None:
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} must be a dict of names and arrays, such as {{'x': x}}, got {type(values).__name__}")
    for name in values:
        if not isinstance(name, str) or not name:
            raise TypeError(f"a name in {what} must be a str that is not empty, got {name!r}")


def edge_list(edge_index: Any, what: str = "edge_index") -> tuple[NDArray[Any], NDArray[Any]]:
    """Sources and targets."""
    if isinstance(edge_index, (tuple, list)) and len(edge_index) == 2 and not np.isscalar(edge_index[0]):
        sources, targets = (as_array(part, f"{what}[{number}]") for number, part in enumerate(edge_index))
        if sources.ndim != 1 or targets.shape != sources.shape:
            raise ValueError(
                f"{what} has sources of shape {sources.shape} and targets of shape {targets.shape}: "
                f"give two flat arrays of one length"
            )
    else:
        array = as_array(edge_index, what)
        if array.ndim != 2 or array.shape[0] != 2:
            turned = " (it seems to be turned: give edge_index.T)" if array.ndim == 2 and array.shape[1] == 2 else ""
            raise ValueError(f"{what} must have shape (2, number of edges), got {array.shape}{turned}")
        sources, targets = array
    for part in (sources, targets):
        if part.dtype.kind not in "iu" and part.size:
            raise TypeError(
                f"{what} has dtype {part.dtype}, and node numbers are whole "
                f"(if these are: {what}.astype('int64'); if they are weights, give them as weights=)"
            )
    return (sources, targets) if sources.size else (np.empty(0, np.int64), np.empty(0, np.int64))


def highest(nodes: NDArray[Any]) -> int:
    return int(nodes.max()) if nodes.size else -1


def check_range(relation: Relation, num_sources: int, num_targets: int, what: str) -> None:
    """That every edge leads from a node to a node."""
    sources, targets = relation.sources, relation.targets
    if not sources.size or (_within(sources, num_sources) and _within(targets, num_targets)):
        return
    for low, chunk in _chunks(sources):
        ends = targets[low : low + CHUNK]
        wrong = (chunk < 0) | (chunk >= num_sources)
        bad = np.flatnonzero(wrong | (ends < 0) | (ends >= num_targets))
        if not bad.size:
            continue
        number = low + int(bad[0])
        from_there = bool(wrong[bad[0]])
        nodes, limit = (sources, num_sources) if from_there else (targets, num_targets)
        advice = f"set num_nodes to at least {int(nodes.max()) + 1}, and give features for all of them"
        raise ValueError(
            f"{what}: edge {number} is {int(sources[number])} → {int(targets[number])}, and its "
            f"{'source' if from_there else 'target'} is none of the {limit} nodes (0 … {limit - 1}); "
            f"{advice if nodes[number] >= 0 else 'nodes are numbered from 0'}"
        )


def _within(nodes: NDArray[Any], limit: int) -> bool:
    return int(nodes.min()) >= 0 and int(nodes.max()) < limit


def edge_weights(weights: Any, count: int, what: str = "weights") -> NDArray[Any]:
    array = as_array(weights, what)
    if array.shape != (count,):
        raise ValueError(f"{what} has shape {array.shape} for {count} edges: it needs one number for each edge")
    if array.dtype.kind == "c" or array.dtype.kind == "b":
        raise TypeError(f"{what} has dtype {array.dtype}: weights are real numbers (such as float32)")
    for low, chunk in _chunks(array):
        bad = np.flatnonzero(~(np.isfinite(chunk) & (chunk >= 0)))
        if bad.size:
            number = low + int(bad[0])
            raise ValueError(
                f"{what}[{number}] is {array[number]}: an edge is drawn in proportion to its weight, which must be "
                f"finite and not negative (0 for an edge that is never to be drawn)"
            )
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)


def edge_times(times: Any, count: int, what: str = "times") -> NDArray[Any]:
    array = np.asarray(times) if isinstance(times, np.ndarray) else as_array(times, what)
    if array.shape != (count,):
        raise ValueError(f"{what} has shape {array.shape} for {count} edges: it needs one number for each edge")
    if array.dtype.kind not in "iu":
        raise TypeError(
            f"{what} has dtype {array.dtype}: times are whole numbers, such as seconds since 1970 "
            f"(.astype('int64'), after a multiplication where parts of a unit count)"
        )
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise ValueError(f"{what} goes up to {int(array.max())}, beyond int64 (subtract the earliest one)")
    return array


def _chunks(array: NDArray[Any]) -> Iterator[tuple[int, NDArray[Any]]]:
    return ((low, array[low : low + CHUNK]) for low in range(0, len(array), CHUNK))


# ---------------------------------------------------------------- a whole graph


def one_kind(
    edge_index: Any,
    num_nodes: int | None,
    node_features: Mapping[str, Any] | None,
    edge_features: Mapping[str, Any] | None,
    weights: Any,
    times: Any,
) -> Given:
    """A graph of one kind of nodes and edges."""
    for name, value in (("num_nodes", num_nodes), ("weights", weights), ("times", times)):
        if isinstance(value, Mapping):
            raise TypeError(
                f"{name} is a dict, and edge_index is not: for a graph of several kinds, give edge_index as a dict, too"
            )
    for name, value in (("node_features", node_features), ("edge_features", edge_features)):
        if isinstance(value, Mapping) and any(isinstance(inner, Mapping) for inner in value.values()):
            raise TypeError(f"{name} is a dict of dicts, and edge_index is no dict: give {name} as {{'x': x}}")
    return many_kinds(
        {ONE_RELATION: edge_index},
        None if num_nodes is None else {ONE_KIND: num_nodes},
        None if node_features is None else {ONE_KIND: node_features},
        None if edge_features is None else {ONE_RELATION: edge_features},
        None if weights is None else {ONE_RELATION: weights},
        None if times is None else {ONE_RELATION: times},
    )


def many_kinds(
    edge_index: Mapping[EdgeType, Any],
    num_nodes: Mapping[str, int] | None,
    node_features: Mapping[str, Mapping[str, Any]] | None,
    edge_features: Mapping[EdgeType, Mapping[str, Any]] | None,
    weights: Mapping[EdgeType, Any] | None,
    times: Mapping[EdgeType, Any] | None,
) -> Given:
    """A graph of several kinds of nodes or edges; all arguments are by kind."""
    for kind in edge_index:
        if not (isinstance(kind, tuple) and len(kind) == 3 and all(isinstance(word, str) for word in kind)):
            raise TypeError(f"a kind of edge is (kind of source, relation, kind of target), all str, got {kind!r}")
    if not edge_index:
        raise ValueError("edge_index has no kind of edges (an empty one is an array of shape (2, 0))")
    given: tuple[tuple[str, Any, str], ...] = (
        ("num_nodes", num_nodes, "nodes"),
        ("node_features", node_features, "nodes"),
        ("edge_features", edge_features, "edges"),
        ("weights", weights, "edges"),
        ("times", times, "edges"),
    )
    for name, value, _ in given:
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"edge_index is a dict by kind, so {name} must be one, too, got {type(value).__name__}")
    for name, value in (("node_features", node_features), ("edge_features", edge_features)):
        for of, features in (value or {}).items():
            _check_named(features, _named(name, of))
    lists = {kind: edge_list(edges, _named("edge_index", kind)) for kind, edges in edge_index.items()}
    counts = _node_counts(lists, num_nodes or {}, node_features or {})
    known: dict[str, Any] = {"nodes": counts, "edges": edge_index}
    for name, value, of in given:
        for kind in value or {}:
            if kind not in known[of]:
                raise ValueError(f"{name} has the kind {kind!r}, and there are no such {of} (but {list(known[of])})")
    relations = {}
    for kind, (sources, targets) in lists.items():
        relation = relations[kind] = Relation(sources, targets)
        check_range(relation, counts[kind[0]], counts[kind[2]], _named("edge_index", kind))
        count = len(sources)
        relation.features = named_arrays((edge_features or {}).get(kind), count, _named("edge_features", kind), "edges")
        if (weights or {}).get(kind) is not None:
            relation.weights = edge_weights((weights or {})[kind], count, _named("weights", kind))
        if (times or {}).get(kind) is not None:
            relation.times = edge_times((times or {})[kind], count, _named("times", kind))
    features = {
        kind: named_arrays((node_features or {}).get(kind), count, _named("node_features", kind), "nodes")
        for kind, count in counts.items()
    }
    return Given(counts, features, relations)


def _named(argument: str, kind: Any) -> str:
    return argument if kind in (ONE_KIND, ONE_RELATION) else f"{argument}[{kind!r}]"


def _node_counts(
    lists: Mapping[EdgeType, tuple[NDArray[Any], NDArray[Any]]],
    num_nodes: Mapping[str, int],
    features: Mapping[str, Mapping[str, Any]],
) -> dict[str, int]:
    """How many nodes of each kind: as said, else as there are rows of features, else as the edges need."""
    counts: dict[str, int] = {}
    kinds = dict.fromkeys([*num_nodes, *features, *(kind for ends in lists for kind in (ends[0], ends[2]))])
    for kind in kinds:
        said = num_nodes.get(kind)
        if said is not None:
            if isinstance(said, bool) or not hasattr(said, "__index__") or said.__index__() < 0:
                raise ValueError(f"{_named('num_nodes', kind)} must be a whole number from 0, got {said!r}")
            counts[kind] = said.__index__()
            continue
        rows = [len(array) for array in (features.get(kind) or {}).values() if hasattr(array, "__len__")]
        ends = [sources for ends, (sources, _) in lists.items() if ends[0] == kind]
        ends += [targets for ends, (_, targets) in lists.items() if ends[2] == kind]
        counts[kind] = rows[0] if rows else 1 + max(map(highest, ends), default=-1)
    return counts
