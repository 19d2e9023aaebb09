"""Small rules of the fault policy: pauses, budgets, intensity.

Reads   a policy and counts.
Writes  nothing.
Never   the clock; the time is handed in.
"""

from __future__ import annotations

import random
from collections import deque

from outlive.settings import FaultPolicy

# A share of bad samples says little before there are some.
_LEAST_BAD = 20


def pause_s(policy: FaultPolicy, attempt: int, seed: int) -> float:
    """How long to wait before retry number `attempt` (from 1): doubling, capped, varied reproducibly."""
    pause = min(policy.backoff_s * 2.0 ** (attempt - 1), policy.backoff_max_s)
    return pause * (1.0 + policy.jitter * (2.0 * random.Random(seed * 1_000_003 + attempt).random() - 1.0))


def too_many_bad(policy: FaultPolicy, bad: int, drawn: int) -> bool:
    """Whether the budget for bad samples is spent."""
    limit = policy.max_bad
    if limit is None:
        return False
    if isinstance(limit, float):
        return bad >= _LEAST_BAD and bad > limit * drawn
    return bad > limit


class Intensity:
    """So many restarts in so many seconds, as in Erlang's supervisors."""

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._times: deque[float] = deque()

    def exceeded_by(self, now: float) -> bool:
        """Count one restart; True when there were too many."""
        times = self._times
        times.append(now)
        while times and now - times[0] > self._window_s:
            times.popleft()
        return len(times) > self._most
