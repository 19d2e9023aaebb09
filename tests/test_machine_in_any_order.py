"""The machine under any order of events that Hypothesis can think of, through a simulated fleet.

Reads   what the simulated fleet was told to do, and how its tasks ended.
Writes  choices; the same ones lead to the same events.
Never   a process, a clock.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from outlive._fleet.breaker import State
from outlive._fleet.renewal import MOST
from outlive.incident import Decision
from outlive.records import MOST_SUBSTITUTES, LimitKind, Outcome
from outlive.settings import FaultPolicy
from simulated_fleet import NO_LIMITS, RULES, STEPS, Scenario, SimulatedFleet, interpret, scenarios


@settings(max_examples=600)
@given(
    scenario=scenarios(),
    steps=STEPS,
    rule=st.sampled_from(sorted(RULES)),
    retries=st.integers(0, 2),
    max_restarts=st.sampled_from([2, 10**9]),
    max_bad=st.sampled_from([None, 1, 0.1]),
    patience=st.sampled_from([None, 0, 4]),
    last_word=st.sampled_from([Decision.SKIP, Decision.RAISE, Decision.REPLACE]),
)
def test_any_order_of_events_ends_in_a_lawful_state(
    scenario, steps, rule, retries, max_restarts, max_bad, patience, last_word
):
    """Each task is concluded exactly once, or the fleet given up exactly once; the laws of sending are never broken."""
    slots, scenario = scenario
    policy = FaultPolicy(
        on_error=RULES[rule],
        retries=retries,
        max_restarts=max_restarts,
        restart_window_s=5,
        max_bad=max_bad,
        breaker_patience=patience,
    )
    fleet = SimulatedFleet(slots, policy, scenario)

    interpret(fleet, steps)
    fleet.settle(last_word)

    fleet.check_lawful_end()


@settings(max_examples=300)
@given(scenario=scenarios(poison=False, streams=False), steps=STEPS, rule=st.sampled_from(sorted(RULES)))
def test_everything_is_delivered_when_finitely_many_workers_die_by_chance(scenario, steps, rule):
    """Without limits, and with as many tries as there are accidents, deaths and doubts cost nothing."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(on_error=RULES[rule], retries=len(steps), **NO_LIMITS), scenario)

    interpret(fleet, [step for step in steps if step[0] not in (15, 16)])
    fleet.settle()

    fleet.check_lawful_end()
    assert not fleet.machine.given_up
    assert set(fleet.outcomes.values()) <= {Outcome.DELIVERED}
    assert len(fleet.outcomes) == len(scenario.sizes)
    assert fleet.quarantined == []


@settings(max_examples=300)
@given(
    scenario=scenarios(poison=False, streams=False),
    steps=st.lists(
        st.tuples(st.sampled_from([0, 5, 10, 19, 20, 21, 22]), st.integers(0, 2), st.integers(0, 5), st.integers(0, 3)),
        max_size=60,
    ),
)
def test_everything_is_delivered_when_workers_doubt_their_source_and_die(scenario, steps):
    """Whoever waits, probes, leaves or dies: in the end the breaker is closed, and nobody was condemned."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(on_error="skip", **NO_LIMITS), scenario)
    for _ in scenario.sizes:
        fleet.submit()

    interpret(fleet, steps)
    fleet.settle()

    fleet.check_lawful_end()
    assert set(fleet.outcomes.values()) == {Outcome.DELIVERED}
    assert fleet.quarantined == []
    assert fleet.machine.breaker.state is State.CLOSED


@settings(max_examples=300)
@given(scenario=scenarios(streams=False), steps=STEPS, retries=st.integers(0, 2))
def test_exactly_the_deadly_samples_are_left_out_under_skip(scenario, steps, retries):
    """However events interleave, when samples are all that kills: they and no others."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(on_error="skip", retries=retries, **NO_LIMITS), scenario)

    interpret(fleet, steps, accidents=False)
    fleet.settle()

    fleet.check_lawful_end()
    assert sorted(fleet.quarantined) == sorted(scenario.poison)
    for seq, size in enumerate(scenario.sizes):
        all_bad = all((seq, position) in scenario.poison for position in range(size))
        assert fleet.outcomes[seq] is (Outcome.EMPTY if all_bad else Outcome.DELIVERED)


