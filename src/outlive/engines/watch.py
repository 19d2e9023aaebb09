"""Decides whether a worker hangs. Pure: what was seen goes in, a judgement comes out.

Reads   what the black box and /proc said.
Writes  nothing.
Never   the clock, a process.

    healthy → suspected (it is looked at, and told of) → condemned (it is replaced)

How long it may take depends on what it does: nothing that can ever go on is ended soon, a wait for something that lives
is given minutes, and work as long as such work has taken before.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from outlive._capture.blackbox import BATCH_STEPS, SAMPLE_STEPS, SPANS, span_s
from outlive._system.processes import Activity
from outlive.incident import InHand, Stage
from outlive.settings import FaultPolicy

_OWN_CODE = (Stage.IDLE, Stage.WAITING, Stage.LEAVING, Stage.STARTING, Stage.DELIVERING)
_SAMPLES = (Stage.FETCHING, Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING, Stage.PROBING)
_STARTS = (Stage.PREPARING, Stage.FORWARDING)

FACTOR = 20  # times as long as healthy steps took
TOLD_FACTOR = 2  # and so many times, before a hang is suspected at all
AGAIN = 0.5  # of the limit, for a sample that has hung a worker already
WAIT_SHARE, BUSY_SHARE, MOST_SHARE = 4, 10, 60  # of `floor_s`: 2, 5 and 30 minutes where that is 30 s
BUSY_CPU = 0.1  # of a processor: who uses less sleeps between two looks at something
LEARNED = 1000  # steps: older ones fade
RARE = 0.005  # of them: so many may have taken longer than what is taken for usual,
_LEAST_RARE = 1.0  # and one at least
_WILD = 1 << 40  # no such number of steps: somebody wrote over the black box


@dataclass(frozen=True)
class WatchSettings:
    sample_timeout: float | Literal["auto"] | None
    floor_s: float
    memory_limit: int | None = None  # of a worker, in bytes: to say how long it will last
    memory_budget: str | int | None = None  # of all workers together: a size, a share of what there is; None: that
    left_behind: tuple[str, ...] = ()  # threads of the trainer that workers have not got, where they are forks of it
    left_native: tuple[str, ...] = ()  # likewise, those that Python does not know
    wait_s: float | None = None  # None, here and below: a multiple of `floor_s`
    busy_s: float | None = None
    most_wait_s: float | None = None

    @classmethod
    def of(cls, policy: FaultPolicy, memory_limit: int | None, memory_budget: str | int | None) -> WatchSettings:
        return cls(
            policy.sample_timeout,
            policy.hang_floor_s,
            memory_limit,
            memory_budget,
            wait_s=policy.hang_wait_s,
            busy_s=policy.hang_busy_s,
            most_wait_s=policy.hang_wait_max_s,
        )

    @property
    def first_look_s(self) -> float:
        timeout = self.sample_timeout
        limits = (self.floor_s, self.waits_s, self.works_s, *(() if timeout in ("auto", None) else (timeout,)))
        return float(min(limits))

    @property
    def interval_s(self) -> float:
        return min(1.0, max(0.02, self.first_look_s / 5))

    @property
    def waits_s(self) -> float:
        return WAIT_SHARE * self.floor_s if self.wait_s is None else self.wait_s

    @property
    def works_s(self) -> float:
        return BUSY_SHARE * self.floor_s if self.busy_s is None else self.busy_s

    @property
    def waits_at_most_s(self) -> float:
        most_s = MOST_SHARE * self.floor_s if self.most_wait_s is None else self.most_wait_s
        return max(most_s, self.waits_s)


class Judgement(enum.Enum):
    HEALTHY = "healthy"
    SUSPECTED = "suspected"
    CONDEMNED = "condemned"


class Doing(enum.Enum):
    """What a worker that is late does, as far as its limit depends on it."""

    STUCK = "can never go on"  # it is stopped, or no living process can release what all its threads wait for
    WAITS = "waits"
    WORKS = "uses the CPU"


@dataclass(frozen=True)
class Looks:
    """A worker that is late: the first look at it, the one before this one, and this one."""

    first: Activity
    before: Activity
    now: Activity
    seconds: float  # from the first to this one

    @property
    def doing(self) -> Doing:
        before, now = self.before, self.now
        if before.stopped and now.stopped:
            return Doing.STUCK
        if before.stuck and now.stuck and before.pulse == now.pulse:
            return Doing.STUCK
        used_s = now.cpu_s - self.first.cpu_s
        if (before.runs and now.runs) or used_s >= BUSY_CPU * self.seconds > 0:
            return Doing.WORKS
        return Doing.WAITS


@dataclass(frozen=True)
class Case:
    """What a worker has in hand, and what is known of it beside."""

    in_hand: InHand
    count: int = 1  # samples in hand at once
    usual_s: float = 0.0  # such steps have taken so long, nearly all of them
    again: bool = False  # it has hung a worker before


def limit_s(settings: WatchSettings, case: Case, doing: Doing) -> float | None:
    """After how long a worker that does this is taken for hung; None: never."""
    timeout, stage = settings.sample_timeout, case.in_hand.stage
    if timeout is None:
        return None
    if stage in _OWN_CODE:  # it waits for us, unless it is stopped
        if doing is not Doing.STUCK:
            return None
        return settings.floor_s if timeout == "auto" else timeout
    if timeout != "auto" and stage in _SAMPLES:
        return timeout * case.count  # it is the user's word, whatever the worker does
    if doing is Doing.STUCK:
        found = settings.floor_s
    elif doing is Doing.WORKS or stage in _STARTS:  # a start may copy all its data first
        found = max(settings.works_s, FACTOR * case.usual_s)
    else:
        found = min(max(settings.waits_s, FACTOR * case.usual_s), settings.waits_at_most_s)
    return AGAIN * found if case.again else found


def is_late(settings: WatchSettings, case: Case) -> bool:
    """Whether a worker is to be looked at."""
    timeout, seconds = settings.sample_timeout, case.in_hand.seconds
    if timeout is None:
        return False
    if case.in_hand.stage in _OWN_CODE:
        return seconds > (settings.floor_s if timeout == "auto" else timeout)
    least_s = min(settings.floor_s, settings.waits_s, settings.works_s)
    if timeout != "auto" and case.in_hand.stage in _SAMPLES:
        return seconds > min(settings.floor_s, timeout * case.count)
    return seconds > (AGAIN * least_s if case.again else least_s)


def judge(settings: WatchSettings, case: Case, looks: Looks | None) -> Judgement:
    """`looks`: None where it was not looked at twice yet, or no system says what it does."""
    if not is_late(settings, case):
        return Judgement.HEALTHY
    timeout, stage, seconds = settings.sample_timeout, case.in_hand.stage, case.in_hand.seconds
    if timeout not in ("auto", None) and stage in _SAMPLES and seconds > float(timeout or 0) * case.count:
        return Judgement.CONDEMNED  # whatever it does
    if looks is None:
        return Judgement.SUSPECTED
    limit = limit_s(settings, case, looks.doing)
    if limit is None:
        return Judgement.HEALTHY
    return Judgement.CONDEMNED if seconds > limit else Judgement.SUSPECTED


# ---------------------------------------------------------------- telling of it


def first_told_s(settings: WatchSettings, case: Case) -> float:
    """When a hang is told of for the first time: not while others of its kind have taken as long."""
    return max(settings.floor_s, TOLD_FACTOR * case.usual_s)


def next_told_s(settings: WatchSettings, told_s: float, doing: Doing) -> float:
    """When it is told of again: at growing intervals, and of one that works every minute."""
    pause_s = max(settings.floor_s, told_s)
    return told_s + (min(pause_s, 2 * settings.floor_s) if doing is Doing.WORKS else pause_s)


# ---------------------------------------------------------------- how long it usually takes


class UsualTimes:
    """Learns how long healthy steps take: what 199 of 200 of about the last 1,000 stay below, and never what just one
    took.

    One slow sample says nothing of the others; a maximum would let it decide for the rest of the job.
    """

    def __init__(self) -> None:
        self._weights: tuple[dict[int, float], ...] = ({}, {})  # by bucket, 0 for all that is short
        self._usual_s = [0.0, 0.0]

    def learn(self, before: Sequence[int], now: Sequence[int]) -> None:
        """What a black box has counted, at two looks."""
        for kind in (SAMPLE_STEPS, BATCH_STEPS):
            added = {n: now[at] - before[at] for n, at in enumerate(range(kind * SPANS, (kind + 1) * SPANS))}
            added = {n: count for n, count in added.items() if 0 < count < _WILD}
            if added:
                self._add(self._weights[kind], added)
                self._usual_s[kind] = self._quantile(kind)

    def _add(self, weights: dict[int, float], added: dict[int, int]) -> None:
        steps = sum(added.values())
        kept, share = (1 - 1 / LEARNED) ** steps, min(1.0, LEARNED / steps)
        for n in set(weights) | set(added):
            weights[n] = kept * weights.get(n, 0.0) + share * added.get(n, 0)

    def _quantile(self, kind: int) -> float:
        weights = self._weights[kind]
        rare = max(_LEAST_RARE, RARE * sum(weights.values()))
        for n in sorted(weights, reverse=True):
            rare -= weights[n]
            if rare < 0:
                return span_s(n)
        return 0.0

    def of(self, stage: Stage) -> float:
        """For steps of this kind; 0 where nothing is known, or they are short."""
        if stage in _STARTS or stage in _OWN_CODE:
            return 0.0
        return self._usual_s[SAMPLE_STEPS if stage is Stage.FETCHING else BATCH_STEPS]
