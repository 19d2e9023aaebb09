"""Questions to the user's callable, and what its answers do.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import pytest

from machine.events import asked_about_death, begun, concluded, death, handle, killed_twice, of, sent, submit
from outlive import records as r
from outlive.incident import Decision, Stage
from outlive.records import Outcome, Plan
from simulated_fleet import failure


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
