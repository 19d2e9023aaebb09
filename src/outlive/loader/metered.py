"""What is published of a loader.

Reads   machine, engine, door and ledger of a pass.
Writes  through the loader's meter.
Never   holds the iterator: that must be free to go when its last user lets go of it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterable
from typing import Any

from outlive._fleet.machine import Machine
from outlive._fleet.runner import Runner
from outlive._metrics import layout, publishing
from outlive._metrics.metering import Meter
from outlive.engines.metered import Metered, Quietly, Unmetered


class LoaderMetered(Metered):
    """One pass's, or several of workers that persist."""

    _counting = False
    _giving = -1
    _replaced = 0  # when the epoch began

    def begin(self) -> None:
        with Quietly(self.meter):
            self._settle()
            self._counting, self._replaced = True, self.machine.replaced
            self.meter.set_delivered(self.ledger.delivered)
            self.meter.epoch_began(self.ledger.epoch)
            self.words = self.meter.publisher.words

    def end(self) -> None:
        with Quietly(self.meter):
            self.meter.set_delivered(self.ledger.delivered)
            self.meter.epoch_ended()

    def gave(self, seq: int, payload: Any) -> None:
        """This batch is about to be delivered."""
        with self._quietly:
            self._giving = seq
            self.due = self.meter.gave(self.ledger.delivered + 1, payload)

    def flush(self) -> None:
        """After the next task was sent, so that its samples are on the board, too."""
        self.due = False
        with self._quietly:
            self.meter.flush(time.monotonic())
            self.words = self.meter.publisher.words

    def detach(self) -> None:
        with Quietly(self.meter):
            self.end()
            self.meter.detach(self)
            self._settle()
            if self.ledger.watcher == self.saw_incident:
                self.ledger.watcher = None  # it would keep all this

    def _settle(self) -> None:
        """The epoch's samples are counted: the machine begins anew."""
        if self._counting:
            self.meter.samples = self.samples()
            self._counting, self._giving = False, -1

    def samples(self) -> int:
        """What was drawn, less what is under way or was left out."""
        if not self._counting:
            return self.meter.samples
        machine, door = self.machine, self.door
        under_way = sum(door.size_of(seq) for seq in list(door.drawn) if seq != self._giving)
        here: int = machine.drawn - under_way - machine.bad + machine.replaced - self._replaced
        return self.meter.samples + max(0, here)

    def indices(self, batch: int) -> Iterable[int]:
        index = self.door.drawn.get(batch)
        if index is None or self.door.stream:
            return ()
        listed = index if self.door.batched and hasattr(index, "__iter__") else (index,)
        try:
            return [operator.index(i) for i in listed][: layout.LISTED]
        except TypeError:  # their keys are no numbers
            return ()


def attach(loader: Any, runner: Runner, machine: Machine, engine: Any, door: Any) -> Unmetered:
    meter = loader._meter
    if meter is None or not meter.is_mine or meter.publisher.here:
        name = type(loader.dataset).__name__
        limits = {"memory": loader._limits.memory_bytes, "budget": loader._budget}
        publisher = publishing.new("loader", name, len(machine.slots), limits)
        if publisher is None:
            return Unmetered()
        meter = loader._meter = Meter(publisher)
    metered = LoaderMetered(meter, loader._ledger, machine, engine, door, loader._limits.memory_bytes or 0)
    runner.listener = metered.saw
    loader._ledger.watcher = metered.saw_incident
    return metered
