"""The judge of hangs: who is healthy, who is suspected, who is replaced.

Reads   judgements.
Writes  what a black box and /proc might have said.
Never   a process, a clock.
"""

from __future__ import annotations

import itertools

import pytest

from outlive._capture.blackbox import BATCH_STEPS, LONG_NS, SAMPLE_STEPS, SPANS, span_s
from outlive._system.processes import Activity
from outlive.engines.watch import (
    Case,
    Doing,
    Judgement,
    Looks,
    UsualTimes,
    WatchSettings,
    first_told_s,
    is_late,
    judge,
    limit_s,
    next_told_s,
)
from outlive.incident import InHand, Stage

AUTO = WatchSettings("auto", 30.0)
LOCKED = Activity(stuck=True, pulse=((7, 5),), cpu_s=1.0)
WOKEN = Activity(stuck=True, pulse=((7, 6),), cpu_s=1.0)
STOPPED = Activity(stopped=True, cpu_s=1.0)
ASLEEP = Activity(cpu_s=1.0)
RUNNING = Activity(runs=True, cpu_s=1.0)

STUCK = Looks(LOCKED, LOCKED, LOCKED, 1.0)
WAITS = Looks(ASLEEP, ASLEEP, ASLEEP, 50.0)
WORKS = Looks(ASLEEP, RUNNING, RUNNING, 50.0)
DOES = {Doing.STUCK: STUCK, Doing.WAITS: WAITS, Doing.WORKS: WORKS}

OWN_STAGES = [Stage.STARTING, Stage.IDLE, Stage.WAITING, Stage.LEAVING, Stage.DELIVERING]
SAMPLE_STAGES = [Stage.FETCHING, Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING]


def case(seconds: float, stage: Stage = Stage.FETCHING, count: int = 1, usual_s: float = 0.0, again: bool = False):
    return Case(InHand(stage, 0, 0, seconds), count, usual_s, again)


# ---------------------------------------------------------------- what it does


@pytest.mark.parametrize(
    ("looks", "doing"),
    [
        (Looks(LOCKED, LOCKED, LOCKED, 1.0), Doing.STUCK),
        (Looks(ASLEEP, LOCKED, LOCKED, 1.0), Doing.STUCK),
        (Looks(LOCKED, LOCKED, WOKEN, 1.0), Doing.WAITS),
        (Looks(LOCKED, ASLEEP, LOCKED, 1.0), Doing.WAITS),
        (Looks(LOCKED, LOCKED, ASLEEP, 1.0), Doing.WAITS),
        (Looks(STOPPED, STOPPED, STOPPED, 1.0), Doing.STUCK),
        (Looks(ASLEEP, ASLEEP, STOPPED, 1.0), Doing.WAITS),
        (Looks(STOPPED, STOPPED, ASLEEP, 1.0), Doing.WAITS),
        (Looks(ASLEEP, RUNNING, RUNNING, 1.0), Doing.WORKS),
        (Looks(ASLEEP, ASLEEP, RUNNING, 1.0), Doing.WAITS),
        (Looks(Activity(cpu_s=1.0), ASLEEP, Activity(cpu_s=1.9), 10.0), Doing.WAITS),
        (Looks(Activity(cpu_s=1.0), ASLEEP, Activity(cpu_s=2.1), 10.0), Doing.WORKS),
    ],
)
def test_what_a_worker_does_is_judged_by_more_than_one_look(looks, doing):
    """It is stuck only if it was so twice and nothing woke in between; it works by its share of the time."""
    assert looks.doing is doing


# ---------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("doing", "usual_s", "expected_s"),
    [
        (Doing.STUCK, 0.0, 30.0),
        (Doing.STUCK, 1000.0, 30.0),
        (Doing.WAITS, 0.0, 120.0),
        (Doing.WAITS, 6.0, 120.0),
        (Doing.WAITS, 50.0, 1000.0),
        (Doing.WAITS, 1000.0, 1800.0),
        (Doing.WORKS, 0.0, 300.0),
        (Doing.WORKS, 15.0, 300.0),
        (Doing.WORKS, 1000.0, 20000.0),
    ],
)
def test_the_limit_depends_on_what_the_worker_does(doing, usual_s, expected_s):
    """The table of the docs, and half of it for a sample that has hung a worker before."""
    assert limit_s(AUTO, case(0, usual_s=usual_s), doing) == expected_s
    assert limit_s(AUTO, case(0, usual_s=usual_s, again=True), doing) == expected_s / 2


