"""`num_workers="auto"` against fleets whose best size is known: time is a number here.

Reads   which size is asked for.
Writes  what a fleet of that size would deliver.
Never   a process, a clock.
"""

from __future__ import annotations

import random

import pytest

from outlive._fleet.sizing import HOLD_S, Sizing


class SimulatedWorkers:
    """Batches take `work_s` in a worker, of which `cpu_s` on one of so many CPUs; the consumer takes `step_s`."""

    def __init__(self, *, cpus: int = 2, work_s: float = 0.1, cpu_s: float = 0.1, step_s: float = 0.0) -> None:
        self.cpus, self.work_s, self.cpu_s, self.step_s = cpus, work_s, cpu_s, step_s
        self.now = 0.0
        self.chance = random.Random(1)

    def made_per_s(self, size: int) -> float:
        crowding = 1.0 - 0.01 * max(0, size - self.cpus)  # too many are in each other's way
        return min(size / self.work_s, self.cpus * crowding / self.cpu_s)

    def run(self, sizing: Sizing, seconds: float) -> int:
        """Deliver for so long; the size it ends with."""
        end = self.now + seconds
        while self.now < end:
            size = sizing.size
            make_s = self.chance.uniform(0.95, 1.05) / self.made_per_s(size)
            waited_s = max(0.0, make_s - self.step_s)
            self.now += max(make_s, self.step_s)
            idle = round(size * max(0.0, 1 - make_s / self.step_s)) if self.step_s else 0
            sizing.delivered(self.now, waited_s, idle, size)
        return sizing.size

    def best(self, most: int) -> float:
        return max(min(self.made_per_s(n), 1 / self.step_s if self.step_s else 1e9) for n in range(1, most + 1))

    def speed(self, size: int) -> float:
        return min(self.made_per_s(size), 1 / self.step_s if self.step_s else 1e9)


@pytest.mark.parametrize("cpus", [1, 2, 3, 8, 32])
@pytest.mark.parametrize("share", [0.02, 0.1, 0.3, 1.0])
@pytest.mark.parametrize("step", [0.0, 0.3, 1.0, 5.0])
def test_the_size_found_is_nearly_the_best(cpus, share, step):
    """Whether the CPU, the disk or the consumer sets the pace; from small beginnings, within an epoch."""
    fleet = SimulatedWorkers(cpus=cpus, cpu_s=0.1 * share, step_s=0.1 * step / cpus)
    sizing = Sizing(most=max(16, 4 * cpus), at_first=2)

    found = fleet.run(sizing, 60.0)

    assert fleet.speed(found) >= 0.9 * fleet.best(sizing.most)


def test_unneeded_workers_are_not_kept():
    """The consumer takes as long as one worker does."""
    assert SimulatedWorkers(cpus=8, step_s=0.12).run(Sizing(16, 8), 100.0) <= 2


def test_it_follows_when_the_work_changes():
    fleet = SimulatedWorkers(cpus=8, cpu_s=0.01, step_s=0.05)
    sizing = Sizing(16, 2)
    few = fleet.run(sizing, 60.0)
    fleet.work_s = 0.5
    fleet.now += 8 * HOLD_S

    assert few <= 4
    assert fleet.run(sizing, 60.0) >= 8


def test_no_judgement_while_workers_are_on_the_way():
    sizing = Sizing(16, 2)

    assert all(sizing.delivered(n, 0.9, 0, 1) is None for n in range(100))
    assert any(sizing.delivered(n, 0.9, 0, 2) == 4 for n in range(100, 200))


def test_a_size_limited_by_memory_stays():
    sizing = Sizing(16, 8)
    sizing.settle_for(3)

    assert sizing.size == 3
    assert any(sizing.delivered(n, 0.9, 0, 3) for n in range(100))
