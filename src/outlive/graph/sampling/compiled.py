"""Sampling in C: checks arrays, hands their addresses over, and says what C found damaged.

Reads   the arrays of a graph.
Writes  nodes and edges that were found.
Never   lets C see an array that it would misread: type, order and length are checked here, contents there.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlive.graph.sampling.damage import Damage, error
from outlive.graph.sampling.growing import Edges, Found, Rule, Span
from outlive.graph.topology import Longs, Topology

try:
    from outlive.graph.sampling import _sampler
except ImportError:  # built without a C compiler: plain.py does the same, more slowly
    _sampler = None  # type: ignore[assignment]

AVAILABLE = _sampler is not None

_LEAST_BITS = 10
_MOST_KEPT_BITS = 22  # 32 MiB: larger tables are made anew, and not kept


class _Spare(threading.local):
    """Tables that this thread has used before: their memory is warm. By their size in bits."""

    def __init__(self) -> None:
        self.tables: dict[int, list[NDArray[np.uint64]]] = {}


_spare = _Spare()


def expand(topology: Topology, found: Found, of: Found, span: Span, rule: Rule, edges: Edges) -> None:
    """Take edges into a span of the nodes `of` a kind, and number their sources among those `found`."""
    arrays = _addresses(topology, of.num_nodes, found.num_nodes)
    sizes = np.empty((3, span.end - span.first), np.int64)
    picks = tuple(_address(row) for row in sizes)
    rules = (rule.fanout, int(rule.replace), int(rule.weighted), int(rule.last), rule.key)
    total, longest = _checked(_sampler.survey(arrays, _frontier(of, span), rules, picks))
    found.reserve(total)
    edges.reserve(total)
    table = _table(found, found.count + total)
    scratch: NDArray[np.int64] = np.empty(0, np.int64)
    if rule.weighted or span.times is not None:
        scratch = np.empty(3 * longest + 1, np.int64)
    elif rule.fanout > 0 and not rule.replace:
        scratch = np.zeros(longest // 64 + 1, np.int64)
    # The frontier's address anew: the nodes may have moved, to have room for more.
    taken, found.count = _checked(
        _sampler.hop(arrays, _frontier(of, span), rules, picks, table, _room(edges), (_address(scratch), len(scratch)))
    )
    edges.count += taken
    found.entered = found.count


def induce(topology: Topology, found: Found, of: Found, times: Longs | None, edges: Edges) -> None:
    """Take all edges between nodes that were met."""
    arrays = _addresses(topology, of.num_nodes, found.num_nodes)
    frontier = _frontier(of, Span(0, of.count, times))
    table = _table(found, found.count)
    total, _ = _checked(_sampler.induce(arrays, frontier, table, (0, 0, 0, 0)))
    edges.reserve(total)
    taken, _ = _checked(_sampler.induce(arrays, frontier, table, _room(edges)))
    edges.count += taken


def walk(topology: Topology, starts: Longs, length: int, key: int, p: float, q: float) -> Longs:
    """Walks against the direction of edges, one per row of the answer's transpose; see walks.c."""
    num_nodes = len(topology.indptr) - 1
    steps = np.empty((length + 1, len(starts)), np.int64)
    steps[0] = starts
    _checked(_sampler.walk(_addresses(topology, num_nodes, num_nodes), _address(steps), len(starts), length, key, p, q))
    return steps


def gather(source: NDArray[Any], index: Longs, out: NDArray[Any]) -> None:
    """Copy rows; the caller has checked types, shapes and order."""
    row_bytes = source.itemsize * int(np.prod(source.shape[1:], dtype=np.int64))
    damage, place, _, _ = _sampler.gather(
        _address(source), len(source), row_bytes, _address(index), len(index), _address(out)
    )
    if damage:
        raise IndexError(f"row {int(index[place])} was asked for, of {len(source)}")


def finish(found: Found) -> None:
    """Keep the table for the next batch."""
    if found.slots is not None and len(found.slots) <= 1 << _MOST_KEPT_BITS:
        _spare.tables.setdefault(len(found.slots).bit_length() - 1, []).append(found.slots)
    found.slots = None


def _table(found: Found, nodes: int) -> tuple[int, ...]:
    """The table over the nodes found, with room for so many in all: at least half of it stays empty."""
    bits = max(_LEAST_BITS, (2 * nodes).bit_length())
    if found.slots is None or len(found.slots) < 1 << bits:
        finish(found)
        kept = _spare.tables.get(bits)
        if kept:
            found.slots = kept.pop()
            found.slots.fill(0)
        else:
            found.slots = np.zeros(1 << bits, np.uint64)
        found.entered = 0
    addresses = (
        _address(found.nodes),
        0 if found.owners is None else _address(found.owners),
        _address(found.slots),
        len(found.slots).bit_length() - 1,
        int(found.owners is None and found.num_nodes <= 1 << 32),
        found.count,
        len(found.nodes),
    )
    if found.entered < found.count:
        _checked(_sampler.enter(addresses, found.entered))
        found.entered = found.count
    return addresses


def _addresses(topology: Topology, destinations: int, sources: int) -> tuple[int, ...]:
    indptr, indices, edge_ids, weights, times = topology[:5]
    count = len(indices)
    _check(indptr, "indptr", destinations + 1, ("int64",))
    _check(indices, "indices", count, ("int32", "int64"))
    if edge_ids is not None:
        _check(edge_ids, "edge_ids", count, ("int32", "int64"))
    if weights is not None:
        _check(weights, "weights", count, ("float32", "float64"))
    if times is not None:
        _check(times, "times", count, ("int64",))
    return (
        _address(indptr),
        *(_address(indices), indices.itemsize),
        *((0, 0) if edge_ids is None else (_address(edge_ids), edge_ids.itemsize)),
        *((0, 0) if weights is None else (_address(weights), weights.itemsize)),
        0 if times is None else _address(times),
        *(destinations, sources, count),
    )


def _frontier(of: Found, span: Span) -> tuple[int, ...]:
    here = 8 * span.first
    return (
        _address(of.nodes) + here,
        0 if of.owners is None else _address(of.owners) + here,
        0 if span.times is None else _address(span.times),
        *(span.first, span.end - span.first),
    )


def _room(edges: Edges) -> tuple[int, ...]:
    here = 8 * edges.count
    return (
        *(_address(edges.rows) + here, _address(edges.cols) + here, _address(edges.ids) + here),
        len(edges.rows) - edges.count,
    )


def _check(array: NDArray[Any], name: str, length: int, types: tuple[str, ...]) -> None:
    fits = array.dtype.name in types and array.dtype.isnative and array.ndim == 1 and len(array) == length
    if not fits or not array.flags.c_contiguous or not array.flags.aligned:
        raise ValueError(
            f"{name} of a topology must be a contiguous array of {length} {' or '.join(types)}, "
            f"got {array.dtype} of shape {array.shape}"
        )


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _checked(answer: tuple[int, int, int, int]) -> tuple[int, int]:
    damage, place, first, second = answer
    if damage:
        raise error(Damage(damage), place)
    return first, second
