"""The circuit breaker's decisions alone: who probes, when it opens, closes and gives up; what failures have in common.

Reads   the actions that doubts and probes are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import pickle
import socket
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outlive import Incident, IncidentKind, SourceUnavailableError, TooManyFaultsError, errors
from outlive import records as r
from outlive._fleet.breaker import ALIKE, Breaker, State
from outlive._forensics.ledger import Ledger
from outlive.incident import InHand, Stage
from outlive.loader.door import Door
from outlive.loader.source import IN_A_ROW, RATE, Source, cause_of
from outlive.records import SourceWord
from outlive.settings import FaultPolicy
from simulated_fleet import failure

PROBE, AGAIN, CONDEMN, LEAVE = SourceWord


def breaker(**policy: Any) -> Breaker:
    return Breaker(FaultPolicy(**{"backoff_s": 1.0, "backoff_max_s": 4.0, "jitter": 0.0, **policy}))


def doubt(slot: int = 0, *samples: str, proven: bool = True) -> r.SourceDoubted:
    named = samples or (f"of {slot}",)
    return r.SourceDoubted(slot, 1, 100 + slot, slot, failure(0), named, tuple(range(len(named))), proven)


def probe(slot: int, works: bool = False, *samples: str, proven: bool = False) -> r.SourceProbed:
    goods = (7,) if works else ()
    return r.SourceProbed(slot, 1, 100 + slot, slot, works, goods, None if works else failure(0), samples, proven)


def answers(actions: list[r.Action]) -> list[tuple[int, SourceWord]]:
    return [(a.slot, a.word) for a in actions if isinstance(a, r.AnswerDoubt)]


def pauses(actions: list[r.Action]) -> list[float]:
    return [a.pause_s for a in actions if isinstance(a, r.AnswerDoubt)]


def reported_incidents(actions: list[r.Action]) -> list[Incident]:
    return [a.incident for a in actions if isinstance(a, r.ReportIncident)]


def test_it_opens_at_once_when_a_sample_that_was_good_fails_too():
    """One incident says so; the worker that found it probes after the first pause."""
    it = breaker()

    actions = it.doubted(doubt(0, "3", "4"), 10.0)

    assert it.state is State.OPEN
    assert answers(actions) == [(0, PROBE)]
    assert pauses(actions) == [1.0]
    (incident,) = reported_incidents(actions)
    assert incident.kind is IncidentKind.BREAKER
    assert incident.positions == (0, 1)
    assert str(incident) == (
        "the source is gone: 2 different samples raised ValueError: bad: "
        "opened the breaker, no sample is condemned, waiting for it"
    )
    assert it.words(22.4) == "open since 12 s: ValueError: bad"
    assert Incident.from_json(incident.to_json()) == incident


def late(slot: int, failed_at: float, kind: str = "ValueError") -> r.SourceDoubted:
    """A worker to which the source answers again, and of which samples failed then."""
    return r.SourceDoubted(slot, 1, 100 + slot, slot, replace(failure(0), type_name=kind), (), (0,), False, failed_at)


def test_samples_that_failed_while_it_was_gone_are_tried_again_though_it_answers_now():
    """Also after it was closed; not those of another kind, nor those of a batch that began to fail after it."""
    it = breaker()
    assert answers(it.doubted(late(1, 4.9), 5.0)) == [(1, CONDEMN)]
    it.doubted(doubt(0), 100.0)

    while_open = [it.doubted(late(1, 100.5), 101.0), it.doubted(late(1, 100.5, "KeyError"), 101.0)]
    it.probed(probe(0, works=True), 102.0)
    after = [it.doubted(late(1, then), 110.0) for then in (101.0, 109.0)]
    it.reset()

    assert [answers(actions) for actions in while_open] == [[(1, AGAIN)], [(1, CONDEMN)]]
    assert [answers(actions) for actions in after] == [[(1, AGAIN)], [(1, CONDEMN)]]
    assert answers(it.doubted(late(1, 101.0), 110.0)) == [(1, CONDEMN)]
    assert it.state is State.CLOSED


def test_one_probes_after_the_other_and_pauses_grow():
    """Whoever has waited longest is next; the pause doubles up to backoff_max_s."""
    it = breaker(breaker_patience=None)
    for slot in range(3):
        last = it.doubted(doubt(slot), 0.0)
    assert answers(last) == []

    turns = [it.probed(probe(slot), 0.0) for slot in (0, 1)]

    assert [answers(actions) for actions in turns] == [[(1, PROBE)], [(2, PROBE)]]
    assert [pauses(actions) for actions in turns] == [[2.0], [4.0]]
    assert [reported_incidents(actions) for actions in turns] == [[], []]


def test_every_third_prober_makes_room_for_a_fresh_worker():
    """What it holds open may be dead though the source is back; the others go on probing."""
    it = breaker(breaker_patience=None)
    it.doubted(doubt(0), 0.0)
    it.doubted(doubt(1), 0.0)
    for slot in (0, 1):
        it.probed(probe(slot), 0.0)

    actions = it.probed(probe(0), 0.0)

    assert answers(actions) == [(0, LEAVE), (1, PROBE)]
    assert it.exited(0, 0.0) == []
    assert answers(it.probed(probe(1, works=True), 1.0)) == [(1, AGAIN)]


def test_no_worker_leaves_where_the_trainer_itself_probes():
    """num_workers=0: it goes on by itself."""
    it = breaker(breaker_patience=None)
    it.replaceable = False
    it.doubted(doubt(0), 0.0)

    assert [answers(it.probed(probe(0), 0.0)) for _ in range(7)] == [[(0, PROBE)]] * 7


def test_all_workers_try_again_when_a_probe_succeeds():
    """They are told which sample works, so that they can see for themselves what their own failures are."""
    it = breaker()
    for slot in range(3):
        it.doubted(doubt(slot), 0.0)

    actions = it.probed(probe(0, works=True), 2.5)

    assert sorted(answers(actions)) == [(0, AGAIN), (1, AGAIN), (2, AGAIN)]
    assert all(a.goods == (7,) for a in actions if isinstance(a, r.AnswerDoubt))
    (incident,) = reported_incidents(actions)
    assert str(incident) == "the source answers again, after 2.5 s and 1 probe: closed the breaker, going on"
    assert (it.state, it.words(3.0)) == (State.CLOSED, "closed")


def test_it_does_not_open_when_the_first_probe_of_a_mere_suspicion_succeeds():
    """No incident: files were bad where nothing good was known yet. They are tried once more."""
    it = breaker()

    first = it.doubted(doubt(0, proven=False), 0.0)
    actions = it.probed(probe(0, works=True), 0.1)

    assert (answers(first), pauses(first), reported_incidents(first)) == ([(0, PROBE)], [0.0], [])
    assert (answers(actions), reported_incidents(actions)) == ([(0, AGAIN)], [])


def test_samples_are_condemned_when_too_few_fail_alike():
    """A dataset of two bad samples is no outage."""
    it = breaker()
    it.doubted(doubt(0, "0", proven=False), 0.0)

    actions = it.probed(probe(0, False, "1"), 0.1)

    assert (answers(actions), reported_incidents(actions)) == ([(0, CONDEMN)], [])
    assert it.state is State.CLOSED


@pytest.mark.parametrize("more", [{"proven": True}, {}])
def test_it_opens_when_a_suspicion_proves_true(more):
    """A sample that was good elsewhere fails, or enough different ones do."""
    it = breaker()
    it.doubted(doubt(0, "0", proven=False), 0.0)

    actions = it.probed(probe(0, False, *map(str, range(1, 1 if more else ALIKE)), **more), 0.1)

    assert (answers(actions), pauses(actions)) == ([(0, PROBE)], [2.0])
    assert len(reported_incidents(actions)) == 1
    assert it.state is State.OPEN


def test_the_next_one_probes_when_the_prober_dies():
    """And nobody is answered who is gone."""
    it = breaker()
    for slot in range(3):
        it.doubted(doubt(slot), 0.0)
    it.exited(1, 1.0)

    assert answers(it.exited(0, 1.0)) == [(2, PROBE)]
    assert answers(it.probed(probe(0, works=True), 1.0)) == []
    assert answers(it.probed(probe(2, works=True), 1.0)) == [(2, AGAIN)]


def test_it_can_close_when_all_waiting_workers_have_died():
    """Their successors find the source well, or doubt in turn."""
    it = breaker()
    it.doubted(doubt(0), 0.0)
    it.exited(0, 1.0)
    assert it.deserted

    assert answers(it.doubted(doubt(0, proven=False), 2.0)) == [(0, PROBE)]
    assert not it.deserted
    it.exited(0, 3.0)
    (incident,) = reported_incidents(it.close(4.0))

    assert "answers again, after 4.0 s" in str(incident)
    assert it.state is State.CLOSED


@pytest.mark.parametrize("ends_by", ["failing", "dying"])
def test_it_is_given_up_at_the_end_of_the_patience_and_not_before(ends_by):
    """The last probe falls on the end of the patience, and then one error says it all."""
    it = breaker(breaker_patience=6.0)
    it.doubted(doubt(0, "3"), 0.0)
    assert pauses(it.probed(probe(0), 1.0)) == [2.0]
    assert pauses(it.probed(probe(0), 3.0)) == [3.0]

    actions = it.probed(probe(0), 6.0) if ends_by == "failing" else it.exited(0, 6.0)

    (given_up,) = [a for a in actions if isinstance(a, r.GiveUp)]
    assert given_up.limit is r.LimitKind.PATIENCE
    assert given_up.text == "the source has not answered for 6.0 s: a sample raised ValueError: bad"
    assert given_up.incident is not None
    assert given_up.incident.action == "gave up"
    assert it.words(6.0) == "given up after 6 s: ValueError: bad"


def test_it_probes_once_more_when_the_trainer_was_away_longer_than_the_patience():
    """A probe of long ago says nothing of now."""
    it = breaker(breaker_patience=6.0)
    it.doubted(doubt(0), 0.0)

    late = it.probed(probe(0), 1000.0)
    actions = it.probed(probe(0), 1000.5)

    assert (answers(late), pauses(late)) == ([(0, PROBE)], [0.0])
    assert [type(a) for a in actions] == [r.ReportIncident, r.GiveUp]


@settings(max_examples=300)
@given(
    steps=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.booleans()), max_size=60),
    patience=st.sampled_from([None, 0.0, 3.0]),
)
def test_no_worker_waits_for_ever(steps, patience):
    """As long as somebody doubts, exactly one probes; whoever is dismissed has doubted; it is given up once at most."""
    it = breaker(breaker_patience=patience)
    waiting: set[int] = set()
    probing: set[int] = set()
    opened = closed = given_up = 0
    for now, (what, slot, flag) in enumerate(steps):
        actions: list[r.Action] = []
        if what <= 1 and slot not in waiting:
            waiting.add(slot)
            actions = it.doubted(doubt(slot, proven=flag), float(now))
        elif what == 2 and probing:
            actions = it.probed(probe(probing.pop(), flag, str(now), proven=bool(slot)), float(now))
        elif what == 3:
            waiting.discard(slot)
            probing.discard(slot)
            actions = it.exited(slot, float(now))
        elif what == 4 and it.deserted:
            actions = it.close(float(now))
        for incident in reported_incidents(actions):
            opened += "is gone" in str(incident)
            closed += "answers again" in str(incident)
        for slot, word in answers(actions):
            assert slot in waiting
            if word is PROBE:
                probing.add(slot)
            else:  # it goes on, or leaves
                waiting.remove(slot)
        given_up += sum(isinstance(a, r.GiveUp) for a in actions)
        if given_up:
            break
        assert len(probing) == min(1, len(waiting)), "somebody waits, and nobody probes"
        assert opened - closed == (it.state is State.OPEN)

    assert given_up == (it.state is State.GIVEN_UP) <= 1


# ---------------------------------------------------------------- the worker's side


def error_of(call: Any, *arguments: Any) -> Exception:
    try:
        call(*arguments)
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


def refuse(text: str) -> None:
    raise RuntimeError(text)


def test_failures_of_different_samples_have_one_cause_when_they_are_alike():
    """Type, errno and place; without a place of the user's, the message without its particulars."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # so that nobody else listens there
        refused = error_of(socket.create_connection, closed.getsockname())
    missing = [error_of(open, name) for name in ("/nowhere/1", "/nowhere/2")]
    raised = [error_of(refuse, text) for text in ("sample 1", "anything else")]
    bare = [ValueError("cannot read '/data/a b.png' at 12"), ValueError('cannot read "/mnt/c.png" at 0x7f')]

    assert cause_of(missing[0]) == cause_of(missing[1]) != cause_of(refused)
    assert cause_of(raised[0]) == cause_of(raised[1]) != cause_of(error_of(refuse, "") and KeyError("sample 1"))
    assert cause_of(bare[0]) == cause_of(bare[1]) == "builtins.ValueError: cannot read … at …"
    assert cause_of(bare[0]) != cause_of(ValueError("cannot decode '/data/a.png' at 12"))