@settings(max_examples=200)
@given(scenario=scenarios(streams=False), steps=STEPS, retries=st.integers(0, 2))
def test_exactly_the_deadly_samples_are_replaced_under_replace(scenario, steps, retries):
    """Every batch is delivered in its full size."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(on_error="replace", retries=retries, **NO_LIMITS), scenario)

    interpret(fleet, steps, accidents=False)
    fleet.settle()

    fleet.check_lawful_end()
    assert sorted(fleet.quarantined) == sorted(scenario.poison)
    assert set(fleet.outcomes.values()) == {Outcome.DELIVERED}
    assert fleet.machine.replaced == len(scenario.poison)


@settings(max_examples=200)
@given(scenario=scenarios(streams=False), steps=STEPS, retries=st.integers(0, 2))
def test_a_deadly_sample_is_named_and_other_batches_come_under_raise(scenario, steps, retries):
    """Its batch errors with an incident that names a sample which does kill; all other batches are delivered."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(on_error="raise", retries=retries, **NO_LIMITS), scenario)

    interpret(fleet, steps, accidents=False)
    fleet.settle()

    fleet.check_lawful_end()
    for seq in range(len(scenario.sizes)):
        deadly = [position for place, position in sorted(scenario.poison) if place == seq]
        assert fleet.outcomes[seq] is (Outcome.ERRORED if deadly else Outcome.DELIVERED)
        if deadly:
            incident = fleet.ends[seq].incident
            assert incident is not None
            assert len(incident.positions) == 1
            assert incident.positions[0] in deadly


@settings(max_examples=100)
@given(scenario=scenarios(streams=False), retries=st.integers(0, 1), bad=st.integers(1, MOST_SUBSTITUTES + 1))
def test_substitutes_are_tried_until_one_lives_or_there_were_enough(scenario, retries, bad):
    """Deadly candidates are replaced in turn, MOST_SUBSTITUTES times at most."""
    slots, scenario = scenario
    scenario.bad_substitutes = bad
    fleet = SimulatedFleet(slots, FaultPolicy(on_error="replace", retries=retries, **NO_LIMITS), scenario)

    fleet.settle()

    fleet.check_lawful_end()
    hopeless = {seq for seq, _ in scenario.poison} if bad >= MOST_SUBSTITUTES else set()
    assert {seq for seq, outcome in fleet.outcomes.items() if outcome is Outcome.ERRORED} == hopeless


@settings(max_examples=200)
@given(
    batches=st.integers(0, 5),
    slots=st.integers(1, 3),
    size=st.integers(1, 3),
    steps=STEPS,
    rule=st.sampled_from(["raise", "skip", "replace"]),
)
def test_streams_give_all_they_have_when_workers_die_by_chance(batches, slots, size, steps, rule):
    """Each slot's stream is delivered to its end, once; then what is asked of it has ended."""
    scenario = Scenario([size] * 18, stream_batches=batches)
    fleet = SimulatedFleet(slots, FaultPolicy(on_error=rule, retries=len(steps), **NO_LIMITS), scenario)

    interpret(fleet, [step for step in steps if step[0] not in (15, 16)])
    fleet.settle()

    fleet.check_lawful_end()
    asked = [len(range(slot, 18, slots)) for slot in range(slots)]
    assert [len(fleet.delivered_by[slot]) for slot in range(slots)] == [min(batches, asks) for asks in asked]
    assert set(fleet.outcomes.values()) <= {Outcome.DELIVERED, Outcome.ENDED}


@settings(max_examples=200)
@given(scenario=scenarios(streams=False), batches=st.integers(0, 4), steps=STEPS, retries=st.integers(0, 1))
def test_a_stream_that_can_step_over_goes_on_after_each_deadly_sample(scenario, batches, steps, retries):
    """Under raise each deadly batch is an error, under skip a smaller batch: the stream is given to its end."""
    slots, scenario = scenario
    scenario.stream_batches, scenario.can_skip, scenario.bound = batches, True, True
    reached = {seq for seq in range(len(scenario.sizes)) if seq // slots < batches}
    deadly = {seq for seq, _ in scenario.poison} & reached
    for rule in ("raise", "skip"):
        fleet = SimulatedFleet(slots, FaultPolicy(on_error=rule, retries=retries, **NO_LIMITS), scenario)

        interpret(fleet, steps, accidents=False)
        fleet.settle()

        fleet.check_lawful_end()
        bad = {Outcome.ERRORED} if rule == "raise" else {Outcome.DELIVERED, Outcome.EMPTY}
        assert all(fleet.outcomes[seq] in bad for seq in deadly)
        assert all(fleet.outcomes[seq] is Outcome.DELIVERED for seq in reached - deadly)
        assert all(fleet.outcomes[seq] is Outcome.ENDED for seq in set(range(len(scenario.sizes))) - reached)
        if rule == "skip":
            assert set(fleet.quarantined) == {place for place in scenario.poison if place[0] in reached}


@settings(max_examples=200)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), max_size=40),
    most=st.integers(0, 5),
    window=st.sampled_from([1.0, 2.0, 5.0]),
)
def test_the_fleet_is_given_up_exactly_when_too_many_deaths_fall_into_the_window(gaps, most, window):
    """Never one death early, never one late."""
    fleet = SimulatedFleet(2, FaultPolicy(max_restarts=most, restart_window_s=window, max_bad=None), Scenario([1] * 4))
    times: list[float] = []
    for number, gap in enumerate(gaps):
        fleet.now += gap
        fleet.advance(number % 2)
        fleet.advance(number % 2)
        if fleet.machine.given_up:
            break
        fleet.die_idle(number % 2)
        times.append(fleet.now)

    too_many = [sum(1 for t in times[: n + 1] if times[n] - t <= window) > most for n in range(len(times))]

    assert fleet.machine.given_up == any(too_many)
    assert not any(too_many[:-1])


