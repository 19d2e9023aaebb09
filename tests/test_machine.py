"""The fleet's decisions alone, without a process: each transition of the machine by hand; halving, pauses, limits.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlive import records as r
from outlive._fleet import policy as rules
from outlive._fleet.dealing import MOST_SENT
from outlive._fleet.halving import Halving
from outlive._fleet.machine import LEAST_STARTS, Machine
from outlive.incident import Decision, Exit, Failure, IncidentKind, InHand, Stage
from outlive.records import MOST_SUBSTITUTES, LimitKind, Outcome, Plan
from outlive.settings import FaultPolicy
from simulated_fleet import NO_LIMITS, failure

# ---------------------------------------------------------------- by hand


def begun(slots: int = 1, **policy: Any) -> Machine:
    """A machine whose workers have all started."""
    machine = Machine(slots, FaultPolicy(**policy))
    machine.begin()
    for slot in range(slots):
        machine.handle(r.WorkerReady(slot, 1), 0.0)
    return machine


def submit(machine: Machine, *seqs: int, slot: int = 0, size: int = 4, **more: Any) -> list[r.Action]:
    return [a for seq in seqs for a in machine.handle(r.TaskSubmitted(seq, slot, size, **more), 0.0)]


def death(
    incarnation: int = 1, stage: Stage = Stage.FETCHING, batch: int = 0, position: int = -1, slot: int = 0, **more: Any
) -> r.WorkerExited:
    return r.WorkerExited(slot, incarnation, 4000 + incarnation, Exit(signal=9), InHand(stage, batch, position), **more)


def of(kind: type, actions: list[r.Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: list[r.Action]) -> list[tuple[int, int, Plan]]:
    return [(a.incarnation, a.seq, a.plan) for a in of(r.SendTask, actions)]


def concluded(actions: list[r.Action]) -> list[tuple[int, Outcome]]:
    return [(a.seq, a.outcome) for a in of(r.ConcludeTask, actions)]


def handle(machine: Machine, *events: r.Event, now: float = 0.0) -> list[r.Action]:
    return [action for event in events for action in machine.handle(event, now)]


def ready(incarnation: int, slot: int = 0) -> r.WorkerReady:
    return r.WorkerReady(slot, incarnation)


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


@pytest.mark.parametrize("stage", [Stage.IDLE, Stage.WAITING, Stage.LEAVING, Stage.DELIVERING])
def test_no_sample_is_blamed_for_a_death_with_nothing_in_hand(stage):
    """However often it happens, no sample is condemned for it."""
    machine = begun(retries=0, on_error="skip")
    submit(machine, 0)

    for incarnation in range(1, 6):
        actions = handle(machine, death(incarnation, stage, 0, 2), r.WorkerReady(0, incarnation + 1))

    assert of(r.PutInQuarantine, actions) == []
    assert of(r.ReportIncident, actions)[0].incident.action == "replaced"


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


def killed_twice(machine: Machine, position: int = 2, size: int = 4, **more: Any) -> list[r.Action]:
    submit(machine, 0, 1, size=size, **more)
    handle(machine, death(1, position=position), ready(2))
    return handle(machine, death(2, position=position))


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


# ---------------------------------------------------------------- by hand: asking


def asked_about_death() -> tuple[Machine, r.AskPolicy]:
    machine = begun(on_error=lambda incident: "skip")
    [question] = of(r.AskPolicy, killed_twice(machine))
    handle(machine, ready(3))
    return machine, question


def test_a_callable_is_asked_and_the_batch_waits_for_its_answer():
    """Nothing is sent of this slot meanwhile: order is kept."""
    machine = begun(on_error=lambda incident: "skip")

    actions = killed_twice(machine)

    assert [a.incident.positions for a in of(r.AskPolicy, actions)] == [(2,)]
    assert of(r.StartWorker, actions) == [r.StartWorker(0, 3)]
    assert sent(actions) == []


@pytest.mark.parametrize(
    ("decision", "plan", "outcome"),
    [
        (Decision.SKIP, Plan(frozenset({2})), None),
        (Decision.REPLACE, Plan(frozenset(), {2: 1}), None),
        (Decision.RETRY, r.WHOLE, None),
        (Decision.RAISE, None, (0, Outcome.ERRORED)),
    ],
    ids=str,
)
def test_the_answer_about_a_death_is_carried_out(decision, plan, outcome):
    """Whatever the callable said; the batches behind follow."""
    machine, question = asked_about_death()

    actions = handle(machine, r.DecisionMade(question.ticket, decision))

    assert concluded(actions) == ([] if outcome is None else [outcome])
    assert sent(actions) == [*([] if plan is None else [(3, 0, plan)]), (3, 1, r.WHOLE)]


def test_a_callable_is_asked_again_when_the_sample_kills_again():
    """ "retry" is one more try, not an acquittal."""
    machine, question = asked_about_death()
    handle(machine, r.DecisionMade(question.ticket, Decision.RETRY))

    assert of(r.AskPolicy, handle(machine, death(3, position=2)))


def test_a_question_is_answered_once():
    """A second answer, or one to nobody's question, does nothing."""
    machine, question = asked_about_death()
    handle(machine, r.DecisionMade(question.ticket, Decision.SKIP))

    assert handle(machine, r.DecisionMade(question.ticket, Decision.RAISE), r.DecisionMade(99, Decision.SKIP)) == []


