"""num_workers=0 under a fault policy: the same jobs and the same machine, in the trainer's own process.

Reads   the dataset.
Writes  the ledger.
Never   survives what kills a process: here that is the trainer. Exceptions are dealt with as in workers.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import IterDataPipe, MapDataPipe
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import pin_memory as torch_pin

from outlive import errors
from outlive import records as r
from outlive._fleet.machine import Machine
from outlive._fleet.runner import Runner
from outlive._forensics.ledger import COUNTS
from outlive._worker.loop import StreamEnded, TaskFailed
from outlive._worker.randomness import Randomness
from outlive.incident import Decision, Failure, InHand
from outlive.loader import agreeing, here, position
from outlive.loader.door import Door, give_up_error, replacement_pool
from outlive.loader.jobs import JobSettings
from outlive.loader.raising import reraise
from outlive.loader.samples import MapJob
from outlive.loader.single import Passage, Unprofiled
from outlive.loader.source import Doubt, Found
from outlive.loader.streams import StreamJob
from outlive.records import Event, Outcome

_OVER = object()  # what a sampler that has no more is taken to give


class _NoBox:
    """Where nothing is published, nobody reads the black box of a process that cannot be replaced."""

    def __init__(self) -> None:
        self.words = [0] * 64

    def enter(self, stage: int, batch: int = -1, position: int = -1, count: int = 1) -> None: ...
    def fetch(self, position: int) -> None: ...
    def note_stand_in(self, index: object) -> None: ...
    def finished(self) -> None: ...
    def were_short(self, count: int) -> None: ...
    def took_long(self, nanoseconds: int) -> None: ...


_NO_BOX = _NoBox()


class _NoArena:
    def begin(self) -> None: ...


class Here:
    """A batch that is already where it is wanted."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def open(self) -> Any:
        return self._batch

    def discard(self) -> None: ...


