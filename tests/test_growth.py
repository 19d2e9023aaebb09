"""Leaks are told from warm-up, from sawteeth and from noise; and what grows is named."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlive._fleet.growth import Sample, growth_of
from outlive.evidence import Growth, GrowthKind

MIB = 1 << 20


def life(batches: int, private, resident=None, cells=lambda batch: 0) -> list[Sample]:
    """One sample every five batches."""
    resident = resident or (lambda batch: 300 * MIB + private(batch))
    return [Sample(n, int(resident(n)), int(private(n)), int(cells(n))) for n in range(0, batches, 5)]


def sawtooth(batch: int) -> float:
    return (batch % 40) * 2 * MIB


@pytest.mark.parametrize(
    ("name", "private"),
    [
        ("constant", lambda n: 100 * MIB),
        ("warming up", lambda n: 100 * MIB + min(n, 60) * 5 * MIB),
        ("warming up slowly", lambda n: 100 * MIB * (1 - 0.95**n)),
        ("sawtooth", lambda n: 100 * MIB + sawtooth(n)),
        ("steps up and down", lambda n: 100 * MIB + (n // 30 % 2) * 60 * MIB),
        ("noise", lambda n: 100 * MIB + random.Random(n).random() * 50 * MIB),
        ("shrinking", lambda n: 500 * MIB - n * MIB / 2),
        ("one jump", lambda n: 100 * MIB + (60 * MIB if n > 350 else 0)),
        ("growing too little to matter", lambda n: 100 * MIB + n * 0.02 * MIB),
    ],
)
def test_health_is_no_leak(name, private):
    """Whatever a healthy worker's memory does."""
    assert growth_of(life(400, private)) is None


@pytest.mark.parametrize(
    ("name", "private", "per_batch"),
    [
        ("steady", lambda n: 100 * MIB + n * MIB, 1.0),
        ("after a warm-up", lambda n: 100 * MIB + min(n, 60) * 5 * MIB + n * MIB, 1.0),
        ("under a sawtooth", lambda n: 100 * MIB + sawtooth(n) + n * MIB, 1.0),
        ("in steps", lambda n: 100 * MIB + n // 20 * 20 * MIB, 1.0),
        ("with noise", lambda n: 100 * MIB + n * MIB + random.Random(n).random() * 40 * MIB, 1.0),
        ("fast", lambda n: 100 * MIB + n * 64 * MIB, 64.0),
        ("slow", lambda n: 100 * MIB + n * MIB / 8, 0.125),
    ],
)
def test_a_leak_is_found_with_its_slope(name, private, per_batch):
    """Within a quarter of what it is."""
    found = growth_of(life(400, private))

    assert found is not None
    assert found.kind is GrowthKind.LEAK
    assert found.bytes_per_batch == pytest.approx(per_batch * MIB, rel=0.25)


def test_pages_that_stop_being_shared_are_copies_and_no_leak():
    """The worker writes reference counts into objects that it inherited: it owns more and is no larger."""
    found = growth_of(life(400, lambda n: 50 * MIB + n * MIB, resident=lambda n: 900 * MIB + n * 0.02 * MIB))

    assert found is not None
    assert found.kind is GrowthKind.COPY_ON_READ


def test_cells_that_grow_are_named():
    """Batches that somebody keeps, not the worker's heap."""
    found = growth_of(life(400, lambda n: 50 * MIB, cells=lambda n: n * MIB))

    assert found is not None
    assert found.kind is GrowthKind.CELLS


@given(st.integers(0, 11), st.integers(0, 1 << 30))
def test_it_is_too_early_to_say_with_few_samples(count, step):
    """However steep."""
    assert growth_of([Sample(n, n * step, n * step) for n in range(count)]) is None


@given(
    st.lists(st.tuples(st.integers(0, 5), *(st.integers(0, 1 << 40) for _ in range(3))), max_size=60),
)
def test_any_life_is_judged_without_failing(steps):
    """Batches never go back; everything else may do anything."""
    batches = 0
    samples = []
    for step, resident, private, cells in steps:
        batches += step
        samples.append(Sample(batches, resident, private, cells))

    found = growth_of(samples)

    assert found is None or found.bytes_per_batch > 0


def test_the_time_that_is_left_follows_from_the_slope():
    """In batches, never below nothing; nobody knows without a limit."""
    assert Growth(GrowthKind.LEAK, 2 * MIB, 100, 100 * MIB, 200 * MIB).batches_left == 50
    assert Growth(GrowthKind.LEAK, 2 * MIB, 100, 300 * MIB, 200 * MIB).batches_left == 0
    assert Growth(GrowthKind.LEAK, 2 * MIB, 100, 300 * MIB).batches_left is None
