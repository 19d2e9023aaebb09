"""A worker's memory over its life: real processes, a clock of our own."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest

from outlive._capture import vitals
from outlive._capture.vitals import INTERVAL_S, Vitals

MIB = 1 << 20
GROWING = """
import sys, threading
kept = []
print(flush=True)
for line in sys.stdin:
    kept.append(bytearray(int(line)))
    kept[-1][:: 4096] = bytes(len(kept[-1][:: 4096]))
    print(flush=True)
"""


@pytest.fixture
def growing() -> Iterator[subprocess.Popen[str]]:
    """A process that takes as much memory as it is told to."""
    with subprocess.Popen(
        [sys.executable, "-c", GROWING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        assert process.stdin is not None
        process.stdin.close()


def grow(process: subprocess.Popen[str], size: int) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{size}\n")
    process.stdin.flush()
    process.stdout.readline()


def test_growth_shows_in_the_samples(growing):
    """Resident and private memory, oldest first, with how long before."""
    seen = Vitals(growing.pid)
    seen.look(100.0)
    grow(growing, 30 * MIB)
    seen.look(1000.0)

    first, last = seen.samples(1010.0)

    assert (first.seconds_before, last.seconds_before) == (910.0, 10.0)
    assert 25 * MIB < last.resident_bytes - first.resident_bytes < 35 * MIB
    assert first.private_bytes is not None
    assert last.private_bytes is not None
    assert 25 * MIB < last.private_bytes - first.private_bytes < 35 * MIB
    assert (seen.threads, seen.descriptors) == (1, 3)


def test_a_look_too_early_is_none(growing):
    """However often the watchman comes by."""
    seen = Vitals(growing.pid)

    for step in range(100):
        seen.look(50.0 + step * INTERVAL_S / 50)

    assert len(seen.samples(60.0)) == 2


def test_a_long_life_is_told_in_as_many_samples_as_a_short_one(growing):
    """The first and the latest are among them, and the spaces between are even."""
    seen = Vitals(growing.pid)

    for step in range(5000):
        seen.look(step * INTERVAL_S)

    times = [sample.seconds_before for sample in seen.samples(5000 * INTERVAL_S)]
    assert 100 <= len(times) <= 241
    assert times == sorted(times, reverse=True)
    assert times[0] > 4900 * INTERVAL_S
    assert times[-1] <= 64 * INTERVAL_S
    gaps = {round(a - b) for a, b in itertools.pairwise(times)}
    assert max(gaps) <= 2 * 32 * INTERVAL_S


def test_a_process_that_is_gone_is_looked_at_without_harm(growing):
    """It may go at any time."""
    seen = Vitals(growing.pid)
    growing.kill()
    growing.wait()

    seen.look(1.0)

    assert seen.samples(2.0) == ()
    assert vitals.own_bytes(growing.pid) is None


@pytest.mark.parametrize(
    ("costs_s", "rest_s", "known_at_each_look"),
    [
        pytest.param([0.001, 3.0, 0.001], 1.0, [True] * 4, id="one look that seemed dear"),
        pytest.param([0.001, 3.0, 3.0], 600.0, [True, True, True, False, True], id="two in a row"),
    ],
)
def test_the_rest_after_a_dear_look_goes_by_the_cheaper_of_two(
    growing, monkeypatch, costs_s, rest_s, known_at_each_look
):
    """A host that takes the processor away for seconds leaves no leak unseen for minutes."""
    spent = list(itertools.accumulate(itertools.chain.from_iterable((0.0, cost) for cost in costs_s)))
    seen = Vitals(growing.pid)
    with monkeypatch.context() as clock:
        clock.setattr(vitals.time, "thread_time", iter(spent).__next__)
        for at in (100.0, 110.0, 120.0):
            assert seen.look(at)

    seen.look(120.0 + rest_s - 0.5)
    seen.look(120.0 + rest_s + 0.5)

    assert [sample.private_bytes is not None for sample in seen.kept] == known_at_each_look
