"""Limits on deaths, restarts and bad samples; pauses between restarts; what is only put on record.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from machine.events import begun, concluded, death, handle, of, submit
from outlive import records as r
from outlive._fleet import policy as rules
from outlive.incident import Decision, IncidentKind, InHand, Stage
from outlive.records import LimitKind, Outcome
from outlive.settings import FaultPolicy
from simulated_fleet import failure


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