def test_a_living_worker_gets_the_answer_to_its_question():
    """An exception under a callable: the worker waits for the decision."""
    machine = begun(on_error=lambda incident: "skip")
    submit(machine, 0)

    [question] = of(r.AskPolicy, handle(machine, r.DecisionAsked(0, 1, 77, 0, failure(3))))
    actions = handle(machine, r.DecisionMade(question.ticket, Decision.SKIP))

    assert (question.incident.pid, question.incident.positions) == (77, (3,))
    assert actions == [r.AnswerWorker(0, 1, Decision.SKIP)]


def test_an_answer_for_a_worker_that_died_meanwhile_is_dropped():
    """Its successor asks for itself."""
    machine = begun(on_error=lambda incident: "skip")
    submit(machine, 0)
    [question] = of(r.AskPolicy, handle(machine, r.DecisionAsked(0, 1, 77, 0, failure(3))))
    handle(machine, death(1, Stage.WAITING, 0, 3))

    assert handle(machine, r.DecisionMade(question.ticket, Decision.SKIP)) == []


# ---------------------------------------------------------------- by hand: whole batches


@pytest.mark.parametrize("stage", [Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING])
def test_a_batch_is_tried_again_whole_after_its_first_death(stage):
    """Only a second death starts the search."""
    machine = begun(on_error="skip")
    submit(machine, 0)

    actions = handle(machine, death(1, stage))

    assert sent(actions) == [(2, 0, r.WHOLE)]
    assert of(r.ReportIncident, actions)[0].incident.positions == (0, 1, 2, 3)


def searching(**policy: Any) -> tuple[Machine, list[r.Action]]:
    machine = begun(**policy)
    submit(machine, 0, 1)
    handle(machine, death(1, Stage.COLLATING), ready(2))
    return machine, handle(machine, death(2, Stage.COLLATING), ready(3))


def test_half_of_a_batch_is_probed_after_its_second_death_and_the_others_wait():
    """The first half first; batches behind it are not sent until the search is over."""
    _, actions = searching(on_error="skip")

    assert sent(actions) == [(3, 0, Plan(probe=(0, 1)))]


def test_the_other_half_is_probed_when_the_first_survives():
    """A finished probe is no delivery."""
    machine, _ = searching(on_error="skip")

    actions = handle(machine, r.TaskFinished(0, 3, 0))

    assert sent(actions) == [(3, 0, Plan(probe=(2,)))]
    assert concluded(actions) == []


def test_an_exception_in_a_probe_is_a_survival():
    """The search is for what kills."""
    machine, _ = searching(on_error="skip")

    actions = handle(machine, r.TaskErrored(0, 3, 0, failure()))

    assert sent(actions) == [(3, 0, Plan(probe=(2,)))]
    assert concluded(actions) == []