@settings(max_examples=100)
@given(scenario=scenarios(), steps=STEPS, rule=st.sampled_from(sorted(RULES)))
def test_the_same_events_give_the_same_actions(scenario, steps, rule):
    """The machine has no memory but its state, and no chance."""
    slots, scenario = scenario

    def play() -> Any:
        fleet = SimulatedFleet(slots, FaultPolicy(on_error=RULES[rule], max_bad=None), scenario)
        interpret(fleet, steps)
        return fleet.history, fleet.outcomes, fleet.quarantined, fleet.incarnations, fleet.now

    assert play() == play()


@settings(max_examples=300)
@given(scenario=scenarios(poison=False, streams=False), steps=STEPS, wanted=st.integers(1, 3), killed=st.integers(0, 3))
def test_nothing_is_lost_with_fewer_workers_than_slots(scenario, steps, wanted, killed):
    """Slots take turns, or share the work: every task is delivered, however few workers may live."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(retries=len(steps), **NO_LIMITS), scenario)

    fleet.want(wanted)
    for slot in range(min(killed, slots)):
        fleet.run_out_of_memory(slot)
    interpret(fleet, [step for step in steps if step[0] not in (15, 16)])
    fleet.settle()

    fleet.check_lawful_end()
    assert not fleet.machine.given_up
    assert list(fleet.outcomes.values()) == [Outcome.DELIVERED] * len(scenario.sizes)
    assert fleet.quarantined == []


HANGS = st.lists(
    st.tuples(st.sampled_from([0, 5, 7, 8, 19, 20, 23, 23]), st.integers(0, 2), st.integers(0, 5), st.integers(0, 3)),
    max_size=60,
)


@settings(max_examples=300)
@given(scenario=scenarios(poison=False), steps=HANGS, rule=st.sampled_from(sorted(RULES)))
def test_everything_is_delivered_when_forks_hang_for_want_of_threads(scenario, steps, rule):
    """No try is spent, no restart counted, no sample blamed; a task that hung is never sent to that kind of worker."""
    slots, scenario = scenario
    policy = FaultPolicy(on_error=RULES[rule], retries=0, max_restarts=0, restart_window_s=1e9, max_bad=0)
    fleet = SimulatedFleet(slots, policy, scenario)

    interpret(fleet, steps)
    fleet.settle()

    fleet.check_lawful_end()
    assert not fleet.machine.given_up
    assert set(fleet.outcomes.values()) <= {Outcome.DELIVERED, Outcome.ENDED}
    assert fleet.quarantined == []
    assert fleet.machine.retries == 0
    assert fleet.machine.healed == fleet.renewals <= MOST


@settings(max_examples=100)
@given(scenario=scenarios(poison=False), steps=HANGS)
def test_the_fleet_is_given_up_once_where_no_clean_process_can_be_had(scenario, steps):
    """With the incident that says who waited for what, and nothing in the quarantine for it."""
    slots, scenario = scenario
    fleet = SimulatedFleet(slots, FaultPolicy(on_error="skip", **NO_LIMITS), scenario)
    fleet.can_renew = False

    interpret(fleet, steps)
    fleet.settle()

    fleet.check_lawful_end()
    assert fleet.quarantined == []
    assert fleet.machine.healed == 0
    assert [end.limit for end in fleet.give_ups] == [LimitKind.RENEWAL] * bool(fleet.hung_in)
