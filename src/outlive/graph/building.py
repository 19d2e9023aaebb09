"""Sorts edges by destination, straight into the memory that the graph will live in, by several threads.

Reads   edges as they were given.
Writes  the arrays of a `Topology`, in place.
Never   a second copy of them: what it needs beside is a few chunks.

    chunks of the edge list ─ to which range of destinations ─► edge_ids, grouped by range
    ranges of destinations  ─ sorted, each by itself ─────────► edge_ids, indices, indptr, weights, times
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlive._system import cpus
from outlive.graph.checking import CHUNK, Relation

_RANGES = 256  # of destinations: their number fits a byte, which NumPy sorts in linear time
EDGES_PER_RANGE = 1 << 17  # so many edges are one range
COPIED_BYTES = 1 << 23  # at a time
_MOST_THREADS = 16


@dataclass(frozen=True)
class Room:
    """Where a topology is to be written."""

    indptr: NDArray[np.int64]
    indices: NDArray[Any]
    edge_ids: NDArray[Any] | None
    weights: NDArray[Any] | None
    times: NDArray[Any] | None


class Threads:
    """Does steps side by side: NumPy lets go of the interpreter while it sorts and copies."""

    def __init__(self, number: int | None) -> None:
        if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
            raise ValueError(f"threads must be at least 1, got {number!r} (None: as many as this process may use)")
        self._number = number or max(1, min(_MOST_THREADS, int(cpus.look().usable)))

    def do(self, steps: Iterable[Callable[[], object]]) -> None:
        """All of them; raises what one of them raises."""
        steps = list(steps)
        if self._number == 1 or len(steps) < 2:
            for step in steps:
                step()
            return
        with ThreadPoolExecutor(self._number, "outlive-graph") as pool:
            for done in [pool.submit(step) for step in steps]:
                done.result()


def copying(out: NDArray[Any], source: NDArray[Any]) -> list[Callable[[], object]]:
    """Steps that copy an array, a part each."""
    rows = max(1, COPIED_BYTES // max(1, out.nbytes // max(1, len(out))))

    def step(low: int) -> Callable[[], object]:
        return lambda: np.copyto(
            out[low : low + rows], source[low : low + rows], casting="unsafe"
        )  # its range is checked

    return [step(low) for low in range(0, len(out), rows)]


def is_sorted(relation: Relation) -> bool:
    """Whether edges come by destination already, those into one node by source."""
    sources, targets = relation.sources, relation.targets
    for low in range(0, len(targets), CHUNK):
        there, here = targets[low : low + CHUNK + 1], sources[low : low + CHUNK + 1]
        before, after = there[:-1], there[1:]
        if not bool(((before < after) | ((before == after) & (here[:-1] <= here[1:]))).all()):
            return False
    return True


def build(relation: Relation, num_sources: int, room: Room, threads: Threads) -> None:
    """Write the topology of these edges. `room.edge_ids` is None where they are sorted."""
    if room.edge_ids is None:
        _copy_sorted(relation, room, threads)
        return
    num_targets = len(room.indptr) - 1
    shift = max(0, max(0, num_targets - 1).bit_length() - 8) if len(relation.targets) > EDGES_PER_RANGE else 63
    starts = _group(relation.targets, shift, room.edge_ids, threads)
    room.indptr[0] = 0

    def step(number: int) -> Callable[[], object]:
        return lambda: _sort_range(relation, num_sources, number, shift, starts, room)

    in_use = ((num_targets - 1) >> shift) + 1 if num_targets else 0
    threads.do([step(number) for number in range(in_use)])


def _group(targets: NDArray[Any], shift: int, edge_ids: NDArray[Any], threads: Threads) -> NDArray[np.int64]:
    """Write the numbers of all edges, grouped by range of destinations, each group ascending; where groups begin."""
    lows = range(0, len(targets), CHUNK)
    counts = np.zeros((len(lows), _RANGES), np.int64)

    def ranges(low: int) -> NDArray[np.uint8]:
        chunk = targets[low : low + CHUNK]
        found: NDArray[np.uint8] = (chunk >> chunk.dtype.type(min(shift, 8 * chunk.itemsize - 1))).astype(np.uint8)
        return found

    def count(row: int, low: int) -> Callable[[], object]:
        return lambda: np.copyto(counts[row], np.bincount(ranges(low), minlength=_RANGES))

    def write(row: int, low: int) -> Callable[[], object]:
        def step() -> None:
            order = np.argsort(ranges(low), kind="stable")
            order += low
            begin = 0
            for number in np.flatnonzero(counts[row]):
                end = begin + int(counts[row, number])
                at = int(places[row, number])
                edge_ids[at : at + end - begin] = order[begin:end]
                begin = end

        return step

    threads.do([count(row, low) for row, low in enumerate(lows)])
    totals = counts.sum(0)
    starts = np.zeros(_RANGES + 1, np.int64)
    np.cumsum(totals, out=starts[1:])
    places = starts[:-1] + np.cumsum(counts, 0) - counts
    threads.do([write(row, low) for row, low in enumerate(lows)])
    return starts


def _sort_range(
    relation: Relation, num_sources: int, number: int, shift: int, starts: NDArray[np.int64], room: Room
) -> None:
    """Sort the edges into one range of destinations."""
    num_targets = len(room.indptr) - 1
    first, last = number << shift, min((number + 1) << shift, num_targets)
    begin, end = int(starts[number]), int(starts[number + 1])
    assert room.edge_ids is not None
    ids = room.edge_ids[begin:end]
    targets = relation.targets[ids].astype(np.int64)
    targets -= first
    sources = relation.sources[ids]
    if (last - first) * max(1, num_sources) < 2**63:
        order = np.argsort(targets * max(1, num_sources) + sources.astype(np.int64), kind="stable")
    else:
        order = np.lexsort((sources, targets))
    room.indices[begin:end] = sources[order]
    ids[:] = ids[order]
    if room.weights is not None and relation.weights is not None:
        room.weights[begin:end] = relation.weights[ids]
    if room.times is not None and relation.times is not None:
        room.times[begin:end] = relation.times[ids]
    counts = np.bincount(targets, minlength=last - first)
    np.cumsum(counts, out=room.indptr[first + 1 : last + 1])
    room.indptr[first + 1 : last + 1] += begin


def _copy_sorted(relation: Relation, room: Room, threads: Threads) -> None:
    room.indptr[0] = 0
    nodes = len(room.indptr) - 1

    def count(low: int) -> Callable[[], object]:
        # Edges into nodes up to and with this one: where the next one's begin.
        high = min(low + CHUNK, nodes)
        dtype = relation.targets.dtype
        asked = np.arange(low, high).clip(max=np.iinfo(dtype).max).astype(dtype)
        return lambda: np.copyto(
            room.indptr[low + 1 : high + 1], np.searchsorted(relation.targets, asked, side="right")
        )

    steps = [count(low) for low in range(0, nodes, CHUNK)]
    steps += copying(room.indices, relation.sources)
    for out, source in ((room.weights, relation.weights), (room.times, relation.times)):
        if out is not None and source is not None:
            steps += copying(out, source)
    threads.do(steps)
