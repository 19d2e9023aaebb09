"""Descriptors and threads that become more and more are told from a warm-up, a cache that fills and a sawtooth."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deadlines import wait_until
from outlive import trends
from outlive._capture.blackbox import Reason
from outlive._worker.creep import Creep, Descriptors, Gauge, Threads
from outlive.evidence import Creep as Told
from outlive.evidence import CreepKind


def filling(shards: int) -> Callable[[int], float]:
    """A cache of handles: each batch opens one of so many, drawn at random, unless it is open."""
    return lambda batch: 20 + shards * (1 - math.exp(-batch / shards))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("constant", lambda n: 30),
        ("warming up", lambda n: 30 + min(n, 60)),
        ("a cache of handles that fills", filling(100)),
        ("one jump", lambda n: 30 + (100 if n > 350 else 0)),
        ("sawtooth", lambda n: 30 + n % 80),
        ("noise", lambda n: 30 + random.Random(n).randrange(60)),
        ("falling", lambda n: 900 - n),
    ],
)
def test_health_is_no_creep(name, count):
    """Whatever healthy handles do."""
    assert trends.steady_slope([(n, int(count(n))) for n in range(0, 400, 5)], 16) is None


@pytest.mark.parametrize(
    ("name", "count", "per_batch"),
    [
        ("steady", lambda n: 30 + n, 1.0),
        ("many at once", lambda n: 30 + 8 * n, 8.0),
        ("now and then", lambda n: 30 + n // 8, 0.125),
        ("after a warm-up", lambda n: 30 + min(n, 40) + n, 1.0),
        ("with garbage that is collected", lambda n: 30 + n + n % 30, 1.0),
    ],
)
def test_creep_is_found_with_its_slope(name, count, per_batch):
    """Within a quarter of what it is."""
    found = trends.steady_slope([(n, int(count(n))) for n in range(0, 400, 5)], 16)

    assert found == pytest.approx(per_batch, rel=0.25)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 40)), max_size=80), st.floats(0, 1e6))
def test_any_points_are_judged_without_failing(steps, least):
    """Batches never go back; everything else may do anything."""
    points, batches = [], 0
    for step, count in steps:
        batches += step
        points.append((batches, count))

    found = trends.steady_slope(points, least)

    assert found is None or found > 0 or least <= 0


# ---------------------------------------------------------------- when a worker tells, and when it leaves


class FakeBlackBox:
    """What a worker writes when it leaves."""

    def __init__(self) -> None:
        self.retired: tuple[Reason, int, int] | None = None

    def retire(self, reason: Reason, amount: int, bound: int) -> None:
        self.retired = (reason, amount, bound)


class ScriptedGauge(Gauge):
    kind, reason = CreepKind.DESCRIPTORS, Reason.DESCRIPTORS
    tells_at, leaves_at = 32, 1024

    def __init__(self, counts: Iterator[int], limit: int | None) -> None:
        self.counts = counts
        self.most = limit
        super().__init__()

    def count(self) -> int:
        return next(self.counts)

    def limit(self, now: int) -> int | None:
        return self.most

    def mostly(self) -> tuple[str, ...]:
        return ("9 pipes",)


def live(count: Callable[[int], int], limit: int | None, batches: int) -> tuple[int | None, list[Told], FakeBlackBox]:
    """After which batch a worker with these counts leaves, and what it tells."""
    told: list[Told] = []
    box = FakeBlackBox()
    at = [0]
    gauge = ScriptedGauge((int(count(at[0])) for _ in iter(int, 1)), limit)
    creep = Creep(box, told.append, [gauge])  # type: ignore[arg-type]
    for batch in range(1, batches + 1):
        at[0] = batch
        if creep.is_too_much():
            return batch, told, box
    return None, told, box


@pytest.mark.parametrize(
    ("count", "limit", "leaves_at"),
    [
        (lambda n: 20 + 4 * n, 128, 22),  # 20 + 80 % of 108
        (lambda n: 20 + 25 * n, 128, 4),  # another batch would be too much
        (lambda n: 20 + 40 * n, 128, 2),
        (lambda n: 110 + n, 128, 15),  # what it was born with does not count
        (lambda n: 20 + n, None, 1024),
        (lambda n: 20 + max(0, n - 500) * 4, 128, 522),  # late, after looks had become rare
    ],
)
def test_a_worker_leaves_before_the_limit(count, limit, leaves_at):
    """In time, and not much before."""
    left, told, box = live(count, limit, 3000)

    assert left is not None
    assert leaves_at <= left <= leaves_at + 8
    assert limit is None or count(left) < limit
    assert len(told) == 1
    assert box.retired == (Reason.DESCRIPTORS, count(left), limit or 20 + 1024)


@pytest.mark.parametrize(
    ("count", "limit"),
    [
        (lambda n: 20, 128),
        (lambda n: 20 + (95 if n > 1 else 0), 128),  # a pool that is opened at once, near the limit, and stays
        (lambda n: 20 + 10 * (n % 4), 100),
        (lambda n: filling(900)(n), 65536),
        (lambda n: 20 + n // 40, 65536),
    ],
)
def test_a_healthy_worker_stays(count, limit):
    """However near to its limit it lives."""
    left, _, box = live(count, limit, 3000)

    assert (left, box.retired) == (None, None)


def test_creep_is_told_once_and_early():
    """With what is left."""
    _, told, _ = live(lambda n: 20 + 2 * n, 1024, 200)

    assert told == [Told(CreepKind.DESCRIPTORS, told[0].now, 20, 2.0, told[0].batches, 1024, ("9 pipes",))]
    assert told[0].now < 200
    assert told[0].left == 1024 - told[0].now


# ---------------------------------------------------------------- this process


def test_open_descriptors_are_counted_and_named(tmp_path):
    """As the kernel counts them; files by their folder."""
    gauge = Descriptors()
    opened: list[Any] = [open(tmp_path / str(n), "w") for n in range(7)]  # noqa: SIM115
    opened += [os.fdopen(fd) for fd in os.pipe()]

    risen, named = gauge.look(1), gauge.mostly()
    for file in opened:
        file.close()

    assert risen
    assert gauge.points[-1] == (1, gauge.first + 9)
    assert named == (f"7 files in {tmp_path}", "2 pipes")
    assert gauge.count() == gauge.first == len(os.listdir("/proc/self/fd")) - 1
    gauge.has_size = False  # as before Linux 6.2
    assert gauge.count() == gauge.first


def test_threads_are_counted():
    """Two ways to the same number."""
    gauge, slow = Threads(), Threads()
    slow.has_links = False

    assert wait_until(lambda: gauge.count() == slow.count() >= 1, 10.0)  # others' threads may end in between
    now = gauge.count()
    limit = gauge.limit(now)
    assert limit is None or limit >= now
