"""How many CPUs this process may really use, and how often it is made to stop for having used them up.

Reads   the affinity mask; cpu.max or cpu.cfs_*, and cpu.stat, of its groups up to the root.
Writes  nothing.
Never   fails: where the system tells nothing, the machine's own number counts.

A limit of a group is time in periods: 2.5 CPUs are 250 ms of each 100 ms, on however many cores. What runs when they
are used up stops until the next period begins: it is *throttled*.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from outlive._system import cgroups
from outlive._system.cgroups import Folder


@dataclass(frozen=True)
class Throttled:
    """Counts of one group, since it was made or since an earlier count."""

    periods: int = 0
    throttled: int = 0  # of these
    seconds: float = 0.0  # that its threads stood still, together

    @property
    def share(self) -> float:
        return self.throttled / self.periods if self.periods > 0 else 0.0

    def since(self, earlier: Throttled) -> Throttled:
        return Throttled(
            self.periods - earlier.periods, self.throttled - earlier.throttled, self.seconds - earlier.seconds
        )


@dataclass(frozen=True)
class Cpus:
    """What one look at the system says."""

    usable: float  # that this process may use at most: of the affinity mask and of every group's limit the least
    limit: float | None = None  # the least of its groups' limits; None: there is none
    throttling: tuple[Throttled, ...] = ()  # of each group that it is in, innermost first


def look(root: str = "/") -> Cpus:
    folders = cgroups.own_folders("cpu", root)
    limit = min((found for folder in folders if (found := _limit_of(folder)) is not None), default=None)
    allowed = float(_allowed())
    return Cpus(allowed if limit is None else min(allowed, limit), limit, tuple(map(_throttled, folders)))


def usable_cpus(root: str = "/") -> float:
    """How many CPUs this process may use at most."""
    return look(root).usable


def throttled_share(before: Sequence[Throttled], now: Sequence[Throttled]) -> float | None:
    """The share of periods in which somebody was stopped, in the group where that was most; None: nobody counts."""
    pairs = [later.since(earlier) for earlier, later in zip(before, now)]
    counted = [counts.share for counts in pairs if counts.periods > 0]
    return max(counted, default=None)


def _allowed() -> int:
    try:
        return len(os.sched_getaffinity(0)) or 1
    except (AttributeError, OSError):  # no such thing on this system
        return os.cpu_count() or 1


def _limit_of(folder: Folder) -> float | None:
    if folder.is_v2:
        words = cgroups.text(f"{folder.path}/cpu.max").split()
    else:
        words = [cgroups.text(f"{folder.path}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) != 2 or not words[0].isdigit() or not words[1].isdigit():  # «max», -1, or no such file
        return None
    quota, period = map(int, words)
    return quota / period if quota > 0 and period > 0 else None


def _throttled(folder: Folder) -> Throttled:
    counts: dict[str, int] = {}
    for line in cgroups.text(f"{folder.path}/cpu.stat").splitlines():
        name, _, value = line.partition(" ")
        if value.isdigit():
            counts[name] = int(value)
    stood = counts.get("throttled_usec", 0) / 1e6 + counts.get("throttled_time", 0) / 1e9
    return Throttled(counts.get("nr_periods", 0), counts.get("nr_throttled", 0), stood)
