"""Whether a worker's memory grows for ever, how fast, and in what. Pure.

Reads   samples of its memory, with how many batches it had done.
Writes  nothing.
Never   the clock, a process.

A healthy worker warms up, then goes up and down (a sawtooth: garbage that is collected, caches that are emptied). What
counts is the lower edge: the least of each stretch of its life, after the warm-up. A leak raises all of them.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.evidence import Growth, GrowthKind

_WARM_UP = 0.2  # of its life so far: imports, caches, first batches
_STRETCHES = 8
_LEAST_SAMPLES = 12
_LEAST_GROWTH_BYTES = 16 << 20
_LEAST_RISES = 0.8  # of all pairs of stretches: the later one is higher
_COPIED = 0.35  # of what became private so much may be new, and it is still copying that dominates


@dataclass(frozen=True)
class Sample:
    batches: int
    resident_bytes: int
    private_bytes: int
    cell_bytes: int = 0


def growth_of(samples: Sequence[Sample]) -> Growth | None:
    """How a worker grows; None: it does not, or it is too early to say."""
    if len(samples) < _LEAST_SAMPLES:
        return None
    first, last = samples[0].batches, samples[-1].batches
    settled = [s for s in samples if s.batches >= first + _WARM_UP * (last - first)]
    span = settled[-1].batches - settled[0].batches if settled else 0
    if span < _STRETCHES:
        return None
    private = _slope([(s.batches, s.private_bytes) for s in settled])
    cells = _slope([(s.batches, s.cell_bytes) for s in settled])
    if cells is not None and (private is None or cells > private):
        return Growth(GrowthKind.CELLS, cells, span, samples[-1].cell_bytes)
    if private is None:
        return None
    resident = _slope([(s.batches, s.resident_bytes) for s in settled]) or 0.0
    kind = GrowthKind.COPY_ON_READ if resident < _COPIED * private else GrowthKind.LEAK
    return Growth(kind, private, span, samples[-1].private_bytes)


def _slope(points: Sequence[tuple[int, int]]) -> float | None:
    """Bytes per batch of the lower edge; None where it does not rise for sure."""
    edge = _lower_edge(points)
    if len(edge) < _STRETCHES // 2 or edge[-1][1] - edge[0][1] < _LEAST_GROWTH_BYTES:
        return None
    pairs = list(itertools.combinations(edge, 2))
    rising = sum(later[1] > earlier[1] for earlier, later in pairs)
    if rising < _LEAST_RISES * len(pairs):
        return None
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in pairs if b[0] > a[0])


def _lower_edge(points: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The lowest point of each stretch."""
    begin, end = points[0][0], points[-1][0]
    stretches: list[list[tuple[int, int]]] = [[] for _ in range(_STRETCHES)]
    for point in points:
        stretches[min(_STRETCHES - 1, (point[0] - begin) * _STRETCHES // max(1, end - begin))].append(point)
    return [min(stretch, key=lambda point: point[1]) for stretch in stretches if stretch]
