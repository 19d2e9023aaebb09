"""What is published of a loader without workers: the trainer itself makes its batches.

Reads   the ledger; the batches that are given.
Writes  through the loader's meter; what the trainer has in hand, to the slate on its board.
Never   more than a few stores for a batch that is one of thousands a second; never a batch, nor what a dataset sees.

    asked ─► takes ─► (the dataset, sample by sample; collating) ─► gave | failed
          └────────────── where batches come fast, 63 of 64 ──────► passed

Viewers see one slot, «here». Of short batches one in sixteen is timed and has its samples noted one by one.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from outlive import records as r
from outlive._capture.blackbox import Slate
from outlive._forensics.ledger import Ledger
from outlive._metrics import layout, publishing
from outlive._metrics.layout import LEFT
from outlive._metrics.metering import Meter
from outlive._system import ownership
from outlive.engines.metered import Quietly
from outlive.incident import Incident, Stage
from outlive.statistics import Load

# The first loaders of a process are published with their first batch. There may be thousands of later ones: they are
# published when they have lived this long.
PUBLISHED_AT_ONCE = 8
PUBLISH_DELAY_S = 0.25
_FAST_NS, _TOLD_OF_FAST = 1_000_000, 64  # from one batch to the next; of those so fast one in so many is told of
_SHORT_NS, _QUICK_NS, _TIMED_OF_SHORT = 500_000, 20_000, 16  # batches, or samples; of those so short one in so many
_DEEP, _MOST_LOOKED_AT = 8, 64  # that tensors are looked for in a batch, and in how many parts of a part

loader_numbers = itertools.count()  # of this process


class _Slot(NamedTuple):
    """The only one, as the meter asks for slots."""

    number: int = 0
    state: str = "here"
    incarnation: int = 1
    queue: tuple[int, ...] = ()


class _Sized(NamedTuple):
    batch: Any

    @property
    def nbytes(self) -> int:
        return _bytes_of(self.batch)


class _Noted(list[Any]):
    """An index list that tells where it is gone through: as torch's fetcher does it, a sample after another."""

    slate: Slate
    batch = -1
    fast = False  # it takes no longer than to tell of each
    collating_ns = 0  # since when its samples are together

    def __iter__(self) -> Iterator[Any]:
        if self.fast:
            yield from super().__iter__()
        else:
            take = self.slate.take
            for position, index in enumerate(super().__iter__()):
                take(position, index)
                yield index
        self.slate.enter(Stage.COLLATING, self.batch)
        self.collating_ns = time.monotonic_ns()


class Trainer:
    """A fleet of none: what the meter reads. It outlives passes, and holds neither them nor the meter."""

    def __init__(self, publisher: publishing.Publisher, by_verdict: Counter[str], ledger: Ledger) -> None:
        self.samples = 0
        self._publisher = publisher
        self._by_verdict = by_verdict
        self._ledger = ledger
        self.passes = 0
        self.board = publisher.words
        self.slate = Slate(layout.slate(self.board, 1))
        self.slate.own(os.getpid())
        ownership.own(self)

    def move(self) -> None:
        """To the board that others see, once there is one."""
        if self.board is not self._publisher.words:
            self.board = self._publisher.words
            before, self.slate.words = self.slate.words, layout.slate(self.board, 1)
            self.slate.words[:] = before

    def abandon(self) -> None:
        """In a fork of this process: the board is the parent's, and a pass may go on in both."""
        self._publisher.is_over = True
        self._publisher.words = self.board = memoryview(bytearray(8 * len(self.board))).cast("q")
        self.slate.words = layout.slate(self.board, 1)

    def counts(self) -> dict[str, int]:
        ledger = self._ledger
        names = ("errored", "emptied", "restarts", "retries", "replaced", "recycled")
        return {
            **{name: getattr(ledger, name) for name in names},
            "samples": self.samples,
            "quarantined": sum(self._by_verdict.values()),
            "incidents": ledger.earlier + len(ledger.incidents),
        }

    def slots(self) -> Sequence[_Slot]:
        return (_Slot(),)

    def box_of(self, slot: int) -> tuple[Slate, tuple[int, int, int]]:
        return self.slate, (0, -1, -1)

    def cell_bytes(self, slot: int) -> int:
        return 0

    def times(self) -> Sequence[int]:
        return self.slate.times

    def indices(self, batch: int) -> Iterable[int]:
        return ()

    def stuck_words(self) -> str:
        return ""  # there are no workers

    def words_now(self) -> tuple[str, Callable[[Sequence[Load]], str]]:
        breaker = self._ledger.breaker
        return breaker.words(time.monotonic()) if breaker is not None else "closed", lambda loads: ""


