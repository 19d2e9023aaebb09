"""What the process that forked a worker shares with it. Plain data.

Reads   nothing.
Writes  nothing.
Never   more than this: a zygote has it before it has what looks at workers that hang.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Kin:
    job: Callable[[], Any]  # where the search for locks begins
    left_behind: tuple[str, ...] = ()  # threads of the trainer when it was forked, which no worker has
    relatives: Callable[[], Collection[int]] = tuple  # processes that have the job at the same addresses, by pid
    left_native: tuple[str, ...] = ()  # likewise, those that Python does not know

    @property
    def has_left_any(self) -> bool:
        return bool(self.left_behind or self.left_native)
