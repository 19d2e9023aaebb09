"""What a check counts with: intervals, choices of samples, spreads, weights."""

from __future__ import annotations

import collections
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outlive.checking import spread
from outlive.checking.plan import Choice, Done, Pace, Portions, choice_of
from outlive.checking.spread import Spread
from outlive.checking.weighing import Unsendable, weigh

INTERVALS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)).map(lambda pair: (pair[0], pair[0] + pair[1])))


@given(INTERVALS)
def test_what_is_done_is_the_union_of_what_came(intervals):
    """In any order, overlapping or not; what is left are the gaps, and a state on disk says the same."""
    done = Done()
    for begin, end in intervals:
        done.add(begin, end)

    places = {place for begin, end in intervals for place in range(begin, end)}
    assert {place for begin, end in done.intervals for place in range(begin, end)} == places
    assert done.number == len(places)
    assert all(end < begin for (_, end), (begin, _) in zip(done.intervals, done.intervals[1:], strict=False))
    gaps = {place for begin, end in done.gaps(60) for place in range(begin, end)}
    assert gaps == set(range(60)) - places
    assert Done(done.intervals).intervals == done.intervals


@given(INTERVALS, st.integers(1, 4), st.floats(1e-7, 2.0))
def test_portions_are_what_is_not_done_once_each(intervals, workers, seconds):
    """However long samples take; a sample leads to its portion."""
    plan, pace = range(100, 160), Pace(workers)
    done = Done(intervals)
    portions = Portions(plan, done, pace)

    drawn = []
    for portion in portions:
        drawn.append(portion)
        pace.took(len(portion), seconds * len(portion))

    left = [100 + place for begin, end in done.gaps(60) for place in range(begin, end)]
    assert [index for portion in drawn for index in portion] == left
    for portion in drawn:
        begin, end = portions.around(portion[-1])
        assert plan[begin:end] == portion


@given(st.integers(0, 500), st.integers(1, 9), st.sampled_from([None, "10%", "1%", 7]), st.integers(0, 5))
def test_shards_are_disjoint_and_a_sample_is_spread(length, shards, sample, seed):
    """Together they are everything, or as much of every part as was asked for."""
    chosen = [choice_of(sample, (n + 1, shards), seed).indices(length) for n in range(shards)]

    flat = [index for indices in chosen for index in indices]
    assert flat == sorted(set(flat))
    assert set(flat) <= set(range(length))
    if sample is None:
        assert len(flat) == length
    if sample == 7:
        assert all(len(c) == min(7, len(Choice(n, shards).indices(length))) for n, c in enumerate(chosen))


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=300), st.integers(1, 5))
def test_percentiles_are_right_to_five_percent(values, parts):
    """Whoever counted which of them; the least and the largest exactly."""
    whole = Spread()
    for part in np.array_split(np.array(values, np.int64), min(parts, len(values))):
        whole.add(spread.count(part, list(range(len(part))), floor=10**11))

    for share in (0.25, 0.5, 0.99):
        right = int(np.quantile(values, share, method="inverted_cdf"))
        assert whole.quantile(share) == pytest.approx(right, rel=0.05, abs=1)
    assert whole.largest.value == max(values)
    assert whole.least == min(values)
    assert len(whole.beyond(10**11)) == sum(value >= 10**11 for value in values)
    again = Spread.from_dict(whole.to_dict())
    assert (again.quantile(0.5), again.beyond(10**11)) == (whole.quantile(0.5), whole.beyond(10**11))


def test_what_is_far_from_others_is_told_from_what_merely_differs():
    """Two kinds of samples, one five times as slow, are both usual; one fifty times as slow is not."""
    usual, far = Spread(), Spread()
    values = np.array([10**6] * 50 + [5 * 10**6] * 50, np.int64)
    usual.add(spread.count(values, list(range(100)), floor=1))
    far.add(spread.count(np.append(values, 5 * 10**8), list(range(101)), floor=1))

    assert usual.beyond(usual.threshold(1)) == []
    assert [outlier.index for outlier in far.beyond(far.threshold(1))] == [100]
    assert far.number_beyond(far.threshold(1)) == 1


Pair = collections.namedtuple("Pair", "image label")


@dataclass
class Record:
    image: Any
    name: str


@pytest.mark.parametrize(
    ("sample", "size"),
    [
        (7, 8),
        (None, 0),
        (torch.zeros(10, dtype=torch.float16), 20),
        (np.zeros((3, 4)), 96),
        (np.float32(1), 4),
        ("ä", 2),
        (b"abc", 3),
        ([torch.zeros(4), {"label": True}], 16 + 5 + 1),
        (Pair(torch.zeros(4), 1), 24),
    ],
)
def test_what_is_known_is_weighed_as_it_is(sample, size):
    """Nothing is copied for it."""
    assert weigh(sample) == size


def test_other_objects_are_weighed_as_their_pickle():
    """Tensors in them as they are."""
    light, heavy = weigh(Record(torch.zeros(0), "a")), weigh(Record(torch.zeros(1000), "a"))

    assert heavy - light == 4000
    assert 0 < light < 500


@pytest.mark.parametrize("sample", [threading.Lock(), {"lock": [threading.Lock()]}, lambda: None])
def test_what_cannot_travel_has_no_weight(sample):
    """It is bad."""
    with pytest.raises(Unsendable):
        weigh(sample)
