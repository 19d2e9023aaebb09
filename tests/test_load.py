"""What workers do with their time: the shares that follow from two looks, and the one line of advice."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlive._capture import blackbox
from outlive._capture.blackbox import BlackBox
from outlive._capture.load import LoadMeter, LoadReading, shares
from outlive._fleet.load import Figures, advice
from outlive._system import nameless
from outlive.incident import Stage
from outlive.statistics import Load

SECOND = 1_000_000_000


@pytest.fixture
def box() -> Iterator[BlackBox]:
    fd = nameless.descriptor(blackbox.SIZE, "test")
    made = BlackBox(nameless.attach(fd))
    os.close(fd)
    yield made
    made.release()


def load(on_cpu=0.0, starved=0.0, waiting=0.0, idle=0.0, disk=0.0, seconds=5.0) -> Load:
    return Load(on_cpu, starved, waiting, idle, disk, seconds)


@pytest.mark.parametrize(
    ("figures", "told"),
    [
        (Figures(8, [load(on_cpu=0.9)] * 8, 8.0), ""),
        (Figures(8, [load(on_cpu=0.2, waiting=0.4, idle=0.4)] * 8, 8.0), ""),
        (Figures(2, [], 8.0), ""),
        (Figures(8, [load(starved=0.9)] * 3, 8.0), ""),  # most have not been looked at
        (Figures(2, [load(starved=0.9, seconds=1.0)] * 2, 1.0), ""),  # too early
        (
            Figures(8, [load(on_cpu=0.2, starved=0.8)] * 8, 2.0, 2.0, 0.83),
            "the container's CPU limit of 2 throttles workers in 83% of periods: num_workers=2, or raise the limit",
        ),
        (
            Figures(8, [load(on_cpu=0.2, waiting=0.8)] * 8, 2.5, 2.5, 0.5),
            "the container's CPU limit of 2.5 throttles workers in 50% of periods: num_workers=2, or raise the limit",
        ),
        (
            Figures(2, [load(on_cpu=1.5, starved=0.1)] * 2, 2.0, 2.0, 0.4),
            "the container's CPU limit of 2 throttles workers in 40% of periods: fewer threads in each worker "
            "(worker_threads=1), or raise the limit",
        ),
        (Figures(2, [load(on_cpu=0.8)] * 2, 2.0, 2.0, 0.01), ""),
        (
            Figures(8, [load(on_cpu=0.25, starved=0.71)] * 8, 2.0),
            "8 workers share 2 CPUs and waited 71% of their time for one: num_workers=2 would do as much, or give the "
            "job more CPUs",
        ),
        (
            Figures(3, [load(on_cpu=0.3, starved=0.6)] * 3, 0.5),
            "3 workers share 0.5 CPUs and waited 60% of their time for one: num_workers=1 would do as much, or give "
            "the job more CPUs",
        ),
        (
            Figures(2, [load(on_cpu=0.5, starved=0.5)] * 2, 8.0),
            "workers waited 50% of their time for a CPU, although there are 8 for 2 workers: other processes, or "
            "threads of the trainer, take them",
        ),
        (
            Figures(2, [load(on_cpu=0.3, waiting=0.64, disk=0.6)] * 2, 8.0),
            "workers wait 64% of their time for disks: more workers (now 2), or faster storage",
        ),
        (
            Figures(2, [load(on_cpu=0.3, waiting=0.64)] * 2, 8.0),
            "workers wait 64% of their time for reads, answers or locks: more workers (now 2), or a faster source",
        ),
        (
            Figures(8, [load(on_cpu=0.2, idle=0.8)] * 8, 8.0, 8.0, 0.5),  # a limit that nobody suffers from
            "workers are idle 80% of their time, for the loader waits for you: num_workers=2 would do",
        ),
        (Figures(1, [load(on_cpu=0.1, idle=0.9)], 8.0), ""),  # fewer than one is none
        (
            Figures(2, [load(on_cpu=0.97)] * 2, 8.0),
            "workers compute 97% of their time, and there are 8 CPUs: more workers (now 2) would use them",
        ),
        (Figures(2, [load(on_cpu=0.97)] * 2, 3.0), ""),  # one is the trainer's
        (Figures(2, [load(on_cpu=0.97)] * 2, 8.0, waits=0.01), ""),  # they keep up with it
        (Figures(2, [load(on_cpu=0.3, waiting=0.64)] * 2, 8.0, waits=0.09), ""),
        (
            Figures(2, [load(on_cpu=0.3, waiting=0.64)] * 2, 8.0, waits=0.1),
            "workers wait 64% of their time for reads, answers or locks: more workers (now 2), or a faster source",
        ),
        (
            Figures(8, [load(on_cpu=0.2, idle=0.8)] * 8, 8.0, waits=0.01),
            "workers are idle 80% of their time, for the loader waits for you: num_workers=2 would do",
        ),
    ],
)
def test_one_line_of_advice_follows_from_the_figures(figures, told):
    """The first thing that is wrong, with the number to set; nothing where nothing is."""
    assert advice(figures) == told


AMOUNT = st.floats(0, 2, allow_nan=False)


@given(
    st.integers(1, 64),
    st.lists(st.builds(Load, AMOUNT, AMOUNT, AMOUNT, AMOUNT, AMOUNT, st.floats(0, 10)), max_size=8),
    st.floats(0.01, 256),
    st.none() | st.floats(0.01, 256),
    st.none() | st.floats(0, 1),
    st.none() | st.floats(0, 1),
)
def test_any_figures_make_one_line_at_most(workers, loads, cpus, limit, throttled, waits):
    """Whatever was measured."""
    told = advice(Figures(workers, loads, cpus, limit, throttled, waits))

    assert "\n" not in told
    assert "num_workers=0" not in told


@pytest.mark.parametrize(
    ("later", "expected"),
    [
        (LoadReading(SECOND, SECOND, 0, SECOND, 0, False), load(on_cpu=1.0)),
        (LoadReading(SECOND, SECOND // 4, SECOND // 2, 0, 0, False), load(on_cpu=0.25, starved=0.5, waiting=0.25)),
        (LoadReading(SECOND, 0, 0, 0, SECOND, False), load(idle=1.0)),
        (LoadReading(SECOND, 0, 0, 0, 0, True), load(waiting=1.0, disk=0.5)),
        (LoadReading(SECOND, 0, 0, 4 * SECOND, 0, False), load(on_cpu=4.0)),  # its threads work, it waits for them
        (LoadReading(SECOND, 0, 5 * SECOND, 0, SECOND, False), load(starved=1.0)),  # clocks that disagree
        (LoadReading(SECOND, 0, 0, 0, -SECOND, False), load(waiting=1.0)),
    ],
)
def test_shares_follow_from_two_looks(later, expected):
    """They add up, whatever the clocks of the kernel and of the worker say."""
    found = shares(deque([LoadReading(0, 0, 0, 0, 0, False), later]))

    assert found is not None
    assert (found.on_cpu, found.starved, found.waiting, found.idle, found.disk, found.seconds) == pytest.approx(
        (expected.on_cpu, expected.starved, expected.waiting, expected.idle, expected.disk, 1.0)
    )
    assert shares(deque([later])) is None


def test_time_is_told_where_the_kernel_keeps_no_queues(monkeypatch, box):
    """As in gVisor: what computes is seen, what starves is not."""
    meter = LoadMeter(os.getpid())
    told = [["S", *[b"0"] * 10, str(ticks).encode(), b"0"] for ticks in (0, 50)]
    monkeypatch.setattr(meter, "pid", "no such process")

    assert meter.look(10.0, box, told[0]) is None
    found = meter.look(11.0, box, told[1])

    assert found is not None
    assert (found.on_cpu, found.starved, found.waiting) == pytest.approx((0.5, 0.0, 0.5))


def test_the_black_box_carries_load_and_idle_time(box):
    """Written by the watchman, or by the worker, and read by anybody."""
    assert (box.load, box.counts, box.idle_ns(5)) == (None, (None, None), 0)

    box.enter(Stage.IDLE)
    begun = box.mark[3]
    assert box.idle_ns(begun + 7) == 7
    box.note_idle()
    box.enter(Stage.FETCHING, 0, 0)
    over = box.idle_ns(begun + SECOND)
    box.note_load(load(0.25, 1 / 3, 0.5, 0.1, 0.2, 4.5))
    box.note_counts(31, 2)

    assert 0 < over < 60 * SECOND
    assert box.idle_ns(begun + 100 * SECOND) == over
    assert box.load == load(0.25, 0.333333, 0.5, 0.1, 0.2, 4.5)
    assert box.counts == (31, 2)
