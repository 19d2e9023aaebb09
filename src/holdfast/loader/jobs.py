"""What a worker does for a data loader: prepare like torch's worker, then make batches.

Reads   the dataset.
Writes  batches, through its desk; what it is doing, to the black box.
Never   lets an exception of the user's code out unexplained; never catches what ends a process.

`LoaderJob` is what map-style and iterable datasets have in common: seeds, worker_init_fn, and
what a fault policy says about an exception. `MapJob` and `StreamJob` know how to fetch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from holdfast._capture.blackbox import POSITION, SINCE
from holdfast._fleet.policy import pause_s
from holdfast._transport import wire
from holdfast._worker import failures, threads
from holdfast._worker.loop import Desk, Restored, StreamEnded, TaskFailed
from holdfast.incident import Decision, Failure, Stage
from holdfast.limits import NO_LIMITS, Limits
from holdfast.loader import collating, culprits, tasks
from holdfast.records import MOST_SUBSTITUTES
from holdfast.settings import FaultPolicy


@dataclass
class JobSettings:
    """What every worker of a loader needs to know; travels once, to the zygote."""

    dataset: Any
    collate_fn: Callable[[Any], Any]
    batched: bool
    drop_last: bool
    base_seed: int
    shared_seed: int | None
    worker_init_fn: Callable[[int], None] | None
    num_workers: int
    policy: FaultPolicy
    asks: bool  # on_error is a callable, which only the trainer has
    worker_threads: int | None = 1
    limits: Limits = NO_LIMITS
    seeds_by_batch: bool = False  # random numbers depend on the batch alone, not on who makes it


class Again(Exception):
    """Start this batch once more, from the random state before it."""


class LoaderJob:
    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.dataset = settings.dataset
        self.collate_fn = settings.collate_fn
        self.slot = -1
        self.desk: Desk
        self._dirty = False  # the last task was a probe: its random numbers do not count
        self._attempts: dict[tuple[int, int], int] = {}
        self.limits = settings.limits
        self.can_skip = False  # samples can be stepped over without fetching them

    # ------------------------------------------------------------ beginning

    def prepare(self, desk: Desk, slot: int, restored: Restored) -> None:
        settings = self.settings
        self.desk, self.slot = desk, slot
        if settings.worker_threads is not None:
            threads.limit(settings.worker_threads)
        seed = settings.base_seed + slot
        random.seed(seed)
        torch.manual_seed(seed)
        _seed_numpy(settings.base_seed, slot)
        self._seed_pipe(restored.epoch_note if restored.epoch_note is not None else settings.shared_seed)
        self._set_worker_info(slot, seed)
        collating.install(desk.arena)
        if settings.worker_init_fn is not None:
            settings.worker_init_fn(slot)
        if restored.dataset is not None:
            self.dataset = wire.load(restored.dataset)
            self._seed_pipe(restored.epoch_note)
            self._set_worker_info(slot, seed)
        self.replay_iterations(restored.iterations)
        if restored.random_at_start is not None:
            desk.randomness.set(restored.random_at_start)
        else:
            restored = replace(restored, random_at_start=desk.randomness.read())
        self.open(restored)
        if restored.random_now is not None:
            desk.randomness.set(restored.random_now)

    def begin_epoch(self, note: Any) -> bytes:
        kept = self.keep_dataset()  # before iter(dataset) changes it
        self._seed_pipe(note)
        self.open(Restored(random_at_start=self.desk.randomness.read()))
        return kept

    def replay_iterations(self, count: int) -> None:
        """Let earlier epochs begin, for what that changes in the dataset."""

    def keep_dataset(self) -> bytes:
        """What a replacement needs of the dataset's own state in a later epoch."""
        return b""

    def open(self, restored: Restored) -> None:
        """Be ready for the first task of an epoch, or for the one after `restored.place`."""

    def _seed_pipe(self, shared_seed: int | None) -> None:
        if isinstance(self.dataset, IterDataPipe):
            generator = torch.Generator()
            generator.manual_seed(shared_seed)  # type: ignore[arg-type]
            self.dataset = torch.utils.data.graph_settings.apply_random_seed(self.dataset, generator)

    def _set_worker_info(self, slot: int, seed: int) -> None:
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=slot, num_workers=self.settings.num_workers, seed=seed, dataset=self.dataset
        )

    def prepare_here(self, desk: Any) -> None:
        """For num_workers=0: in the trainer's own process, whose seeds and threads are left alone."""
        self.desk = desk
        self.open(Restored(random_at_start=desk.randomness.read()))

    # ------------------------------------------------------------ faults

    def judge(
        self,
        error: Exception,
        seq: int,
        stage: Stage,
        position: int,
        ordinal: int = -1,
        stand_in: Any = None,
        place: str = "",
    ) -> Failure:
        """What is to be done about an exception; the answer is in `failure.decision`. Retrying waits here."""
        policy = self.settings.policy
        if self.desk.allowance is not None:
            self.desk.box.enter(stage, seq, position)
            self.desk.allowance.stop_if_refused(error)
        failure = replace(failures.capture(error, stage, position), ordinal=ordinal, stand_in=stand_in, place=place)
        key = (seq, position)
        attempt = self._attempts[key] = self._attempts.get(key, 0) + 1
        failure = replace(failure, attempts=attempt)
        if policy.retry_on and isinstance(error, policy.retry_on) and attempt <= policy.retries:
            decision = Decision.RETRY
        elif self.settings.asks:
            decision = self.desk.ask(seq, failure)
        else:
            decision = Decision(policy.on_error)
        failure = replace(failure, decision=decision)
        if decision is Decision.RAISE:
            raise TaskFailed(failure)
        if decision is Decision.RETRY:
            self.desk.dealt_with.append(failure)
            self.desk.box.enter(Stage.WAITING, seq, position)
            time.sleep(pause_s(policy, attempt, hash(key) & 0xFFFF))
        return failure

    def settle(self, failure: Failure, positions: Sequence[int]) -> None:
        """Note that these samples are left out or replaced because of `failure`."""
        for position in positions:
            self.desk.dealt_with.append(replace(failure, position=position, culprits=(position,)))

    def works_with(
        self, step: Callable[[Sequence[int]], Any], stage: Stage, seq: int
    ) -> Callable[[Sequence[int]], bool]:
        """Whether a step over some samples raises; memory it took for them is taken back."""

        def works(positions: Sequence[int]) -> bool:
            self.desk.box.enter(stage, seq, count=max(1, len(positions)))
            try:
                step(positions)
            except Exception:  # that it raises is the answer
                return False
            finally:
                self.desk.arena.begin()
            return True

        return works

    def _place_of_unpicklable(self, batch: Any, seq: int, error: Exception) -> str:
        if isinstance(error, (OSError, MemoryError)):
            return ""  # no fault of what is in it
        part: list[Any] = [None]
        works = self.works_with(lambda _: self.desk.can_pack(part[0]), Stage.SENDING, seq)

        def packs(value: Any) -> bool:
            part[0] = value
            return works(())

        try:
            return culprits.place_in(batch, packs)
        except Exception:  # an attribute or a repr of the user's that raises: then the place is not told
            return ""

    def before_task(self, seq: int, probe: bool) -> None:
        if self.settings.seeds_by_batch:
            self._seed_by_batch(seq)
        elif self._dirty:
            self.desk.rewind()
        self._dirty = probe
        if self._attempts:
            self._attempts = {key: n for key, n in self._attempts.items() if key[0] == seq}

    def _seed_by_batch(self, seq: int) -> None:
        seed = batch_seed(self.settings.base_seed, self.desk.epoch, seq)
        random.seed(seed)
        torch.manual_seed(seed)
        _seed_numpy(seed, 0)
        self.desk.last_random = self.desk.randomness.read()  # where a retry begins

    def first_ordinal(self) -> int:
        """Which sample of its stream a batch begins with; -1 where samples have indices."""
        return -1

    def collated(self, seq: int, probe: bool) -> None:
        """A batch was collated, and will be sent unless it was for a probe."""

    def finish(
        self, seq: int, positions: Sequence[int], data: Any, probe: bool, gather: Callable[[Sequence[int]], Any]
    ) -> tuple[Failure, tuple[int, ...]] | None:
        """Collate and send. None when it is done; else what failed, and which samples are to blame."""
        box = self.desk.box
        self.desk.samples = len(positions)
        stage = Stage.COLLATING
        ordinal = self.first_ordinal()
        batch: Any = None
        try:
            box.enter(stage, seq, count=max(1, len(positions)))
            batch = self.collate_fn(data)
            box.finished()
            stage = Stage.SENDING
            box.enter(stage, seq)
            self.collated(seq, probe)
            if probe:
                self.desk.can_pack(batch)
            else:
                self.desk.send_batch(seq, batch)
            return None
        except Exception as error:
            self.desk.arena.begin()
            if isinstance(error, StopIteration) and ordinal >= 0 and self.settings.policy.on_error == "raise":
                raise StreamEnded from None  # as in torch, where a stream's collate function may end it
            place = self._place_of_unpicklable(batch, seq, error) if stage is Stage.SENDING else ""
            failure = self.judge(error, seq, stage, -1, ordinal, place=place)
        if failure.decision is Decision.RETRY:
            self.desk.rewind()
            raise Again
        works = self.works_with(lambda chosen: self.desk.can_pack(self.collate_fn(gather(chosen))), stage, seq)
        return failure, culprits.by_company(list(positions), works)


