"""What a worker does for a check: fetch, time and weigh each sample, and send only what it found.

Reads   the dataset.
Writes  a few counts per batch; what it is doing, to the black box, as every worker of a loader.
Never   keeps a sample: of a batch of thousands one is in memory at a time.
"""

from __future__ import annotations

import pickle
import time
from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data._utils import worker as torch_worker

from outlive._capture.blackbox import LONG_NS, POSITION, SINCE
from outlive._worker.loop import Restored
from outlive.checking import spread
from outlive.checking.spread import Counts
from outlive.checking.weighing import FIXED, Unsendable, weigh
from outlive.incident import Failure, Stage
from outlive.loader.jobs import Again, JobSettings, LoaderJob
from outlive.loader.samples import MapJob
from outlive.loader.streams import Base, StreamJob

_OBJECTS = ord("o")  # a task as it was drawn, as `loader.tasks` marks it


class Floors(NamedTuple):
    """From which time and size on a sample may be worth naming."""

    nanoseconds: int
    bytes: int


class Summary(NamedTuple):
    """What became of a batch: of those of its samples that were good."""

    first: Any  # the index of one of them
    number: int
    nanoseconds: Counts
    bytes: Counts
    total_ns: int


class Weighed(NamedTuple):
    index: Any
    nanoseconds: int
    bytes: int


class Columns(NamedTuple):
    """A whole batch of them."""

    indices: Sequence[Any]
    nanoseconds: array[int]
    bytes: array[int]


class FairClock:
    """Takes from a sample's time what it waited for a CPU: on a busy machine, any sample may be held up for a while.

    Linux counts these waits by thread. Reading the count takes as long as a small sample, so it is read at most every
    `LOOK_NS`. A sample that takes longer than that is followed by a look, and the waits before it are known.
    """

    LOOK_NS = 10_000_000

    def __init__(self) -> None:
        self._starved_ns = _starved_ns()
        self.look_at_ns = time.monotonic_ns() + self.LOOK_NS

    def taken(self, took_ns: int, now_ns: int) -> int:
        """What a sample took that has just ended. Call it from `look_at_ns` on."""
        starved_ns = _starved_ns()
        waited_ns, self._starved_ns = starved_ns - self._starved_ns, starved_ns
        self.look_at_ns = now_ns + self.LOOK_NS
        return max(0, took_ns - waited_ns) if took_ns >= self.LOOK_NS else took_ns

    def since(self, begun_ns: int) -> int:
        """What a sample took that began then, and has just ended."""
        now_ns = time.monotonic_ns()
        return now_ns - begun_ns if now_ns < self.look_at_ns else self.taken(now_ns - begun_ns, now_ns)


def _starved_ns() -> int:
    """How long this thread was ready to run and had no CPU; 0 where the system does not count it."""
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1])
    except (OSError, ValueError, IndexError):
        return 0


class Fold:
    """In a collate function's place."""

    def __init__(self, floors: Floors) -> None:
        self.floors = floors

    def __call__(self, found: Columns | list[Weighed]) -> Summary:
        indices, times, sizes = found if isinstance(found, Columns) else zip(*found, strict=True)
        nanoseconds, sizes_bytes = np.asarray(times, np.int64), np.asarray(sizes, np.int64)
        return Summary(
            indices[0],
            len(indices),
            spread.count(nanoseconds, indices, self.floors.nanoseconds),
            spread.count(sizes_bytes, indices, self.floors.bytes),
            int(nanoseconds.sum()),
        )


class _Judging(LoaderJob):
    def judge(self, error: Exception, seq: int, stage: Stage, position: int, *more: Any, **named: Any) -> Failure:
        if isinstance(error, Unsendable):
            named["place"] = self._place_of_unpicklable(error.sample, seq, error.error)
            return super().judge(error.error, seq, Stage.SENDING, position, *more, **named)
        return super().judge(error, seq, stage, position, *more, **named)