class InlineEngine:
    """Engine and desk in one: a task is done while it is sent."""

    def __init__(self, job: MapJob | StreamJob) -> None:
        self.box: Any = _NO_BOX
        self.arena = _NoArena()
        self.randomness = Randomness()
        self.last_random = self.randomness.read()
        self.dealt_with: list[Failure] = []
        self.place: bytes | None = None
        self.samples = 0
        self.timed = False
        self.collating_ns = self.sending_ns = 0
        self.epoch = 0
        self.allowance = None  # the trainer's own process is not to be replaced
        self.door: Door | None = None
        self._job = job
        self._news: list[tuple[Event, Any]] = []
        self.runner: Runner | None = None
        self._answer: r.AnswerDoubt | None = None

    # the engine's side

    def start_worker(self, slot: int, incarnation: int) -> None:
        self._job.prepare_here(self, self.place)

    def send_task(self, slot: int, incarnation: int, seq: int, body: bytes, probe: bool) -> None:
        self.dealt_with.clear()
        self.last_random = self.randomness.read()
        try:
            self._job.run(seq, memoryview(body), probe)
        except StreamEnded:
            self._tell(r.TaskFinished(0, 1, seq, tuple(self.dealt_with), ended=True))
        except TaskFailed as failed:
            self._tell(r.TaskErrored(0, 1, seq, failed.failure, tuple(self.dealt_with), failed.ended))

    def renew_workers(self) -> r.WorkersRenewed | r.RenewalFailed:
        raise AssertionError("nothing was forked")

    def dismiss_worker(self, slot: int, incarnation: int) -> None:
        raise AssertionError("there is nobody to spare")

    def answer(self, slot: int, incarnation: int, decision: Decision) -> None: ...

    def answer_doubt(self, answer: r.AnswerDoubt) -> None:
        self._answer = answer

    def step_over(self, slot: int, count: int, killers: frozenset[int]) -> None: ...

    def wait_ready(self, timeout_s: float | None) -> Any: ...

    def take_events(self, ready: Any) -> Sequence[tuple[Event, Any]]:
        news, self._news = self._news, []
        return news

    def look(self, slot: int) -> tuple[int | None, InHand | None]:
        return os.getpid(), None

    def place_of(self, slot: int) -> bytes | None:
        return self.place

    # the desk's side

    def send_batch(self, seq: int, batch: Any) -> None:
        self._tell(r.TaskFinished(0, 1, seq, tuple(self.dealt_with)), Here(batch))

    def send_empty(self, seq: int) -> None:
        self._tell(r.TaskFinished(0, 1, seq, tuple(self.dealt_with), empty=True))

    def can_pack(self, batch: Any) -> None: ...

    def rewind(self) -> None:
        self.randomness.set(self.last_random)

    def ask(self, seq: int, failure: Failure) -> Decision:
        assert self.door is not None
        return self.door.decide_failure(seq, failure)

    def tell_retry(self, seq: int, failure: Failure) -> None:
        assert self.runner is not None
        self.runner.tell(r.TaskRetried(0, 1, seq, failure))  # at rest, as in `_consult`

    def doubt(self, seq: int, doubt: Doubt) -> r.AnswerDoubt:
        return self._consult(r.SourceDoubted(0, 1, os.getpid(), seq, *doubt), doubt.failure)

    def tell_probe(self, seq: int, found: Found) -> r.AnswerDoubt:
        return self._consult(r.SourceProbed(0, 1, os.getpid(), seq, *found), found.failure)

    def pause(self, seconds: float) -> None:
        time.sleep(seconds)

    def leave(self) -> None:
        raise AssertionError("nobody takes the trainer's place")

    def _consult(self, doubt: r.SourceDoubted | r.SourceProbed, failure: Failure | None) -> r.AnswerDoubt:
        """The machine is at rest while a task is done here: it can be told at once."""
        assert self.runner is not None
        self._answer = None
        self.runner.tell(doubt)
        if self._answer is None:  # the machine has given up, and the iterator will say so
            assert failure is not None
            raise TaskFailed(failure)
        return self._answer

    def _tell(self, event: Event, payload: Any = None) -> None:
        self._news.append((event, payload))


