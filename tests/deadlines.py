"""Waiting for a condition, with a deadline.

Reads   the clock.
Writes  nothing.
Never   asserts how long something took.
"""

from __future__ import annotations

import time
from collections.abc import Callable

_LONGEST_STEP_S = 1.0


class Deadline:
    """A time to give up, counted from look to look.

    A virtual machine may be stopped for minutes. What is waited for then stood still, too, so a step of the clock that
    is longer than a second counts as one second.
    """

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._looked_at = time.monotonic()

    @property
    def passed(self) -> bool:
        now = time.monotonic()
        self._left_s -= min(now - self._looked_at, _LONGEST_STEP_S)
        self._looked_at = now
        return self._left_s < 0


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    """Whether a condition came true before the deadline."""
    deadline = Deadline(deadline_s)
    while not condition():
        if deadline.passed:
            return False
        time.sleep(0.005)  # between two looks, with a deadline
    return True
