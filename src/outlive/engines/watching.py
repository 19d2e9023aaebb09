"""Looks at a worker that may hang: reads its black box and what its threads do, and has it write its stacks.

Reads   the black box, the system's word on its threads, its stack file.
Writes  nothing; the worker writes its stacks when it is asked.
Never   decides (`watch` does), never kills (the caller does).
"""

from __future__ import annotations

import contextlib
import importlib
from dataclasses import dataclass

from outlive._capture import stacks
from outlive._capture.blackbox import BlackBox
from outlive._forensics.kin import Kin
from outlive._system import processes
from outlive._system.processes import Activity
from outlive.engines.watch import Judgement, WatchSettings, judge
from outlive.evidence import Seen
from outlive.incident import InHand


@dataclass
class Watched:
    """What was seen of a worker so far."""

    mark: tuple[int, int, int, int] = (0, 0, 0, 0)
    suspected: Activity | None = None


@dataclass(frozen=True)
class Found:
    suspected: tuple[InHand, str, Seen] | None = None  # for the first time: what is in hand, its stacks, how it looks
    condemned_after_s: float | None = None
    seen: Seen | None = None  # how it looks before its end


_NOTHING = Found()


def prepare() -> None:
    """Import what looks at a worker that hangs: at a quiet moment, neither before the first batch nor in need."""
    with contextlib.suppress(OSError):  # no descriptor just now: at the next quiet moment, then
        importlib.import_module("outlive._forensics.hanging")


def look_after(
    watched: Watched,
    box: BlackBox,
    pid: int,
    stack_fd: int,
    settings: WatchSettings,
    slowest_s: float,
    kin: Kin | None = None,
) -> Found:
    """`kin`: what it shares with this process; None where it is no fork of ours."""
    if settings.sample_timeout is None:
        return _NOTHING
    mark = box.mark
    if mark != watched.mark:
        watched.mark = mark
        watched.suspected = None
    in_hand = box.in_hand()
    judgement = judge(settings, in_hand, box.count, slowest_s, None, None)
    if judgement is Judgement.HEALTHY:
        return _NOTHING
    from outlive._forensics import hanging  # see prepare()

    told = None
    if judgement is Judgement.SUSPECTED:
        now = processes.activity(pid)
        judgement = judge(settings, in_hand, box.count, slowest_s, watched.suspected, now)
        if judgement is Judgement.SUSPECTED and watched.suspected is None:
            watched.suspected = now
            seen = hanging.see(pid, stack_fd, ending=False, kin=kin)
            told = in_hand, stacks.read(stack_fd), seen
    if judgement is not Judgement.CONDEMNED:
        return _NOTHING if told is None else Found(told)
    seen = hanging.see(pid, stack_fd, ending=True, kin=kin)
    if box.mark != mark:
        return _NOTHING  # it got on while we looked: what it has in hand now is not to blame
    return Found(told, in_hand.seconds, seen)
