"""The thread behind a pool: hands tasks to workers, and their outcomes to whoever waits.

Reads   tasks from any thread; news from the engine.
Writes  outcomes into items.
Never   the pool object: when its last user lets go of it, what was submitted is finished and the workers go.

Everything of the fleet (engine, machine, runner) belongs to this one thread; others put items into a deque and ring.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holdfast import errors
from holdfast import records as r
from holdfast._fleet.machine import Machine
from holdfast._fleet.runner import Concluded, Runner
from holdfast._forensics.ledger import Ledger
from holdfast.engines.choice import make_engine
from holdfast.engines.watch import WatchSettings
from holdfast.incident import Incident, IncidentKind
from holdfast.limits import Limits
from holdfast.pool.door import Door
from holdfast.pool.failing import PoolBrokenError, error_of
from holdfast.pool.jobs import PoolJob, Results
from holdfast.pool.work import Chunk, Item
from holdfast.settings import FaultPolicy

_CHUNK_S = 0.002  # tasks are put together so that a chunk takes about so long,
_MOST_TOGETHER = 256
_SHORT_S = 0.001  # and while they are so short, the next chunk waits at the worker


@dataclass(frozen=True)
class ManagerSettings:
    context: Any
    workers: int
    initializer: Any
    initargs: tuple[Any, ...]
    policy: FaultPolicy
    limits: Limits
    budget: str | int | None
    at_most_once: bool


class Manager:
    def __init__(self, settings: ManagerSettings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._incoming: deque[Item] = deque()
        self._rung = False
        self._stopping = False
        self._ending = False  # at once, whatever is under way
        self._thread: threading.Thread | None = None
        self._numbers = 0
        self._seq = 0
        self._item_s: float | None = None  # how long a task takes, about
        self.broken: BaseException | None = None

    @property
    def workers(self) -> int:
        return self._settings.workers

    @property
    def at_most_once(self) -> bool:
        return self._settings.at_most_once

    def good_size(self, most: int) -> int:
        """How many items of a `map` to send at a time: so that a chunk takes a while, and each worker gets some."""
        if self._item_s is None or self._item_s >= _SHORT_S:
            return 1
        return max(1, min(round(_CHUNK_S / max(self._item_s, 1e-7)), _MOST_TOGETHER, most // (4 * self.workers)))

    # ------------------------------------------------------------ from any thread

    def add(self, items: Sequence[Item]) -> None:
        with self._lock:
            self.check_open()
            for item in items:
                item.number = self._numbers
                self._numbers += len(item.rows)
            self._incoming.extend(items)
            if self._thread is None:
                try:
                    self._start()
                except BaseException:
                    self._incoming.clear()  # whoever submitted is told by what is raised here
                    raise
            self._ring()

    def check_open(self) -> None:
        if os.getpid() != self._owner:
            raise errors.ForkedLoaderError(
                f"this pool belongs to process {self._owner}; make a new one in this process, a fork of it"
            )
        if self.broken is not None:
            raise self.broken
        if self._stopping:
            raise RuntimeError("cannot schedule new futures after shutdown")

    def _start(self) -> None:
        settings = self._settings
        job = PoolJob(settings.initializer, settings.initargs, settings.policy.without_callables(), settings.limits)
        watch = WatchSettings(
            settings.policy.sample_timeout, settings.policy.hang_floor_s, settings.limits.memory_bytes, settings.budget
        )
        self._bell, self._ringer = os.pipe()
        for fd in (self._bell, self._ringer):
            os.set_blocking(fd, False)
        self._engine = make_engine(settings.context, job, settings.workers, watch)
        self._machine = Machine(settings.workers, settings.policy, never_twice=settings.at_most_once)
        self._machine.crew.wanted = 1
        self._door = Door(self._ledger, self._engine, imports_main=self._engine.imports_main)
        self._runner = Runner(self._engine, self._machine, self._door)
        try:
            self._engine.launch(1)
        except BaseException:
            self._engine.close()
            raise
        self._engine.wake_by(self._bell)
        self._thread = threading.Thread(target=self._run, name="holdfast-pool")
        self._thread.start()

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._ringer, b"!")

    def stop(self, *, cancel: bool = False, end: bool = False) -> None:
        """Finish what was submitted and leave. `cancel`: what has not begun is dropped; `end`: also what has."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._stopping = True
            self._ending = self._ending or end
            if cancel or end:
                dropped = list(self._incoming)
                self._incoming.clear()
            else:
                dropped = []
            if self._thread is not None:
                self._ring()
        for item in dropped:
            item.drop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the workers are gone; whether they are."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or os.getpid() != self._owner:
            return True
        thread.join(timeout)
        return not thread.is_alive()

    @property
    def pids(self) -> list[int]:
        return self._engine.pids if self._thread is not None and self._thread.is_alive() else []

    @property
    def retries(self) -> int:
        """How often a task was begun again so far."""
        return self._machine.retries if self._thread is not None else 0

    # ------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            self._runner.begin()
            while True:
                self._take_in()
                if self._is_over():
                    break
                self._runner.wait(None)
                self._hush()
                self._deliver()
                if self._runner.given_up is not None:
                    self._break(self._given_up_error(self._runner.given_up))
                    break
        except BaseException as error:  # ours: nobody may wait for ever because of it
            self._break(PoolBrokenError(f"the pool's own thread failed: {type(error).__name__}: {error}", None))
            raise
        finally:
            self._engine.close(**({"grace_s": 0.0} if self._ending else {}))
            self._break(PoolBrokenError("the pool was ended while this task was under way", None), say=False)
            with self._lock:
                self._stopping = True
                os.close(self._bell)
                os.close(self._ringer)
                self._ring = lambda: None  # type: ignore[method-assign]

    def _is_over(self) -> bool:
        with self._lock:
            return self._ending or (self._stopping and not self._incoming and not self._door.chunks)

    def _hush(self) -> None:
        with self._lock:
            if self._rung:
                self._rung = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell, 4096)

    def _take_in(self) -> None:
        """Give the machine as many chunks as its workers can take up soon; the rest can still be cancelled."""
        machine = self._machine
        short = self._item_s is not None and self._item_s < _SHORT_S and not self._settings.at_most_once
        machine.dealer.depth = 2 if short else 1
        while self._incoming:
            unfinished = len(machine.tasks) + len(self._incoming)
            if unfinished > machine.crew.wanted < self._settings.workers:
                self._runner.tell(r.SizeWanted(min(unfinished, self._settings.workers)))
            if len(machine.tasks) >= machine.crew.capacity * (machine.dealer.depth + 1):
                return
            items = self._next_items(short)
            if items:
                self._submit(items)

    def _next_items(self, short: bool) -> list[Item]:
        together = 1
        if short and self._item_s is not None:
            fair = len(self._incoming) // (2 * self._machine.crew.capacity)
            together = max(1, min(fair, round(_CHUNK_S / max(self._item_s, 1e-7)), _MOST_TOGETHER))
        taken: list[Item] = []
        with self._lock:
            while self._incoming and len(taken) < together and not (taken and self._incoming[0].alone):
                taken.append(self._incoming.popleft())
                if taken[0].alone:
                    break
        return [item for item in taken if item.begin()]

    def _submit(self, items: list[Item]) -> None:
        chunk = Chunk(items)
        if not chunk.sendable:
            self._settle(chunk, None, {})
            return
        seq = self._seq
        self._seq += 1
        self._door.chunks[seq] = chunk
        self._runner.tell(r.TaskSubmitted(seq, -1, chunk.size, True))

    def _deliver(self) -> None:
        concluded = self._runner.concluded
        while concluded:
            self._conclude(*concluded.popitem())

    def _conclude(self, seq: int, concluded: Concluded) -> None:
        chunk = self._door.chunks.pop(seq)
        condemned = self._door.condemned.pop(seq, {})
        results: Results | None = None
        if concluded.payload is not None:
            try:
                results = concluded.payload.open()
            except Exception as error:  # what a worker could pickle and we cannot unpickle
                concluded.payload.discard()
                self._unreadable(chunk, error, condemned)
                return
            self._learn(results)
        self._settle(chunk, results, condemned)

    def _settle(self, chunk: Chunk, results: Results | None, condemned: dict[int, Incident]) -> None:
        """Hand out what came of a chunk."""
        if results is not None and len(results.done) == chunk.size and len(chunk.items) == 1:
            chunk.items[0].settle(results.values, {})
            return
        values: dict[int, Any] = {}
        failed: dict[int, BaseException] = dict(chunk.unsendable)
        if results is not None:
            values.update(zip(results.done, results.values))
            failed.update({p: _with_incident(it.rebuilt(), condemned.get(p)) for p, it in results.raised.items()})
        for item, first in zip(chunk.items, chunk.firsts):
            positions = range(first, first + len(item.rows))
            wrong = {p - first: _error(p, failed, condemned) for p in positions if p not in values}
            item.settle([values.get(p) for p in positions], wrong)

    def _learn(self, results: Results) -> None:
        each = results.seconds / max(1, len(results.done) + len(results.raised))
        self._item_s = each if self._item_s is None else 0.8 * self._item_s + 0.2 * each

    def _unreadable(self, chunk: Chunk, error: BaseException, condemned: dict[int, Incident]) -> None:
        if chunk.size == 1 or self._settings.at_most_once:
            for item in chunk.items:
                item.fail(error)
            return
        again = []
        condemned = {p: incident for p, incident in condemned.items() if incident.kind is not IncidentKind.EXCEPTION}
        for position, part in enumerate(part for item in chunk.items for part in item.split()):
            if position in condemned or position in chunk.unsendable:
                part.fail(_error(position, chunk.unsendable, condemned))
            else:
                again.append(part)  # one of them is to blame: each by itself
        with self._lock:
            self._incoming.extendleft(reversed(again))

    def _given_up_error(self, given_up: r.GiveUp) -> BaseException:
        incident = given_up.incident
        if incident is not None and given_up.limit is r.LimitKind.STARTS:
            return PoolBrokenError(str(errors.start_error(incident, incident.attempt)), incident)
        return PoolBrokenError(f"{given_up.text}; pool.incidents has every one", incident)

    def _break(self, error: BaseException, *, say: bool = True) -> None:
        """Nothing more will come: tell everybody who waits."""
        with self._lock:
            if say and self.broken is None:
                self.broken = error
            waiting = list(self._incoming)
            self._incoming.clear()
        for item in waiting:
            if item.begin():
                item.fail(error)
        for chunk in list(self._door.chunks.values()):
            for item in chunk.items:
                item.fail(error)
        self._door.chunks.clear()


def _error(position: int, failed: dict[int, BaseException], condemned: dict[int, Incident]) -> BaseException:
    error = failed.get(position)
    if error is None and position in condemned:
        error = error_of(condemned[position])
    return error if error is not None else errors.HoldfastError("this task was lost: please report it")


def _with_incident(error: BaseException, incident: Incident | None) -> BaseException:
    if incident is not None:
        with contextlib.suppress(Exception):  # a class may refuse new attributes
            error.incident = incident  # type: ignore[attr-defined]
    return error
