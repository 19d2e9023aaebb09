"""Whether a worker's memory grows for ever, how fast, and in what. Pure.

Reads   samples of its memory, with how many batches it had done.
Writes  nothing.
Never   the clock, a process.

How a leak is told from the ups and downs of a healthy worker is in `trends`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlive import trends
from outlive.evidence import Growth, GrowthKind

_LEAST_SAMPLES = 12
_LEAST_GROWTH_BYTES = 16 << 20
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
    settled = [s for s in samples if s.batches >= first + trends.WARM_UP * (last - first)]
    span = settled[-1].batches - settled[0].batches if settled else 0
    if span < trends.STRETCHES:
        return None
    private = trends.slope([(s.batches, s.private_bytes) for s in settled], _LEAST_GROWTH_BYTES)
    cells = trends.slope([(s.batches, s.cell_bytes) for s in settled], _LEAST_GROWTH_BYTES)
    if cells is not None and (private is None or cells > private):
        return Growth(GrowthKind.CELLS, cells, span, samples[-1].cell_bytes)
    if private is None:
        return None
    resident = trends.slope([(s.batches, s.resident_bytes) for s in settled], _LEAST_GROWTH_BYTES) or 0.0
    kind = GrowthKind.COPY_ON_READ if resident < _COPIED * private else GrowthKind.LEAK
    return Growth(kind, private, span, samples[-1].private_bytes)