class Unseen:
    """A pass of which nothing is published."""

    def begin(self, batch: int) -> None: ...
    def asked(self) -> bool:
        """A batch is asked for; whether the rest is to be told of it, too: else only that it `passed`."""
        return False

    def takes(self, index: Any) -> Any:
        """What the sampler drew, as the fetcher shall get it."""
        return index

    def leaves_to(self, engine: Any, seq: int, index: Any) -> None:
        """As `takes`, where a job does it, and notes by itself which of these samples it has in hand."""

    def gave(self, data: Any, samples: int) -> None:
        """This batch is about to be delivered, with so many samples."""

    def passed(self, data: Any, samples: int) -> None:
        """As `gave`, where batches come fast."""

    def failed(self) -> None:
        """It will not come: the epoch is over, or something was raised."""

    def end(self) -> None:
        """Of the pass, or of its iterator that was left early; not of one after it."""


class Seen(Unseen):
    """One pass."""

    def __init__(self, meter: Meter, trainer: Trainer, ledger: Ledger, *, batched: bool, noted: bool) -> None:
        self._meter = meter
        self._trainer = trainer
        self._ledger = ledger
        self._batched = batched
        self._notes = batched and noted  # samples are taken one by one, in the order of their list
        trainer.passes += 1
        self._mine = trainer.passes
        self.slate = trainer.slate
        self.door: Any = None
        self._batch = 0
        self._asked_ns = 0
        self._fast = 0  # batches before the next that is told of
        self._stands_for = 1  # so many of which it is one
        self._took_s = 0.0  # the last that was told of
        self._untimed = 0  # of those that are told of, before the next that is timed
        self._weight = 1  # so many stand for it
        self._timed: Any = None  # who has the times of the batch in hand

    def begin(self, batch: int) -> None:
        self._batch = batch - 1
        self.slate.rest(time.monotonic_ns())
        with Quietly(self._meter):
            publisher = self._meter.publisher
            if not publisher.holds_until:
                publisher.make()
            self._trainer.move()
            self._meter.set_delivered(self._ledger.delivered)
            self._meter.epoch_began(self._ledger.epoch)

    # ------------------------------------------------------------ a batch

    def asked(self) -> bool:
        batch = self._batch = self._batch + 1
        self._fast -= 1
        if self._fast >= 0:
            self.slate.ask(batch)
            return False
        now = time.monotonic_ns()
        fast = self._asked_ns and now - self._asked_ns < _FAST_NS * self._stands_for
        self._settle()
        self._stands_for = _TOLD_OF_FAST if fast else 1
        self._asked_ns = now
        self.slate.ask(batch, now)
        return True

    def takes(self, index: Any) -> Any:
        self._untimed -= 1
        if self._untimed >= 0:
            return index
        self._timed = self
        if self._notes and type(index) is list:
            self._timed = index = _Noted(index)
            index.slate, index.batch, index.fast = self.slate, self._batch, self._stands_for > 1
            self.slate.enter(Stage.FETCHING, self._batch)
        elif type(index) is int and not self._batched:
            self.slate.enter(Stage.FETCHING, self._batch)
            self.slate.take(0, index)
        return index

    collating_ns = 0  # where it is this that has the times: nobody can say

    def leaves_to(self, engine: Any, seq: int, index: Any) -> None:
        self._batch = seq  # one before it may have lost all its samples
        engine.box = self.slate
        self._untimed -= 1
        engine.timed = self._untimed < 0
        if not engine.timed:
            return
        self._timed = engine
        engine.collating_ns = engine.sending_ns = 0
        listed = index[: layout.LISTED] if self._batched and isinstance(index, list) else (index,)
        with contextlib.suppress(TypeError, OverflowError):  # their keys are no numbers
            layout.write_list(self._trainer.board, 0, 0, seq, listed)

    def gave(self, data: Any, samples: int) -> None:
        now = time.monotonic_ns()
        took = now - self._asked_ns
        self.slate.rest(now)
        self._took_s = took * 1e-9
        self._meter.wait_s += self._took_s
        self._fast = self._stands_for - 1
        if self._timed is not None:
            who, self._timed = self._timed, None
            collating = who.collating_ns or now
            self.slate.note_made(collating - self._asked_ns, now - collating, self._weight)
            short = took < _SHORT_NS or took < _QUICK_NS * samples
            self._weight = self._stands_for if self._fast else _TIMED_OF_SHORT if short else 1
            self._untimed = 0 if self._fast else self._weight - 1
        self._count(data, samples)

    def passed(self, data: Any, samples: int) -> None:
        self.slate.rest()
        self._count(data, samples)

    def _count(self, data: Any, samples: int) -> None:
        trainer = self._trainer
        trainer.samples += samples
        board = trainer.board
        left = board[LEFT] = board[LEFT] - 1
        if left > 0:
            return
        with Quietly(self._meter):
            if self._meter.gave(self._ledger.delivered, _Sized(data)):
                self._meter.flush(time.monotonic())
            trainer.move()

    def _settle(self) -> None:
        """Batches that passed since the last one that was told of took as long as it did."""
        self._meter.wait_s += self._took_s * (self._stands_for - 1 - max(0, self._fast))
        self._stands_for, self._fast = 1, 0

    def failed(self) -> None:
        self._settle()
        self._timed = None
        self.slate.rest(time.monotonic_ns())

    # ------------------------------------------------------------ the rest

    def saw(self, record: Any) -> None:
        with Quietly(self._meter):
            if isinstance(record, r.PutInQuarantine):
                self._meter.saw_quarantine(record, self.door.explain(record.incident))
            elif isinstance(record, r.GiveUp):
                self._meter.saw(record)
            self._trainer.move()

    def end(self) -> None:
        if self._mine != self._trainer.passes:
            return
        with Quietly(self._meter):
            self._settle()
            self._meter.set_delivered(self._ledger.delivered)
            self._meter.epoch_ended()
            self._trainer.move()


