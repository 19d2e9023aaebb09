"""Counts what a job does while it does it, and brings it to the board a few times a second.

Reads   machine, engine and ledger of a loader or pool, when it is time to.
Writes  through its publisher.
Never   a thread; never more per batch than a subtraction and a store, nor a look at the clock for each.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from outlive import records as r
from outlive._metrics import history, layout
from outlive._metrics.fold import Fold
from outlive._metrics.publishing import Publisher
from outlive.incident import Incident
from outlive.statistics import Load

SOON_S, LATE_S = 0.02, 0.25  # between two times that the whole board is written, by how long that takes:
_SHARE = 1000  # a so manieth part of the time, between these bounds
PATIENCE_S = 0.25  # a longer wait is told while it lasts
LONG_S = 0.9 * PATIENCE_S
_ADVISE_S = 3.0  # between two looks at groups and their limits, for advice
_CHECK_S = 0.01  # between two looks at the clock, where batches come faster;
_MOST_BETWEEN = 16  # and never more batches: they may come slowly from now on
_SEQUENCE, _LEFT, _BASE = layout.SEQUENCE, layout.LEFT, layout.BASE


class Fleet(Protocol):
    """What is read of a loader or a pool whose workers are at work."""

    def counts(self) -> dict[str, int]:
        """Of `layout.COUNTS` those that it knows; the rest is the meter's."""
        ...

    def slots(self) -> Sequence[Any]:
        """The machine's."""
        ...

    def box_of(self, slot: int) -> Any: ...
    def cell_bytes(self, slot: int) -> int: ...
    def times(self) -> Sequence[int]: ...
    def indices(self, batch: int) -> Iterable[int]:
        """The samples of a batch, where they have numbers."""
        ...

    def words_now(self) -> tuple[str, Callable[[Sequence[Load]], str]]:
        """The breaker's state; and what makes advice of loads."""
        ...

    def stuck_words(self) -> str:
        """Workers that are stuck in the kernel; empty for none."""
        ...


