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
    """How many restarts there may be in a window of time, as in Erlang's supervisors.

    While tasks wait, a restart counts until the window has passed *and* a task was concluded after it: a fleet that
    only restarts ends, however long each restart takes.
    """

    def __init__(self, most: int, window_s: float) -> None:
        self._most = most
        self._window_s = window_s
        self._restarts: deque[tuple[float, int]] = deque()  # when, and how many tasks had been concluded then
        self._waited_s = 0.0

    def exceeded_by(self, now: float, concluded: int, *, waiting: bool) -> bool:
        """Count a restart. Return True when there were too many."""
        restarts = self._restarts
        restarts.append((now, concluded))
        while now - restarts[0][0] > self._window_s and not (waiting and concluded == restarts[0][1]):
            restarts.popleft()
        self._waited_s = now - restarts[0][0]
        return len(restarts) > self._most

    @property
    def words(self) -> str:
        """That there were too many, and in what time."""
        often = f"within {self._window_s:g} s"
        if self._waited_s > self._window_s:
            often = f"in {self._waited_s:.0f} s, and nothing was finished in that time"
        return f"workers died more than {self._most} times {often}: the epoch cannot be finished like this"
