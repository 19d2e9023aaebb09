"""What is published of a pool.

Reads   machine, engine, door and ledger.
Writes  through its meter.
Never   the pool object, nor what tasks are given or return.
"""

from __future__ import annotations

from collections.abc import Iterable

from outlive._fleet.runner import Runner
from outlive._forensics.ledger import Ledger
from outlive._metrics import layout, publishing
from outlive._metrics.metering import Meter
from outlive.engines.exchange import Exchange
from outlive.engines.metered import Metered, Quietly, Unmetered
from outlive.pool.door import Door


class PoolMetered(Metered):
    _done = 0

    def begin(self) -> None:
        with Quietly(self.meter):
            self.meter.epoch_began(0)

    def did(self, count: int, nbytes: int) -> None:
        """So many more tasks are done, and this is how large their results are."""
        self._done += count
        with Quietly(self.meter):
            self.meter.did(self._done, nbytes)

    def waited(self, since: float) -> None:
        """The pool's own thread has, which costs nobody anything."""
        with Quietly(self.meter):
            self.meter.set_delivered(self._done)
            self.meter.rested(since)

    def detach(self) -> None:
        with Quietly(self.meter):
            self.meter.set_delivered(self._done)
            self.meter.epoch_ended()
            self.meter.detach(self)
            self.meter.publisher.end()

    def samples(self) -> int:
        return self._done

    def indices(self, batch: int) -> Iterable[int]:
        """Tasks by their number, in the order of submission."""
        chunk = self.door.chunks.get(batch)
        if chunk is None:
            return ()
        numbers = (item.number + row for item in chunk.items for row in range(len(item.rows)))
        return [number for number, _ in zip(numbers, range(layout.LISTED))]


def attach(ledger: Ledger, runner: Runner, engine: Exchange, door: Door, memory: int | None) -> Unmetered:
    machine = runner.machine
    publisher = publishing.new("pool", "Pool", len(machine.slots), {"memory": memory})
    if publisher is None:
        return Unmetered()
    metered = PoolMetered(Meter(publisher), ledger, machine, engine, door, memory or 0)
    runner.listener = metered.saw
    ledger.watcher = metered.saw_incident
    return metered
