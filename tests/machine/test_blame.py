"""Which sample a death is blamed on, and what becomes of that sample.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import pytest

from machine.events import begun, concluded, death, handle, killed_twice, of, ready, sent, submit
from outlive import records as r
from outlive.incident import Exit, IncidentKind, InHand, Stage
from outlive.records import MOST_SUBSTITUTES, Outcome, Plan
from simulated_fleet import NO_LIMITS


@pytest.mark.parametrize("stage", [Stage.IDLE, Stage.WAITING, Stage.LEAVING, Stage.DELIVERING])
def test_no_sample_is_blamed_for_a_death_with_nothing_in_hand(stage):
    """However often it happens, no sample is condemned for it."""
    machine = begun(retries=0, on_error="skip")
    submit(machine, 0)

    for incarnation in range(1, 6):
        actions = handle(machine, death(incarnation, stage, 0, 2), r.WorkerReady(0, incarnation + 1))

    assert of(r.PutInQuarantine, actions) == []
    assert of(r.ReportIncident, actions)[0].incident.action == "replaced"


def test_the_batch_that_is_next_is_blamed_when_the_black_box_cannot_be_read():
    """A wild write went over it: the worker was at its first task all the same."""
    machine = begun(on_error="skip", retries=0)
    submit(machine, 0, size=1)

    actions = handle(machine, death(1, Stage.AT_WORK, -1))

    assert [(q.seq, q.incident.batch) for q in of(r.PutInQuarantine, actions)] == [(0, 0)]


def test_no_sample_is_blamed_when_workers_die_with_their_zygote():
    """blameless: the worker died of another process's death, whatever it was doing."""
    machine = begun(retries=0, on_error="skip")
    submit(machine, 0)

    actions = handle(machine, death(1, Stage.FETCHING, 0, 2, blameless=True))

    assert of(r.PutInQuarantine, actions) == []
    assert sent(actions) == [(2, 0, r.WHOLE)]


def test_no_sample_is_blamed_for_a_death_after_its_batch_arrived():
    """The black box still names it, but it is done."""
    machine = begun(retries=0, on_error="skip")
    submit(machine, 0, 1)
    handle(machine, r.TaskFinished(0, 1, 0))

    actions = handle(machine, death(1, Stage.SENDING, 0))

    assert of(r.PutInQuarantine, actions) == []
    assert sent(actions) == [(2, 1, r.WHOLE)]


def test_a_sample_is_tried_again_after_its_first_death():
    """One death may be anybody's."""
    machine = begun(on_error="skip")
    submit(machine, 0)

    actions = handle(machine, death(1, position=2))

    [report] = of(r.ReportIncident, actions)
    assert (report.incident.positions, report.incident.attempt, report.incident.attempts_allowed) == ((2,), 1, 2)
    assert "tried again" in report.incident.action
    assert sent(actions) == [(2, 0, r.WHOLE)]
    assert machine.retries == 1


def test_a_sample_is_raised_with_its_name_after_its_second_death():
    """faults="raise": WorkerCrashedError for this batch; the next one goes on."""
    machine = begun()

    actions = killed_twice(machine)

    [end] = of(r.ConcludeTask, actions)
    assert (end.seq, end.outcome) == (0, Outcome.ERRORED)
    assert (end.incident.positions, end.incident.action, end.incident.attempt) == ((2,), "raised", 2)
    assert sent(actions) == [(3, 1, r.WHOLE)]


def test_a_sample_is_left_out_after_its_second_death_under_skip():
    """Its batch is done again without it; bystanders stay."""
    machine = begun(on_error="skip")

    actions = killed_twice(machine)

    [quarantine] = of(r.PutInQuarantine, actions)
    assert (quarantine.seq, quarantine.positions, quarantine.incident.action) == (0, (2,), "left out")
    assert sent(actions) == [(3, 0, Plan(frozenset({2}))), (3, 1, r.WHOLE)]
    assert machine.bad == 1


def test_a_sample_is_replaced_after_its_second_death_under_replace():
    """The first candidate takes its place; the batch keeps its size."""
    machine = begun(on_error="replace")

    actions = killed_twice(machine)

    assert sent(actions)[0] == (3, 0, Plan(frozenset(), {2: 1}))
    assert [q.incident.action for q in of(r.PutInQuarantine, actions)] == ["replaced by another sample"]
    assert machine.replaced == 1


