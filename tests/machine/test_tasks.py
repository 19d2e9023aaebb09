"""Tasks: how they are sent, delivered, sent again, and what their deaths cost.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

from typing import Any

import pytest

from machine.events import begun, concluded, death, handle, of, ready, sent, submit
from outlive import records as r
from outlive._fleet.dealing import MOST_SENT
from outlive._fleet.machine import Machine
from outlive.incident import Decision, Failure, IncidentKind, InHand, Stage
from outlive.records import Outcome
from outlive.settings import FaultPolicy
from simulated_fleet import failure


def test_every_slot_is_filled_when_the_fleet_begins():
    """One first incarnation for each slot."""
    actions = Machine(3, FaultPolicy()).begin()

    assert actions == [r.StartWorker(0, 1), r.StartWorker(1, 1), r.StartWorker(2, 1)]


def test_a_task_is_sent_at_once_though_its_worker_is_still_starting():
    """Tasks wait in the worker's socket, not in the trainer."""
    machine = Machine(2, FaultPolicy())
    machine.begin()

    actions = submit(machine, 0, slot=1)

    assert actions == [r.SendTask(1, 1, 0, r.WHOLE)]


def test_a_finished_task_is_delivered():
    """Its result concludes it, and nothing else happens."""
    machine = begun()
    submit(machine, 0, 1)

    actions = handle(machine, r.TaskFinished(0, 1, 0))

    assert actions == [r.ConcludeTask(0, Outcome.DELIVERED, None)]
    assert list(machine.tasks) == [1]


def test_an_empty_result_concludes_its_task_as_empty():
    """A batch of which nothing is left is no batch."""
    machine = begun()
    submit(machine, 0)

    assert handle(machine, r.TaskFinished(0, 1, 0, empty=True)) == [r.ConcludeTask(0, Outcome.EMPTY, None)]


def test_an_exception_concludes_its_task_and_no_other():
    """It is reported, and the worker goes on."""
    machine = begun()
    submit(machine, 0, 1)

    actions = handle(machine, r.TaskErrored(0, 1, 0, failure(2)), r.TaskFinished(0, 1, 1))

    assert concluded(actions) == [(0, Outcome.ERRORED), (1, Outcome.DELIVERED)]
    [report] = of(r.ReportIncident, actions)
    assert report.incident.kind is IncidentKind.EXCEPTION
    assert (report.incident.positions, report.incident.action, report.incident.batch) == ((2,), "raised", 0)
    assert of(r.ConcludeTask, actions)[0].incident == report.incident


def test_an_exception_over_a_whole_batch_names_all_its_samples():
    """In collate or __getitems__ nobody knows which sample it was."""
    machine = begun()
    submit(machine, 0, size=3)
    raised = Failure("ValueError", "bad", "", None, Stage.COLLATING)

    [report] = of(r.ReportIncident, handle(machine, r.TaskErrored(0, 1, 0, raised)))

    assert report.incident.positions == (0, 1, 2)


LATE = {
    "result": r.TaskFinished(0, 1, 0),
    "exception": r.TaskErrored(0, 1, 0, failure()),
    "death": death(1, position=1),
    "start": r.WorkerReady(0, 1),
    "failed preparation": r.PreparationFailed(0, 1, 4001, failure()),
    "suspicion": r.WorkerSuspected(0, 1, 4001, InHand(Stage.FETCHING, 0, 1)),
    "question": r.DecisionAsked(0, 1, 4001, 0, failure()),
    "retry": r.TaskRetried(0, 1, 0, failure(0, Decision.RETRY)),
}


@pytest.mark.parametrize("event", LATE.values(), ids=LATE)
def test_late_news_of_an_earlier_incarnation_count_for_nothing(event):
    """Whoever is dead has no say any more."""
    machine = begun()
    submit(machine, 0)
    handle(machine, death(1, Stage.IDLE, -1))
    before = (machine.slots[0].state, machine.slots[0].incarnation, dict(machine.tasks))

    assert handle(machine, event) == []
    assert (machine.slots[0].state, machine.slots[0].incarnation, dict(machine.tasks)) == before


def test_a_task_that_was_concluded_is_not_concluded_again():
    """A second result for it is dropped."""
    machine = begun()
    submit(machine, 0)
    handle(machine, r.TaskFinished(0, 1, 0))

    assert handle(machine, r.TaskFinished(0, 1, 0), r.TaskErrored(0, 1, 0, failure())) == []