class MapJob(LoaderJob):
    """Map-style datasets: a task names its samples."""

    _stand_ins: dict[int, Any]  # positions of this batch that candidates have taken
    _tried: dict[int, int]  # how many of them, each

    def open(self, restored: Restored) -> None:
        many = getattr(self.dataset, "__getitems__", None) if self.settings.batched else None
        self._get_many = many or None  # torch leaves a false one alone, too

    def run(self, seq: int, body: memoryview, probe: bool) -> None:
        self.before_task(seq, probe)
        if self._get_many is None and not probe and tasks.is_plain(body):
            self._run_plain(seq, body)
        else:
            self._run(seq, body, probe)

    def _run_plain(self, seq: int, body: memoryview) -> None:
        """A batch as it was drawn, sample by sample: as nearly all of them are. What fails goes the long way."""
        box, dataset = self.desk.box, self.dataset
        words, clock = box.words, time.monotonic_ns
        slowest, position = 0, -1
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
                if now - since > slowest:
                    slowest = now - since
                since = now
        except Exception as error:
            failed = error  # dealt with below: errors to come are not to be chained to this one
        if failed is not None:
            try:
                self._run(seq, body, False, dict(enumerate(data)), failed=(failed, position))
            finally:
                failed = None  # else it holds this frame, and the frame holds it
            return
        box.was_healthy(slowest)
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
            self.desk.dealt_with.append(self.judge(problem, seq, Stage.FETCHING, -1))
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
                if whole is not None or len(missing) == len(live):
                    if not hasattr(got, "__len__") or len(got) != len(missing):
                        samples.update(dict.fromkeys(missing))
                        return got
                    samples.update(zip(missing, got, strict=True))
                    return got
                samples.update(zip(missing, got, strict=True))
            except Exception as error:
                failure = self.judge(error, seq, Stage.FETCHING_MANY, -1)
                if failure.decision is Decision.RETRY:
                    self.desk.rewind()
                    raise Again from None
                works = self.works_with(lambda chosen: get_many([live[p] for p in chosen]), Stage.FETCHING_MANY, seq)
                self._give_up(failure, culprits.by_halving(missing, works), task, live, samples)
                self.desk.rewind()
                whole = None
            missing = [p for p in live if p not in samples]
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
        failure = self.judge(error, seq, Stage.FETCHING, position, stand_in=self._stand_ins.get(position))
        if failure.decision is Decision.RETRY:
            self.desk.rewind()
            raise Again from None
        self._give_up(failure, (position,), task, live, samples)

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


def batch_seed(base_seed: int, epoch: int, seq: int) -> int:
    """Far apart for neighbours (the mixing of splitmix64), and never negative."""
    mask = (1 << 64) - 1
    mixed = (base_seed + 0x9E3779B97F4A7C15 * (seq + 1) + 0xD1B54A32D192ED03 * epoch) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    return (mixed ^ (mixed >> 31)) >> 1


def _seed_numpy(base_seed: int, slot: int) -> None:
    try:
        import numpy
    except ImportError:
        return
    numpy.random.seed(torch_worker._generate_state(base_seed, slot))