class CheckJob(_Judging, MapJob):
    """Map-style datasets."""

    def open(self, restored: Restored) -> None:
        if not isinstance(self.dataset, _OneByOne):
            self.dataset = _OneByOne(self.dataset)  # not before: worker_init_fn has seen the user's own
        super().open(restored)

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        if probe or body[0] != _OBJECTS:
            super().run(seq, body, probe)
            return
        self.before_task(seq, probe)
        self._probe = False
        self._run_through(seq, body, pickle.loads(body[1:])[0])

    def _run_through(self, seq: int, body: memoryview, indices: Sequence[int]) -> None:
        """A batch as it was drawn. What fails in it goes the long way, as in any loader."""
        box, dataset = self.desk.box, self.dataset.dataset
        words, clock, known = box.words, time.monotonic_ns, FIXED.get
        times, sizes = array("q"), array("q")
        add_time, add_size = times.append, sizes.append
        fair, long = self.dataset.clock, 0
        look_at = fair.look_at_ns
        failed: Exception | None = None
        position = -1
        box.enter(Stage.FETCHING, seq)
        since = clock()
        try:
            for position, index in enumerate(indices):
                words[POSITION] = position
                sample = dataset[index]
                now = clock()
                if now - since >= LONG_NS:
                    box.took_long(now - since)  # by the wall, as a hang is
                    long += 1
                if now < look_at:
                    add_time(now - since)
                else:
                    add_time(fair.taken(now - since, now))
                    look_at = fair.look_at_ns
                size = known(type(sample))
                if size is None:
                    size = weigh(sample)
                    now = clock()
                add_size(size)
                since = words[SINCE] = now
        except Exception as error:
            failed = error  # dealt with below: errors to come are not to be chained to this one
        sample = None
        if failed is not None:
            done = {p: Weighed(indices[p], times[p], sizes[p]) for p in range(len(sizes))}
            if done:
                self._source.went_well(indices[len(done) - 1], len(done))
            try:
                self._run(seq, body, False, done, failed=(failed, position))
            finally:
                failed = None  # else it holds this frame, and the frame holds it
            return
        if not sizes:
            self._run(seq, body, False)
            return
        box.were_short(len(sizes) - long)
        self._source.went_well(index, len(sizes))
        columns = Columns(indices, times, sizes)
        again = False
        try:
            self.finish(seq, range(len(sizes)), columns, False, lambda chosen: [_nth(columns, p) for p in chosen])
        except Again:
            again = True
        if again:
            self._run(seq, body, False)


def _nth(columns: Columns, position: int) -> Weighed:
    return Weighed(columns.indices[position], columns.nanoseconds[position], columns.bytes[position])


class _OneByOne:
    """A dataset whose samples are weighed and let go of."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.clock = FairClock()

    def __getitem__(self, index: Any) -> Weighed:
        begun = time.monotonic_ns()
        sample = self.dataset[index]
        took = self.clock.since(begun)
        return Weighed(index, took, weigh(sample))


class CheckStreamJob(_Judging, StreamJob):
    """Iterable datasets. `shard`: which of so many machines this is; workers of all of them share the stream."""

    def __init__(self, settings: JobSettings, shard: int, shards: int) -> None:
        super().__init__(settings)
        self._shard, self._shards = shard, shards

    def _set_worker_info(self, slot: int, seed: int) -> None:
        number = self.settings.num_workers
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=slot + self._shard * number, num_workers=number * self._shards, seed=seed, dataset=self.dataset
        )

    def _iterator_at(self, base: Base) -> Any:
        return _AsTheyCome(super()._iterator_at(base), self)

    def named(self) -> tuple[int, int]:
        """The sample that comes next: whose, and which of his."""
        return self.slot + self._shard * self.settings.num_workers, self._taken

    def _note_broken(self, failure: Failure) -> None:
        weighing = self._iterator
        self._iterator = weighing.iterator
        try:
            super()._note_broken(failure)
        finally:
            self._iterator = weighing


class _AsTheyCome:
    """An iterator whose samples are weighed and let go of; it can whatever that of the user can."""

    def __init__(self, iterator: Iterator[Any], job: CheckStreamJob) -> None:
        self.iterator = iterator
        self._job = job
        self._clock = FairClock()

    def __iter__(self) -> _AsTheyCome:
        return self

    def __next__(self) -> Weighed:
        named = self._job.named()
        begun = time.monotonic_ns()
        sample = next(self.iterator)
        took = self._clock.since(begun)
        return Weighed(named, took, weigh(sample))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.iterator, name)
