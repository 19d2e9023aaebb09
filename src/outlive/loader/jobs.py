"""What a worker does for a data loader: prepare like torch's worker, then make batches.

Reads   the dataset.
Writes  batches, through its desk; what it is doing, to the black box.
Never   lets an exception of the user's code out unexplained; never catches what ends a process.

`LoaderJob` is what map-style and iterable datasets have in common: seeds, worker_init_fn, and
what a fault policy says about an exception. `MapJob` (samples.py) and `StreamJob` (streams.py) know how to fetch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
import torch
from torch.utils.data import IterDataPipe
from torch.utils.data._utils import worker as torch_worker

from outlive._capture.blackbox import SINCE
from outlive._fleet.policy import pause_s
from outlive._worker import failures, threads
from outlive._worker.loop import Desk, Restored, StreamEnded, TaskFailed
from outlive.incident import Decision, Failure, Stage
from outlive.limits import NO_LIMITS, Limits
from outlive.loader import collating, culprits, epochs
from outlive.settings import FaultPolicy

_MOST_UNEXPLAINED = 5  # times that a batch fails as a whole though all of its samples work


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
    persistent: bool = False  # workers live on after their epoch
    foreseen: frozenset[tuple[int, int]] = frozenset()  # known to be bad: worker, and which sample of its stream


class Again(Exception):
    """Start this batch once more, from the random state before it."""


class LoaderJob:
    may_end = False  # a worker's part may be over before the epoch is

    def __init__(self, settings: JobSettings) -> None:
        self.settings = settings
        self.dataset = settings.dataset
        self.collate_fn = settings.collate_fn
        self.slot = -1
        self.desk: Desk
        self._dirty = False  # the last task was a probe: its random numbers do not count
        self._attempts: dict[tuple[int, int], int] = {}
        self._unexplained, self._unexplained_in = 0, (-1, -1)  # failures without a culprit; of which epoch and batch
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
        note = restored.epoch_note or epochs.Note(settings.shared_seed)
        self._seed_pipe(note.shared_seed)
        self._set_worker_info(slot, seed)
        collating.install(desk.arena)
        if settings.worker_init_fn is not None:
            settings.worker_init_fn(slot)
        if restored.dataset is not None:
            self.restore_dataset(restored.dataset)
        iterations = restored.iterations
        for left in restored.earlier:
            self._repeat(left, iterations)
            iterations = 0
        if restored.earlier:
            desk.dataset = self.keep_dataset()  # for other replacements
        if restored.dataset is not None or restored.earlier:
            self._seed_pipe(note.shared_seed)
        note.repeat_calls(self.dataset)
        self.replay_iterations(iterations)
        if restored.random_at_start is not None:
            desk.randomness.set(restored.random_at_start)
        else:
            restored = replace(restored, random_at_start=desk.randomness.read())
        self.open(restored)
        if restored.random_now is not None:
            desk.randomness.set(restored.random_now)

    def begin_epoch(self, note: epochs.Note) -> bytes:
        kept = self.keep_dataset()  # before iter(dataset) changes it
        self._seed_pipe(note.shared_seed)
        state = self.desk.randomness.read()
        if note.calls:
            note.repeat_calls(self.dataset)
            self.desk.randomness.set(state)  # a replacement begins with it, too
        self.open(Restored(random_at_start=state))
        return kept

    def _repeat(self, left: Restored, iterations: int) -> None:
        """Bring the dataset to where an earlier epoch left it, before which so many others began."""
        note = left.epoch_note or epochs.Note(self.settings.shared_seed)
        self._seed_pipe(note.shared_seed)
        note.repeat_calls(self.dataset)
        self.replay_iterations(iterations)
        if left.random_at_start is not None:
            self.desk.randomness.set(left.random_at_start)
        self.open(left)

    def replay_iterations(self, count: int) -> None:
        """Let earlier epochs begin, for what that changes in the dataset."""

    def next_epoch(self, place: bytes | None) -> tuple[bytes | None, bytes | None, bool]:
        """What the epoch after the one that was left at this place begins with: a place, or the dataset itself; and
        whether that one must be repeated.
        """
        return place, None, False

    def keep_dataset(self) -> bytes:
        """What a replacement needs of the dataset's own state in a later epoch."""
        return b""

    def restore_dataset(self, kept: bytes) -> None:
        """Have the dataset that was kept."""

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

    def prepare_here(self, desk: Any, place: bytes | None = None) -> None:
        """For num_workers=0: in the trainer's own process, whose seeds and threads are left alone."""
        self.desk = desk
        self.open(Restored(random_at_start=desk.randomness.read(), place=place))

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
            self.desk.box.enter(Stage.WAITING, seq, position)
            if not self._dirty:  # a probe's failures are nobody's: its batch is made again
                self.desk.tell_retry(seq, failure)
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
            if self.desk.timed:
                self.desk.collating_ns = box.words[SINCE]
            batch = self.collate_fn(data)
            box.finished()
            stage = Stage.SENDING
            box.enter(stage, seq)
            if self.desk.timed:
                self.desk.sending_ns = box.words[SINCE]
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
        return failure, self.blamed(culprits.by_company, seq, list(positions), works)

    def blamed(self, search: culprits.Search, seq: int, positions: list[int], works: culprits.Works) -> tuple[int, ...]:
        """Which samples made a step fail. None where it works by now: it is tried again, though not for ever."""
        found = () if works(positions) else search(positions, works)
        if found:
            return found
        self._unexplained = self._unexplained + 1 if self._unexplained_in == (self.desk.epoch, seq) else 1
        self._unexplained_in = (self.desk.epoch, seq)
        return tuple(positions) if self._unexplained > _MOST_UNEXPLAINED else ()


def is_stateful(thing: Any) -> bool:
    """Whether a dataset, a sampler or an iterator can say where it stands. A module means something else by it."""
    return hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict") and not isinstance(thing, torch.nn.Module)


def batch_seed(base_seed: int, epoch: int, seq: int) -> int:
    """Far apart for neighbours (the mixing of splitmix64), and never negative."""
    mask = (1 << 64) - 1
    mixed = (base_seed + 0x9E3779B97F4A7C15 * (seq + 1) + 0xD1B54A32D192ED03 * epoch) & mask
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & mask
    return (mixed ^ (mixed >> 31)) >> 1


def _seed_numpy(base_seed: int, slot: int) -> None:
    numpy.random.seed(torch_worker._generate_state(base_seed, slot))