def test_the_sample_found_by_halving_is_left_out_and_the_rest_delivered():
    """Sample 1 kills: {0,1} dies, {0} lives, {1} alone dies."""
    machine, _ = searching(on_error="skip")

    handle(machine, death(3, Stage.COLLATING), ready(4))
    handle(machine, r.TaskFinished(0, 4, 0))
    found = handle(machine, death(4, Stage.COLLATING), ready(5))
    end = handle(machine, r.TaskFinished(0, 5, 0), r.TaskFinished(0, 5, 1))

    assert [q.positions for q in of(r.PutInQuarantine, found)] == [(1,)]
    assert sent(found) == [(5, 0, Plan(frozenset({1}))), (5, 1, r.WHOLE)]
    assert concluded(end) == [(0, Outcome.DELIVERED), (1, Outcome.DELIVERED)]


def test_the_whole_batch_is_condemned_when_no_single_sample_kills():
    """They kill together only; each alone survives."""
    machine, _ = searching(on_error="skip")

    handle(machine, r.TaskFinished(0, 3, 0), r.TaskFinished(0, 3, 0))
    actions = handle(machine, r.TaskFinished(0, 3, 0))

    assert [q.positions for q in of(r.PutInQuarantine, actions)] == [(0, 1, 2, 3)]
    assert concluded(actions) == [(0, Outcome.EMPTY)]
    assert sent(actions) == [(3, 1, r.WHOLE)]


def test_a_lone_sample_is_condemned_without_a_search():
    """There is nothing to halve."""
    machine = begun(on_error="skip")
    submit(machine, 0, size=1)
    handle(machine, death(1, Stage.COLLATING), ready(2))

    actions = handle(machine, death(2, Stage.COLLATING))

    assert [q.positions for q in of(r.PutInQuarantine, actions)] == [(0,)]
    assert concluded(actions) == [(0, Outcome.EMPTY)]


# ---------------------------------------------------------------- by hand: tasks that pay for their deaths


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


# ---------------------------------------------------------------- by hand: starts


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


# ---------------------------------------------------------------- by hand: streams


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


# ---------------------------------------------------------------- by hand: the rest


def test_a_suspicion_is_reported_and_nothing_done():
    """The user hears of it with the worker's stack; the worker goes on."""
    machine = begun()
    submit(machine, 0)

    actions = handle(machine, r.WorkerSuspected(0, 1, 9, InHand(Stage.FETCHING, 0, 2, 31.0), "the stack"))

    [report] = of(r.ReportIncident, actions)
    assert len(actions) == 1
    assert report.incident.kind is IncidentKind.SUSPECTED_HANG
    assert (report.incident.positions, report.incident.stack, report.incident.pid) == ((2,), "the stack", 9)


def test_failures_that_the_worker_dealt_with_are_put_on_record():
    """Skipped and replaced samples are quarantined, retries counted, the batch delivered."""
    machine = begun(on_error="skip")
    submit(machine, 0)
    dealt = (failure(1, Decision.SKIP), failure(2, Decision.REPLACE))

    actions = handle(machine, r.TaskRetried(0, 1, 0, failure(0, Decision.RETRY)), r.TaskFinished(0, 1, 0, dealt))

    assert [a.incident.action for a in of(r.ReportIncident, actions)] == [
        "retried",
        "left out",
        "replaced by another sample",
    ]
    assert [q.positions for q in of(r.PutInQuarantine, actions)] == [(1,), (2,)]
    assert concluded(actions) == [(0, Outcome.DELIVERED)]
    assert (machine.retries, machine.replaced, machine.bad) == (1, 1, 2)


def test_failures_before_an_error_are_put_on_record_too():
    """What was skipped in a batch that then raised stays known."""
    machine = begun(on_error="skip")
    submit(machine, 0)

    actions = handle(machine, r.TaskErrored(0, 1, 0, failure(3), earlier=(failure(1, Decision.SKIP),)))

    assert [q.positions for q in of(r.PutInQuarantine, actions)] == [(1,)]
    assert concluded(actions) == [(0, Outcome.ERRORED)]


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


