"""One pass over a loader: draws indices as torch does, hands them out, delivers what comes back.

Reads   the sampler; outcomes from the runner.
Writes  tasks to the runner; the ledger.
Never   an order or a batch that differs from torch's own loader's, whatever happens to workers.

Batch i goes to slot i mod n (skipping ended streams), prefetch_factor × n batches are in flight, and one more index
is drawn per delivered batch: as in torch, because samplers, seeds and tests depend on it.
"""

from __future__ import annotations

import functools
import itertools
import os
import pickle
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter, deque
from typing import Any, NoReturn

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import pin_memory as torch_pin

from outlive import errors
from outlive import records as r
from outlive._fleet.machine import Machine
from outlive._fleet.runner import Concluded, Runner
from outlive._forensics.ledger import COUNTS, Ledger
from outlive._metrics.layout import LEFT
from outlive.engines.choice import make_engine
from outlive.engines.watch import WatchSettings
from outlive.engines.workers import Stand
from outlive.loader import agreeing, drawing, epochs, looking, metered, resuming
from outlive.loader.door import Door, give_up_error, replacement_pool
from outlive.loader.handing import HandsOut
from outlive.loader.jobs import JobSettings
from outlive.loader.pacing import Pacing
from outlive.loader.raising import NOT_PICKLABLE, annotate, reraise
from outlive.loader.resuming import Bookmark, Track
from outlive.loader.samples import MapJob
from outlive.loader.streams import StreamJob
from outlive.records import Outcome
from outlive.settings import FaultPolicy
from outlive.statistics import Load, SlotStatistics, StuckWorker

_INTERRUPTED_GRACE_S = 0.3  # for busy workers, when somebody waits for his prompt


