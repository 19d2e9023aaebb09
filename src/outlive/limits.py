"""What a worker may use before it is recycled or replaced: plain data, checked when it is set.

Reads   what the user passed.
Writes  nothing.
Never   looks at a process.

    private memory   0 ─────────── soft ──────── hard
                     healthy        recycled:     replaced at once, the sample in
                                    finishes its  hand treated as at a crash
                                    batch, leaves
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Any

from outlive.quantities import check_size, parse_bytes, parse_bytes_or_share

SOFT_SHARE = 0.85
BUDGET_VARIABLE = "OUTLIVE_MEMORY_BUDGET"  # as a container's manifest may set it
_COUNTED = re.compile(r"\s*(\d{1,18})\s*(batch|batches|sample|samples)\s*")


@dataclass(frozen=True)
class Limits:
    """Of one worker. Memory is what it does not share with others, cells aside."""

    memory_bytes: int | None = None  # the hard limit
    after_batches: int | None = None
    after_samples: int | None = None
    after_growth_bytes: int | None = None

    @property
    def soft_bytes(self) -> int | None:
        return None if self.memory_bytes is None else round(self.memory_bytes * SOFT_SHARE)

    @property
    def any(self) -> bool:
        return self != NO_LIMITS


NO_LIMITS = Limits()


def budget_of(memory_budget: Any) -> str | int | None:
    """What `memory_budget=` means, checked; where it is not set, OUTLIVE_MEMORY_BUDGET. None: what is left."""
    name = "memory_budget"
    if memory_budget is None:
        memory_budget, name = os.environ.get(BUDGET_VARIABLE) or None, BUDGET_VARIABLE
    if memory_budget is not None:
        parse_bytes_or_share(name, memory_budget, 1 << 40)
    return memory_budget  # type: ignore[no-any-return]


def limits_of(memory_limit: Any, recycle_after: Any) -> Limits:
    """What `memory_limit=` and `recycle_after=` mean."""
    memory = None if memory_limit is None else parse_bytes("memory_limit", memory_limit)
    check_size("recycle_after", recycle_after)
    if recycle_after is None:
        return Limits(memory)
    if isinstance(recycle_after, int) and not isinstance(recycle_after, bool) and recycle_after >= 1:
        return Limits(memory, after_batches=recycle_after)
    if isinstance(recycle_after, str):
        counted = _COUNTED.fullmatch(recycle_after)
        if counted is not None and int(counted[1]) >= 1:
            count = int(counted[1])
            return Limits(memory, count) if counted[2].startswith("batch") else Limits(memory, after_samples=count)
        if counted is None and re.search("[A-Za-z]", recycle_after):
            try:
                return Limits(memory, after_growth_bytes=parse_bytes("recycle_after", recycle_after))
            except TypeError:
                pass  # said below, with all that it may be
    raise ValueError(
        'recycle_after must be a number of batches (500 or "500 batches"), of samples ("20000 samples") or a growth '
        f'in memory ("1GiB"), got {recycle_after!r}'
    )