def test_on_crash_outweighs_on_error_for_deaths():
    """The two may differ."""
    machine = begun(on_error="raise", on_crash="skip")

    assert of(r.PutInQuarantine, killed_twice(machine))


def test_a_sample_is_condemned_at_its_first_death_when_there_are_no_retries():
    """retries + 1 deaths is 1."""
    machine = begun(on_error="skip", retries=0)
    submit(machine, 0)

    assert [q.positions for q in of(r.PutInQuarantine, handle(machine, death(1, position=3)))] == [(3,)]


def test_a_batch_is_left_empty_when_its_last_sample_is_left_out():
    """It is concluded without being sent again."""
    machine = begun(on_error="skip", retries=0)
    submit(machine, 0, 1, size=1)

    actions = handle(machine, death(1, position=0))

    assert concluded(actions) == [(0, Outcome.EMPTY)]
    assert sent(actions) == [(2, 1, r.WHOLE)]


def test_a_hang_is_told_from_a_crash():
    """The engine knows that it killed the worker because it hung."""
    machine = begun(retries=0)
    submit(machine, 0)

    [end] = of(r.ConcludeTask, handle(machine, death(1, position=1, hung=True)))

    assert end.incident.kind is IncidentKind.HANG


@pytest.mark.parametrize("rule", ["skip", "replace"])
def test_a_substitute_that_kills_has_as_many_tries_as_the_sample_it_stands_for(rule):
    """Deaths are counted per sample: those of the first are not held against the second."""
    machine = begun(on_error=rule, retries=1)
    killed_twice(machine)

    actions = handle(machine, ready(3), death(3, position=1 if rule == "skip" else 2))

    assert of(r.PutInQuarantine, actions) == []


def test_a_substitute_of_a_lone_sample_has_as_many_tries_when_collating_kills():
    """A batch of one: its whole-batch deaths are the sample's deaths."""
    machine = begun(on_error="replace", retries=1)
    submit(machine, 0, size=1)
    handle(machine, death(1, Stage.COLLATING), ready(2), death(2, Stage.COLLATING), ready(3))
    assert machine.replaced == 1

    actions = handle(machine, death(3, Stage.COLLATING))

    assert of(r.PutInQuarantine, actions) == []


def test_a_sample_is_raised_when_all_its_substitutes_kill_too():
    """«replace» does not go on for ever."""
    machine = begun(on_error="replace", retries=0, **NO_LIMITS)
    submit(machine, 0)

    for incarnation in range(1, MOST_SUBSTITUTES + 2):
        actions = handle(machine, death(incarnation, position=2), r.WorkerReady(0, incarnation + 1))

    assert concluded(actions) == [(0, Outcome.ERRORED)]
    assert machine.replaced == MOST_SUBSTITUTES


@pytest.mark.parametrize(
    ("rule", "plan"),
    [
        ("skip", Plan(frozenset({1, 3}))),
        ("replace", Plan(frozenset(), {1: 1, 3: 1})),
        ("raise", r.WHOLE),
        (lambda incident: "skip", r.WHOLE),
    ],
    ids=["skip", "replace", "raise", "callable"],
)
def test_samples_that_killed_in_an_earlier_epoch_do_not_kill_again(rule, plan):
    """Where the policy already says what becomes of them."""
    machine = begun(on_error=rule)

    assert sent(submit(machine, 0, known_bad=(1, 3))) == [(1, 0, plan)]


def test_a_batch_of_nothing_but_known_killers_is_empty_at_once():
    """No worker sees it."""
    machine = begun(on_error="skip")

    assert submit(machine, 0, size=2, known_bad=(0, 1)) == [r.ConcludeTask(0, Outcome.EMPTY, None)]


def test_a_sample_is_condemned_with_the_stand_in_that_killed_its_worker():
    """The worker had replaced it by itself, and nobody else knows that it raised."""
    machine = begun(on_error="replace", retries=0)
    submit(machine, 0)
    dying = r.WorkerExited(0, 1, 4001, Exit(signal=9), InHand(Stage.FETCHING, 0, 2, stand_in=77))

    told = of(r.PutInQuarantine, handle(machine, dying))

    assert [(quarantined.incident.kind, quarantined.positions) for quarantined in told] == [
        (IncidentKind.EXCEPTION, (2,)),
        (IncidentKind.CRASH, (2,)),
    ]
    again = death(incarnation=2, position=2)
    assert len(of(r.PutInQuarantine, handle(machine, r.WorkerReady(0, 2), again))) == 1