class InlineIterator(Unprofiled):
    def __init__(self, loader: Any) -> None:
        bookmark = self._bookmark = loader._bookmark
        told = (bookmark.resumed or {}).get("begun")
        self._passage = Passage(bookmark, loader, told)
        # Not _SingleProcessDataLoaderIter's: its fetcher would call iter(dataset), and the job does.
        torch_loader._BaseDataLoaderIter.__init__(self, loader)
        if self._timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if isinstance(self._dataset, (IterDataPipe, MapDataPipe)):
            torch.utils.data.graph_settings.apply_sharding(self._dataset, self._world_size, self._rank)
        stream = self._dataset_kind == torch_loader._DatasetKind.Iterable
        policy = self._policy = loader._policy
        settings = JobSettings(
            dataset=self._dataset,
            collate_fn=self._collate_fn,
            batched=self._auto_collation,
            drop_last=self._drop_last,
            base_seed=int(self._base_seed),
            shared_seed=None,
            worker_init_fn=None,
            num_workers=0,
            policy=policy.without_callables(),
            asks=callable(policy.on_error),
        )
        self._sampler_iter = self._passage.draw_from(loader, self._sampler_iter, told)
        self._ledger = loader._ledger
        self._ledger.begin_epoch()
        engine = InlineEngine(loader._make_job(settings, stream))
        self._door = Door(
            self._ledger, policy, engine, stream=stream, batched=self._auto_collation, describe=loader.describe
        )
        self._door.seed = int(self._base_seed)
        self._door.pool = () if stream else replacement_pool(loader)
        engine.door = self._door
        self._machine = Machine(1, policy)
        self._runner = engine.runner = Runner(engine, self._machine, self._door)
        self._ledger.breaker = self._machine.breaker
        self._machine.breaker.replaceable = False
        self._engine = engine
        seen = self._seen = here.attach(loader, self, batched=self._auto_collation, noted=False)
        if isinstance(seen, here.Seen):
            seen.door, self._runner.listener = self._door, seen.saw
        self._is_told = False
        if told is not None and "stream" in told:
            engine.place = position.to_place(told["stream"], self._dataset)
        if stream:
            dataset = self._dataset
            self._passage.tell = lambda finished: (
                {} if finished or engine.place is None else {"stream": position.of_place(engine.place, dataset)}
            )
        self._runner.begin()
        self._user = 0  # the thread that is in next()
        self._seq = self._passage.taken
        self._told = False
        self._over = False
        self._agreement = agreeing.agreement_of(policy)
        seen.begin(self._seq)

    def _next_data(self) -> Any:
        thread = threading.get_ident()
        if self._user and self._user != thread:
            raise errors.two_threads_error()
        self._user = thread  # no call since the question: no other thread comes in between
        try:
            return self._noted_batch()
        finally:
            self._user = 0

    def _noted_batch(self) -> Any:
        seen, engine = self._seen, self._engine
        self._is_told = seen.asked()
        engine.samples, engine.timed, engine.box = 0, False, _NO_BOX
        try:
            data = self._next_batch()
        except BaseException:
            seen.failed()
            raise
        if self._is_told:
            seen.gave(data, engine.samples)
        else:
            seen.passed(data, engine.samples)
        return data

    def _next_batch(self) -> Any:
        self._agreement.look()
        while True:
            if self._runner.given_up is not None:
                if self._told:
                    raise StopIteration
                self._told = True
                self._end_epoch()
                error = give_up_error(self._runner.given_up, self._ledger, self._policy)
                self._agreement.gave_up(error)
                raise error
            index = next(self._sampler_iter, _OVER) if not self._over else _OVER
            if index is _OVER:
                return self._leave()
            seq, self._seq = self._seq, self._seq + 1
            self._door.draw(seq, index)
            if self._is_told:
                self._seen.leaves_to(self._engine, seq, index)
            self._runner.tell(r.TaskSubmitted(seq, 0, self._door.size_of(seq), True, *self._door.known_bad(seq)))
            self._runner.wait(0)
            self._count()
            concluded = self._runner.concluded.pop(seq, None)
            self._door.forget(seq)
            if self._runner.problem is not None:
                problem, self._runner.problem = self._runner.problem, None
                raise problem
            if concluded is None:
                continue
            if concluded.outcome is Outcome.ENDED:
                return self._leave()
            if concluded.outcome is Outcome.EMPTY:
                self._ledger.emptied += 1
                if (data := self._agreement.emptied()) is agreeing.NOTHING:
                    continue
                return self._given(data)
            if concluded.outcome is Outcome.ERRORED:
                self._ledger.errored += 1
                assert concluded.incident is not None
                reraise(concluded.incident)
            return self._given(self._agreement.given(concluded.payload.open()))

    def _given(self, data: Any) -> Any:
        if self._pin_memory:
            data = torch_pin.pin_memory(data, self._pin_memory_device)
        self._bookmark.delivered(self._passage)
        self._ledger.delivered += 1
        return data

    def _leave(self) -> Any:
        """There are no more: the epoch is over, once other ranks have no more either."""
        self._over = True
        if (spare := self._agreement.ended()) is not agreeing.NOTHING:
            return self._given(spare)
        self._end_epoch()
        raise StopIteration

    def _count(self) -> None:
        for name in COUNTS:
            setattr(self._ledger, name, getattr(self._ledger, name) + getattr(self._machine, name))
            setattr(self._machine, name, 0)

    def _end_epoch(self) -> None:
        self._passage.end()
        self._door.remember(self._machine.breaker.good_batch)
        self._ledger.end_epoch()
        self._seen.end()