def test_a_source_is_suspect_when_samples_fail_in_a_row_or_at_a_rate():
    """The same sample again and again is one sample; other causes do not count together."""
    source = Source(lambda index: index)
    for _ in range(IN_A_ROW):
        source.failed(1, ValueError("bad"))
    source.failed(2, KeyError("bad"))
    source.failed(3, ValueError("bad"))
    source.failed(4, ValueError("bad"))
    assert not source.is_suspect
    source.failed(5, ValueError("bad"))
    assert source.is_suspect

    source.went_well(6, 100)
    assert not source.is_suspect
    assert not source.is_unsure
    for index in range(2 * RATE):
        source.failed(index, OSError(5, "bad"))
        assert source.is_suspect is (index >= RATE - 1)
        assert source.is_unsure
        source.went_well(-1)
        assert not source.is_unsure


def test_running_out_of_memory_is_no_fault_of_the_source():
    """Waiting does not help there."""
    source = Source(lambda index: index)
    for index in range(IN_A_ROW):
        source.failed(index, MemoryError())

    assert not source.is_suspect
    assert not source.is_unsure


def test_probes_are_samples_that_were_good_and_none_that_kill():
    """Of this epoch, else of an earlier one; the others are drawn by chance."""
    door = Door(Ledger(), FaultPolicy(), None, stream=False, batched=True)  # type: ignore[arg-type]
    door.pool = range(10, 20)
    door.draw(0, [1, 2, 3])
    assert door.probes(-1)[0] == ()
    goods, others = door.probes(0)
    assert goods == (1, 3)
    assert others
    assert set(others) <= set(door.pool)

    door.remember(0)
    door.begin_epoch(range(10, 20))
    assert door.probes(-1)[0] == (1, 3)
    crash = Incident(IncidentKind.CRASH, 0, 1, 1, 0, InHand(Stage.FETCHING, 0, 0), indices=(3,))
    for deadly in (3, *range(10, 20)):
        door.ledger.quarantine.put(deadly, crash)
    assert door.probes(-1) == ((1,), ())


