"""Decides whether a worker hangs. Pure: what was seen goes in, a judgement comes out.

Reads   what the black box and /proc said.
Writes  nothing.
Never   the clock, a process.

    healthy → suspected (its stack is reported) → condemned (it is replaced)
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal

from outlive._system.processes import Activity
from outlive.incident import InHand, Stage

_OWN_CODE = (Stage.IDLE, Stage.WAITING, Stage.LEAVING, Stage.STARTING, Stage.DELIVERING)
_SAMPLES = (Stage.FETCHING, Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING, Stage.PROBING)
SUSPECT_FACTOR = 20
CONDEMN_FACTOR = 10


@dataclass(frozen=True)
class WatchSettings:
    sample_timeout: float | Literal["auto"] | None
    floor_s: float
    memory_limit: int | None = None  # of a worker, in bytes: to say how long it will last
    memory_budget: str | int | None = None  # of all workers together: a size, a share of what there is; None: that
    left_behind: tuple[str, ...] = ()  # threads of the trainer that workers have not got, where they are forks of it

    @property
    def interval_s(self) -> float:
        limit = self.floor_s if self.sample_timeout in ("auto", None) else float(self.sample_timeout or 1)
        return min(1.0, max(0.02, limit / 5))


class Judgement(enum.Enum):
    HEALTHY = "healthy"
    SUSPECTED = "suspected"
    CONDEMNED = "condemned"


def judge(
    settings: WatchSettings,
    in_hand: InHand,
    count: int,
    slowest_s: float,
    before: Activity | None,
    now: Activity | None,
) -> Judgement:
    """`before`: what its threads did when it was suspected; `now`: what they do, None as long as nobody looked."""
    timeout = settings.sample_timeout
    if timeout is None:
        return Judgement.HEALTHY
    if in_hand.stage in _OWN_CODE:  # it waits for us, unless it is stopped
        late = in_hand.seconds > (settings.floor_s if timeout == "auto" else timeout)
        if not late or (now is not None and not now.stopped):
            return Judgement.HEALTHY
        return Judgement.SUSPECTED if now is None else Judgement.CONDEMNED
    if timeout != "auto" and in_hand.stage in _SAMPLES:
        return Judgement.CONDEMNED if in_hand.seconds > timeout * count else Judgement.HEALTHY
    suspect_s = max(settings.floor_s, SUSPECT_FACTOR * slowest_s)
    if in_hand.seconds <= suspect_s:
        return Judgement.HEALTHY
    if in_hand.seconds > CONDEMN_FACTOR * suspect_s:
        return Judgement.CONDEMNED
    if now is not None and now.stopped:
        return Judgement.CONDEMNED
    if before is not None and now is not None and _waits_for_ever(before, now):
        return Judgement.CONDEMNED
    return Judgement.SUSPECTED


def _waits_for_ever(before: Activity, now: Activity) -> bool:
    return before.all_wait_for_locks and now.all_wait_for_locks and before.cpu_ticks == now.cpu_ticks
