"""The random state of a worker: what is read can be set, and every generator then goes on as if nothing had been.

Reads   the three global generators.
Writes  them; each test leaves them as it found them.
Never   a worker.
"""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outlive._worker import randomness
from outlive._worker.randomness import Randomness


@pytest.fixture(autouse=True)
def _generators_as_they_were() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draw_all() -> list[Any]:
    """Some of every kind; gaussians come first, so that a cached one shows."""
    return [
        random.gauss(0, 1),
        random.random(),
        random.getrandbits(70),
        random.gauss(0, 1),
        float(np.random.randn()),
        np.random.randint(0, 1 << 40, 3).tolist(),
        float(np.random.standard_normal()),
        np.random.permutation(5).tolist(),
        torch.randn(3).tolist(),
        torch.randint(0, 1 << 40, (2,)).tolist(),
        torch.randn(17).tolist(),
    ]


DRAWS = {
    "nothing": lambda: None,
    "one of random's": random.random,
    "one of random's gaussians": lambda: random.gauss(0, 1),
    "two of random's gaussians": lambda: (random.gauss(0, 1), random.gauss(0, 1)),
    "one of NumPy's gaussians": np.random.randn,
    "two of NumPy's gaussians": lambda: np.random.randn(2),
    "three of NumPy's gaussians": lambda: np.random.randn(3),
    "NumPy's uniform": np.random.rand,
    "a shuffle": lambda: np.random.permutation(50),
    "one of torch's": lambda: torch.rand(1),
    "torch's gaussians, few": lambda: torch.randn(3),
    "torch's gaussians, many": lambda: torch.randn(100),
    "one of torch's double gaussians": lambda: torch.randn(1, dtype=torch.float64),
    "random seeded": lambda: random.seed(4),
    "NumPy seeded": lambda: np.random.seed(4),
    "NumPy seeded by a list": lambda: np.random.seed([1, 2, 3]),
    "torch seeded": lambda: torch.manual_seed(4),
    "so many that the words are made anew": lambda: ([random.random() for _ in range(700)], np.random.rand(700)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_generators_go_on_from_the_state_that_was_read(draw):
    """Whatever was drawn before, left-over gaussians included."""
    generators = Randomness()
    draw()

    state = generators.read()
    first = draw_all()
    generators.set(state)

    assert draw_all() == first


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_reading_disturbs_nothing(draw):
    """Numbers drawn after a look are those drawn without it."""
    draw()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    first = draw_all()
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])
    generators = Randomness()
    generators.read()
    generators.read()

    assert draw_all() == first


@pytest.mark.parametrize("way", ["flat", "slow"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_quick_and_the_slow_way_agree(draw, way):
    """What one reads, the other sets."""
    readers = {"flat": Randomness(), "slow": Randomness(fast=False)}
    reader = readers.pop(way)
    [setter] = readers.values()
    draw()

    state = reader.read()
    first = draw_all()
    setter.set(state)

    assert draw_all() == first


def test_the_quick_way_is_taken_here():
    """Else the other tests say nothing about it, and a batch costs 40 µs more."""
    assert randomness.flat_random() is not None
    assert randomness.flat_numpy(np) is not None


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(sorted(DRAWS)), max_size=12))
def test_each_of_many_states_can_be_gone_back_to(names):
    """One reader, read again and again, as a worker does after each batch."""
    generators = Randomness()
    seen = []
    for name in names:
        DRAWS[name]()
        state = generators.read()
        seen.append((state, draw_all()))
        generators.set(state)

    for state, numbers in reversed(seen):
        generators.set(state)
        assert draw_all() == numbers


def test_the_same_state_reads_the_same_and_another_does_not():
    """States can be compared."""
    generators = Randomness()
    one, again = generators.read(), generators.read()
    random.gauss(0, 1)
    gaussian = generators.read()
    random.gauss(0, 1)
    cache_gone = generators.read()

    assert one == again
    assert len({one, gaussian, cache_gone}) == 3


def test_a_state_fits_into_the_black_box():
    """Both ways of reading it."""
    from outlive._capture import blackbox

    assert len(Randomness().read()) <= blackbox.STATE_ROOM


def test_a_slow_state_fits_into_the_black_box():
    """Where the generators' words are not where we think, they are pickled."""
    from outlive._capture import blackbox

    random.gauss(0, 1)
    np.random.randn()

    assert len(Randomness(fast=False).read()) <= blackbox.STATE_ROOM


def test_another_reader_sets_the_state_as_well():
    """It is set by a replacement, in another process."""
    random.gauss(0, 1)
    np.random.randn()
    state = Randomness().read()
    first = draw_all()

    Randomness().set(state)

    assert draw_all() == first


def run_alone(program: str) -> str:
    """In an interpreter of its own: what is imported there, or changed for good, is its own affair."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_is_imported_that_the_user_did_not_import():
    """A pool without torch and NumPy stays without them."""
    said = run_alone(
        """
        import random, sys
        from outlive._worker.randomness import Randomness
        generators = Randomness()
        random.gauss(0, 1)
        state = generators.read()
        first = [random.gauss(0, 1), random.random()]
        generators.set(state)
        assert [random.gauss(0, 1), random.random()] == first
        print(sorted({"torch", "numpy"} & set(sys.modules)))
        """
    )

    assert said == "[]"


def test_a_generator_that_is_imported_later_is_read_from_then_on():
    """A worker may import NumPy with its first sample."""
    run_alone(
        """
        from outlive._worker.randomness import Randomness
        generators = Randomness()
        generators.read()
        import numpy
        numpy.random.randn()
        state = generators.read()
        first = numpy.random.randn(3).tolist()
        generators.set(state)
        assert numpy.random.randn(3).tolist() == first
        """
    )


@pytest.mark.parametrize("kind", ["PCG64", "Philox", "MT19937"])
def test_numpys_bit_generator_may_be_exchanged(kind):
    """np.random.set_bit_generator, before the first look or after it: never the words of the old one."""
    run_alone(
        f"""
        import numpy
        from outlive._worker.randomness import Randomness
        for look_before in (False, True):
            numpy.random.set_bit_generator(numpy.random.MT19937(1))
            generators = Randomness()
            if look_before:
                generators.read()
            numpy.random.set_bit_generator(numpy.random.{kind}(7))
            numpy.random.randn()
            state = generators.read()
            first = numpy.random.randn(3).tolist()
            numpy.random.rand(10)
            generators.set(state)
            assert numpy.random.randn(3).tolist() == first, look_before
        """
    )
