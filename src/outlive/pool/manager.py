"""The thread behind a pool: hands tasks to workers, and their outcomes to whoever waits.

Reads   tasks from any thread; news from the engine.
Writes  outcomes into items.
Never   the pool object: when its last user lets go of it, what was submitted is finished and the workers go.

Everything of the fleet (engine, machine, runner) belongs to this one thread; others put items into a deque and ring.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outlive import errors
from outlive import records as r
from outlive._fleet.machine import Machine
from outlive._fleet.runner import Concluded, Runner
from outlive._forensics.ledger import Ledger
from outlive.engines.choice import make_engine
from outlive.engines.watch import WatchSettings
from outlive.incident import Incident, IncidentKind
from outlive.limits import Limits
from outlive.pool import metered
from outlive.pool.door import Door
from outlive.pool.failing import PoolBrokenError, broken_message, error_of, unreadable
from outlive.pool.jobs import PoolJob, Results
from outlive.pool.parcels import Apart
from outlive.pool.work import Chunk, Item
from outlive.settings import FaultPolicy

_CHUNK_S = 0.002  # tasks are put together so that a chunk takes about so long,
_MOST_TOGETHER = 1024
_CHUNK_BYTES = 1 << 18  # and is no larger than this;
_SHORT_S = 0.001  # while they are so short, the next chunk waits at the worker
_FLIGHT_BYTES = 1 << 28  # of what one `map` has under way or waiting
_LOOK_S = 0.1  # between two looks whether the pool has ended, at most
END_S = 1.0  # what is under way has this long to finish when the pool is told to end


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
    threads: int | None


class Manager:
    def __init__(self, settings: ManagerSettings, ledger: Ledger) -> None:
        self._settings = settings
        self._ledger = ledger
        self._owner = os.getpid()
        self._lock = threading.RLock()  # a collection of garbage under it may end the pool, in the same thread
        self._incoming: deque[Item] = deque()
        self._rung = False
        self._stopping = False
        self._end_at: float | None = None  # the pool was told to end: what is under way by then is lost
        self._thread: threading.Thread | None = None
        self._over = False  # the workers are gone
        self._numbers = 0
        self._seq = 0
        self._item_s: float | None = None  # how long a task takes, about,
        self._item_bytes = 0.0  # and how large its arguments, or its result, are
        self.broken: BaseException | None = None

    @property
    def workers(self) -> int:
        return self._settings.workers

    @property
    def is_stopping(self) -> bool:
        return self._stopping and self.broken is None

    @property
    def at_most_once(self) -> bool:
        return self._settings.at_most_once

    @property
    def _one_by_one(self) -> bool:
        """What a worker does is counted, by task: or none may be begun twice."""
        return self._settings.at_most_once or self._settings.limits.after_batches is not None

    def good_size(self, most: int) -> int:
        """How many items of a `map` to send at a time: so that a chunk takes a while, and each worker gets some."""
        return max(1, min(self._together, most // (4 * self.workers)))

    @property
    def good_flight(self) -> int:
        """How many items of a `map` may be under way or waiting, for the memory they take."""
        return max(4 * self.workers, round(_FLIGHT_BYTES / max(1.0, self._item_bytes)))

    @property
    def _together(self) -> int:
        """How many tasks to send at a time, if there are enough."""
        if self._item_s is None or self._item_s >= _SHORT_S or self._one_by_one:
            return 1
        fit = _CHUNK_BYTES / max(1.0, self._item_bytes)
        return max(1, min(round(min(_CHUNK_S / max(self._item_s, 1e-7), fit)), _MOST_TOGETHER))

    # ------------------------------------------------------------ from any thread

    def add(self, items: Sequence[Item]) -> None:
        if os.getpid() != self._owner:
            self.check_open()  # not under the lock: nobody may be left here who lets go of it
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
        policy = settings.policy.without_callables()
        job = PoolJob(settings.initializer, settings.initargs, policy, settings.limits, threads=settings.threads)
        watch = WatchSettings.of(settings.policy, settings.limits.memory_bytes, settings.budget)
        self._bell, self._ringer = os.pipe()
        for fd in (self._bell, self._ringer):
            os.set_blocking(fd, False)
        self._engine = make_engine(settings.context, job, settings.workers, watch)
        self._machine = Machine(settings.workers, settings.policy, never_twice=settings.at_most_once)
        self._machine.tasks_pay = True
        self._machine.crew.wanted = 1
        self._door = Door(self._ledger, self._engine, imports_main=self._engine.imports_main)
        self._runner = Runner(self._engine, self._machine, self._door)
        self._metered = metered.attach(
            self._ledger, self._runner, self._engine, self._door, settings.limits.memory_bytes
        )
        thread = threading.Thread(target=self._run, name="outlive-pool")
        try:
            self._engine.launch(1)
            self._engine.wake_by(self._bell)
            self._thread = thread
            thread.start()
        except BaseException:
            if thread.ident is None:  # else it serves, and only the wait for it was interrupted
                self._thread = None
                self._engine.close()
            raise

    def _ring(self) -> None:
        if not self._rung:
            self._rung = True
            with contextlib.suppress(BlockingIOError):
                os.write(self._ringer, b"!")

    def stop(self, *, cancel: bool = False, end: bool = False) -> None:
        """Finish what was submitted and leave. `cancel`: drop what has not begun; `end`: and give the rest a second."""
        if os.getpid() != self._owner:
            return
        with self._lock:
            self._stopping = True
            if end and self._end_at is None:
                self._end_at = time.monotonic() + END_S
            dropped = list(self._incoming) if cancel or end else []
            if dropped:
                self._incoming.clear()
                if not end:  # as many as have a worker to themselves count as begun, which they are in an instant
                    free = max(0, self.workers - len(self._door.chunks))
                    self._incoming.extend(dropped[:free])
                    dropped = dropped[free:]
            if self._thread is not None:
                self._ring()
        for item in dropped:
            item.drop()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the workers are gone; whether they are."""
        thread = self._thread
        if thread is None or thread is threading.current_thread() or os.getpid() != self._owner:
            return True
        give_up_at = math.inf if timeout is None else time.monotonic() + timeout
        while not self._over and time.monotonic() < give_up_at:
            # An interrupted join takes the thread for ended, and an interrupted wait for an event may keep its lock.
            thread.join(min(_LOOK_S, max(0.0, give_up_at - time.monotonic())))
            if not self._over:
                time.sleep(0.001)
        return self._over

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
            self._metered.begin()
            self._runner.begin()
            while True:
                self._take_in()
                if self._is_over():
                    break
                since = time.monotonic()
                self._runner.wait(self._patience_s())
                self._metered.waited(since)
                self._hush()
                self._deliver()
                if self._runner.given_up is not None:
                    self._break(self._given_up_error(self._runner.given_up))
                    break
        except BaseException as error:  # ours: nobody may wait for ever because of it
            self._break(PoolBrokenError(f"the pool's own thread failed: {type(error).__name__}: {error}", None))
            raise
        finally:
            self._metered.detach()
            self._engine.close(**({} if self._end_at is None else {"grace_s": self._left_s()}))
            self._break(PoolBrokenError("the pool was ended while this task was under way", None), say=False)
            with self._lock:
                self._stopping = True
                os.close(self._bell)
                os.close(self._ringer)
                self._ring = lambda: None  # type: ignore[method-assign]
            self._over = True

    def _is_over(self) -> bool:
        with self._lock:
            if not self._stopping or (self._incoming and self._end_at is None):
                return False
        return not self._door.chunks or (self._end_at is not None and not self._left_s())

    def _left_s(self) -> float:
        """Until the pool that was told to end has ended."""
        assert self._end_at is not None
        return max(0.0, self._end_at - time.monotonic())

    def _patience_s(self) -> float | None:
        patience_s = self._metered.patience_s
        if self._end_at is None:
            return patience_s
        return self._left_s() if patience_s is None else min(patience_s, self._left_s())

    def _hush(self) -> None:
        with self._lock:
            if self._rung:
                self._rung = False
                with contextlib.suppress(BlockingIOError):
                    os.read(self._bell, 4096)

    def _take_in(self) -> None:
        """Give the machine as many chunks as its workers can take up soon; the rest can still be cancelled."""
        machine = self._machine
        short = self._item_s is not None and self._item_s < _SHORT_S and not self._one_by_one
        machine.dealer.depth = 2 if short else 1
        while self._incoming and self._end_at is None:
            unfinished = len(machine.tasks) + len(self._incoming)
            if unfinished > machine.crew.wanted < self._settings.workers:
                self._runner.tell(r.SizeWanted(min(unfinished, self._settings.workers)))
            if len(machine.tasks) >= machine.crew.capacity * (machine.dealer.depth + 1):
                return
            items = self._next_items(short)
            if items:
                self._submit(items)

    def _next_items(self, short: bool) -> list[Item]:
        together = self._together if short else 1
        if together > 1:
            together = max(1, min(together, self._rows_waiting() // (2 * self._machine.crew.capacity)))
        taken: list[Item] = []
        rows = 0
        with self._lock:
            while self._incoming:
                item = self._incoming[0]
                if taken and (item.alone or rows + len(item.rows) > together):
                    break
                rows += len(item.rows)
                taken.append(self._incoming.popleft())
                if item.alone:
                    break
        return [item for item in taken if item.begin()]

    def _rows_waiting(self) -> int:
        """As many as matter."""
        enough = 2 * self._machine.crew.capacity * _MOST_TOGETHER
        rows = 0
        with self._lock:  # others add to it
            for item in self._incoming:
                rows += len(item.rows)
                if rows >= enough:
                    break
        return rows

    def _submit(self, items: list[Item]) -> None:
        chunk = Chunk(items, keep=not self._settings.at_most_once)
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
        if concluded.outcome is r.Outcome.ERRORED:
            self._part(chunk, condemned)
            return
        if concluded.payload is not None:
            try:
                results = concluded.payload.open()
                if type(results) is not Results or not results.fit(chunk.size):
                    raise ValueError("a worker sent what are no results of these tasks")
            except BaseException as error:  # what a worker could pickle and we cannot unpickle, SystemExit included
                concluded.payload.discard()
                self._unreadable(chunk, unreadable(error), condemned)
                return
            nbytes = concluded.payload.nbytes
            self._learn(chunk, results, nbytes)
            self._metered.did(results.count, nbytes)
        self._settle(chunk, results, condemned)

    def _settle(self, chunk: Chunk, results: Results | None, condemned: dict[int, Incident]) -> None:
        """Hand out what came of a chunk; what was not begun goes to the head of the queue."""
        if results is not None and len(results.values) == chunk.size and Apart not in set(map(type, results.values)):
            values = results.values
            if len(chunk.items) == 1:
                chunk.items[0].settle(values, {})
                return
            for item, first in zip(chunk.items, chunk.firsts):
                item.settle(values[first : first + len(item.rows)], {})
            return
        found: dict[int, Any] = {}
        failed: dict[int, BaseException] = dict(chunk.unsendable)
        rest: set[int] = set()
        if results is not None:
            rest.update(results.rest)
            _open(zip((position for some in results.done for position in some), results.values), found, failed)
            failed.update({p: _with_incident(it.rebuilt(), condemned.get(p)) for p, it in results.raised.items()})
        again: list[Item] = []
        for item, first in zip(chunk.items, chunk.firsts):
            for start, stop in _stretches(first, first + len(item.rows), rest):
                whole = stop - start == len(item.rows)
                part = item if whole else item.part(start - first, stop - first)
                if start in rest:
                    again += [part] if whole else self._pieces(part)
                else:
                    wrong = {p - start: _error(p, failed, condemned) for p in range(start, stop) if p not in found}
                    part.settle([found.get(p) for p in range(start, stop)], wrong)
        if again:
            with self._lock:
                self._incoming.extendleft(reversed(again))

    def _pieces(self, item: Item) -> list[Item]:
        """What was handed back, as it is better sent."""
        size = self._together
        pieces = [item.part(at, min(at + size, len(item.rows))) for at in range(0, len(item.rows), size)]
        for piece in pieces:
            piece.whole = None  # none was begun: what was pickled with them need not be sent with each
        return pieces

    def _learn(self, chunk: Chunk, results: Results, nbytes: int) -> None:
        count = max(1, results.count)
        each, large = results.seconds / count, max(nbytes, chunk.nbytes) / count
        if self._item_s is None:
            self._item_s, self._item_bytes = each, large
        else:
            self._item_s = 0.8 * self._item_s + 0.2 * each
            self._item_bytes = 0.8 * self._item_bytes + 0.2 * large
        if results.rest:  # it was expected to take a tenth of that
            self._item_s = max(self._item_s, each)

    def _unreadable(self, chunk: Chunk, error: BaseException, condemned: dict[int, Incident]) -> None:
        if chunk.size == 1 or self._settings.at_most_once:
            for item in chunk.items:
                item.fail(error)
            return
        self._part(chunk, {p: it for p, it in condemned.items() if it.kind is not IncidentKind.EXCEPTION})

    def _part(self, chunk: Chunk, condemned: dict[int, Incident]) -> None:
        """One of them is to blame for all: each by itself, again."""
        again = []
        parts = [item.part(row, row + 1) for item in chunk.items for row in range(len(item.rows))]
        for position, part in enumerate(parts):
            part.alone = True
            if position in condemned or position in chunk.unsendable:
                part.fail(_error(position, chunk.unsendable, condemned))
            else:
                again.append(part)
        with self._lock:
            self._incoming.extendleft(reversed(again))

    def _given_up_error(self, given_up: r.GiveUp) -> BaseException:
        incident = given_up.incident
        if incident is not None and given_up.limit is r.LimitKind.STARTS:
            return PoolBrokenError(str(errors.start_error(incident, incident.attempt)), incident)
        if incident is not None and given_up.limit is r.LimitKind.RENEWAL:
            return PoolBrokenError(str(errors.renewal_error(incident, given_up.text, delivered=0)), incident)
        return PoolBrokenError(broken_message(given_up.text, self._settings.policy), incident)

    def _break(self, error: BaseException, *, say: bool = True) -> None:
        """Nothing more will come: tell everybody who waits."""
        with self._lock:
            if say and self.broken is None:
                self.broken = error
            waiting = list(self._incoming)
            self._incoming.clear()
        for item in waiting:
            if self._end_at is not None:  # handed back by its worker
                item.drop()
            elif item.begin():
                item.fail(error)
        for chunk in list(self._door.chunks.values()):
            for item in chunk.items:
                item.fail(error)
        self._door.chunks.clear()


def _open(values: Iterable[tuple[int, Any]], found: dict[int, Any], failed: dict[int, BaseException]) -> None:
    for position, value in values:
        try:
            found[position] = value.open() if type(value) is Apart else value
        except BaseException as error:  # what a worker could pickle and we cannot unpickle
            failed[position] = unreadable(error)


def _stretches(start: int, stop: int, rest: set[int]) -> Iterator[tuple[int, int]]:
    """Neighbours that are all in the rest, or all not."""
    for _, group in itertools.groupby(range(start, stop), rest.__contains__):
        some = list(group)
        yield some[0], some[-1] + 1


def _error(position: int, failed: dict[int, BaseException], condemned: dict[int, Incident]) -> BaseException:
    error = failed.get(position)
    if error is None and position in condemned:
        error = error_of(condemned[position])
    return error if error is not None else errors.OutliveError("this task was lost: please report it")


def _with_incident(error: BaseException, incident: Incident | None) -> BaseException:
    if incident is not None:
        with contextlib.suppress(Exception):  # a class may refuse new attributes
            error.incident = incident  # type: ignore[attr-defined]
    return error