def test_the_epoch_is_given_up_at_exactly_one_death_too_many():
    """max_restarts within restart_window_s seconds, as in Erlang."""
    machine = begun(max_restarts=3, restart_window_s=10)

    ends = [len(of(r.GiveUp, handle(machine, death(n, Stage.IDLE, -1), now=float(n)))) for n in range(1, 5)]

    assert ends == [0, 0, 0, 1]


def test_deaths_far_apart_do_not_end_the_epoch():
    """The window moves on."""
    machine = begun(max_restarts=3, restart_window_s=10)

    ends = [len(of(r.GiveUp, handle(machine, death(n, Stage.IDLE, -1), now=4.0 * n))) for n in range(1, 50)]

    assert ends == [0] * 49


def test_giving_up_over_restarts_says_how_many_are_allowed():
    """The number to change is in the text."""
    machine = begun(max_restarts=0, restart_window_s=2.5)

    [end] = of(r.GiveUp, handle(machine, death(1, Stage.IDLE, -1)))

    assert end.limit is LimitKind.RESTARTS
    assert "more than 0 times within 2.5 s" in end.text
    assert end.incident.slot == 0


@pytest.mark.parametrize(("max_bad", "ends"), [(2, [0, 0, 1]), (0, [1]), (None, [0, 0, 0])])
def test_the_epoch_is_given_up_at_exactly_one_bad_sample_too_many(max_bad, ends):
    """max_bad as a count: so many may be bad, one more may not."""
    machine = begun(on_error="skip", max_bad=max_bad)
    submit(machine, *range(len(ends)))

    finished = [r.TaskFinished(0, 1, seq, (failure(0, Decision.SKIP),)) for seq in range(len(ends))]

    assert [len(of(r.GiveUp, handle(machine, event))) for event in finished] == ends


def test_a_share_of_bad_samples_is_looked_at_once_there_are_twenty():
    """max_bad as a share of what was drawn: 20 of 100 pass at 20 %, 21 do not."""
    machine = begun(on_error="skip", max_bad=0.2)
    submit(machine, *range(100), size=1)

    finished = [r.TaskFinished(0, 1, seq, (failure(0, Decision.SKIP),)) for seq in range(21)]
    ends = [of(r.GiveUp, handle(machine, event)) for event in finished]

    assert [len(end) for end in ends] == [0] * 20 + [1]
    assert ends[-1][0].limit is LimitKind.BAD_SAMPLES
    assert "21 samples are bad; the policy allows 20% of 100" in ends[-1][0].text


@settings(max_examples=200)
@given(bad=st.lists(st.integers(0, 4), max_size=30), limit=st.integers(0, 12) | st.floats(0, 1))
def test_the_fleet_is_given_up_exactly_when_too_many_samples_are_bad(bad, limit):
    """A count is a count; a share is one of the samples drawn, looked at from twenty bad ones on."""
    machine = begun(on_error="skip", max_bad=limit)
    submit(machine, *range(len(bad)), size=4)
    drawn = 4 * len(bad)

    total = 0
    for seq, count in enumerate(bad):
        failures = tuple(failure(position, Decision.SKIP) for position in range(count))
        handle(machine, r.TaskFinished(0, 1, seq, failures, empty=count == 4))
        for _ in range(count):
            if not machine.given_up or total < machine.bad:
                total += 1
        exceeded = total >= 20 and total > limit * drawn if isinstance(limit, float) else total > limit
        assert machine.given_up == exceeded
        if exceeded:
            break


# ---------------------------------------------------------------- halving


def search(suspects: tuple[int, ...], dies: Any) -> tuple[tuple[int, ...], int]:
    halving = Halving(suspects)
    for tries in itertools.count():
        if halving.culprits is not None:
            return halving.culprits, tries
        probe = halving.probe
        assert probe
        assert set(probe) <= set(suspects)
        would_end = halving.would_end
        died = dies(set(probe))
        halving.learn(survived=not died)
        if died:
            assert would_end == (halving.culprits is not None)
        assert tries <= 2 * len(suspects)
    raise AssertionError


