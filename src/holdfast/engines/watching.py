"""Looks at a worker that may hang: reads its black box and what its threads do, and has it write its stacks.

Reads   the black box, the system's word on its threads, its stack file.
Writes  nothing; the worker writes its stacks when it is asked.
Never   decides (`watch` does), never kills (the caller does).
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from holdfast._capture import stacks
from holdfast._capture.blackbox import BlackBox
from holdfast._system import processes
from holdfast._system.processes import Activity
from holdfast.engines.watch import Judgement, WatchSettings, judge
from holdfast.incident import InHand

_STACK_WAIT_S = 0.3


@dataclass
class Watched:
    """What was seen of a worker so far."""

    mark: tuple[int, int, int, int] = (0, 0, 0, 0)
    suspected: Activity | None = None


@dataclass(frozen=True)
class Found:
    suspected: tuple[InHand, str] | None = None  # for the first time: what is in hand, and its stacks
    condemned_after_s: float | None = None


_NOTHING = Found()


def look_after(
    watched: Watched, box: BlackBox, pid: int, stack_fd: int, settings: WatchSettings, slowest_s: float
) -> Found:
    if settings.sample_timeout is None:
        return _NOTHING
    mark = box.mark
    if mark != watched.mark:
        watched.mark = mark
        watched.suspected = None
    in_hand = box.in_hand()
    judgement = judge(settings, in_hand, box.count, slowest_s, None, None)
    told = None
    if judgement is Judgement.SUSPECTED:
        now = processes.activity(pid)
        judgement = judge(settings, in_hand, box.count, slowest_s, watched.suspected, now)
        if judgement is Judgement.SUSPECTED and watched.suspected is None:
            watched.suspected = now
            _wait_stack(pid, stack_fd)
            told = in_hand, stacks.read(stack_fd)
    if judgement is not Judgement.CONDEMNED:
        return _NOTHING if told is None else Found(told)
    _wait_stack(pid, stack_fd)
    return Found(told, in_hand.seconds)


def _wait_stack(pid: int, stack_fd: int) -> None:
    """Have the worker write its stacks; a stopped one cannot, and is not waited for."""
    activity = processes.activity(pid)
    if activity is None or activity.stopped:
        return
    before = os.fstat(stack_fd).st_size
    stacks.ask(pid)
    deadline = time.monotonic() + _STACK_WAIT_S
    last = -1
    while time.monotonic() < deadline:
        size = os.fstat(stack_fd).st_size
        if size > before and size == last:
            return
        last = size
        time.sleep(0.005)