class SupervisedIterator(HandsOut, torch_loader._MultiProcessingDataLoaderIter):
    """The iterator of a loader with workers. Of torch's class, because libraries ask for that."""

    def __init__(self, loader: Any) -> None:
        self._bookmark: Bookmark = loader._bookmark
        self._resumed = self._bookmark.resumed
        self._track: Track
        fleet = resuming.fleet_of(self._resumed, loader)
        if fleet is not None and fleet["base_seed"] is None:
            self._bookmark.set(loader, fleet)
        torch_loader._BaseDataLoaderIter.__init__(self, loader)
        if fleet is not None and fleet["base_seed"] is not None:
            self._base_seed, self._shared_seed = fleet["base_seed"], fleet["shared_seed"]
        self._job_seed = self._shared_seed
        self._seeds_by_batch = loader._sizing is not None or (fleet is not None and fleet["by_batch"])
        if loader.prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        self._shutdown = True  # until there is something to shut down
        self._owner = os.getpid()
        self._user = 0  # the thread that is in next()
        self._ledger: Ledger = loader._ledger
        self._policy: FaultPolicy = loader._policy
        self._stream = self._dataset_kind == torch_loader._DatasetKind.Iterable
        self._calls = epochs.Calls(self._dataset) if self._persistent_workers else None
        context = loader.multiprocessing_context or torch.multiprocessing
        watch = WatchSettings.of(self._policy, loader._limits.memory_bytes, loader._budget)
        self._engine = make_engine(context, self._make_job(loader), self._num_workers, watch)
        if self._ledger.healed:
            self._engine.renew_workers(self._ledger.healed)
        ahead = self._prefetch_factor * (self._num_workers if self._stream or not self._in_order else 1)
        self._engine.expect(ahead)
        if fleet is not None:
            resuming.set_out(self._engine, fleet, loader.dataset)
        self._machine = Machine(self._num_workers, self._policy, takes_turns=not self._stream)
        self._pacing = Pacing(loader._sizing, self._machine, self._engine) if loader._sizing is not None else None
        self._door = Door(
            self._ledger,
            self._policy,
            self._engine,
            stream=self._stream,
            batched=self._auto_collation,
            describe=loader.describe,
        )
        self._door.history.expect(self._num_workers, loader.batch_size or 1)
        self._door.seed = int(self._base_seed)
        self._door.imports_main = self._engine.imports_main
        self._runner = Runner(self._engine, self._machine, self._door)
        self._ledger.breaker = self._machine.breaker
        self._metered = metered.attach(loader, self._runner, self._machine, self._engine, self._door)
        if not self._in_order:
            self._runner.arrived = deque()
        try:
            self._engine.launch(self._machine.crew.wanted)
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            self._engine.close()
            self._door.unsendable(error, self._engine.job)
            warnings.warn(NOT_PICKLABLE, stacklevel=3)
            raise
        except BaseException as error:
            self._engine.close()
            if isinstance(error, Exception) and not isinstance(error, OSError):  # a __getstate__ may raise anything
                self._door.unsendable(error, self._engine.job)
            raise
        self._shutdown = False
        self._finalizer = weakref.finalize(self, self._engine.close)
        try:
            self._runner.begin()
            self._reset(loader, first_iter=True)
        except BaseException:
            self._shutdown_workers()  # now: a traceback that somebody keeps would keep this object
            raise

    def _make_job(self, loader: Any) -> MapJob | StreamJob:
        init = loader.worker_init_fn
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            init = functools.partial(torch_loader._sharding_worker_init_fn, init, self._world_size, self._rank)
        settings = JobSettings(
            dataset=loader._dataset_for_workers(),
            collate_fn=self._collate_fn,
            batched=self._auto_collation,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            shared_seed=self._shared_seed,
            worker_init_fn=init,
            num_workers=self._num_workers,
            policy=self._policy.without_callables(),
            asks=callable(self._policy.on_error),
            worker_threads=loader.worker_threads,
            limits=loader._limits,
            persistent=self._persistent_workers,
            seeds_by_batch=self._seeds_by_batch,
            foreseen=self._ledger.quarantine.foreseen_in_streams(),
        )
        return loader._make_job(settings, self._stream)  # type: ignore[no-any-return]

    # ------------------------------------------------------------ an epoch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        stands: dict[int, Stand] = {} if first_iter else self._track.next_stands
        if not first_iter:
            self._check_thread()
            self._drain()
        track = self._track = resuming.begin(self, loader)
        torch_loader._BaseDataLoaderIter._reset(self, loader, first_iter)
        self._sampler_iter = drawing.iterator_of(loader, self._sampler_iter, self._bookmark.resumed)
        self._ledger.begin_epoch()
        self._agreement = agreeing.agreement_of(self._policy)
        self._metered.begin()
        self._send_idx = 0
        self._rcvd_idx = 0
        self._hand: tuple[int, Any] | None = None  # a batch that was opened and not returned yet
        self._owed = 0  # indices to be drawn, for batches that were booked
        self._outstanding: dict[int, int] = {}  # seq → slot
        self._workers_status = [True] * self._num_workers
        self._workers_num_tasks = [0] * self._num_workers
        self._worker_queue_idx_cycle = itertools.cycle(range(self._num_workers))
        self._door.remember(self._machine.breaker.good_batch)
        self._door.begin_epoch(() if self._stream else replacement_pool(loader))
        if not first_iter:
            calls = self._calls.all() if self._calls is not None else ()
            self._engine.begin_epoch(self._ledger.epoch, epochs.Note(self._shared_seed, calls))
            for slot, stand in stands.items():
                self._engine.begin_at(slot, stand)
            self._runner.tell(r.EpochBegan(self._ledger.epoch))
            while not self._engine.epoch_begun and self._runner.given_up is None:
                self._wait()
        self._sampler_error = None
        if track.resumed is not None:
            resuming.go_on(self, track.resumed)
        else:
            self._owed = self._prefetch_factor * self._machine.crew.wanted
            self._draw_owed()
        if not self._outstanding:
            self._raise_sampler_error()

    def position(self, given: bool = False) -> dict[str, Any]:
        """Where this pass is, as `state_dict()` has it; `given`: the batch in hand counts as delivered."""
        return resuming.position_of(self, given)

    def _drain(self) -> None:
        """Have the workers finish what an unfinished epoch asked of them: as in torch, it uses random numbers."""
        self._check_owner()
        while self._machine.tasks and self._runner.given_up is None:
            self._wait()
        for concluded in self._runner.concluded.values():
            if concluded.payload is not None:
                concluded.payload.discard()
        self._runner.concluded.clear()
        if self._runner.arrived is not None:
            self._runner.arrived.clear()

    # ------------------------------------------------------------ next

    def __next__(self) -> Any:
        try:
            if self._stream or self._sampler_iter is None or torch._C._autograd._profiler_enabled():
                return super().__next__()
            # What torch does there, without telling a profiler that nobody runs: that takes longer than a small batch.
            data = self._next_data()
            self._num_yielded += 1
            return data
        except KeyboardInterrupt as interrupt:
            # A notebook keeps the traceback, and with its frames us and our workers, until the next error. Whoever
            # holds this iterator himself can go on with it; a loop that is gone lets go of it.
            if self._finalizer.detach() is not None:
                self._finalizer = weakref.finalize(self, self._engine.close, _INTERRUPTED_GRACE_S)
            traceback.clear_frames(interrupt.__traceback__)
            del self
            raise

    def _next_data(self) -> Any:
        thread = threading.get_ident()
        if self._user and self._user != thread:
            raise errors.two_threads_error()
        self._user = thread  # no call since the question: no other thread comes in between
        try:
            return self._next_batch()
        finally:
            self._user = 0

    def _next_batch(self) -> Any:
        self._check_owner()
        if self._hand is not None and self._hand[0] not in self._runner.concluded:
            return self._give()  # an interrupt came between booking this batch and returning it
        self._agreement.look()
        while True:
            seq = self._next_seq()
            if seq is None:
                if (spare := self._agreement.ended()) is not agreeing.NOTHING:
                    self._ledger.delivered += 1
                    return self._pinned(spare)
                self._track.finished = True
                self._bookmark.ended(self)
                if self._persistent_workers:
                    self._engine.rest()
                else:
                    self._shutdown_workers()
                self._metered.end()
                self._ledger.end_epoch()
                raise StopIteration
            concluded = self._runner.concluded[seq]
            problem = None
            if concluded.outcome is Outcome.DELIVERED:
                problem = self._open(seq, concluded.payload)
            slot = self._book(seq, concluded.outcome)
            if problem is not None:
                concluded.payload.discard()
                self._draw_owed()
                try:
                    self._unreadable(seq, slot, problem)
                finally:
                    problem = None  # its traceback leads here: a cycle would keep the batch
                if self._stands_in(seq):
                    return self._give()
            elif concluded.outcome is Outcome.DELIVERED:
                words = self._metered.words
                left = words[LEFT] = words[LEFT] - 1
                if left <= 0:
                    self._metered.gave(seq, concluded.payload)
                return self._give()
            else:
                self._draw_owed()
                self._door.forget(seq)
                if concluded.outcome is Outcome.EMPTY:
                    self._ledger.emptied += 1
                    if self._stands_in(seq):
                        return self._give()
                elif concluded.outcome is Outcome.ERRORED:
                    self._ledger.errored += 1
                    self._raise(concluded, slot)

    def _book(self, seq: int, outcome: Outcome) -> int:
        """This batch has had its turn, and another index is owed for it; the slot that made it."""
        self._runner.torn = True
        del self._runner.concluded[seq]
        slot = self._outstanding.pop(seq)
        self._track.book(slot, seq)
        if self._in_order:
            self._rcvd_idx = seq + 1
        if self._pacing is not None:
            self._owed = max(0, self._prefetch_factor * self._machine.crew.capacity - len(self._outstanding))
        elif outcome is not Outcome.ENDED:
            self._workers_num_tasks[slot] -= 1
            self._owed += 1
        elif self._workers_status[slot]:
            self._workers_status[slot] = False
            self._owed += 1
        self._runner.torn = False
        return slot

    def _give(self) -> Any:
        """The batch in hand, which was booked: returned now, or with the next call if this is interrupted."""
        assert self._hand is not None
        self._draw_owed()
        if self._pacing is not None and (wanted := self._pacing.delivered()) is not None:
            self._runner.tell(wanted)
        seq, data = self._hand
        try:
            data = self._pinned(data)
        except Exception:
            self._hand = None
            raise
        if self._metered.due:
            self._metered.flush()
        self._bookmark.delivered(self)
        self._door.forget(seq)
        self._ledger.delivered += 1
        self._hand = None
        return data

    def _pinned(self, data: Any) -> Any:
        return torch_pin.pin_memory(data, self._pin_memory_device) if self._pin_memory else data

    def _stands_in(self, seq: int) -> bool:
        """Take another batch in hand for this one, which has lost all its samples; whether there is one."""
        if (data := self._agreement.emptied()) is not agreeing.NOTHING:
            self._hand = seq, data
        return data is not agreeing.NOTHING

    def _unreadable(self, seq: int, slot: int, error: Exception) -> None:
        """A batch that the worker could pickle and this process cannot unpickle."""
        incident = self._door.unreadable(seq, slot, error)
        self._door.forget(seq)
        if self._policy.on_error in ("skip", "replace"):
            self._ledger.emptied += 1
            return
        self._ledger.errored += 1
        annotate(error, incident)
        try:
            raise error
        finally:
            del error  # as above

    def _next_seq(self) -> int | None:
        """The batch whose turn it is, waiting for it; None when there is none left."""
        runner = self._runner
        while True:
            if runner.problem is not None:
                problem, runner.problem = runner.problem, None
                raise problem
            if not self._outstanding:
                self._raise_sampler_error()
                if not self._shutdown:
                    self._draw_owed()
            if not self._outstanding:
                if self._sampler_error is None:
                    return None
                continue
            if self._in_order:
                if self._rcvd_idx in runner.concluded:
                    return self._rcvd_idx
            elif runner.arrived:  # not in order
                seq = runner.arrived.popleft()
                if seq in runner.concluded:
                    return seq
                continue
            if runner.given_up is not None:
                self._shutdown_workers()
                self._outstanding.clear()  # told once; after that the epoch is over, so that nobody spins on it
                self._ledger.end_epoch()
                error = give_up_error(runner.given_up, self._ledger, self._policy)
                self._agreement.gave_up(error)
                raise error
            since = time.monotonic()
            self._wait()
            self._metered.waited(since)
            if self._pacing is not None:
                self._pacing.waited(since)

    @property
    def ready_batches(self) -> int:
        """Batches that have come from workers and were not delivered yet."""
        return len(self._runner.concluded)

    def poll(self, timeout_s: float) -> None:
        """Handle what workers have sent, and wait this long for it if there is nothing; delivers no batch."""
        self._check_owner()
        self._check_thread()
        self._runner.wait(timeout_s)

    def _wait(self) -> None:
        if self._timeout <= 0:
            self._runner.wait(self._metered.patience_s)
            return
        known = (len(self._runner.concluded), self._engine.epoch_begun)
        deadline = time.monotonic() + self._timeout
        while (len(self._runner.concluded), self._engine.epoch_begun) == known and self._runner.given_up is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"DataLoader timed out after {self._timeout} seconds")
            self._runner.wait(left)

    def _raise(self, concluded: Concluded, slot: int) -> NoReturn:
        incident = concluded.incident
        assert incident is not None
        if incident.failure is not None:
            reraise(incident)
        raise errors.crash_error(incident, healthy_slots=self._num_workers - 1, delivered=self._ledger.delivered)

    # ------------------------------------------------------------ the rest

    def _check_thread(self) -> None:
        if self._user and self._user != threading.get_ident():
            raise errors.two_threads_error()

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise errors.ForkedLoaderError(
                f"this iterator belongs to process {self._owner} and cannot be used in process {os.getpid()}, "
                "a fork of it; make a new one there: iter(loader)"
            )
        if self._runner.torn:
            self._shutdown_workers()
            self._outstanding.clear()
            self._hand = None
            self._runner.torn = False
            raise errors.OutliveError(
                "this iterator was interrupted while it read from its workers, and a batch may be missing; "
                "make a new one: iter(loader)"
            )
        if self._shutdown and self._outstanding:
            self._outstanding.clear()
            raise errors.OutliveError("this iterator was shut down; make a new one: iter(loader)")

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin with these workers."""
        return not self._shutdown and not self._runner.torn and os.getpid() == self._owner

    @property
    def workers(self) -> int:
        return 0 if self._shutdown else self._machine.crew.capacity

    @property
    def cell_bytes(self) -> int:
        return self._engine.cell_bytes()

    def counts(self) -> Counter[str]:
        """What the machine has counted, beside what the ledger has."""
        return Counter({name: getattr(self._machine, name) for name in COUNTS})

    def loads(self) -> tuple[Load, ...]:
        """What workers did with the last seconds, or with the last ones of the epoch."""
        if self._shutdown:
            return self._ledger.loads
        looked = (self._engine.load_of(slot)[0] for slot in range(self._num_workers))
        return tuple(load for load in looked if load is not None)

    @property
    def stuck(self) -> tuple[StuckWorker, ...]:
        return () if self._shutdown else self._engine.stuck

    def slot_statistics(self) -> tuple[SlotStatistics, ...]:
        return looking.at_slots(self._machine, None if self._shutdown else self._engine)

    def _shutdown_workers(self) -> None:
        if os.getpid() != self._owner:
            return
        if self._shutdown:
            self._engine.close()  # does nothing, unless the first call was interrupted before it
            return
        try:
            self._bookmark.left(self)
            self._ledger.loads = self.loads()  # advice is asked for after an epoch more often than in it
            self._shutdown = True
            self._ledger.stuck += self._engine.stuck
            self._metered.detach()
            self._door.remember(self._machine.breaker.good_batch)
            self._machine.breaker.rest()
            for name, count in self.counts().items():
                setattr(self._ledger, name, getattr(self._ledger, name) + count)
                setattr(self._machine, name, 0)
        finally:  # also where an interrupt comes in between
            self._shutdown = True
            self._finalizer()

    def __del__(self) -> None:
        if not getattr(self, "_shutdown", True) and self._finalizer.alive:  # else Python ends, and has run it
            self._shutdown_workers()
