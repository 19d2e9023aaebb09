"""`num_workers="auto"`: watches how an epoch goes, and has the fleet become larger or smaller.

Reads   how long the consumer waits, what the black boxes say that workers do.
Writes  the number of workers that is wanted, to the machine.
Never   changes a batch: random numbers are seeded by batch, so it is the same whoever makes it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Protocol

from outlive import records as r
from outlive._fleet.machine import Machine
from outlive._fleet.sizing import Sizing
from outlive._system.cpus import usable_cpus
from outlive.incident import InHand, Stage

MOST = 64
_LEAST_MOST = 16  # also on a small machine: workers that wait for a disk need no CPU
_PER_CPU = 4
_LOOK_EVERY_S = 0.02


class Sight(Protocol):
    def look(self, slot: int) -> tuple[int | None, InHand | None]: ...


class Auto(int):
    """The most workers that "auto" may have. Who makes another loader from this one's attributes gets "auto" again."""


def is_auto(num_workers: Any) -> bool:
    return isinstance(num_workers, Auto) or num_workers == "auto"


def new_sizing() -> Sizing:
    """For a loader, whose epochs then go on where the last one was."""
    cpus = usable_cpus()
    most = min(MOST, max(_LEAST_MOST, math.ceil(_PER_CPU * cpus)))
    return Sizing(most, at_first=max(1, min(2, math.floor(cpus))))


def check_dataset(is_stream: bool) -> None:
    if is_stream:
        raise ValueError(
            'num_workers="auto" needs a map-style dataset: an IterableDataset is split among a fixed number of '
            "workers; give that number"
        )


class Pacing:
    """Of one pass over a loader."""

    def __init__(self, sizing: Sizing, machine: Machine, sight: Sight) -> None:
        self._sizing = sizing
        self._machine = machine
        self._sight = sight
        self._waited_s = 0.0
        self._idle = 0
        self._next_look = 0.0
        machine.crew.wanted = sizing.size
        sizing.begin_epoch()

    def waited(self, since: float) -> None:
        """The consumer has waited from then until now."""
        self._waited_s += time.monotonic() - since

    def delivered(self) -> r.SizeWanted | None:
        """A batch goes to the consumer; what the machine is to be told, if anything."""
        now = time.monotonic()
        waited_s, self._waited_s = self._waited_s, 0.0
        slots = self._machine.slots
        there = [slot.number for slot in slots if slot.state == "ready"]
        if now >= self._next_look:
            self._next_look = now + _LOOK_EVERY_S
            self._idle = self._count_idle(there)
        if self._machine.crew.capacity < self._sizing.size:
            self._sizing.settle_for(self._machine.crew.capacity)
        size = self._sizing.delivered(now, waited_s, self._idle, len(there))
        return None if size is None else r.SizeWanted(size)

    def _count_idle(self, slots: Sequence[int]) -> int:
        hands = (self._sight.look(slot)[1] for slot in slots)
        return sum(hand is not None and hand.stage is Stage.IDLE for hand in hands)