def test_what_did_not_arrive_is_sent_to_the_next_incarnation_in_the_same_order():
    """Nothing is lost with a worker, nothing done twice."""
    machine = begun()
    submit(machine, 0, 1, 2)
    handle(machine, r.TaskFinished(0, 1, 0))

    actions = handle(machine, death(1, Stage.IDLE, -1))

    assert of(r.StartWorker, actions) == [r.StartWorker(0, 2)]
    assert sent(actions) == [(2, 1, r.WHOLE), (2, 2, r.WHOLE)]
    assert machine.restarts == 1


def test_a_batch_that_no_worker_can_hand_over_does_not_go_round_for_ever():
    """Five times may be chance; then it is the batch's, and one of its samples'."""
    machine = begun(retries=0, on_error="skip")
    submit(machine, 0)
    actions = [handle(machine, death(n, Stage.DELIVERING, 0, -1), r.WorkerReady(0, n + 1)) for n in range(1, 7)]

    told = [of(r.ReportIncident, each)[0].incident.action for each in actions]

    assert told == [*["replaced"] * 5, "searched by halving"]


def test_a_worker_has_a_bounded_queue_and_gets_the_next_task_as_it_finishes():
    """The rest waits in the machine, in order."""
    machine = begun()

    first = submit(machine, *range(MOST_SENT + 3))
    then = handle(machine, r.TaskFinished(0, 1, 0))
    again = handle(machine, death(1, Stage.IDLE, -1))

    assert [seq for _, seq, _ in sent(first)] == list(range(MOST_SENT))
    assert [seq for _, seq, _ in sent(then)] == [MOST_SENT]
    assert [seq for _, seq, _ in sent(again)] == list(range(1, MOST_SENT + 1))


def paying(**policy: Any) -> Machine:
    machine = begun(on_error="skip", **policy)
    machine.tasks_pay = True
    return machine


def test_a_chunk_is_given_back_to_be_parted_when_its_worker_died_with_all_of_it_in_hand():
    """No search: whoever submitted it sends each by itself."""
    machine = paying()
    submit(machine, 0, size=4)

    actions = handle(machine, death(1, Stage.SENDING))

    assert concluded(actions) == [(0, Outcome.ERRORED)]
    assert of(r.PutInQuarantine, actions) == []


@pytest.mark.parametrize("stage", [Stage.SENDING, Stage.DELIVERING, Stage.WAITING])
def test_a_task_pays_for_deaths_while_its_result_travels(stage):
    """Else one that kills there, always, would be tried for ever."""
    machine = paying()
    submit(machine, 0, size=1)

    first = handle(machine, death(1, stage), ready(2))
    second = handle(machine, death(2, stage))

    assert [i.incident.action for i in of(r.ReportIncident, first)] == ["replaced, batch tried again"]
    assert concluded(second) == [(0, Outcome.EMPTY)]


def test_deaths_that_tasks_pay_for_are_no_reason_to_give_up():
    """Those with nothing in hand are."""
    machine = paying(max_restarts=2, retries=0)
    for seq in range(10):
        submit(machine, seq, size=1)
        handle(machine, death(seq + 1, Stage.FETCHING, batch=seq, position=0), ready(seq + 2))
    assert not machine.given_up

    for incarnation in (11, 12, 13):
        handle(machine, death(incarnation, Stage.IDLE, batch=-1), ready(incarnation + 1))

    assert machine.given_up


@pytest.mark.parametrize("stage", [Stage.DELIVERING, Stage.SENDING, Stage.WAITING, Stage.FETCHING])
@pytest.mark.parametrize("never_twice", [False, True])
def test_a_task_that_was_begun_is_never_begun_again_where_that_is_promised(stage, never_twice):
    """Even where its worker died of something else, with the result on its way."""
    machine = Machine(1, FaultPolicy(on_error="skip", retries=0), never_twice=never_twice)
    machine.begin()
    handle(machine, r.WorkerReady(0, 1))
    submit(machine, 0, 1, size=1)

    actions = handle(machine, death(stage=stage, position=0, blameless=True))

    again = [seq for _, seq, _ in sent(actions)]
    assert again == ([1] if never_twice else [0, 1])
    assert [seq for seq, _ in concluded(actions)] == ([0] if never_twice else [])
