"""What is published of a fleet: reads machine, engine and ledger for the meter.

Reads   the machine's slots and counts, black boxes through the engine.
Writes  through the meter.
Never   raises into the job.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outlive import records as r
from outlive._fleet import load
from outlive._fleet.machine import Machine
from outlive._forensics.ledger import Ledger
from outlive._metrics import layout
from outlive._metrics.metering import LONG_S, PATIENCE_S, Meter
from outlive._system import cpus
from outlive.engines.exchange import Exchange
from outlive.incident import Incident
from outlive.statistics import Load, in_kernel_words

log = logging.getLogger("outlive")
_monotonic = time.monotonic


class Unmetered:
    """For a job of which nothing is published."""

    patience_s: float | None = None

    def __init__(self) -> None:
        self.words: Any = [sys.maxsize] * (layout.LEFT + 1)
        self.due = False  # it is time to bring everything to the board

    def begin(self) -> None: ...
    def end(self) -> None: ...
    def gave(self, seq: int, payload: Any) -> None: ...
    def flush(self) -> None: ...
    def did(self, count: int, nbytes: int) -> None: ...
    def waited(self, since: float) -> None: ...
    def detach(self) -> None: ...


class Metered(Unmetered):
    """One fleet's."""

    patience_s = PATIENCE_S

    def __init__(self, meter: Meter, ledger: Ledger, machine: Machine, engine: Exchange, door: Any, limit: int) -> None:
        self.meter = meter
        self.ledger = ledger
        self.machine = machine
        self.engine = engine
        self.door = door
        self._limit = limit
        self.words = meter.publisher.words
        self.due = False
        self._quietly = Quietly(meter)
        meter.attach(self)

    # ------------------------------------------------------------ what happens

    def waited(self, since: float) -> None:
        """The consumer has waited since then, and may go on to."""
        now, meter = _monotonic(), self.meter
        took = now - since
        meter.wait_s += took
        if took >= LONG_S or meter.waiting_since:
            with self._quietly:
                meter.waits(since, now)

    def saw(self, record: Any) -> None:
        with Quietly(self.meter):
            if isinstance(record, r.PutInQuarantine):
                self.meter.saw_quarantine(record, self.door.explain(record.incident))
            else:
                self.meter.saw(record)

    def saw_incident(self, incident: Incident) -> None:
        with Quietly(self.meter):
            self.meter.saw_incident(incident)

    # ------------------------------------------------------------ for the meter

    def samples(self) -> int:
        """That were delivered."""
        raise NotImplementedError

    def indices(self, batch: int) -> Iterable[int]:
        raise NotImplementedError

    def counts(self) -> dict[str, int]:
        ledger, machine = self.ledger, self.machine
        return {
            "samples": self.samples(),
            "errored": ledger.errored,
            "emptied": ledger.emptied,
            "restarts": ledger.restarts + machine.restarts,
            "retries": ledger.retries + machine.retries,
            "replaced": ledger.replaced + machine.replaced,
            "recycled": ledger.recycled + machine.recycled,
            "quarantined": sum(self.meter.fold.by_verdict.values()),
            "incidents": ledger.earlier + len(ledger.incidents),
            "workers": machine.crew.capacity,
            "cell_bytes": self.engine.cell_bytes(),
            "cells": self.engine.cells,
            "memory_limit": self._limit,
        }

    def slots(self) -> Sequence[Any]:
        return self.machine.slots

    def box_of(self, slot: int) -> Any:
        return self.engine.box_of(slot)

    def cell_bytes(self, slot: int) -> int:
        return self.engine.cell_bytes(slot)

    def times(self) -> Sequence[int]:
        return self.engine.times()

    def words_now(self) -> tuple[str, Callable[[Sequence[Load]], str]]:
        return self.machine.breaker.words(time.monotonic()), self._advice

    def stuck_words(self) -> str:
        return in_kernel_words(self.engine.stuck)

    def _advice(self, loads: Sequence[Load]) -> str:
        there = cpus.look()
        throttled = cpus.throttled_share(self.ledger.throttling or (), there.throttling)
        workers = self.machine.crew.capacity
        return load.advice(load.Figures(workers, loads, there.usable, there.limit, throttled, self.meter.wait_share))


class Quietly:
    """What goes wrong in here is told, and nothing more is published; the job goes on."""

    __slots__ = ("_meter",)

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        log.warning("this job is published no longer, because of a mistake of ours: %r", error, exc_info=error)
        self._meter.publisher.is_over = True
        return True