def test_all_limits_follow_the_floor_unless_they_are_given():
    """One setting makes all of them longer or shorter."""
    short = WatchSettings("auto", 0.3)
    given = WatchSettings("auto", 30.0, wait_s=40.0, busy_s=50.0, most_wait_s=60.0)

    assert [limit_s(short, case(0), doing) for doing in DOES] == pytest.approx([0.3, 1.2, 3.0])
    assert limit_s(short, case(0, usual_s=9.0), Doing.WAITS) == pytest.approx(18.0)
    assert [limit_s(given, case(0), doing) for doing in DOES] == [30.0, 40.0, 50.0]
    assert limit_s(given, case(0, usual_s=9.0), Doing.WAITS) == 60.0


@pytest.mark.parametrize("settings", [AUTO, WatchSettings(2.0, 30.0), WatchSettings(600.0, 30.0)])
@pytest.mark.parametrize("doing", list(Doing))
def test_a_worker_is_condemned_past_its_limit_and_not_before(settings, doing):
    """Whatever the stage, the samples in hand and the worker's past."""
    stages = [*SAMPLE_STAGES, *OWN_STAGES, Stage.PREPARING, Stage.FORWARDING]
    for stage, count, usual_s, again in itertools.product(stages, [1, 8], [0.0, 50.0], [False, True]):
        limit = limit_s(settings, case(0, stage, count, usual_s, again), doing)
        if limit is None:
            assert judge(settings, case(1e9, stage, count, usual_s, again), DOES[doing]) is Judgement.HEALTHY
            continue
        below, above = (case(seconds, stage, count, usual_s, again) for seconds in (0.999 * limit, 1.001 * limit))
        assert judge(settings, below, DOES[doing]) is not Judgement.CONDEMNED
        assert judge(settings, above, DOES[doing]) is Judgement.CONDEMNED
        assert is_late(settings, above)


@pytest.mark.parametrize("doing", list(Doing))
def test_nothing_is_condemned_under_auto_before_it_was_looked_at_twice(doing):
    """A job that was stopped as a whole, and goes on, is not ended for the time in between."""
    assert judge(AUTO, case(1e9), None) is Judgement.SUSPECTED


@pytest.mark.parametrize("stage", OWN_STAGES)
@pytest.mark.parametrize("settings", [AUTO, WatchSettings(0.1, 30.0)], ids=["auto", "0.1 s"])
def test_a_worker_without_user_code_in_hand_never_hangs(settings, stage):
    """Waiting for work, or for a trainer in a long step, is no hang, unless it is stopped: work would wait for ever."""
    assert judge(settings, case(1e9, stage), WAITS) is Judgement.HEALTHY
    assert judge(settings, case(1e9, stage), WORKS) is Judgement.HEALTHY
    assert judge(settings, case(1e9, stage), Looks(STOPPED, STOPPED, STOPPED, 1.0)) is Judgement.CONDEMNED


@pytest.mark.parametrize("stage", SAMPLE_STAGES)
def test_a_sample_may_take_its_timeout_and_no_longer(stage):
    """sample_timeout in seconds, looked at or not; a step over many samples may take as long for each."""
    settings = WatchSettings(2.0, 30.0)

    assert judge(settings, case(2.0, stage), None) is Judgement.HEALTHY
    assert judge(settings, case(2.1, stage), None) is Judgement.CONDEMNED
    assert judge(settings, case(15.9, stage, count=8), None) is Judgement.HEALTHY
    assert judge(settings, case(16.1, stage, count=8), None) is Judgement.CONDEMNED


def test_a_timeout_that_is_given_is_not_halved():
    """It is what the user says that a sample may take."""
    assert limit_s(WatchSettings(20.0, 30.0), case(0, again=True), Doing.WAITS) == 20.0


def test_a_timeout_that_is_given_counts_whatever_the_worker_does():
    """sample_timeout=600 means 600 seconds; from the floor on the worker is looked at, to tell of it."""
    settings = WatchSettings(600.0, 30.0)

    assert [limit_s(settings, case(0), doing) for doing in Doing] == [600.0] * 3
    assert [is_late(settings, case(seconds)) for seconds in (29.0, 31.0)] == [False, True]


def test_nothing_is_a_hang_when_the_timeout_is_none():
    """sample_timeout=None: never."""
    assert judge(WatchSettings(None, 0.01), case(1e9), STUCK) is Judgement.HEALTHY


@pytest.mark.parametrize("stage", [Stage.PREPARING, Stage.FORWARDING])
def test_a_start_that_waits_has_as_long_as_one_that_works(stage):
    """worker_init_fn may copy all the data, whatever a sample may take."""
    for settings in (AUTO, WatchSettings(0.1, 30.0)):
        assert [limit_s(settings, case(0, stage), doing) for doing in Doing] == [30.0, 300.0, 300.0]


