"""Sampling with NumPy: what serves where the C extension is not built, and what it is held to.

Reads   the arrays of a graph, which may be those of a damaged file: they are checked where they are followed.
Writes  nodes and edges that were found.
Never   differs from the C files in a bit: hops.c and walks.c say the same things in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from outlive.graph.sampling import keys
from outlive.graph.sampling.damage import Damage, error
from outlive.graph.sampling.growing import Edges, Found, Rule, Span
from outlive.graph.topology import Longs, Topology


class Columns(NamedTuple):
    """Columns of a frontier, and of each the edges that may be taken."""

    starts: Longs
    degrees: Longs
    eligible: Longs  # how many may be taken
    positions: Longs | None  # which, column after column; None: all


def expand(topology: Topology, found: Found, of: Found, span: Span, rule: Rule, edges: Edges) -> None:
    """Take edges into a span of the nodes `of` a kind, and number their sources among those `found`."""
    columns = survey(topology, of.nodes[span.first : span.end], span.times, rule.weighted)
    positions, counts = _choose(topology, of.nodes[span.first : span.end], span.first, columns, rule)
    sources = sources_at(topology, positions, found.num_nodes)
    cols = np.repeat(np.arange(span.first, span.end), counts)
    owners = None if of.owners is None else of.owners[cols]
    append(edges, number(found, sources, owners), cols, ids_at(topology, positions))


def induce(topology: Topology, found: Found, of: Found, times: Longs | None, edges: Edges) -> None:
    """Take all edges between nodes that were met."""
    columns = survey(topology, of.taken(), times, weighted=False)
    positions = all_positions(columns) if columns.positions is None else columns.positions
    sources = sources_at(topology, positions, found.num_nodes)
    cols = np.repeat(np.arange(of.count), columns.eligible)
    known = _keyed(found, found.taken(), found.owners)
    wanted = _keyed(found, sources, None if of.owners is None else of.owners[cols])
    order = np.argsort(known, kind="stable")
    at = np.minimum(np.searchsorted(known[order], wanted), found.count - 1) if found.count else wanted * 0
    hit = known[order][at] == wanted if found.count else np.zeros(len(wanted), bool)
    append(edges, order[at[hit]], cols[hit], ids_at(topology, positions[hit]))


def walk(topology: Topology, starts: Longs, length: int, key: int, p: float, q: float) -> Longs:
    """Walks against the direction of edges, one per row of the answer's transpose; see walks.c."""
    num_nodes = len(topology.indptr) - 1
    steps = np.empty((length + 1, len(starts)), np.int64)
    steps[0] = starts
    walks = np.arange(len(starts))
    for step in range(length):
        here = steps[step]
        columns = survey(topology, here, None, weighted=False)
        bases = keys.drawn(int(keys.drawn(key, step)), walks)
        free = np.flatnonzero(columns.degrees)
        at = np.zeros(len(starts), np.int64)
        if step == 0 or (p == 1.0 and q == 1.0):
            at[free] = columns.starts[free] + keys.below(keys.drawn(bases[free], 0), columns.degrees[free])
        else:
            at[free] = _second_order(topology, steps[step - 1][free], columns, free, bases[free], p, q)
        steps[step + 1] = here
        steps[step + 1][free] = sources_at(topology, at[free], num_nodes)
    return steps


