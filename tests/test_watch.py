"""The judge of hangs: who is healthy, who is suspected, who is replaced.

Reads   judgements.
Writes  what a black box and /proc might have said.
Never   a process, a clock.
"""

from __future__ import annotations

import pytest

from outlive._system.processes import Activity
from outlive.engines.watch import Judgement, WatchSettings, judge
from outlive.incident import InHand, Stage

AUTO = WatchSettings("auto", 30.0)
BUSY = Activity(stopped=False, all_wait_for_locks=False, cpu_ticks=5)
LOCKED = Activity(stopped=False, all_wait_for_locks=True, cpu_ticks=5)
STOPPED = Activity(stopped=True, all_wait_for_locks=False, cpu_ticks=5)


def judged(
    settings: WatchSettings,
    seconds: float,
    stage: Stage = Stage.FETCHING,
    count: int = 1,
    slowest_s: float = 0.0,
    before: Activity | None = None,
    now: Activity | None = None,
) -> Judgement:
    return judge(settings, InHand(stage, 0, 0, seconds), count, slowest_s, before, now)


OWN_STAGES = [Stage.STARTING, Stage.IDLE, Stage.WAITING, Stage.LEAVING, Stage.DELIVERING]


@pytest.mark.parametrize("stage", OWN_STAGES)
@pytest.mark.parametrize("settings", [AUTO, WatchSettings(0.1, 30.0)], ids=["auto", "0.1 s"])
def test_a_worker_without_user_code_in_hand_never_hangs(settings, stage):
    """Waiting for work, or for a trainer in a long step, is no hang; it is looked at, that is all."""
    assert judged(settings, 1e9, stage) is Judgement.SUSPECTED
    assert judged(settings, 1e9, stage, now=BUSY) is Judgement.HEALTHY
    assert judged(settings, 1e9, stage, before=LOCKED, now=LOCKED) is Judgement.HEALTHY


@pytest.mark.parametrize("stage", OWN_STAGES)
def test_a_worker_that_is_stopped_with_nothing_in_hand_is_replaced_once_it_is_late(stage):
    """Work that comes for it would wait for ever."""
    assert judged(AUTO, 29, stage, now=STOPPED) is Judgement.HEALTHY
    assert judged(AUTO, 31, stage, now=STOPPED) is Judgement.CONDEMNED
    assert judged(WatchSettings(2.0, 30.0), 2.1, stage, now=STOPPED) is Judgement.CONDEMNED
    assert judged(WatchSettings(None, 30.0), 1e9, stage, now=STOPPED) is Judgement.HEALTHY


@pytest.mark.parametrize("stage", [Stage.FETCHING, Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING])
def test_a_sample_may_take_its_timeout_and_no_longer(stage):
    """sample_timeout in seconds; a step over many samples may take as long for each."""
    settings = WatchSettings(2.0, 30.0)

    assert judged(settings, 2.0, stage) is Judgement.HEALTHY
    assert judged(settings, 2.1, stage) is Judgement.CONDEMNED
    assert judged(settings, 15.9, stage, count=8) is Judgement.HEALTHY
    assert judged(settings, 16.1, stage, count=8) is Judgement.CONDEMNED


def test_nothing_is_a_hang_when_the_timeout_is_none():
    """sample_timeout=None: never."""
    assert judged(WatchSettings(None, 0.01), 1e9, before=LOCKED, now=LOCKED) is Judgement.HEALTHY


@pytest.mark.parametrize(("slowest_s", "suspect_s"), [(0.0, 30.0), (1.0, 30.0), (1.5, 30.0), (4.0, 80.0)])
def test_a_hang_is_suspected_after_the_longer_of_floor_and_twenty_times_the_slowest(slowest_s, suspect_s):
    """And acted on at ten times that: a healthy slow sample is never shot."""
    assert judged(AUTO, suspect_s, slowest_s=slowest_s) is Judgement.HEALTHY
    assert judged(AUTO, suspect_s + 0.1, slowest_s=slowest_s, now=BUSY) is Judgement.SUSPECTED
    assert judged(AUTO, 10 * suspect_s, slowest_s=slowest_s, before=BUSY, now=BUSY) is Judgement.SUSPECTED
    assert judged(AUTO, 10 * suspect_s + 0.1, slowest_s=slowest_s, before=BUSY, now=BUSY) is Judgement.CONDEMNED


def test_a_stopped_worker_is_acted_on_at_the_first_suspicion():
    """SIGSTOP: it will not go on by itself."""
    assert judged(AUTO, 29, now=STOPPED) is Judgement.HEALTHY
    assert judged(AUTO, 31, now=STOPPED) is Judgement.CONDEMNED


def test_a_deadlock_is_acted_on_once_it_has_been_seen_twice_without_any_work_between():
    """Every thread waits for a lock, then and now, and no CPU was used."""
    worked = Activity(stopped=False, all_wait_for_locks=True, cpu_ticks=6)

    assert judged(AUTO, 31, before=None, now=LOCKED) is Judgement.SUSPECTED
    assert judged(AUTO, 32, before=LOCKED, now=LOCKED) is Judgement.CONDEMNED
    assert judged(AUTO, 32, before=LOCKED, now=worked) is Judgement.SUSPECTED
    assert judged(AUTO, 32, before=BUSY, now=LOCKED) is Judgement.SUSPECTED
    assert judged(AUTO, 32, before=LOCKED, now=None) is Judgement.SUSPECTED


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.FORWARDING])
def test_a_slow_start_is_judged_as_auto_whatever_a_sample_may_take(stage):
    """worker_init_fn may take longer than a sample."""
    settings = WatchSettings(0.1, 30.0)

    assert judged(settings, 29, stage) is Judgement.HEALTHY
    assert judged(settings, 301, stage) is Judgement.CONDEMNED


@pytest.mark.parametrize(
    ("timeout", "floor_s", "interval_s"),
    [("auto", 30.0, 1.0), ("auto", 0.5, 0.1), (None, 30.0, 1.0), (0.01, 30.0, 0.02), (2, 30.0, 0.4), (100, 30.0, 1.0)],
)
def test_workers_are_looked_at_often_enough_for_the_limit(timeout, floor_s, interval_s):
    """Five times within it, but neither more often than 50 times a second nor less than once."""
    assert WatchSettings(timeout, floor_s).interval_s == pytest.approx(interval_s)
