"""How much memory the workers use together, how much is left, and whether that is too little.

Reads   cgroups (v1 and v2) and /proc/meminfo, below another root in tests; what was seen of each worker.
Writes  nothing.
Never   more than a look a second.

What is left is the least of: the budget that was set, less what workers use; what each cgroup above us allows, less
what cannot be taken back from it; what the machine has available.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from outlive._forensics import surroundings
from outlive.quantities import parse_bytes_or_share

LOOK_EVERY_S = 1.0
SAY_AGAIN_S = 2.0
ROOM_AGAIN_S = 5.0
_SPARE_SHARE = 0.04  # of all memory: less than this is scarce,
_LEAST_SPARE = 32 << 20
_MOST_SPARE = 1 << 30
_OWN_SHARE = 0.95  # of a budget that was set
_ROOM = 1.25  # times the largest worker: so much must be left before there is another
_FADING = 0.99  # per look: how large workers once were


@dataclass(frozen=True)
class Told:
    scarce: bool
    slot: int
    slot_bytes: int
    used_bytes: int
    left_bytes: int


class Budget:
    def __init__(self, setting: str | int | None, root: str = "/") -> None:
        self._root = root
        self._groups = [group for group in surroundings.own_groups(root) if group.limit_bytes is not None]
        self.total = surroundings.total_bytes(root) or 1 << 62
        self.bytes = None if setting is None else parse_bytes_or_share("memory_budget", setting, self.total)
        self._spare = min(_MOST_SPARE, max(_LEAST_SPARE, round(self.total * _SPARE_SHARE)))
        self._next = self._next_word = 0.0
        self._largest = 0.0
        self._most = 0  # workers that there ever were at a time

    def look(self, now: float, sizes: Mapping[int, int]) -> Told | None:
        """What is to be told, if anything. `sizes`: by slot, in bytes."""
        if now < self._next or not sizes:
            return None
        self._next = now + LOOK_EVERY_S
        self._most = max(self._most, len(sizes))
        slot, largest = max(sizes.items(), key=lambda item: item[1])
        self._largest = max(float(largest), self._largest * _FADING)
        used = sum(sizes.values())
        left = self._left()
        room = left - self._spare
        scarce = room < 0 and largest >= self._spare // 8  # else its leaving would change nothing
        if self.bytes is not None:
            left = min(left, self.bytes - used)
            room = min(room, round(self.bytes * _OWN_SHARE) - used)
            scarce = scarce or used >= self.bytes * _OWN_SHARE
        if now < self._next_word:
            return None
        if scarce:
            self._next_word = now + SAY_AGAIN_S
            return Told(True, slot, largest, used, max(0, left))
        if len(sizes) < self._most and room >= self._largest * _ROOM:
            self._next_word = now + ROOM_AGAIN_S
            return Told(False, slot, largest, used, left)
        return None

    def _left(self) -> int:
        """What the machine and the groups above us leave."""
        available = surroundings.available_bytes(self._root)
        rooms = [] if available is None else [available]
        for group in self._groups:
            limit, used = group.limit_bytes, group.held_bytes
            if limit is not None and used is not None:
                rooms.append(limit - used)
        return min(rooms, default=1 << 62)
