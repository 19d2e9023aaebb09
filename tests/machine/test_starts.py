"""Starts of workers: which failures are tried again, and when the fleet gives up.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from machine.events import death, handle, of, sent, submit
from outlive import records as r
from outlive._fleet.machine import LEAST_STARTS, Machine
from outlive.incident import IncidentKind, Stage
from outlive.records import LimitKind
from outlive.settings import FaultPolicy
from simulated_fleet import failure


@pytest.mark.parametrize("stage", [Stage.STARTING, Stage.PREPARING])
def test_a_worker_that_dies_while_starting_is_started_again(stage):
    """Its tasks wait for it."""
    machine = Machine(1, FaultPolicy())
    machine.begin()
    submit(machine, 0)

    actions = handle(machine, death(1, stage, -1))

    assert of(r.ReportIncident, actions)[0].incident.kind is IncidentKind.START
    assert of(r.StartWorker, actions) == [r.StartWorker(0, 2)]
    assert sent(actions) == [(2, 0, r.WHOLE)]


@pytest.mark.parametrize("retries", [0, 1, LEAST_STARTS + 2])
def test_the_fleet_is_given_up_when_a_worker_cannot_be_started(retries):
    """After retries + 1 deaths in a row, but not before there were LEAST_STARTS: a kill may come from outside."""
    allowed = max(LEAST_STARTS, retries + 1)
    machine = Machine(1, FaultPolicy(retries=retries))
    machine.begin()

    actions = [handle(machine, death(n, Stage.PREPARING, -1)) for n in range(1, allowed + 1)]

    assert [len(of(r.GiveUp, some)) for some in actions] == [0] * (allowed - 1) + [1]
    [end] = of(r.GiveUp, actions[-1])
    assert (end.limit, end.incident.attempt, end.incident.action) == (LimitKind.STARTS, allowed, "gave up")
    assert "worker 0 could not be started" in end.text
    assert of(r.StartWorker, actions[-1]) == []


@pytest.mark.parametrize(("type_name", "allowed"), [("ValueError", 1), ("", LEAST_STARTS)])
def test_a_start_that_ended_without_a_word_is_tried_again_whatever_the_policy(type_name, allowed):
    """What an initializer raised comes again; that somebody killed what workers are forked from need not."""
    machine = Machine(1, FaultPolicy(retries=0))
    machine.begin()

    told = replace(failure(), type_name=type_name)
    ends = [len(of(r.GiveUp, handle(machine, r.PreparationFailed(0, n, 1, told)))) for n in range(1, allowed + 1)]

    assert ends == [0] * (allowed - 1) + [1]


def test_deaths_while_a_stream_is_forwarded_are_limited_by_the_intensity_alone():
    """Forwarding takes as long as the stream is long: kills from outside may well fall into it."""
    machine = Machine(1, FaultPolicy(retries=0, max_restarts=20))
    machine.begin()

    ends = [len(of(r.GiveUp, handle(machine, death(n, Stage.FORWARDING, -1)))) for n in range(1, 22)]

    assert ends == [0] * 20 + [1]


def test_a_start_that_worked_clears_the_earlier_ones():
    """Only failures in a row count."""
    machine = Machine(1, FaultPolicy(retries=1))
    machine.begin()

    for incarnation in range(1, 9, 2):
        actions = handle(
            machine,
            death(incarnation, Stage.PREPARING, -1),
            r.WorkerReady(0, incarnation + 1),
            death(incarnation + 1, Stage.IDLE, -1),
        )

    assert of(r.GiveUp, actions) == []
    assert machine.slots[0].failed_starts == 0


def test_a_failed_preparation_is_tried_again_and_then_given_up_with_its_failure():
    """worker_init_fn raised: the user sees that very exception."""
    machine = Machine(1, FaultPolicy(retries=1))
    machine.begin()

    first = handle(machine, r.PreparationFailed(0, 1, 5, failure()))
    second = handle(machine, r.PreparationFailed(0, 2, 6, failure()))

    assert of(r.StartWorker, first) == [r.StartWorker(0, 2)]
    assert of(r.ReportIncident, first)[0].incident.action == "started again"
    [end] = of(r.GiveUp, second)
    assert (end.limit, end.incident.failure, end.incident.pid) == (LimitKind.STARTS, failure(), 6)


def test_a_given_up_fleet_does_nothing_more():
    """One GiveUp; whatever happens afterwards is nobody's business."""
    machine = Machine(1, FaultPolicy(retries=0))
    machine.begin()
    handle(machine, r.PreparationFailed(0, 1, 5, failure()))

    assert machine.given_up
    assert submit(machine, 0) == []
    assert handle(machine, death(1), r.WorkerReady(0, 1), r.EpochBegan(2)) == []
