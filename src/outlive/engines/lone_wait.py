"""Finds workers that wait for threads which forking left behind, however long a sample may take.

Reads   the black box, and how the worker looks.
Writes  nothing; the worker writes its stacks when it is asked.
Never   looks often: what such a worker waits for is plain from one look, and a sound sample may take long as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from outlive._capture.blackbox import BlackBox
from outlive._forensics.kin import Kin
from outlive.engines.watch import WatchSettings
from outlive.engines.watching import Found
from outlive.incident import Stage

_USERS_CODE = (
    *(Stage.PREPARING, Stage.FORWARDING, Stage.FETCHING, Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING),
    *(Stage.PROBING, Stage.AT_WORK),
)


@dataclass
class LoneWait:
    """When a worker is looked at next."""

    mark: tuple[int, int, int, int] = (0, 0, 0, 0)  # of what it has in hand
    look_at_s: float = 0.0

    def look(self, box: BlackBox, pid: int, stack_fd: int, settings: WatchSettings, kin: Kin | None) -> Found | None:
        """How it looks, where it waits for such a thread; None where it does not, or it is not yet time to look."""
        mark, in_hand = box.mark, box.in_hand()
        if mark != self.mark:
            self.mark, self.look_at_s = mark, 0.0
        if kin is None or in_hand.stage not in _USERS_CODE or in_hand.seconds <= max(settings.floor_s, self.look_at_s):
            return None
        self.look_at_s = 2 * in_hand.seconds
        from outlive._forensics import hanging  # see watching.prepare()

        seen = hanging.see(pid, stack_fd, ending=False, kin=kin)
        return Found(None, in_hand.seconds, seen) if seen.out_of_reach and box.mark == mark else None
