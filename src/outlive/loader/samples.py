"""Map-style datasets: what a worker does for a batch whose samples are named by their indices.

Reads   the dataset.
Writes  batches, through its desk; what it is doing, to the black box.
Never   condemns a sample for what its source does: see `source`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from outlive._capture.blackbox import LONG_NS, POSITION, SINCE
from outlive._transport import wire
from outlive._worker.loop import Restored, TaskFailed
from outlive.incident import Decision, Failure, Stage
from outlive.loader import culprits, tasks
from outlive.loader.jobs import Again, LoaderJob, is_stateful
from outlive.loader.source import Source
from outlive.orders import MOST_SUBSTITUTES

log = logging.getLogger("outlive")


class MapJob(LoaderJob):
    """Map-style datasets: a task names its samples."""

    _stand_ins: dict[int, Any]  # positions of this batch that candidates have taken
    _tried: dict[int, int]  # how many of them, each
    _source: Source
    _tells: bool  # the dataset can say where it stands
    _probe = False  # this task is one of a search: what fails in it is nobody's
    _thought_twice = (-1, -1)  # the epoch and batch that was last done again because others had seen the source gone

    def open(self, restored: Restored) -> None:
        many = getattr(self.dataset, "__getitems__", None) if self.settings.batched else None
        self._get_many = many or None  # torch leaves a false one alone, too
        if not hasattr(self, "_source"):  # what it knows holds in later epochs, too
            self._tells = is_stateful(self.dataset)
            self._source = Source(lambda index: self._get_many([index]) if self._get_many else self.dataset[index])

        if restored.place is not None and self._tells:
            self.dataset.load_state_dict(wire.load(restored.place))

    def collated(self, seq: int, probe: bool) -> None:
        if probe or not self._tells:
            return
        try:
            self.desk.place = wire.dump(self.dataset.state_dict())
        except Exception as error:
            log.warning("state_dict() of the dataset failed, worker %d goes on without it: %r", self.slot, error)
            self._tells = False

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        self.before_task(seq, probe)
        self._probe = probe
        if self._source.failing_since:
            self._source.failing_since = 0.0
        if self._get_many is None and not probe and tasks.is_plain(body):
            self._run_plain(seq, body)
        else:
            self._run(seq, body, probe)

    def _run_plain(self, seq: int, body: memoryview) -> None:
        """A batch as it was drawn, sample by sample: as nearly all of them are. What fails goes the long way."""
        box, dataset = self.desk.box, self.dataset
        words, clock = box.words, time.monotonic_ns
        long, position = 0, -1
        failed: Exception | None = None
        data: list[Any] = []
        add = data.append
        box.enter(Stage.FETCHING, seq)
        since = clock()
        try:
            for position, index in enumerate(tasks.decode_plain(body)):
                words[POSITION] = position
                add(dataset[index])
                now = words[SINCE] = clock()
                if now - since >= LONG_NS:
                    box.took_long(now - since)
                    long += 1
                since = now
        except Exception as error:
            failed = error  # dealt with below: errors to come are not to be chained to this one
        if failed is not None:
            if position > 0:
                self._source.went_well(tasks.decode_plain(body)[position - 1], position)
            try:
                self._run(seq, body, False, dict(enumerate(data)), failed=(failed, position))
            finally:
                failed = None  # else it holds this frame, and the frame holds it
            return
        box.were_short(len(data) - long)
        self._source.went_well(index, len(data))
        again, done = False, None
        try:
            done = self.finish(seq, range(len(data)), data, False, lambda chosen: [data[p] for p in chosen])
        except Again:
            again = True
        if again:
            self._run(seq, body, False)
        elif done is not None:
            self._run(seq, body, False, dict(enumerate(data)), blamed=done)

    def _run(
        self,
        seq: int,
        body: memoryview,
        probe: bool,
        samples: dict[int, Any] | None = None,
        failed: tuple[Exception, int] | None = None,
        blamed: tuple[Failure, tuple[int, ...]] | None = None,
    ) -> None:
        try:
            task = tasks.decode_map(body)
        except Exception as problem:  # a batch sampler that drew something which is no list of indices
            failure = self.judge(problem, seq, Stage.FETCHING, -1)
            while failure.decision is Decision.RETRY:  # it is as wrong as before
                failure = self.judge(problem, seq, Stage.FETCHING, -1)
            self.desk.dealt_with.append(failure)
            self.desk.send_empty(seq)
            return
        live = dict(task.live)
        self._stand_ins = {}
        self._tried = dict(task.tried)
        samples = {} if samples is None else samples
        whole: Any = task.whole if self._get_many else None
        drawn_empty = (
            not live and task.whole is not None
        )  # a batch sampler may draw nothing, and a collate function make something of it
        while live or drawn_empty:
            try:
                if failed is not None:
                    (error, position), failed = failed, None
                    self._failed(error, seq, position, task, live, samples)
                elif blamed is not None:
                    (failure, positions), blamed = blamed, None
                    self._give_up(failure, positions, task, live, samples)
                data = self._fetch(seq, task, live, samples, whole)
                whole = None
                if not live and not drawn_empty:
                    break
                if data is None:
                    data = list(samples.values()) if self.settings.batched else samples[0]
                done = self.finish(seq, list(samples), data, probe, self._gather(samples))
            except Again:
                samples.clear()
                continue
            if done is None:
                return
            self._give_up(*done, task, live, samples)
            if drawn_empty:
                self.desk.dealt_with.append(done[0])
                break
        if not probe:
            self.desk.send_empty(seq)

    def _gather(self, samples: dict[int, Any]) -> Callable[[Sequence[int]], Any]:
        if self.settings.batched:
            return lambda chosen: [samples[p] for p in chosen]
        return lambda chosen: samples[chosen[0]]

    def _fetch(self, seq: int, task: tasks.MapTask, live: dict[int, Any], samples: dict[int, Any], whole: Any) -> Any:
        """Fetch what is missing. Returns what __getitems__ gave, untouched, when it gave the whole batch."""
        box = self.desk.box
        if self._get_many is not None:
            return self._fetch_many(seq, task, live, samples, whole)
        dataset = self.dataset
        while len(samples) < len(live):
            for position in [p for p in live if p not in samples]:
                box.enter(Stage.FETCHING, seq)
                if position in self._stand_ins:
                    box.note_stand_in(live[position])
                box.fetch(position)
                try:
                    samples[position] = dataset[live[position]]
                    box.finished()
                except Exception as error:
                    self._failed(error, seq, position, task, live, samples)
                else:
                    self._source.went_well(live[position])
        self._settle_doubts(seq, task, live)
        _sort(samples, live)
        return None

    def _fetch_many(
        self, seq: int, task: tasks.MapTask, live: dict[int, Any], samples: dict[int, Any], whole: Any
    ) -> Any:
        get_many = self._get_many
        assert get_many is not None
        missing = [p for p in live if p not in samples]
        if not live:
            return get_many(whole if whole is not None else [])
        while missing:
            self.desk.box.enter(Stage.FETCHING_MANY, seq, count=len(missing))
            wanted = whole if whole is not None and len(missing) == len(live) else [live[p] for p in missing]
            try:
                got = get_many(wanted)
                self.desk.box.finished()
                self._source.went_well(live[missing[-1]], len(missing))
                if whole is not None or len(missing) == len(live):
                    if not hasattr(got, "__len__") or len(got) != len(missing):
                        samples.update(dict.fromkeys(missing))
                        return got
                    samples.update(zip(missing, got, strict=True))
                    return got
                samples.update(zip(missing, got, strict=True))
            except Exception as error:
                failure = self._judged(error, seq, Stage.FETCHING_MANY, missing, task, live)
                if self._source.goods:  # before a search in which every step would fail
                    self._settle_doubts(seq, task, live, failure, missing)
                works = self.works_with(lambda chosen: get_many([live[p] for p in chosen]), Stage.FETCHING_MANY, seq)
                found = self.blamed(culprits.by_halving, seq, missing, works)
                if found and len(found) < len(missing):
                    self._source.went_well(live[next(p for p in missing if p not in found)])
                self._give_up(failure, found, task, live, samples)
                self.desk.rewind()
                whole = None
            missing = [p for p in live if p not in samples]
        self._settle_doubts(seq, task, live)
        _sort(samples, live)
        return None

    def _failed(
        self,
        error: Exception,
        seq: int,
        position: int,
        task: tasks.MapTask,
        live: dict[int, Any],
        samples: dict[int, Any],
    ) -> None:
        failure = self._judged(error, seq, Stage.FETCHING, [position], task, live)
        if self._source.is_suspect:
            self._settle_doubts(seq, task, live, failure, [position])
        self._give_up(failure, (position,), task, live, samples)

    def _judged(
        self, error: Exception, seq: int, stage: Stage, positions: list[int], task: tasks.MapTask, live: dict[int, Any]
    ) -> Failure:
        """What is to be done about an exception while fetching; raises Again where that is to retry."""
        position = positions[0] if stage is Stage.FETCHING else -1
        refused = False
        try:
            failure = self.judge(error, seq, stage, position, stand_in=self._stand_ins.get(position))
        except TaskFailed as final:
            if not isinstance(error, self.settings.policy.retry_on):
                raise
            failure, refused = final.failure, True
        if failure.decision is Decision.RETRY:
            self.desk.rewind()
            raise Again from None
        if not self._probe:
            for failed in positions:
                self._source.failed(live[failed], error)
        if refused:
            if self._source.goods or self._source.is_suspect:
                self._settle_doubts(seq, task, live, failure, positions)
            raise TaskFailed(failure) from None
        return failure

    def _settle_doubts(
        self,
        seq: int,
        task: tasks.MapTask,
        live: dict[int, Any],
        failure: Failure | None = None,
        positions: Sequence[int] = (),
    ) -> None:
        """Find out whether it is the source that fails; if so, wait for it and do the batch again."""
        dealt_with = self.desk.dealt_with
        if self._probe or not (dealt_with or failure):
            return
        positions = tuple(dict.fromkeys((*(f.position for f in dealt_with), *positions)))
        failed = list(dealt_with) if failure is None else [*dealt_with, failure]
        unsure = self._source.is_unsure
        if failure is not None and not unsure:
            return
        if not (unsure and self._source.was_gone(self.desk, seq, failed[-1], positions)):
            if self._thought_twice == (self.desk.epoch, seq):
                return
            if not self._source.was_gone_meanwhile(self.desk, seq, failed, positions):
                return
            self._thought_twice = (self.desk.epoch, seq)
        self._source.failing_since = 0.0
        dealt_with.clear()
        self._attempts = {key: n for key, n in self._attempts.items() if key[0] != seq}
        live.clear()
        live.update(task.live)
        self._stand_ins, self._tried = {}, dict(task.tried)
        self.desk.rewind()
        raise Again

    def _give_up(
        self,
        failure: Failure,
        positions: tuple[int, ...],
        task: tasks.MapTask,
        live: dict[int, Any],
        samples: dict[int, Any],
    ) -> None:
        """Leave these samples out, or put candidates in their place."""
        for position in positions:
            self.settle(replace(failure, stand_in=self._stand_ins.get(position)), (position,))
            samples.pop(position, None)
            if failure.decision is not Decision.REPLACE:
                live.pop(position, None)
            elif task.candidates and self._tried.get(position, 0) < MOST_SUBSTITUTES:
                nth = self._tried[position] = self._tried.get(position, 0) + 1
                live[position] = self._stand_ins[position] = task.candidate(position, nth)
            else:
                raise TaskFailed(replace(failure, decision=Decision.RAISE, culprits=positions))


def _sort(samples: dict[int, Any], live: dict[int, Any]) -> None:
    """Replaced samples came last; put them where they belong."""
    ordered = {p: samples[p] for p in live}
    samples.clear()
    samples.update(ordered)