# ---------------------------------------------------------------- the error


def test_the_error_says_what_when_where_and_what_next():
    """It is a TooManyFaultsError, and travels."""
    it = breaker(breaker_patience=0)
    it.doubted(doubt(0, "3", "4"), 0.0)
    actions = it.probed(probe(0), 0.5)
    (given_up,) = [a for a in actions if isinstance(a, r.GiveUp)]
    assert given_up.incident is not None

    error = errors.source_error(
        given_up.text, given_up.incident, reported_incidents(actions), delivered=0, patience_s=0.0
    )

    assert isinstance(error, TooManyFaultsError)
    assert str(error).startswith(
        "the source has not answered for 0.5 s: 2 different samples raised ValueError: bad\n\n  since    "
    )
    assert "  next     see that paths, hosts and credentials are right: not one batch was ever delivered\n" in str(
        error
    )
    assert "FaultPolicy(breaker_patience=600)   to wait longer; None: for ever" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert isinstance(again, SourceUnavailableError)
    assert (str(again), again.incident, again.incidents) == (str(error), error.incident, error.incidents)


def test_the_last_frame_is_told_with_its_line_of_code():
    """From a traceback as Python prints it; anything else is told by its first line."""
    text = 'Traceback …\n  File "/a/b.py", line 3, in read\n    open(path)\n    ~~~~^^^^^^\nOSError: x\n'

    assert errors.last_frame(text) == "b.py:3 read: open(path)"
    assert errors.last_frame("bad luck") == "bad luck"