def attach(loader: Any, iterator: Any, *, batched: bool, noted: bool) -> Unseen:
    """`noted`: samples are fetched one by one, in the order of their list."""
    meter = loader._meter
    if meter is None or not meter.is_mine or not meter.publisher.here:
        publisher = publishing.new("loader", type(loader.dataset).__name__, 1, {}, here=True)
        if publisher is None:
            return Unseen()
        if next(loader_numbers) >= PUBLISHED_AT_ONCE:
            publisher.holds_until = time.monotonic() + PUBLISH_DELAY_S
        meter = loader._meter = Meter(publisher)
        meter.attach(Trainer(publisher, meter.fold.by_verdict, loader._ledger))
    seen = Seen(meter, meter.fleet, loader._ledger, batched=batched, noted=noted)
    loader._ledger.watcher = _watcher(weakref.ref(meter))
    weakref.finalize(iterator, seen.end).atexit = False
    return seen


def _watcher(known: weakref.ref[Meter]) -> Callable[[Incident], None]:
    """For the ledger, which the meter's own fleet reads: it must not keep the meter."""

    def saw(incident: Incident) -> None:
        meter = known()
        if meter is not None:
            with Quietly(meter):
                meter.saw_incident(incident)

    return saw


def samples_in(batch: Any, most: int) -> int:
    """Of a stream's last batch, which may have fewer than were asked for."""
    for _ in range(_DEEP):
        if isinstance(batch, Mapping) and batch:
            batch = next(iter(batch.values()))
        elif isinstance(batch, (tuple, list)) and batch and not isinstance(batch[0], (str, bytes, int, float)):
            batch = batch[0]
        else:
            break
    try:
        return min(most, len(batch))
    except TypeError:
        return most


def _bytes_of(batch: Any, deep: int = _DEEP) -> int:
    """Of tensors, arrays and texts in it; of a long list from its first elements."""
    try:
        nbytes = getattr(batch, "nbytes", None)
    except Exception:  # of a class of the user's, which may raise anything
        return 0
    if isinstance(nbytes, int):
        return nbytes
    if isinstance(batch, (str, bytes)):
        return len(batch)
    if isinstance(batch, Mapping):
        batch = list(itertools.islice(batch.values(), _MOST_LOOKED_AT))
    if not deep or not isinstance(batch, (tuple, list)) or not batch:
        return 0
    some = batch[:_MOST_LOOKED_AT]
    return round(sum(_bytes_of(value, deep - 1) for value in some) * len(batch) / len(some))
