"""What a worker does for an iterable dataset: take samples as they come, and know where it stands.

Reads   the dataset's iterator.
Writes  batches; after each one, its place in the stream, from which a replacement goes on.
Never   a sample twice, nor one less without saying so.

After a death the next worker restores the dataset's own snapshot (`state_dict`) and goes on, or starts the
iterator again and takes as many samples as were taken before. A sample that kills the worker
inside `__next__` can be stepped over only if the iterator offers `skip(n)`.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from holdfast._transport import wire
from holdfast._worker.loop import Restored, StreamEnded, TaskFailed
from holdfast.loader import tasks
from holdfast.loader.jobs import Again, JobSettings, LoaderJob
from holdfast.records import Decision, Failure, Stage

# A snapshot is taken when the time since the last one is this many times what one costs.
_SNAPSHOT_EVERY = 20


class StreamJob(LoaderJob):
    def __init__(self, settings: JobSettings) -> None:
        super().__init__(settings)
        self._iterator: Any = None
        self._taken = 0  # samples taken from the iterator, the failed ones too
        self._stepped_over: list[int] = []
        self._ended = False
        self._told_end = False
        self._broken: Failure | None = None  # an error that ended the iterator, to be told with the next task
        self._held: tuple[int, dict[int, Any]] | None = None
        self._restored = Restored()
        self._snapshot: tuple[bytes, int] | None = None
        self._snapshot_at = 0.0
        self._snapshot_cost = 0.0

    def open(self, restored: Restored) -> None:
        self._restored = restored
        self._ended = self._told_end = False
        self._broken = self._held = None
        taken, stepped_over, snapshot, at = (0, [], None, 0) if restored.place is None else wire.load(restored.place)
        self._stepped_over = list(stepped_over)
        self._snapshot = None if snapshot is None else (snapshot, at)
        if snapshot is not None:
            state = wire.load(snapshot)
            if hasattr(self.dataset, "load_state_dict"):
                self.dataset.load_state_dict(state)
                self._iterator = iter(self.dataset)
            else:
                self._iterator = iter(self.dataset)
                self._iterator.load_state_dict(state)
        else:
            self._iterator = iter(self.dataset)
        self._taken = at if snapshot is not None else 0
        while self._taken < taken and not self._ended:
            self._forward()

    def _forward(self) -> None:
        """Take one sample that was delivered already, or that failed already."""
        self.desk.box.enter(Stage.FORWARDING, position=self._taken)
        if self._taken in self._stepped_over:
            self._skip_one()
        else:
            try:
                next(self._iterator)
            except StopIteration:
                self._ended = True
            except Exception:  # it failed the first time too, and was dealt with then
                pass
        self._taken += 1

    def _skip_one(self) -> None:
        skip = getattr(self._iterator, "skip", None) or self.dataset.skip
        skip(1)

    # ------------------------------------------------------------ batches

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        if self._told_end:
            return
        self.before_task(seq, probe)
        if self._broken is not None:
            self._told_end = True
            raise TaskFailed(self._broken, ended=True)
        task = tasks.decode_stream(body)
        begun = self._taken
        while True:
            try:
                self._run(seq, task, probe)
                return
            except Again:
                self._back_to(begun)
            except TaskFailed:
                self._note_place()
                raise

    def _run(self, seq: int, task: tasks.StreamTask, probe: bool) -> None:
        samples = self._samples(seq, task, probe)
        batched = task.count >= 0
        wanted = task.count if batched else 1
        if self._ended and (not samples or (batched and self.settings.drop_last and self._short(samples, wanted))):
            self._told_end = True
            raise StreamEnded
        while samples:
            chosen = {p: s for p, s in samples.items() if task.probe is None or p in task.probe}
            gather = _gather(chosen, batched)
            if not probe:
                self._note_place()
            done = self.finish(seq, chosen, gather(list(chosen)), probe, gather)
            if done is None:
                return
            failure, positions = done
            self.settle(failure, positions)
            for position in positions:
                del samples[position]
            if failure.decision is Decision.REPLACE:
                self._held = None
                more = max(chosen) + 1
                self._take_into(samples, seq, more, more + len(positions), frozenset())
        if not probe:
            self._note_place()
            self.desk.send_empty(seq)

    def _short(self, samples: dict[int, Any], wanted: int) -> bool:
        dropped = sum(1 for failure in self.desk.dealt_with if failure.decision is Decision.SKIP)
        return len(samples) + dropped < wanted

    def _samples(self, seq: int, task: tasks.StreamTask, probe: bool) -> dict[int, Any]:
        if self._held is not None and self._held[0] == seq:
            samples = dict(self._held[1])
        else:
            samples = {}
            count = max(1, task.count) + task.extended
            self._take_into(samples, seq, 0, count, task.excluded)
            self._held = (seq, dict(samples)) if probe else None
        return {p: s for p, s in samples.items() if p not in task.excluded}

    def _take_into(self, samples: dict[int, Any], seq: int, position: int, end: int, excluded: frozenset[int]) -> None:
        """Take samples for positions up to `end`; under «replace» a failed one makes room for one more."""
        box = self.desk.box
        box.enter(Stage.FETCHING, seq)
        while position < end and not self._ended:
            box.fetch(position)
            if position in excluded and self._can_skip():
                self._skip_one()
                self._stepped_over.append(self._taken)
                self._taken += 1
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

    def _can_skip(self) -> bool:
        return hasattr(self._iterator, "skip") or hasattr(self.dataset, "skip")

    def _failed(self, error: Exception, seq: int, position: int) -> Failure:
        failure = replace(self.judge(error, seq, Stage.FETCHING, position), ordinal=self._taken - 1)
        if failure.decision is Decision.RETRY:
            raise Again from None
        self.settle(failure, (position,))
        if inspect.isgenerator(self._iterator) and self._iterator.gi_frame is None:
            # Python ends a generator with its first error: the rest of this stream cannot be reached. That
            # must not pass for its end.
            said = (
                f"{failure.message}\n(the dataset's iterator is a generator, which Python ends with its first error: "
                f"the rest of worker {self.slot}'s stream cannot be reached. Write it as a class with __next__, "
                "or catch the error inside the generator.)"
            )
            self._broken = replace(
                failure, message=said, decision=Decision.RAISE, traceback=f"{failure.traceback}\n{said}"
            )
        return failure

    def _back_to(self, taken: int) -> None:
        """Before a retry: a fresh iterator, brought to where this batch began."""
        place = wire.dump((taken, self._stepped_over, *(self._snapshot or (None, 0))))
        restored = self._restored
        if restored.random_at_start is not None:
            self.desk.randomness.set(restored.random_at_start)
        self.open(replace(restored, place=place))
        self._restored = restored
        self.desk.rewind()

    # ------------------------------------------------------------ place

    def _note_place(self) -> None:
        self._take_snapshot()
        snapshot, at = self._snapshot or (None, 0)
        self.desk.place = wire.dump((self._taken, self._stepped_over, snapshot, at))

    def _take_snapshot(self) -> None:
        source = self.dataset if hasattr(self.dataset, "load_state_dict") else self._iterator
        if not (hasattr(source, "state_dict") and hasattr(source, "load_state_dict")):
            return
        begun = time.monotonic()
        if begun - self._snapshot_at < _SNAPSHOT_EVERY * self._snapshot_cost:
            return
        self._snapshot = (wire.dump(source.state_dict()), self._taken)
        self._snapshot_at = time.monotonic()
        self._snapshot_cost = self._snapshot_at - begun


def _gather(samples: dict[int, Any], batched: bool) -> Callable[[Sequence[int]], Any]:
    if batched:
        return lambda chosen: [samples[p] for p in chosen]
    return lambda chosen: samples[chosen[0]]
