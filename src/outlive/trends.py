"""Whether a figure goes up and up, and how fast. Pure.

Reads   points: after how many batches, how much.
Writes  nothing.
Never   the clock, a process.

What is healthy warms up, then goes up and down (a sawtooth: garbage that is collected, caches that are emptied). What
counts is the lower edge: the least of each stretch. A leak raises all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

WARM_UP = 0.2  # of a life so far: imports, caches, first batches
STRETCHES = 8
_LEAST_RISES = 0.8  # of all pairs of stretches: the later one is higher
_LEVELS_OFF = 0.4  # of the slope of its first half: a second half with less is on its way to a plateau

Point = tuple[int, int]


def slope(points: Sequence[Point], least: float) -> float | None:
    """Of the lower edge, per batch; None where it does not rise for sure, or by less than `least` in all."""
    edge = lower_edge(points)
    if len(edge) < STRETCHES // 2 or edge[-1][1] - edge[0][1] < least:
        return None
    pairs = list(itertools.combinations(edge, 2))
    rising = sum(later[1] > earlier[1] for earlier, later in pairs)
    if rising < _LEAST_RISES * len(pairs):
        return None
    slopes = sorted((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0])
    return (slopes[len(slopes) // 2] + slopes[~(len(slopes) // 2)]) / 2  # their median


def steady_slope(points: Sequence[Point], least: float) -> float | None:
    """As `slope`, after the warm-up, and only where it does not level off: a pool or a cache that fills does."""
    if not points:
        return None
    begin, end = points[0][0], points[-1][0]
    settled = [point for point in points if point[0] >= begin + WARM_UP * (end - begin)]
    if not settled or settled[-1][0] - settled[0][0] < STRETCHES:
        return None
    found = slope(settled, least)
    if found is None:
        return None
    edge = lower_edge(settled)
    middle = edge[len(edge) // 2]
    early, late = (_between(a, b) for a, b in ((edge[0], middle), (middle, edge[-1])))
    return found if late >= _LEVELS_OFF * early else None


def lower_edge(points: Sequence[Point]) -> list[Point]:
    """The lowest point of each stretch."""
    begin, end = points[0][0], points[-1][0]
    stretches: list[list[Point]] = [[] for _ in range(STRETCHES)]
    for point in points:
        stretches[min(STRETCHES - 1, (point[0] - begin) * STRETCHES // max(1, end - begin))].append(point)
    return [min(stretch, key=lambda point: point[1]) for stretch in stretches if stretch]


def _between(a: Point, b: Point) -> float:
    return (b[1] - a[1]) / max(1, b[0] - a[0])
