"""Looks at a worker that may hang: reads its black box and what its threads do, and has it write its stacks.

Reads   the black box, the system's word on its threads, its stack file.
Writes  to the black box, after how long what is in hand is taken for hung; the worker writes its stacks when asked.
Never   decides (`watch` does), never kills (the caller does).
"""

from __future__ import annotations

import contextlib
import importlib
import time
from dataclasses import dataclass, field, replace

from outlive._capture import stacks
from outlive._capture.blackbox import BlackBox
from outlive._forensics.kin import Kin
from outlive._system import processes
from outlive._system.processes import Activity
from outlive.engines import watch
from outlive.engines.watch import Case, Doing, Judgement, Looks, UsualTimes, WatchSettings
from outlive.evidence import Seen
from outlive.incident import InHand

_GAP_S = 5.0  # between two looks: who watches did not run, and perhaps nothing else did


@dataclass
class Watched:
    """What was seen of a worker so far."""

    mark: tuple[int, int, int, int] = (0, 0, 0, 0)
    first: Activity | None = None  # with what is in hand now: what it did when it was late, and when that was
    first_at: float = 0.0
    before: Activity | None = None  # at the last look
    answered: bool = False  # it wrote its stacks when it was asked; else those that are there are of another time
    told: int = 0  # how often it was told of
    told_next_s: float = 0.0
    looked_at: float = 0.0
    unwatched_s: float = 0.0  # of the time since it took that up, when nobody looked
    spans: list[int] = field(default_factory=list)  # healthy steps that were counted

    def begin(self, mark: tuple[int, int, int, int]) -> None:
        """It has something else in hand."""
        self.mark, self.first, self.before, self.answered = mark, None, None, False
        self.told, self.unwatched_s = 0, 0.0


@dataclass(frozen=True)
class Found:
    # A hang to tell of: what is in hand, its stacks, how it looks; and whether it was told of before.
    suspected: tuple[InHand, str, Seen, bool] | None = None
    condemned_after_s: float | None = None
    seen: Seen | None = None  # how it looks before its end


_NOTHING = Found()


def prepare() -> None:
    """Import what looks at a worker that hangs: at a quiet moment, neither before the first batch nor in need."""
    with contextlib.suppress(OSError):  # no descriptor just now: at the next quiet moment, then
        importlib.import_module("outlive._forensics.hanging")


def learn(watched: Watched, box: BlackBox, usual: UsualTimes) -> None:
    """How long its healthy steps took, since the last time."""
    spans = box.spans.tolist()
    if spans != watched.spans:
        usual.learn(watched.spans or [0] * len(spans), spans)
        watched.spans = spans


def look_after(
    watched: Watched,
    box: BlackBox,
    pid: int,
    stack_fd: int,
    settings: WatchSettings,
    usual: UsualTimes,
    kin: Kin | None = None,
) -> Found:
    """`kin`: what it shares with this process; None where it is no fork of ours."""
    if settings.sample_timeout is None:
        return _NOTHING
    learn(watched, box, usual)
    at = time.monotonic()
    gap_s, watched.looked_at = at - watched.looked_at if watched.looked_at else 0.0, at
    mark = box.mark
    if mark != watched.mark:
        watched.begin(mark)
    elif gap_s > _GAP_S + settings.interval_s:  # a job that was stopped as a whole, and goes on: give it that time
        watched.unwatched_s += gap_s
    in_hand = box.in_hand()
    in_hand = replace(in_hand, seconds=max(0.0, in_hand.seconds - watched.unwatched_s))
    case = Case(in_hand, box.count, usual.of(in_hand.stage), box.has_hung_before)
    if not watch.is_late(settings, case):
        box.note_limit(watch.limit_s(settings, case, Doing.WAITS))
        return _NOTHING
    from outlive._forensics import hanging  # see prepare()

    looks = _look(watched, pid, kin, at)
    doing = looks.doing if looks is not None else Doing.WORKS
    limit_s = watch.limit_s(settings, case, doing)
    box.note_limit(limit_s)
    judgement = watch.judge(settings, case, looks)
    if judgement is Judgement.CONDEMNED:
        seen = hanging.see(pid, stack_fd, ending=True, kin=kin)
        if box.mark != mark:
            return _NOTHING  # it got on while we looked: what it has in hand now is not to blame
        return Found(None, in_hand.seconds, _noted(watched, seen, limit_s))
    known = looks is not None or watched.before is None  # else it is known at the next look
    if judgement is Judgement.SUSPECTED and known and limit_s is not None and _is_due(watched, settings, case, doing):
        seen = hanging.see(pid, stack_fd, ending=False, kin=kin)
        seen = _noted(watched, seen, limit_s)
        watched.before = _activity(pid, kin)  # it woke up to write its stacks
        return Found((in_hand, stacks.read(stack_fd) if seen.stack_answered else "", seen, watched.told > 1))
    return _NOTHING


def _noted(watched: Watched, seen: Seen, limit_s: float | None) -> Seen:
    watched.answered |= seen.stack_answered
    return replace(seen, stack_answered=watched.answered, limit_s=limit_s)


def _look(watched: Watched, pid: int, kin: Kin | None, at: float) -> Looks | None:
    """What it does, if it was looked at before, and there is a word on it at all."""
    now, before = _activity(pid, kin), watched.before
    watched.before = now
    if now is None:
        return None
    if watched.first is None or before is None:
        watched.first, watched.first_at = now, at
        return None
    return Looks(watched.first, before, now, at - watched.first_at)


def _activity(pid: int, kin: Kin | None) -> Activity | None:
    """What its threads do. A lock that processes share is no better than others once who held it is dead."""
    now = processes.activity(pid)
    if now is not None and now.shared and kin is not None:
        from outlive._forensics import locks

        if all(locks.is_abandoned(pid, address, kin) for address in now.shared):
            return replace(now, stuck=True)
    return now


def _is_due(watched: Watched, settings: WatchSettings, case: Case, doing: Doing) -> bool:
    """Whether it is time to tell of it, for the first time or again."""
    seconds = case.in_hand.seconds
    if seconds < (watched.told_next_s if watched.told else watch.first_told_s(settings, case)):
        return False
    watched.told += 1
    watched.told_next_s = watch.next_told_s(settings, seconds, doing)
    return True