@given(
    st.lists(st.integers(0, 1000), min_size=1, max_size=100, unique=True).flatmap(
        lambda all_: st.tuples(st.just(tuple(all_)), st.sampled_from(all_))
    )
)
def test_halving_finds_the_one_sample_that_kills(case):
    """In about log2(n) tries, wherever it is."""
    suspects, culprit = case

    found, tries = search(suspects, lambda probe: culprit in probe)

    assert found == (culprit,)
    assert tries <= len(suspects).bit_length() + 1


@given(st.sets(st.integers(0, 63), min_size=1, max_size=64))
def test_halving_finds_one_of_several_samples_that_kill(culprits):
    """The others are found by the next search, without it."""
    found, _ = search(tuple(range(64)), lambda probe: bool(culprits & probe))

    assert len(found) == 1
    assert set(found) <= culprits


@given(st.integers(2, 64), st.data())
def test_halving_blames_all_when_samples_kill_only_together(size, data):
    """Neither of two samples that kill as a pair is a culprit alone, unless a half held both."""
    pair = data.draw(st.sets(st.integers(0, size - 1), min_size=2, max_size=2))

    found, _ = search(tuple(range(size)), lambda probe: pair <= probe)

    assert found == tuple(range(size))


def test_halving_has_nothing_to_try_for_one_suspect():
    """It is the culprit."""
    assert Halving((7,)).culprits == (7,)


# ---------------------------------------------------------------- policy


def test_pauses_double_up_to_the_longest():
    """Exponential backoff without jitter."""
    policy = FaultPolicy(backoff_s=0.5, backoff_max_s=3, jitter=0)

    assert [rules.pause_s(policy, attempt, 0) for attempt in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(1, 20), st.integers(0, 1 << 16), st.floats(0, 1))
def test_a_pause_is_varied_within_its_jitter_and_reproducibly(attempt, seed, jitter):
    """The same attempt of the same sample waits as long in every run; different ones do not wait in step."""
    plain = rules.pause_s(FaultPolicy(jitter=0), attempt, seed)
    varied = rules.pause_s(FaultPolicy(jitter=jitter), attempt, seed)

    assert abs(varied - plain) <= plain * jitter + 1e-12
    assert varied == rules.pause_s(FaultPolicy(jitter=jitter), attempt, seed)


def test_pauses_of_different_samples_differ():
    """That is what jitter is for."""
    policy = FaultPolicy(jitter=0.5)

    assert len({rules.pause_s(policy, 1, seed) for seed in range(50)}) > 40


# ---------------------------------------------------------------- recycling


def test_a_recycled_worker_is_replaced_without_blame():
    """It left between two batches: what it had not done goes to the next, in order."""
    machine = begun(retries=0)
    submit(machine, 0, 1, 2)
    handle(machine, r.TaskFinished(0, 1, 0))

    actions = handle(machine, death(1, Stage.LEAVING, recycled="its memory reached 190 MiB of 200 MiB"))

    assert of(r.StartWorker, actions) == [r.StartWorker(0, 2)]
    assert [seq for _, seq, _ in sent(actions)] == [1, 2]
    (report,) = of(r.ReportIncident, actions)
    assert report.incident.kind is IncidentKind.RECYCLED
    assert "190 MiB" in str(report.incident)
    assert (machine.recycled, machine.restarts, machine.retries, machine.bad) == (1, 0, 0, 0)


def test_recycling_never_ends_an_epoch():
    """Only deaths count against the limit of restarts."""
    machine = begun(max_restarts=2)
    submit(machine, 0)

    for incarnation in range(1, 50):
        handle(machine, death(incarnation, Stage.LEAVING, recycled="on time"), ready(incarnation + 1))

    assert not machine.given_up
    assert machine.recycled == 49


def test_a_recycled_worker_of_a_stream_that_has_ended_is_not_replaced():
    """There is nothing left to do."""
    machine = begun()
    submit(machine, 0)
    handle(machine, r.TaskFinished(0, 1, 0, ended=True))

    assert of(r.StartWorker, handle(machine, death(1, Stage.LEAVING, recycled="on time"))) == []


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