def leads(topology: Topology, sources: Longs, destinations: Longs) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether an edge leads from each source to its destination, by binary search in all columns at once."""
    columns = survey(topology, destinations, None, weighted=False)
    low, end = columns.starts, columns.starts + columns.degrees
    high = end.copy()
    while True:
        open_ = np.flatnonzero(low < high)
        if not len(open_):
            break
        middle = (low[open_] + high[open_]) >> 1
        less = topology.indices[middle] < sources[open_]
        low[open_[less]] = middle[less] + 1
        high[open_[~less]] = middle[~less]
    hit = low < end
    hit[hit] = topology.indices[low[hit]] == sources[hit]
    return hit


# ---------------------------------------------------------------- which edges


def survey(topology: Topology, nodes: Longs, times: Longs | None, weighted: bool) -> Columns:
    outside = (nodes < 0) | (nodes >= len(topology.indptr) - 1)
    if outside.any():
        raise error(Damage.NODE_OUTSIDE, int(np.argmax(outside)))
    starts, ends = topology.indptr[nodes], topology.indptr[nodes + 1]
    degrees = ends - starts
    bad = (starts < 0) | (degrees < 0) | (ends > len(topology.indices)) | (degrees > keys.MOST)
    # What C meets first it names: a bad weight in an earlier column comes before a damaged column.
    sound = int(np.argmax(bad)) if bad.any() else len(nodes)
    columns = Columns(starts, degrees, degrees, None)
    if weighted or times is not None:
        columns = _filtered(topology, columns, sound, times, weighted)
    if sound < len(nodes):
        raise error(Damage.COLUMN_DAMAGED, int(nodes[sound]))
    return columns


def _filtered(topology: Topology, columns: Columns, sound: int, times: Longs | None, weighted: bool) -> Columns:
    starts, degrees = columns.starts[:sound], columns.degrees[:sound]
    positions = all_positions(Columns(starts, degrees, degrees, None))
    column = np.repeat(np.arange(sound), degrees)
    if times is not None:
        assert topology.times is not None
        early = topology.times[positions] <= times[column]
        positions, column = positions[early], column[early]
    if weighted:
        weights = weights_at(topology, positions)
        good = (weights >= 0.0) & (weights <= np.finfo(np.float64).max)
        if not good.all():
            raise error(Damage.WEIGHT_BAD, int(positions[np.argmin(good)]))
        positions, column = positions[weights > 0.0], column[weights > 0.0]
    return Columns(starts, degrees, np.bincount(column, minlength=sound).astype(np.int64), positions)


def _choose(topology: Topology, nodes: Longs, first: int, columns: Columns, rule: Rule) -> tuple[Longs, Longs]:
    """Positions of the edges taken, and how many there are of each column."""
    eligible = columns.eligible
    counts = eligible.copy()
    if rule.fanout >= 0:
        drawing = (eligible > 0) & (eligible > (0 if rule.replace else rule.fanout))
        counts[drawing] = rule.fanout
    else:
        drawing = np.zeros(len(eligible), bool)
    offsets = _before(eligible)  # where the candidates of a column begin, if they are listed
    into = _before(counts)
    taken = np.empty(int(counts.sum()), np.int64)
    whole = np.flatnonzero(~drawing)
    ranks = _ramp(counts[whole])
    target = np.repeat(into[whole], counts[whole]) + ranks
    taken[target] = _positions_of(columns, np.repeat(whole, counts[whole]), ranks, offsets)
    drawn_from = np.flatnonzero(drawing)
    if rule.fanout > 0 and len(drawn_from):
        bases = keys.drawn(rule.key, first + drawn_from)
        target = into[drawn_from][:, None] + np.arange(rule.fanout)
        if rule.last:
            taken[target] = _latest(topology, columns, drawn_from, offsets, rule.fanout)
        elif rule.weighted and rule.replace:
            taken[target] = _by_sums(topology, nodes, columns, drawn_from, offsets, bases, rule.fanout)
        elif rule.weighted:
            taken[target] = _by_race(topology, columns, drawn_from, offsets, bases, rule.fanout)
        else:
            draw = _with_repeats if rule.replace else _distinct
            chosen = draw(bases, eligible[drawn_from], rule.fanout)
            taken[target] = _positions_of(columns, drawn_from[:, None], chosen, offsets)
    return taken, counts


def _with_repeats(bases: keys.Words, bounds: Longs, count: int) -> Longs:
    return keys.below(keys.drawn(bases[:, None], np.arange(count)), bounds[:, None])


def _distinct(bases: keys.Words, bounds: Longs, count: int) -> Longs:
    """Different numbers below the bounds, by Floyd's algorithm."""
    chosen = np.empty((len(bases), count), np.int64)
    for draw in range(count):
        top = bounds - count + draw
        number = keys.below(keys.drawn(bases, draw), top + 1)
        twice = (chosen[:, :draw] == number[:, None]).any(axis=1)
        chosen[:, draw] = np.where(twice, top, number)
    return chosen


def _latest(topology: Topology, columns: Columns, of: Longs, offsets: Longs, count: int) -> Longs:
    """The most recent edges of each column, in the column's order."""
    assert topology.times is not None
    column, positions = _listed(columns, of, offsets)
    order = np.lexsort((~positions, ~topology.times[positions], column))
    first = _before(columns.eligible[of])[:, None] + np.arange(count)
    return np.sort(positions[order[first]], axis=1)


def _by_race(topology: Topology, columns: Columns, of: Longs, offsets: Longs, bases: keys.Words, count: int) -> Longs:
    """Weighted without replacement: of exponential variates, each divided by its weight, the smallest."""
    column, positions = _listed(columns, of, offsets)
    draws = keys.drawn(bases[column], positions - columns.starts[of][column])
    races = keys.exponential(draws) / weights_at(topology, positions)
    order = np.lexsort((positions, races, column))
    first = _before(columns.eligible[of])[:, None] + np.arange(count)
    taken: Longs = positions[order[first]]
    return taken


def _by_sums(
    topology: Topology, nodes: Longs, columns: Columns, of: Longs, offsets: Longs, bases: keys.Words, count: int
) -> Longs:
    """Weighted with replacement: where a number below the sum of weights falls among their running sums."""
    eligible = columns.eligible[of]
    taken = np.empty((len(of), count), np.int64)
    # Columns of about one length at a time, side by side: sums run along each, in its order, as in C.
    sizes = np.ceil(np.log2(eligible)).astype(np.int64)
    infinite = np.zeros(len(of), bool)
    for size in np.unique(sizes):
        mine = np.flatnonzero(sizes == size)
        ranks = np.arange(1 << int(size))
        inside = ranks < eligible[mine][:, None]
        last = np.minimum(ranks, eligible[mine][:, None] - 1)
        positions = _positions_of(columns, of[mine][:, None], last, offsets)
        with np.errstate(over="ignore"):
            sums = np.cumsum(np.where(inside, weights_at(topology, positions), 0.0), axis=1)
        infinite[mine] = ~np.isfinite(sums[:, -1])
        wanted = keys.unit(keys.drawn(bases[mine][:, None], np.arange(count))) * sums[:, -1:]
        low = np.zeros((len(mine), count), np.int64)
        high = np.broadcast_to(eligible[mine][:, None] - 1, low.shape).copy()
        while (low < high).any():
            middle = (low + high) >> 1
            larger = np.take_along_axis(sums, middle, axis=1) > wanted
            low, high = np.where(larger | (low >= high), low, middle + 1), np.where(larger, middle, high)
        taken[mine] = np.take_along_axis(positions, low, axis=1)
    if infinite.any():
        raise error(Damage.TOTAL_BAD, int(nodes[of[np.argmax(infinite)]]))
    return taken


