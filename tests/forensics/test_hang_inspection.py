"""Looking takes time, and a worker may get on meanwhile: then nobody is to be killed for what it has in hand by now."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from outlive._capture import blackbox, stacks
from outlive._capture.blackbox import BlackBox
from outlive._forensics import hanging
from outlive._system import memory
from outlive.engines.watch import UsualTimes, WatchSettings
from outlive.engines.watching import Watched, look_after
from outlive.evidence import Seen
from outlive.incident import Stage

SETTINGS = WatchSettings(sample_timeout=1.0, floor_s=30.0)
SEEN = Seen(watched_s=0.05)


@pytest.fixture
def late() -> Iterator[BlackBox]:
    """The box of a worker that has been fetching its second sample for ten seconds."""
    fd = memory.create(blackbox.SIZE)
    box = BlackBox(memory.attach(fd))
    os.close(fd)
    box.begin(os.getpid())
    box.enter(Stage.FETCHING, 3, 1)
    box.words[blackbox.SINCE] = time.monotonic_ns() - 10_000_000_000
    yield box
    box.release()


def looked_at(box: BlackBox, monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object]) -> float | None:
    """After how long it is condemned, if at all. What really happens in that time is the race that this is about."""

    def see(*_: object, **__: object) -> Seen:
        meanwhile()
        return SEEN

    monkeypatch.setattr(hanging, "see", see)
    found = look_after(Watched(), box, os.getpid(), -1, SETTINGS, UsualTimes())
    assert found.seen == (None if found.condemned_after_s is None else replace(SEEN, limit_s=1.0))
    return found.condemned_after_s


def test_a_late_worker_is_condemned_with_what_was_seen(late: BlackBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stands where it stood."""
    after_s = looked_at(late, monkeypatch, lambda: None)

    assert after_s is not None
    assert 10 <= after_s < 60


def test_a_worker_that_got_on_while_it_was_looked_at_is_spared(late: BlackBox, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next sample would pay for the last one."""
    assert looked_at(late, monkeypatch, lambda: late.fetch(2)) is None


def test_time_in_which_nobody_looked_is_no_time_of_the_worker(late: BlackBox) -> None:
    """A job that was stopped as a whole, and goes on, is not ended for the time in between."""
    watched = Watched()
    patient, impatient = (WatchSettings("auto", floor_s) for floor_s in (30.0, 2.0))
    look_after(watched, late, os.getpid(), -1, patient, UsualTimes())
    watched.looked_at -= 9.5  # as if it had been then

    found = look_after(watched, late, os.getpid(), -1, impatient, UsualTimes())

    assert found.suspected is found.condemned_after_s is None
    assert watched.first is None  # of the ten seconds, half a one counts: it is not even looked at
    assert late.limit_s == 8.0


def test_stacks_are_taken_though_the_request_came_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was without a processor itself, for all the time that it wanted to wait: the answer lies there."""
    fd = memory.create(stacks.SIZE)
    os.write(fd, b"older ones\n")
    monkeypatch.setattr(stacks, "ask", lambda pid: os.write(fd, b"Current thread 0x1:\n  a.py, line 1 in f\n"))
    monkeypatch.setattr(stacks, "REQUEST_TIMEOUT_S", 0.0)
    try:
        assert stacks.take(os.getpid(), fd) == "Current thread 0x1:\n  a.py, line 1 in f"
    finally:
        os.close(fd)


def test_another_thread_is_not_the_one_that_answered() -> None:
    """Stacks that are cut short before it say nothing of it."""
    other = "Thread 0x2 (most recent call first):\n  b.py, line 2 in g\n\n"

    assert stacks.current_thread(other) == ""
    assert stacks.current_thread(f"{other}Current thread 0x1:\n  a.py, line 1 in f") == "  a.py, line 1 in f"


@pytest.mark.parametrize(
    ("again", "moved"),
    [
        ("a.py, line 1 in f\nb.py, line 2 in g\nc.py, line 3 in h", False),
        ("a.py, line 1 in f\nb.py, line 2 in g", False),
        ("a.py, line 1 in f\nb.py, li", False),
        ("a.p", False),
        ("", False),
        ("a.py, line 9 in f\nb.py, line 2 in g\nc.py, line 3 in h", True),
        ("a.py, line 9 in f", True),
        ("a.py, line 1 in f\nb.py, line 5 in g\nc.py, line 3 in h", True),
        ("b.py, line 2 in g\nc.py, line 3 in h", True),
    ],
)
def test_a_stack_that_is_cut_short_has_not_moved(again: str, moved: bool) -> None:
    """A worker that was without a processor while it wrote is not one that gets on."""
    frames = "a.py, line 1 in f\nb.py, line 2 in g\nc.py, line 3 in h"

    assert stacks.differ(frames, again) is moved
    assert stacks.differ(again, frames) is moved
