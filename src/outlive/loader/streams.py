"""What a worker does for an iterable dataset: take samples as they come, and know where it stands.

Reads   the dataset's iterator.
Writes  batches; after each one, its place in the stream, from which a replacement goes on.
Never   a sample twice, nor one less without saying so.

After a death the next worker restores the dataset's own snapshot (`state_dict`) and goes on, or starts the
iterator again and takes as many samples as were taken before. A sample that kills the worker
inside `__next__` can be stepped over only if the iterator offers `skip(n)`.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from outlive._transport import wire
from outlive._worker import failures
from outlive._worker.loop import Restored, StreamEnded, TaskFailed
from outlive.incident import Decision, Failure, Stage
from outlive.loader import tasks
from outlive.loader.dataset_keeper import DatasetKeeper
from outlive.loader.jobs import Again, JobSettings, LoaderJob, is_stateful

log = logging.getLogger("outlive")

# A snapshot is taken when the time since the last one is this many times what one costs.
_SNAPSHOT_EVERY = 20


_CANNOT_SKIP = (
    "the quarantine file names samples of this stream, and its iterator cannot step over a sample: they are tried. "
    "Give the iterator a method skip(n)"
)
_NOT_KNOWN = (
    "worker %d: the dataset cannot be kept from one epoch to the next, and of %d earlier epochs it is not known what "
    "they took: one sample of each is taken again. If iterating changes the dataset, samples may now come twice or be "
    "missing; give it state_dict() and load_state_dict()"
)


class Base(NamedTuple):
    """Where forwarding begins: the stream's start, or the dataset's last snapshot."""

    taken: int = 0
    snapshot: bytes | None = None
    random: bytes | None = None  # random state there


_START = Base()


class Run(NamedTuple):
    """Batches in a row: how many samples each took, how many there were."""

    size: int
    times: int = 1
    # A batch that was not collated as it was taken (a sample left out, an error): forwarding must not collate it
    # either, and has its random state from here.
    random_after: bytes | None = None


class Place(NamedTuple):
    """Where a stream stands; enough for another worker to bring its iterator there."""

    taken: int = 0
    stepped_over: tuple[int, ...] = ()
    base: Base = _START
    batches: tuple[Run, ...] = ()
    collate_draws: bool = False  # then forwarding must collate, too, or later samples come out otherwise
    dataset: bytes = b""  # the dataset when its stream had ended, for the next epoch of workers that persist
    ended: bool = False  # the stream has, and the trainer was told
    can_skip: bool = False  # as long as it had not
    exhausted: bool = False  # the iterator has said that it has no more


class StreamJob(LoaderJob):
    may_end = True

    def __init__(self, settings: JobSettings) -> None:
        super().__init__(settings)
        self._iterator: Any = None
        self._keeper: DatasetKeeper | None = None
        self._taken = 0  # samples taken from the iterator, the failed ones too
        self._stepped_over: list[int] = []
        self._ended = False
        self._told_end = False
        self._broken: Failure | None = None  # an error that ended the iterator, to be told with the next task
        self._held: tuple[int, dict[int, Any], bytes] | None = None  # taken for a probe, and used again after it
        self._overdrawn = False  # a probe took more than its batch has: what follows begins again
        self._restored = Restored()
        self._told_unkept = False
        self._fresh = b""
        self._base = _START
        self._batches: list[Run] = []  # since the base
        self._whole = True  # the batch in hand is collated as it was taken
        self._batch_begun = 0  # as the place has it
        self._begun = 0  # samples taken before the batch in hand
        self._at_begin = Place()
        self._collate_draws = False
        self._random_before = b""
        self._snapshot_at = 0.0
        self._snapshot_cost = 0.0
        self._snapshot_fails = False

    def open(self, restored: Restored) -> None:
        self._restored = restored
        if self.settings.persistent or self.settings.policy.retry_on or self.settings.asks:
            self._keeper = self._keeper or DatasetKeeper(self.dataset)
        self._ended = self._told_end = False
        self._broken = self._held = None
        place = Place() if restored.place is None else Place(*wire.load(restored.place))
        if place.ended:
            self._open_ended(place)
            return
        base = self._base = Base(*place.base)
        self._stepped_over = list(place.stepped_over)
        self._batches = [Run(*run) for run in place.batches]
        self._collate_draws = place.collate_draws
        if self.settings.policy.retry_on or self.settings.asks:
            self._fresh = self.keep_dataset()  # a retry calls iter(dataset) again, which may change it
        self._iterator = self._iterator_at(base)
        self.can_skip = hasattr(self._iterator, "skip")
        self._foreseen = {ordinal for worker, ordinal in self.settings.foreseen if worker == self.slot}
        if self._foreseen and not self.can_skip:
            log.warning("worker %d: %s", self.slot, _CANNOT_SKIP)
            self._foreseen.clear()
        if self._stepped_over and not self.can_skip:
            from outlive.errors import PositionError

            raise PositionError(
                f"worker {self.slot} is to step over samples of its stream: its iterator has no skip(n)"
            )
        self._taken = base.taken
        if base.random is not None and place.taken > base.taken:
            self.desk.randomness.set(base.random)
        for run in self._batches:
            for _ in range(run.times):
                if self._ended:
                    break
                self._forward(run.size, collate=run.random_after is None)
            if run.random_after is not None:
                self.desk.randomness.set(run.random_after)
        self._forward(place.taken - self._taken)
        if place.exhausted and not self._ended:
            with contextlib.suppress(Exception):  # as in forwarding
                next(self._iterator, None)  # what a generator does after its last sample
            self._ended = True
        for count, killers in restored.steps:
            self._step_over(count, killers, restored.random_now)
        self._batch_begun = self._taken

    def _open_ended(self, place: Place) -> None:
        """Take over from a worker whose stream has ended: there is nothing to deliver before the next epoch."""
        if place.dataset:
            self.restore_dataset(place.dataset)
        elif _is_at_snapshot(place):
            self._iterator_at(Base(*place.base))
        else:
            self.open(replace(self._restored, place=wire.dump(tuple(place._replace(ended=False)))))
        self._ended = self._told_end = True
        self.can_skip = place.can_skip

    def _iterator_at(self, base: Base) -> Any:
        return iterator_from(self.dataset, {} if base.snapshot is None else wire.load(base.snapshot))

    def _forward(self, count: int, collate: bool = True) -> None:
        """Take a batch that was delivered already."""
        samples = []
        for _ in range(count):
            if self._ended:
                return
            self.desk.box.enter(Stage.FORWARDING, position=self._taken)
            if self._taken in self._stepped_over:
                self._skip_one()
            else:
                try:
                    samples.append(next(self._iterator))
                except StopIteration:
                    self._ended = True
                except Exception as error:  # it failed the first time too, and was dealt with then
                    self._note_broken(failures.capture(error, Stage.FETCHING))
            self._taken += 1
        if samples and collate and self._collate_draws:
            with contextlib.suppress(Exception):  # likewise
                self.collate_fn(samples if self.settings.batched else samples[0])
            self.desk.arena.begin()

    def _step_over(self, count: int, killers: frozenset[int], random_after: bytes | None) -> None:
        """Leave a batch behind that was raised as an error in the trainer."""
        begun = self._taken
        if self.can_skip:
            self._stepped_over.extend(begun + position for position in killers)
        self._forward(count, collate=False)
        self._batches.append(Run(self._taken - begun, 1, random_after or self.desk.randomness.read()))

    def next_epoch(self, place: bytes | None) -> tuple[bytes | None, bytes | None, bool]:
        return next_epoch(place)

    def replay_iterations(self, count: int) -> None:
        if count and not is_stateful(self.dataset):  # else its state is that of the last epoch
            log.warning(_NOT_KNOWN, self.slot, count)
        for _ in range(count):
            iterator = iter(self.dataset)
            if inspect.isgenerator(iterator):
                next(iterator, None)  # a generator's body runs only then

    def restore_dataset(self, kept: bytes) -> None:
        self._keeper = self._keeper or DatasetKeeper(self.dataset)
        self.dataset = self._keeper.restore(kept)
        if self.settings.num_workers:  # else this is the trainer's own process
            self._set_worker_info(self.slot, self.settings.base_seed + self.slot)

    def keep_dataset(self) -> bytes:
        """The dataset as it is before iter(), if that is a small matter of plain values."""
        if self._keeper is None:
            return b""
        if inspect.isgeneratorfunction(type(self.dataset).__iter__):
            self._iterator = None  # an epoch that was left: what its «finally» does counts
        try:
            return self._keeper.keep(self.dataset)
        except Exception as error:
            if not self._told_unkept:
                log.info("worker %d: the dataset's own state is not kept between epochs: %r", self.slot, error)
            self._told_unkept = True
            return b""

    def _skip_one(self) -> None:
        self._iterator.skip(1)

    # ------------------------------------------------------------ batches

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        if self._told_end:
            return  # the trainer knows, and has crossed these tasks out
        self.before_task(seq, probe)
        if self._broken is not None:
            self._told_end = True
            raise TaskFailed(self._broken, ended=True)
        task = tasks.decode_stream(body)
        if self._overdrawn:  # by a probe that took more than its batch has
            self._overdrawn = False
            self._back_to_begin()
        if self._held is None or self._held[0] != seq:
            self._begun = self._taken
            self._at_begin = self._place()
        while True:
            try:
                self._run(seq, task, probe)
                return
            except Again:
                self._back_to_begin()
            except TaskFailed:
                self._whole = False
                self._note_place()
                raise
            except StreamEnded:
                self._told_end = True
                self._note_end()
                raise

    def _run(self, seq: int, task: tasks.StreamTask, probe: bool) -> None:
        samples = self._samples(seq, task, probe)
        batched = task.count >= 0
        wanted = task.count if batched else 1
        if self._ended and (not samples or (batched and self.settings.drop_last and self._short(samples, wanted))):
            raise StreamEnded
        while samples:
            chosen = {p: s for p, s in samples.items() if task.probe is None or p in task.probe}
            if not chosen:
                break
            gather = _gather(chosen, batched)
            self._random_before = self.desk.randomness.read()
            self._whole = len(chosen) == self._taken - self._begun
            positions = list(chosen)
            done = self.finish(seq, positions, gather(positions), probe, gather)
            if done is None:
                return
            failure, blamed = done
            self.settle(failure, blamed)
            for position in blamed:
                del samples[position]
            if failure.decision is Decision.REPLACE and not probe:
                self._held = None
                more = self._taken - self._begun
                self._take_into(samples, seq, more, more + len(blamed), frozenset())
        if not probe:
            self._whole = False
            self._note_place()
            self.desk.send_empty(seq)

    def _short(self, samples: dict[int, Any], wanted: int) -> bool:
        dropped = sum(1 for failure in self.desk.dealt_with if failure.decision is Decision.SKIP)
        return len(samples) + dropped < wanted

    def _samples(self, seq: int, task: tasks.StreamTask, probe: bool) -> dict[int, Any]:
        count = max(1, task.count) + task.extended
        beyond = max(task.probe or (), default=-1) + 1
        if beyond > count:  # a probe of what would take bad samples' places, were this no probe
            if self._held is not None and self._held[0] == seq:
                self._back_to_begin()
            self._held, self._overdrawn = None, True
            samples: dict[int, Any] = {}
            self._take_into(samples, seq, 0, beyond, task.excluded)
        elif self._held is not None and self._held[0] == seq:
            samples = dict(self._held[1])
            self.desk.randomness.set(self._held[2])
        else:
            samples = {}
            self._take_into(samples, seq, 0, count, task.excluded)
            self._held = (seq, dict(samples), self.desk.randomness.read()) if probe else None
        return {p: s for p, s in samples.items() if p not in task.excluded}

    def _take_into(self, samples: dict[int, Any], seq: int, position: int, end: int, excluded: frozenset[int]) -> None:
        """Take samples for positions up to `end`; under «replace» a failed one makes room for one more."""
        box, foreseen = self.desk.box, self._foreseen
        box.enter(Stage.FETCHING, seq)
        while position < end and not self._ended:
            box.fetch(position)
            known = self._taken in foreseen if foreseen else False
            if known or (position in excluded and self.can_skip):
                self._skip_one()
                self._stepped_over.append(self._taken)
                self._taken += 1
                if known and self.settings.policy.on_error == "replace":
                    end += 1
                position += 1
                continue
            try:
                samples[position] = next(self._iterator)
                self._taken += 1
            except StopIteration:
                self._ended = True
                break
            except Exception as error:
                self._taken += 1
                failure = self._failed(error, seq, position)
                if failure.decision is Decision.REPLACE:
                    end += 1
                box.enter(Stage.FETCHING, seq)
                if self._broken is not None:
                    break
            position += 1
        box.finished()

    def _failed(self, error: Exception, seq: int, position: int) -> Failure:
        failure = self.judge(error, seq, Stage.FETCHING, position, self.first_ordinal())
        if failure.decision is Decision.RETRY:
            raise Again from None
        self.settle(failure, (position,))
        self._note_broken(failure)
        return failure

    def _note_broken(self, failure: Failure) -> None:
        """Python ends a generator with its first error: the rest of the stream cannot be reached. That must not pass
        for its end.
        """
        if not (inspect.isgenerator(self._iterator) and self._iterator.gi_frame is None):
            return
        said = (
            f"{failure.message}\n(the dataset's iterator is a generator, which Python ends with its first error: "
            f"the rest of worker {self.slot}'s stream cannot be reached. Write it as a class with __next__, "
            "or catch the error inside the generator.)"
        )
        told = f"{failure.traceback}\n{said}"
        self._broken = replace(failure, message=said, decision=Decision.RAISE, traceback=told)

    def _back_to_begin(self) -> None:
        """Before a retry: a fresh iterator, brought to where this batch began."""
        if self._fresh:
            self.restore_dataset(self._fresh)
        place = wire.dump(tuple(self._at_begin))
        restored = self._restored
        if restored.random_at_start is not None:
            self.desk.randomness.set(restored.random_at_start)
        self.open(replace(restored, place=place, steps=()))  # the place is behind them
        self._restored = restored
        self.desk.rewind()

    # ------------------------------------------------------------ place

    def first_ordinal(self) -> int:
        return self._begun

    def collated(self, seq: int, probe: bool) -> None:
        if self.desk.randomness.read() != self._random_before:
            self._collate_draws = True
        if not probe:
            # Once more from where the batch began, when it is collated again because it could not be sent.
            self._base = self._at_begin.base
            self._batches = list(self._at_begin.batches)
            self._batch_begun = self._begun
            self._note_place()

    def _note_place(self) -> None:
        size = self._taken - self._batch_begun
        if size:
            last = self._batches[-1] if self._batches else Run(0)
            if not self._whole:
                self._batches.append(Run(size, 1, self.desk.randomness.read()))
            elif last.size == size and last.random_after is None:
                self._batches[-1] = Run(size, last.times + 1)
            else:
                self._batches.append(Run(size))
            self._batch_begun = self._taken
        if not self._ended:  # after its end, a dataset may say that it is at its beginning
            self._take_snapshot()
        self.desk.place = wire.dump(tuple(self._place()))

    def _note_end(self) -> None:
        """What the next epoch begins with, should another worker be the one to begin it."""
        self._take_snapshot(last=True)
        kept = self.keep_dataset() if self.settings.persistent else b""
        self.desk.place = wire.dump(tuple(self._place()._replace(dataset=kept, ended=True, can_skip=self.can_skip)))

    def _place(self) -> Place:
        return Place(
            self._taken,
            tuple(self._stepped_over),
            self._base,
            tuple(self._batches),
            self._collate_draws,
            exhausted=self._ended,
        )

    def _take_snapshot(self, last: bool = False) -> bool:
        """Take one if it is worth it; whether it was."""
        begun = time.monotonic()
        if begun - self._snapshot_at < _SNAPSHOT_EVERY * self._snapshot_cost and (not last or self._snapshot_fails):
            return False
        try:
            told = snapshot_of(self.dataset, self._iterator)
            if not told:
                return False
            snapshot = wire.dump(told)
        except Exception as error:
            log.warning("state_dict() of the dataset failed, worker %d goes on without snapshots: %r", self.slot, error)
            self._snapshot_cost, self._snapshot_fails = float("inf"), True
            return False
        self._base = Base(self._taken, snapshot, self.desk.randomness.read())
        self._batches.clear()
        self._snapshot_at = time.monotonic()
        self._snapshot_cost = self._snapshot_at - begun
        return True


def snapshot_of(dataset: Any, iterator: Any) -> dict[str, Any]:
    """What a stream's dataset and its iterator say of where they stand, as far as they can; {}: not at all."""
    told = {}
    if iterator is not dataset and is_stateful(dataset):
        told["dataset"] = dataset.state_dict()
    if is_stateful(iterator):
        told["itself" if iterator is dataset else "iterator"] = iterator.state_dict()
    return told


def iterator_from(dataset: Any, told: dict[str, Any]) -> Any:
    """An iterator that stands where `snapshot_of` was asked; {}: at the beginning."""
    if "dataset" in told:
        dataset.load_state_dict(told["dataset"])
    iterator: Any = iter(dataset)
    for name in ("itself", "iterator"):
        if name in told:
            iterator.load_state_dict(told[name])
    return iterator


def next_epoch(place: bytes | None) -> tuple[None, bytes | None, bool]:
    """What the epoch after this one begins with: the dataset itself, or as this one leaves it when it is repeated."""
    if place is None:
        return None, None, True
    left = Place(*wire.load(place))
    if left.dataset:
        return None, left.dataset, False
    return None, None, not left.ended or _is_at_snapshot(left)


def _is_at_snapshot(place: Place) -> bool:
    base = Base(*place.base)
    return base.snapshot is not None and base.taken == place.taken and not place.batches


def _gather(samples: dict[int, Any], batched: bool) -> Callable[[Sequence[int]], Any]:
    if batched:
        return lambda chosen: [samples[p] for p in chosen]
    return lambda chosen: samples[chosen[0]]