def _second_order(
    topology: Topology, before: Longs, columns: Columns, free: Longs, bases: keys.Words, p: float, q: float
) -> Longs:
    """node2vec's steps, by rejection; all walks that still wait are tried together."""
    num_nodes = len(topology.indptr) - 1
    back, away = 1.0 / p, 1.0 / q
    most = max(back, away, 1.0)
    at = np.empty(len(free), np.int64)
    waiting = np.arange(len(free))
    attempt = 0
    while len(waiting):
        draws = keys.drawn(bases[waiting], 2 * attempt)
        at[waiting] = columns.starts[free[waiting]] + keys.below(draws, columns.degrees[free[waiting]])
        candidates = sources_at(topology, at[waiting], num_nodes)
        near = leads(topology, candidates, before[waiting])
        weights = np.where(candidates == before[waiting], back, np.where(near, 1.0, away))
        refused = keys.unit(keys.drawn(bases[waiting], 2 * attempt + 1)) * most >= weights
        waiting = waiting[refused]
        attempt += 1
    return at


# ---------------------------------------------------------------- numbers for nodes


def number(found: Found, sources: Longs, owners: Longs | None) -> Longs:
    """Local numbers of these nodes; those that are new get the next ones, in the order in which they come."""
    known = _keyed(found, found.taken(), found.owners)
    _, first, inverse = np.unique(
        np.concatenate([known, _keyed(found, sources, owners)]), return_index=True, return_inverse=True
    )
    new = np.sort(first[first >= found.count]) - found.count
    numbers = np.where(first < found.count, first, found.count + np.searchsorted(new, first - found.count))
    found.reserve(len(new))
    found.nodes[found.count : found.count + len(new)] = sources[new]
    if found.owners is not None and owners is not None:
        found.owners[found.count : found.count + len(new)] = owners[new]
    local: Longs = numbers[inverse.reshape(-1)[len(known) :]]
    found.count += len(new)
    return local


def _keyed(found: Found, nodes: Longs, owners: Longs | None) -> Longs:
    """One number for a node, and for disjoint sampling the seed that it belongs to."""
    return nodes if owners is None else owners[: len(nodes)] * np.int64(found.num_nodes) + nodes


def append(edges: Edges, rows: Longs, cols: Longs, ids: Longs) -> None:
    edges.reserve(len(rows))
    here = slice(edges.count, edges.count + len(rows))
    edges.rows[here], edges.cols[here], edges.ids[here] = rows, cols, ids
    edges.count += len(rows)


# ---------------------------------------------------------------- reading columns


def sources_at(topology: Topology, positions: Longs, num_nodes: int) -> Longs:
    sources = topology.indices[positions].astype(np.int64)
    outside = (sources < 0) | (sources >= num_nodes)
    if outside.any():
        raise error(Damage.SOURCE_OUTSIDE, int(positions[np.argmax(outside)]))
    return sources


def ids_at(topology: Topology, positions: Longs) -> Longs:
    return positions if topology.edge_ids is None else topology.edge_ids[positions].astype(np.int64)


def weights_at(topology: Topology, positions: Longs) -> keys.Doubles:
    assert topology.weights is not None
    return topology.weights[positions].astype(np.float64)


def all_positions(columns: Columns) -> Longs:
    return np.repeat(columns.starts, columns.degrees) + _ramp(columns.degrees)


def _listed(columns: Columns, of: Longs, offsets: Longs) -> tuple[Longs, Longs]:
    """All candidates of some columns: the place of their column in `of`, and their positions."""
    eligible = columns.eligible[of]
    column = np.repeat(np.arange(len(of)), eligible)
    return column, _positions_of(columns, of[column], _ramp(eligible), offsets)


def _positions_of(columns: Columns, column: Longs, ranks: Longs, offsets: Longs) -> Longs:
    positions: Longs
    if columns.positions is None:
        positions = columns.starts[column] + ranks
    else:
        positions = columns.positions[offsets[column] + ranks]
    return positions


def _before(counts: Longs) -> Longs:
    """How many there are before each."""
    before: Longs = np.cumsum(counts) - counts
    return before


def _ramp(counts: Longs) -> Longs:
    """0, 1, … up to each count, one after the other."""
    ramp: Longs = np.arange(int(counts.sum())) - np.repeat(_before(counts), counts)
    return ramp
