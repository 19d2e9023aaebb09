"""What a loader has done and is doing: an immutable snapshot.

Reads   nothing.
Writes  nothing.
Never   a live object: what is in here does not change.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SlotStatistics:
    slot: int
    state: str
    pid: int | None
    incarnation: int
    doing: str
    batch: int
    seconds: float
    queued: int
    cell_bytes: int = 0  # shared memory that its worker's batches travel in


@dataclass(frozen=True)
class Statistics:
    """A snapshot of a loader: counts since it was made, and its slots as they are now."""

    epoch: int = 0
    delivered: int = 0
    errored: int = 0
    emptied: int = 0
    restarts: int = 0
    retries: int = 0
    replaced: int = 0
    recycled: int = 0
    quarantined: int = 0
    incidents: int = 0
    cell_bytes: int = 0  # shared memory of all batches, those too that you still hold after their worker is gone
    slots: tuple[SlotStatistics, ...] = ()
    breaker: str = "closed"  # or «open since 12 s: ConnectionRefusedError: …», or «given up after 300 s: …»

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
