"""Which parts of a large storage travel, when tensors look at small parts of it.

Reads   the views' extents, after everything was pickled: only then is it known who shares what.
Writes  nothing; `tensors.py` copies what this decides.
Never   two copies of bytes that two views share, unless the views are mostly gaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

# Views that span this many times what they look at, and so many bytes more, travel without what lies between.
WASTE = 2
SPARE_BYTES = 1 << 16
# Every type's size divides it: a part that begins at a multiple can be addressed by elements of any type.
_GRAIN = 16


class Extent(NamedTuple):
    """What one view reaches of its storage, in bytes, and which place it was promised."""

    low: int
    high: int
    size: int  # what it looks at, less than it spans where it has gaps
    place: int


@dataclass
class Part:
    """Bytes of a storage that travel as one, for all views in them; `dense`: each of them by itself, without gaps."""

    low: int
    high: int
    views: list[Extent]

    @property
    def dense(self) -> bool:
        looked_at = sum(view.size for view in self.views)
        return self.high - self.low > WASTE * looked_at + SPARE_BYTES


def parts_of(extents: list[Extent]) -> list[Part]:
    """Views that overlap stay together; the others go apart."""
    parts: list[Part] = []
    for extent in sorted(extents):
        if parts and extent.low < parts[-1].high:
            parts[-1].high = max(parts[-1].high, extent.high)
            parts[-1].views.append(extent)
        else:
            parts.append(Part(extent.low // _GRAIN * _GRAIN, extent.high, [extent]))
    return parts