@pytest.mark.parametrize(
    ("timeout", "floor_s", "interval_s"),
    [("auto", 30.0, 1.0), ("auto", 0.5, 0.1), (None, 30.0, 1.0), (0.01, 30.0, 0.02), (2, 30.0, 0.4), (100, 30.0, 1.0)],
)
def test_workers_are_looked_at_often_enough_for_the_limit(timeout, floor_s, interval_s):
    """Five times within it, but neither more often than 50 times a second nor less than once."""
    assert WatchSettings(timeout, floor_s).interval_s == pytest.approx(interval_s)


# ---------------------------------------------------------------- telling


def told_at(usual_s: float, doing: Doing, until_s: float) -> list[float]:
    times = [first_told_s(AUTO, case(0, usual_s=usual_s))]
    while times[-1] < until_s:
        times.append(next_told_s(AUTO, times[-1], doing))
    return times


def test_a_hang_is_told_of_at_growing_intervals_and_work_every_minute():
    """Nobody waits in silence, and no log is filled."""
    assert told_at(0.0, Doing.WAITS, 1000) == [30, 60, 120, 240, 480, 960, 1920]
    assert told_at(0.0, Doing.WORKS, 300) == [30, 60, 120, 180, 240, 300]
    assert told_at(50.0, Doing.WAITS, 300)[0] == 100


# ---------------------------------------------------------------- what is usual


def counts(short: int = 0, long: dict[float, int] | None = None, kind: int = SAMPLE_STEPS) -> list[int]:
    """What a black box counts for so many short steps, and so many of so many seconds."""
    words = [0] * (2 * SPANS)
    words[kind * SPANS] = short
    for seconds, count in (long or {}).items():
        n = next(n for n in range(1, SPANS) if span_s(n) >= seconds)
        words[kind * SPANS + n] += count
    return words


def learned(*looks: list[int]) -> UsualTimes:
    usual, before = UsualTimes(), [0] * (2 * SPANS)
    for words in looks:
        now = [a + b for a, b in zip(before, words)]
        usual.learn(before, now)
        before = now
    return usual


@pytest.mark.parametrize("more", [[], [counts(10)], [counts(990)], [counts(1)] * 200])
def test_one_slow_sample_says_nothing_of_the_others(more):
    """However many there are, and whether it comes first or last."""
    slow = counts(long={50.0: 1})

    assert learned(slow, *more).of(Stage.FETCHING) == 0.0
    assert learned(*more, slow).of(Stage.FETCHING) == 0.0


def test_what_nearly_all_samples_stay_below_is_usual():
    """Of two the shorter, of many what 199 of 200 stay below, a quarter of an octave at most too high."""
    assert 40.0 <= learned(counts(long={40.0: 1, 50.0: 1})).of(Stage.FETCHING) <= 50.0
    assert 40.0 <= learned(counts(100, {40.0: 100})).of(Stage.FETCHING) <= 50.0
    assert 40.0 <= learned(counts(900, {40.0: 10})).of(Stage.FETCHING) <= 50.0
    assert learned(counts(997, {40.0: 3})).of(Stage.FETCHING) == 0.0


def test_old_samples_fade():
    """A source that was slow once is quick again: after some thousand samples it is judged as such."""
    slow = counts(long={50.0: 1000})

    assert learned(slow).of(Stage.FETCHING) >= 50.0
    assert learned(slow, *[counts(100)] * 100).of(Stage.FETCHING) == 0.0
    assert learned(counts(100_000), slow).of(Stage.FETCHING) >= 50.0


def test_steps_of_whole_batches_are_learned_apart():
    """A batch takes longer than a sample; and there are fewer of them."""
    usual = learned(counts(100_000), counts(0, {50.0: 10}, kind=BATCH_STEPS))

    assert usual.of(Stage.FETCHING) == 0.0
    assert usual.of(Stage.FETCHING_MANY) >= 50.0
    assert usual.of(Stage.COLLATING) >= 50.0
    assert usual.of(Stage.PREPARING) == usual.of(Stage.IDLE) == 0.0


def test_a_black_box_that_was_written_over_teaches_nothing():
    """Counts that fall, or are out of all bounds."""
    wild = [-(1 << 60), 1 << 60] * SPANS

    assert learned(wild).of(Stage.FETCHING) == 0.0
    assert learned(counts(5, {50.0: 5}), wild).of(Stage.FETCHING) >= 50.0


def test_buckets_cover_all_times_without_gaps():
    """From 8 ms to hours; each ends where the next begins."""
    ends = [span_s(n) for n in range(1, SPANS)]

    assert ends[0] == pytest.approx(1.25 * LONG_NS / 1e9)
    assert all(1.1 < b / a < 1.3 for a, b in itertools.pairwise(ends))
    assert ends[-1] > 4 * 3600
