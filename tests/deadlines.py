"""Waiting for a condition, with a deadline.

Reads   the clock.
Writes  nothing.
Never   asserts how long something took.
"""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], bool], deadline_s: float = 10.0) -> bool:
    """Whether a condition came true before the deadline."""
    give_up_at = time.monotonic() + deadline_s
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        time.sleep(0.005)  # between two looks, with a deadline
    return True
