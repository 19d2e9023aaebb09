"""The search for one bad sample in a batch: probes, and the halving that chooses them.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machine.events import begun, concluded, death, handle, of, ready, searching, sent, submit
from outlive import records as r
from outlive._fleet.halving import Halving
from outlive.incident import Stage
from outlive.records import Outcome, Plan
from simulated_fleet import failure


@pytest.mark.parametrize("stage", [Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING])
def test_a_batch_is_tried_again_whole_after_its_first_death(stage):
    """Only a second death starts the search."""
    machine = begun(on_error="skip")
    submit(machine, 0)

    actions = handle(machine, death(1, stage))

    assert sent(actions) == [(2, 0, r.WHOLE)]
    assert of(r.ReportIncident, actions)[0].incident.positions == (0, 1, 2, 3)


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
