"""Streams: their ends, deadly samples that can or cannot be skipped, and a new epoch.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import pytest

from machine.events import (
    asked_about_death,
    begun,
    concluded,
    death,
    handle,
    killed_twice,
    of,
    ready,
    searching,
    sent,
    submit,
)
from outlive import records as r
from outlive._fleet.machine import Machine
from outlive.incident import Decision, Stage
from outlive.records import Outcome, Plan
from outlive.settings import FaultPolicy
from simulated_fleet import failure


def test_what_was_asked_of_an_ended_stream_is_concluded_and_what_will_be_too():
    """A stream has no more: its other tasks end with it."""
    machine = begun()
    submit(machine, 0, 1, skippable=False)

    ended = handle(machine, r.TaskFinished(0, 1, 0, ended=True))
    later = submit(machine, 2, skippable=False)

    assert concluded(ended) == [(0, Outcome.ENDED), (1, Outcome.ENDED)]
    assert later == [r.ConcludeTask(2, Outcome.ENDED, None)]


def test_a_worker_whose_stream_has_ended_is_not_replaced():
    """There is nothing for a new one to do, until the next epoch."""
    machine = begun()
    submit(machine, 0, skippable=False)
    handle(machine, r.TaskFinished(0, 1, 0, ended=True))

    gone = handle(machine, death(1, Stage.IDLE, -1))
    next_epoch = handle(machine, r.EpochBegan(2))

    assert of(r.StartWorker, gone) == []
    assert of(r.StartWorker, next_epoch) == [r.StartWorker(0, 2)]


def test_an_error_that_ends_a_stream_is_raised_before_it_ends():
    """A generator that raised: its error is told, then its end."""
    machine = begun()
    submit(machine, 0, 1, skippable=False)

    actions = handle(machine, r.TaskErrored(0, 1, 0, failure(), ended=True))

    assert concluded(actions) == [(0, Outcome.ERRORED), (1, Outcome.ENDED)]


@pytest.mark.parametrize("rule", ["raise", "skip", "replace"])
def test_a_stream_that_cannot_step_over_a_deadly_sample_raises_and_ends(rule):
    """Whatever the policy: the rest of the stream is out of reach, and that is said."""
    machine = begun(on_error=rule)

    actions = killed_twice(machine, skippable=False)

    assert concluded(actions) == [(0, Outcome.ERRORED), (1, Outcome.ENDED)]
    assert of(r.ConcludeTask, actions)[0].incident.stuck
    assert of(r.StartWorker, actions) == []


def test_a_stream_that_can_step_over_a_deadly_sample_goes_on():
    """Its iterator offers skip(n), which the worker told when it was ready."""
    machine = Machine(1, FaultPolicy(on_error="skip", retries=0))
    machine.begin()
    handle(machine, r.WorkerReady(0, 1, can_skip=True))
    submit(machine, 0, skippable=False)

    actions = handle(machine, death(1, position=2))

    assert sent(actions) == [(2, 0, Plan(frozenset({2})))]


def test_a_stream_is_told_to_step_over_a_batch_that_is_raised():
    """Its samples must not come again with the next batch; the one that kills must not even be fetched."""
    machine = Machine(1, FaultPolicy(retries=0))
    machine.begin()
    handle(machine, r.WorkerReady(0, 1, can_skip=True))
    submit(machine, 0, 1, skippable=False)

    actions = handle(machine, death(1, position=2))

    assert of(r.StepOver, actions) == [r.StepOver(0, 4, frozenset({2}))]
    assert concluded(actions) == [(0, Outcome.ERRORED)]
    assert sent(actions) == [(2, 1, r.WHOLE)]
    order = [type(action) for action in actions]
    assert order.index(r.StepOver) < order.index(r.StartWorker)


def test_a_stream_whose_whole_batch_is_left_out_still_asks_its_worker():
    """Only the worker can step over the samples."""
    machine = Machine(1, FaultPolicy(on_error="skip", retries=0))
    machine.begin()
    handle(machine, r.WorkerReady(0, 1, can_skip=True))
    submit(machine, 0, size=1, skippable=False)

    actions = handle(machine, death(1, position=0))
    end = handle(machine, ready(2), r.TaskFinished(0, 2, 0, empty=True))

    assert sent(actions) == [(2, 0, Plan(frozenset({0})))]
    assert concluded(end) == [(0, Outcome.EMPTY)]


def test_a_stream_that_ends_inside_a_search_has_ended():
    """It need not be the same twice; nobody waits for what it gave the first time."""
    machine = begun(on_error="skip", retries=0)
    submit(machine, 0, 1, skippable=False)
    handle(machine, death(1, Stage.COLLATING), ready(2))

    actions = handle(machine, r.TaskFinished(0, 2, 0, ended=True))

    assert concluded(actions) == [(0, Outcome.ENDED), (1, Outcome.ENDED)]
    assert sent(actions) == []


def test_a_task_that_comes_during_a_search_waits_for_its_end():
    """It is neither done between two probes nor sent twice."""
    machine, _ = searching(on_error="skip")

    during = submit(machine, 2)
    survived = handle(machine, r.TaskFinished(0, 3, 0))

    assert during == []
    assert [(seq, plan.probe) for _, seq, plan in sent(survived)] == [(0, (2,))]


def test_a_new_epoch_starts_from_nothing():
    """Tasks, questions and budgets of the last one are gone; workers that live are kept."""
    machine, question = asked_about_death()

    actions = handle(machine, r.EpochBegan(2))

    assert actions == []
    assert (dict(machine.tasks), machine.bad, machine.drawn) == ({}, 0, 0)
    assert handle(machine, r.DecisionMade(question.ticket, Decision.RAISE)) == []
    assert sent(submit(machine, 0)) == [(3, 0, r.WHOLE)]