class Meter:
    """Of one loader or pool, for all its life."""

    def __init__(self, publisher: Publisher) -> None:
        self.publisher = publisher
        self.fold = Fold()
        self.wait_s = 0.0
        self.bytes = 0
        self.samples = 0  # of epochs that are over
        self.fleet: Fleet | None = None
        self.owner = os.getpid()
        self._delivered = 0  # when last looked
        self._each_bytes = -1  # of a batch, when last looked; -1: nobody has
        self._times = [0] * layout.TIMES  # of fleets that are gone
        self._epoch_since = 0.0
        self._epochs_s = 0.0
        self._epoch = 0
        self._checked = self._flushed = self._slow_at = self._advise_at = 0.0
        self._began = time.monotonic()
        self._pause_s = SOON_S
        self._every = 1  # batches between two looks at the clock
        self.waiting_since = 0.0
        self._told_waiting = False  # which is no longer so with the next batch
        self._lists: dict[int, list[int]] = {}  # slot → batches whose samples are on the board
        self._advice = self._breaker = ""
        self.wait_share: float | None = None  # the share of its time that the consumer waited lately
        self._judged = (0.0, 0.0)  # its wait and all its time, when that was last judged

    # ------------------------------------------------------------ batches

    def gave(self, delivered: int, payload: Any) -> bool:
        """So many batches were delivered, the last one was this; called when «left» has come down to nothing. Whether
        it is time to write the whole board."""
        now = time.monotonic()
        as_now = int(self._every * _CHECK_S / max(now - self._checked, 1e-9))
        every = self._every = max(1, min(_MOST_BETWEEN, 2 * self._every, as_now))
        self._checked = now
        words = self.publisher.words
        sequence = words[_SEQUENCE] + 1
        words[_SEQUENCE] = sequence
        words[_LEFT] = every
        words[_BASE] = delivered + every
        words[_SEQUENCE] = sequence + 1
        due = now - self._flushed >= self._pause_s or self._told_waiting or self._each_bytes < 0
        if due:
            self._each_bytes = payload.nbytes
            self._count(delivered)
        return due

    def _count(self, delivered: int) -> None:
        """Batches since the last look are taken to be as large as the one that was looked at."""
        self.bytes += max(0, self._each_bytes) * max(0, delivered - self._delivered)
        self._delivered = delivered

    def did(self, delivered: int, nbytes: int) -> None:
        """As `gave`, where sizes are known and batches are few."""
        self.bytes += nbytes
        now = time.monotonic()
        if now - self._flushed >= self._pause_s:
            self.set_delivered(delivered)
            self.flush(now)

    def set_delivered(self, delivered: int) -> None:
        words = self.publisher.words
        words[layout.SEQUENCE] += 1
        words[layout.LEFT] = 1
        words[layout.BASE] = delivered + 1
        words[layout.SEQUENCE] += 1
        self._count(delivered)

    def rested(self, since: float) -> None:
        """Nothing has happened since then; it is nobody's wait."""
        now = time.monotonic()
        if now - since >= LONG_S:
            self.flush(now)

    def waits(self, since: float, now: float) -> None:
        """The consumer waits for long, since then, or does so no longer."""
        if now - since < LONG_S:
            self.waiting_since = 0.0
            return
        self.waiting_since = self.waiting_since or since
        self.flush(now)

    # ------------------------------------------------------------ what happens

    def saw(self, record: Any) -> None:
        """An event or an action that is not of every batch."""
        told = self.fold.event(record)
        self.publisher.tell(told, now=not isinstance(record, (r.StartWorker, r.WorkerReady)))

    def saw_quarantine(self, record: r.PutInQuarantine, incident: Incident) -> None:
        self.publisher.tell(self.fold.event(record, incident))
        self._slow_at = 0.0
        self.flush(time.monotonic())

    def saw_incident(self, incident: Incident) -> None:
        self.publisher.tell(self.fold.incident(incident))
        self.flush(time.monotonic())

    def epoch_began(self, epoch: int) -> None:
        self.epoch_ended()
        self._epoch, self._epoch_since = epoch, time.monotonic()
        self.publisher.tell([{"kind": "epoch-began", "epoch": epoch}], now=False)

    def epoch_ended(self) -> None:
        if not self._epoch_since:
            return
        self._epochs_s += time.monotonic() - self._epoch_since
        self._epoch_since = self.waiting_since = 0.0
        self.publisher.tell([{"kind": "epoch-ended", "epoch": self._epoch, "delivered": self._delivered}], now=False)
        self._slow_at = 0.0
        self.flush(time.monotonic())

    def attach(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def detach(self, fleet: Fleet) -> None:
        """Its workers are about to go; what they counted stays."""
        if self.fleet is fleet:
            self.flush(time.monotonic(), closing=True)
            self._times = self.times()
            self.fleet = None

    def times(self) -> list[int]:
        here = self.fleet.times() if self.fleet is not None else ()
        return [a + b for a, b in zip(self._times, here)] if here else list(self._times)

    def figures(self) -> dict[str, Any]:
        """What `statistics()` tells beside what the ledger counts."""
        samples = self.fleet.counts()["samples"] if self.fleet is not None else self.samples
        return {
            "samples": samples,
            "bytes": self.bytes,
            "wait_seconds": self.wait_s,
            "trainer_seconds": self.trainer_s,
            "by_verdict": dict(self.fold.by_verdict),
            "histograms": layout.histograms(self.times()),
        }

    @property
    def is_mine(self) -> bool:
        """Not that of the process which this one was forked from."""
        return os.getpid() == self.owner

    @property
    def trainer_s(self) -> float:
        """How long the trainer was in epochs and did not wait."""
        now = time.monotonic()
        return max(0.0, self._epochs_s + (now - self._epoch_since if self._epoch_since else 0.0) - self.wait_s)

    # ------------------------------------------------------------ the board

    def flush(self, now: float, *, closing: bool = False) -> None:
        publisher, fleet = self.publisher, self.fleet
        if publisher.is_over or fleet is None or os.getpid() != self.owner:
            return
        self._flushed = now
        self._told_waiting = self.waiting_since != 0.0
        if publisher.folder is None:
            if now < publisher.holds_until:
                return
            publisher.make()
            if publisher.is_over:
                return
        words = publisher.words
        self._count(max(self._delivered, words[layout.BASE] - words[layout.LEFT]))
        slowly = closing or now >= self._slow_at
        counts = self._counts(fleet, now)
        words[layout.SEQUENCE] += 1
        try:
            layout.write_counts(words, [counts.get(name, 0) for name in layout.COUNTS])
            loads = self._write_rows(words, fleet, closing)
            if slowly:
                self._slow_at = now + history.TICK_S
                layout.write_times(words, self.times())
                self._breaker, advice = fleet.words_now()
                if now >= self._advise_at or (closing and loads):
                    self._advise_at = now + _ADVISE_S
                    self._judge_wait(now)
                    self._advice = advice(loads)
                layout.write_text(words, "breaker", self._breaker)
                layout.write_text(words, "advice", self._advice)
                layout.write_text(words, "stuck", fleet.stuck_words())
                layout.write_text(words, "by_verdict", json.dumps(self.fold.by_verdict))
        finally:
            words[layout.SEQUENCE] += 1
        self._pause_s = min(LATE_S, max(SOON_S, _SHARE * (time.monotonic() - now)))
        if now >= publisher.tick_at and publisher.has_history:
            publisher.tick_at = history.next_tick(self._began, now)
            publisher.tell([self._tick(counts)])

    def _judge_wait(self, now: float) -> None:
        spent = self._epochs_s + (now - self._epoch_since if self._epoch_since else 0.0)
        wait = self.wait_s + (now - self.waiting_since if self.waiting_since else 0.0)
        before, spent_before = self._judged
        if spent > spent_before:
            self._judged = wait, spent
            self.wait_share = max(0.0, wait - before) / (spent - spent_before)

    def _counts(self, fleet: Fleet, now: float) -> dict[str, int]:
        return {
            **fleet.counts(),
            "time_ns": time.time_ns(),
            "clock_ns": time.monotonic_ns(),
            "epoch": self._epoch,
            "bytes": self.bytes,
            "wait_ns": round(self.wait_s * 1e9),
            "waiting_since_ns": round(self.waiting_since * 1e9),
            "epoch_since_ns": round(self._epoch_since * 1e9),
            "epochs_ns": round(self._epochs_s * 1e9),
        }

    def _write_rows(self, words: Any, fleet: Fleet, closing: bool) -> list[Load]:
        loads = []
        for slot in fleet.slots()[: self.publisher.slots]:
            number = slot.number
            state = layout.STATES.index("closed" if closing else slot.state)
            looked = None if closing else fleet.box_of(number)
            if looked is None:
                layout.write_row(words, number, [slot.incarnation, state, *[0] * (len(layout.ROW) - 2)])
                continue
            box, held = looked
            try:
                row, load = row_of(box)
            except ValueError:  # it was just put away
                continue
            row[: layout.ROW.index("stage")] = [slot.incarnation, state, row[2], *held, len(slot.queue)]
            row[-1] = fleet.cell_bytes(number)
            layout.write_row(words, number, row)
            if load is not None:
                loads.append(load)
            self._write_lists(words, fleet, slot)
        return loads

    def _write_lists(self, words: Any, fleet: Fleet, slot: Any) -> None:
        kept = self._lists.setdefault(slot.number, [-1] * layout.LISTS)
        wanted = list(slot.queue)[: layout.LISTS]
        for batch in wanted:
            if batch not in kept:
                place = next(n for n, old in enumerate(kept) if old not in wanted)
                kept[place] = batch
                layout.write_list(words, slot.number, place, batch, fleet.indices(batch))

    def _tick(self, counts: dict[str, int]) -> dict[str, Any]:
        slots = []
        fleet = self.fleet
        assert fleet is not None
        for slot in fleet.slots()[: self.publisher.slots]:
            looked = fleet.box_of(slot.number)
            if looked is None:
                continue
            try:
                box = looked[0]
                _, private, shared, _ = box.memory
                load, doing = box.load, box.in_hand().stage.name.lower()
            except ValueError:
                continue
            told: dict[str, Any] = {"slot": slot.number, "incarnation": slot.incarnation, "doing": doing}
            if private:
                told |= {"private": private, "shared": shared}
            if load is not None:
                told["cpu"] = round(load.on_cpu, 3)
            slots.append(told)
        names = ("restarts", "retries", "recycled", "quarantined", "incidents", "workers", "samples", "bytes")
        return {
            "kind": "tick",
            "delivered": self._delivered,
            "wait_seconds": round(self.wait_s, 3),
            "trainer_seconds": round(self.trainer_s, 3),
            **{name: counts.get(name, 0) for name in names},
            "cells": counts.get("cell_bytes", 0),
            "slots": slots,
        }


def row_of(box: Any) -> tuple[list[int], Load | None]:
    """A slot's row as far as its black box has it; load in millionths."""
    hand, load = box.in_hand(), box.load
    resident, private, shared, slope = box.memory
    descriptors, threads = box.counts
    since = time.monotonic_ns() - round(hand.seconds * 1e9)
    shares = (0, 0, 0, 0, 0, 0)
    if load is not None:
        told = (load.on_cpu, load.starved, load.waiting, load.idle, load.disk, load.seconds)
        shares = tuple(round(value * 1_000_000) for value in told)
    row = [0, 0, box.pid, 0, -1, -1, 0, int(hand.stage), hand.batch, hand.position, since]
    row += [-1 if hand.stand_in is None else hand.stand_in, resident, private, shared, slope]
    row += [descriptors or 0, threads or 0, *shares, round(1000 * (box.limit_s or 0)), 0]
    return row, load
