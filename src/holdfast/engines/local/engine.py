"""Runs workers on this machine: the trainer's side of zygote, sockets, black boxes and cells.

Reads   what zygote and workers send.
Writes  requests to the zygote, tasks to workers.
Never   waits for a process that may be stuck: everything it waits for has an end or a deadline.

One socket per worker. A death shows as the zygote's report; whatever the dead worker had
sent before is read first, so that finished batches are never lost.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import logging
import os
import pickle
import select
import struct
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import util as multiprocessing_util
from typing import Any

from holdfast import records as r
from holdfast._capture import blackbox, stacks
from holdfast._capture.blackbox import BlackBox
from holdfast._system import channel as channels
from holdfast._system import memory, ownership, processes
from holdfast._system.channel import Channel, Frame
from holdfast._transport import wire
from holdfast._transport.wire import Kind
from holdfast._worker import failures, loop
from holdfast.engines.local import zygote
from holdfast.engines.local.payload import Payload
from holdfast.engines.local.watch import WatchSettings
from holdfast.engines.local.workers import Memory, Result, Worker
from holdfast.records import Decision, Event, Exit, Failure, InHand, Stage

log = logging.getLogger("holdfast")

_WRITABLE = int(select.EPOLLOUT)
_RESULT = int(Kind.RESULT)
_SILENT_EXIT_S = 1.0  # a worker that hung up must be reported dead within this time, or it is killed
_SILENT_ZYGOTE_S = 5.0  # and a zygote that does not even answer to that

News = tuple[Event, Any]


_open_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _close_all() -> None:
    """At interpreter exit, with iterators alive."""
    for engine in list(_open_engines):
        engine.close(grace_s=0.1)


# Registered after multiprocessing's own, so it runs before that one terminates our zygotes.
assert multiprocessing_util
atexit.register(_close_all)


class LocalEngine:
    def __init__(self, context: Any, job: Any, slots: int, watch: WatchSettings) -> None:
        self._context = context  # a multiprocessing context, or the module
        self._job = job
        self._watch = watch
        self._workers: list[Worker | None] = [None] * slots
        self._memories = [Memory() for _ in range(slots)]
        self._epoch = 0
        self._epoch_note: Any = None
        self._epoch_open: set[int] = set()  # slots that have yet to say that they began the epoch
        self._process: Any = None
        self._control: Channel | None = None
        self._zygote_pid = -1
        self._loaded = False
        self._unloadable: Failure | None = None
        self._poller = select.epoll()
        self._by_fd: dict[int, Worker] = {}
        self._pending: list[News] = []
        self._ended = False  # somebody's end was reported and is to be acted on
        self._hung_up: set[int] = set()  # slots whose worker has closed its socket and is not yet reported dead
        self._owner = os.getpid()
        self.closed = False
        ownership.own(self)
        _open_engines.add(self)

    # ------------------------------------------------------------ requests

    def launch(self) -> None:
        """Start the zygote; raises what pickling the job raises."""
        ours, theirs = channels.pair()
        control = Channel(ours, blocking=False, owned=True)
        handle = os.pidfd_open(os.getpid())
        try:
            process = self._context.Process(
                target=zygote.main, args=(theirs, Payload(self._job), loop.main, self._watch), name="holdfast-zygote"
            )
            process.daemon = True
            process.start()
            control.send(Kind.HELLO, descriptors=(handle,))
        except BaseException:
            control.close()
            raise
        finally:
            theirs.close()
            os.close(handle)
        self._process, self._control, self._loaded, self._unloadable = process, control, False, None
        self._zygote_pid = process.pid
        self._poller.register(control.fileno(), select.EPOLLIN)

    def start_worker(self, slot: int, incarnation: int) -> None:
        try:
            self._start_worker(slot, incarnation)
        except OSError as error:  # no descriptor or process to be had just now: a failed start, like others
            failure = failures.capture(error, Stage.STARTING)
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "\n(this process has no descriptor left: raise the limit with `ulimit -n`)"
                failure = replace(failure, message=failure.message + advice, traceback=failure.traceback + advice)
            self._pending.append((r.PreparationFailed(slot, incarnation, -1, failure), None))

    def _start_worker(self, slot: int, incarnation: int) -> None:
        if self._control is None:
            self.launch()
        control = self._control
        assert control is not None
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
            ours, theirs = channels.pair()
            always.enter_context(theirs)
            bell = channels.bell()
            channel = Channel(ours, blocking=False, owned=True, bell=bell)
            on_error.callback(channel.close)
            box_fd = memory.create(blackbox.SIZE, "holdfast-box")
            always.callback(os.close, box_fd)
            stack_fd = memory.create(stacks.SIZE, "holdfast-stacks")
            on_error.callback(os.close, stack_fd)
            worker = Worker(slot, incarnation, channel, BlackBox(memory.attach(box_fd)), stack_fd)
            control.send(Kind.FORK, slot, incarnation, descriptors=(theirs.fileno(), bell, box_fd, stack_fd))
            on_error.pop_all()
        kept = self._memories[slot]
        restored = loop.Restored(
            self._epoch,
            self._epoch_note,
            kept.random_at_start,
            kept.random_now,
            kept.place,
            kept.dataset,
            kept.steps,
            kept.iterations,
        )
        channel.send(Kind.RESTORE, parts=[wire.dump(restored)])
        self._workers[slot] = worker
        self._by_fd[channel.fileno()] = worker
        self._poller.register(channel.fileno(), select.EPOLLIN)

    def send_task(self, slot: int, incarnation: int, seq: int, body: bytes, probe: bool) -> None:
        worker = self._worker(slot, incarnation)
        if worker is None:
            return
        freed = worker.table.take_freed()
        extra = len(freed) | (loop.PROBE if probe else 0)
        worker.channel.send(Kind.TASK, seq, extra, [wire.pack_numbers(freed), body] if freed else [body])
        self._mind_congestion(worker)

    def rest(self) -> None:
        """The epoch is over, and nothing is under way: give the memory back that batches travelled in."""
        for worker in self._workers:
            if worker is not None and worker.status is None and worker.table.forget():
                worker.channel.send(Kind.REST)

    def answer(self, slot: int, incarnation: int, decision: Decision) -> None:
        worker = self._worker(slot, incarnation)
        if worker is not None:
            worker.channel.send(Kind.ANSWER, parts=[decision.value.encode()])

    def step_over(self, slot: int, count: int, killers: frozenset[int]) -> None:
        kept = self._memories[slot]
        kept.steps = (*kept.steps, (count, killers))

    def begin_epoch(self, epoch: int, note: Any) -> None:
        """Have the living workers begin another epoch, and those to come begin with it."""
        self._epoch, self._epoch_note = epoch, note
        for slot, worker in enumerate(self._workers):
            kept = self._memories[slot]
            self._keep_random(slot)
            if kept.random_now is not None:
                kept.random_at_start = kept.random_now
            # Not yet: iter(dataset) may draw before the first batch of this epoch arrives.
            kept.random_now = kept.place = kept.last_seq = None
            kept.steps = ()
            kept.iterations += 1
            if worker is not None and worker.status is None:
                self._epoch_open.add(slot)
                worker.channel.send(Kind.EPOCH, epoch, parts=[wire.dump(note)])

    @property
    def epoch_begun(self) -> bool:
        return not self._epoch_open

    def _worker(self, slot: int, incarnation: int) -> Worker | None:
        worker = self._workers[slot]
        return worker if worker is not None and worker.incarnation == incarnation else None

    def _mind_congestion(self, worker: Worker) -> None:
        if worker.channel.congested and worker.registered:
            self._poller.modify(worker.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    # ------------------------------------------------------------ events

    def wait_ready(self, timeout_s: float | None) -> Any:
        """Wait until something has happened, `timeout_s` at most. May be interrupted without harm."""
        if self._pending:
            timeout_s = 0.0
        elif self._hung_up:
            timeout_s = min(timeout_s if timeout_s is not None else 0.2, 0.2)
        return self._poller.poll(-1 if timeout_s is None else timeout_s)

    def take_events(self, ready: Any) -> Sequence[News]:
        """What has happened."""
        news, self._pending = self._pending, []
        control = self._control.fileno() if self._control is not None else -1
        for fd, mask in ready:
            if fd == control:
                self._read_control(news)
                continue
            worker = self._by_fd.get(fd)
            if worker is None:
                continue
            if mask & _WRITABLE:
                worker.channel.flush()
                if not worker.channel.congested and worker.registered:
                    self._poller.modify(fd, select.EPOLLIN)
            if mask & ~_WRITABLE:
                self._read_worker(worker, news)
        if self._hung_up or self._ended:
            self._bury(news)
        return news

    def _read_worker(self, worker: Worker, news: list[News]) -> None:
        self._receive(worker, news)
        if worker.channel.closed and worker.registered:
            self._poller.unregister(worker.channel.fileno())
            worker.registered = False
            worker.hung_up_at = time.monotonic()
            self._hung_up.add(worker.slot)
            if worker.channel.torn and self._control is not None and worker.pid > 0:
                self._control.send(Kind.KILL, worker.pid)

    def _receive(self, worker: Worker, news: list[News]) -> None:
        for frame in worker.channel.receive():
            try:
                self._take_frame(worker, frame, news)
            except (pickle.UnpicklingError, struct.error, ValueError, KeyError, EOFError, OSError):
                # Bytes that no worker of ours sends, or a cell that cannot be mapped: this worker is lost.
                worker.channel.torn = worker.channel.closed = worker.channel.drained = True
                return

    def _take_frame(self, worker: Worker, frame: Frame, news: list[News]) -> None:
        slot, incarnation, kept = worker.slot, worker.incarnation, self._memories[worker.slot]
        kind = frame.kind
        if kind == _RESULT:
            result = Result(frame, worker.table)
            side = result.side
            if slot not in self._epoch_open:  # else it belongs to the epoch before
                kept.arrived(frame.seq, side.place)
            news.append((r.TaskFinished(slot, incarnation, frame.seq, side.failures), result))
        elif kind == Kind.READY:
            news.append((r.WorkerReady(slot, incarnation, bool(frame.extra)), None))
        elif kind == Kind.SURVIVED:
            news.append((r.TaskFinished(slot, incarnation, frame.seq), None))
        elif kind in (Kind.EMPTY, Kind.ENDED):
            side = wire.load(frame.body)
            if slot not in self._epoch_open:  # else it belongs to the epoch before
                kept.arrived(frame.seq, side.place)
            event = r.TaskFinished(
                slot, incarnation, frame.seq, side.failures, empty=kind == Kind.EMPTY, ended=kind == Kind.ENDED
            )
            news.append((event, None))
        elif kind == Kind.ERROR:
            failure, side = wire.load(frame.body)
            if slot not in self._epoch_open:  # else it belongs to the epoch before
                kept.arrived(frame.seq, side.place)
            news.append((r.TaskErrored(slot, incarnation, frame.seq, failure, side.failures, bool(frame.extra)), None))
        elif kind == Kind.ASK:
            news.append((r.DecisionAsked(slot, incarnation, worker.pid, frame.seq, wire.load(frame.body)), None))
        elif kind == Kind.UNPREPARED:
            worker.unprepared = wire.load(frame.body)
        elif kind == Kind.EPOCH_BEGUN:
            self._epoch_open.discard(slot)
            if frame.body:  # else it cannot be kept, and the replay of iter(dataset) grows longer
                kept.dataset, kept.iterations = bytes(frame.body), 0

    def _read_control(self, news: list[News]) -> None:
        control = self._control
        assert control is not None
        for frame in control.receive():
            if frame.kind == Kind.LOADED:
                self._loaded = True
                if frame.body:
                    log.warning(
                        "importing the main module or the dataset's modules %s, which forked workers cannot share: "
                        "each worker is started with an interpreter of its own (do it in worker_init_fn or lazily "
                        "for faster starts)",
                        frame.body.decode(),
                    )
            elif frame.kind == Kind.FORKED:
                worker = self._worker(frame.extra, wire.load(frame.body))
                if worker is not None:
                    worker.pid = frame.seq
            elif frame.kind == Kind.EXITED:
                slot, incarnation, status, hung, seconds = wire.load(frame.body)
                worker = self._worker(slot, incarnation)
                if worker is not None:
                    worker.pid, worker.status, worker.hung, worker.seconds = frame.seq, status, hung, seconds
                    self._ended = True
            elif frame.kind == Kind.SUSPECTED:
                incarnation, in_hand, stack = wire.load(frame.body)
                news.append((r.WorkerSuspected(frame.extra, incarnation, frame.seq, in_hand, stack), None))
            elif frame.kind == Kind.UNLOADABLE:
                self._unloadable = wire.load(frame.body)
        if control.congested:
            control.flush()
        if control.closed:
            self._zygote_died(news)

    def _zygote_died(self, news: list[News]) -> None:
        """Its workers die with it. A new one is made when the next worker is to be started."""
        code = self._put_zygote_away(wait_s=1.0)
        for worker in self._workers:
            if worker is None or worker.status is not None:
                continue
            if worker.pid > 0:
                processes.kill_group(worker.pid)
            if not self._loaded:
                ended = Exit(signal=-code) if code is not None and code < 0 else Exit(code=code)
                worker.unprepared = self._unloadable or Failure(
                    "", f"the process that was to load the dataset {ended.words}", "", None, Stage.STARTING
                )
            worker.status, worker.lost = 0, True
            self._ended = True

    def _bury(self, news: list[News]) -> None:
        """Turn every reported death into an event, after what the dead worker had still sent."""
        now = time.monotonic()
        self._ended = False
        for slot, worker in enumerate(self._workers):
            if worker is None:
                continue
            if worker.status is None:
                patience_s = _SILENT_ZYGOTE_S if worker.asked_to_end else _SILENT_EXIT_S
                if worker.hung_up_at is not None and now - worker.hung_up_at > patience_s and worker.pid > 0:
                    if worker.asked_to_end and self._zygote_pid > 0:
                        # Stopped, or stuck: it goes, its workers with it, and a new one comes.
                        processes.kill(self._zygote_pid)
                    if self._control is not None:
                        self._control.send(Kind.KILL, worker.pid)
                    worker.hung_up_at, worker.asked_to_end = now, True
                continue
            worker.channel.drained = worker.channel.closed
            while not worker.channel.drained:
                self._receive(worker, news)
            self._unregister(worker)
            if worker.unprepared is not None:
                news.append((r.PreparationFailed(slot, worker.incarnation, worker.pid, worker.unprepared), None))
            else:
                news.append((self._exit_event(worker), None))
            self._keep_random(slot)
            self._epoch_open.discard(slot)
            self._workers[slot] = None
            self._release(worker)

    def _exit_event(self, worker: Worker) -> r.WorkerExited:
        in_hand = worker.box.in_hand()
        if worker.hung:
            in_hand = InHand(in_hand.stage, in_hand.batch, in_hand.position, worker.seconds)
        return r.WorkerExited(
            worker.slot,
            worker.incarnation,
            worker.pid,
            Exit() if worker.lost else Exit.from_wait_status(worker.status or 0),
            in_hand,
            stack=stacks.read(worker.stack_fd),
            hung=worker.hung,
            blameless=worker.lost or worker.channel.torn,
        )

    def _keep_random(self, slot: int) -> None:
        worker, kept = self._workers[slot], self._memories[slot]
        if worker is not None and kept.last_seq is not None:
            state = worker.box.random_state(kept.last_seq)
            if state is not None:  # None: the last batch that arrived was an earlier incarnation's
                kept.random_now = state

    # ------------------------------------------------------------ ending

    def _unregister(self, worker: Worker) -> None:
        if worker.registered:
            self._poller.unregister(worker.channel.fileno())
            worker.registered = False

    def _release(self, worker: Worker) -> None:
        self._unregister(worker)
        self._hung_up.discard(worker.slot)
        self._by_fd.pop(worker.channel.fileno(), None)
        worker.channel.close()
        worker.box.release()
        os.close(worker.stack_fd)

    def _put_zygote_away(self, wait_s: float) -> int | None:
        """Join the zygote, by force if need be; its exit code."""
        control, process = self._control, self._process
        self._control = self._process = None
        if control is not None:
            self._poller.unregister(control.fileno())
            control.close()
        if process is None:
            return None
        process.join(wait_s)
        if process.exitcode is None:
            processes.kill(process.pid)
            process.join(1.0)
        code: int | None = process.exitcode
        with contextlib.suppress(ValueError):
            process.close()
        return code

    def close(self, grace_s: float = zygote.LEAVE_GRACE_S) -> None:
        """End every process; idle workers leave by themselves, busy ones get `grace_s`."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        pids = [worker.pid for worker in self._workers if worker is not None and worker.pid > 0]
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                self._workers[slot] = None
                self._release(worker)
        killed = True
        if self._control is not None:
            self._control.send(Kind.LEAVE, extra=int(grace_s * 1000))
            killed = self._put_zygote_away(grace_s + 2.5) != 0
        if killed:
            for pid in pids:
                if processes.parent_of(pid) in (self._zygote_pid, 1, -1):  # -1: gone, but its group may not be
                    processes.kill_group(pid)
        self._poller.close()

    def abandon(self) -> None:
        """In a fork of the trainer: nothing here is ours."""
        self.closed = True
        self._process = self._control = None
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                with contextlib.suppress(OSError):
                    os.close(worker.stack_fd)
            self._workers[slot] = None
        self._poller.close()

    # ------------------------------------------------------------ looking

    def look(self, slot: int) -> tuple[int | None, InHand | None]:
        """Pid and what is in hand, as the black box says now."""
        worker = self._workers[slot]
        if worker is None:
            return None, None
        try:
            return (worker.pid if worker.pid > 0 else None), worker.box.in_hand()
        except ValueError:  # another thread is just putting it away
            return None, None

    def place_of(self, slot: int) -> bytes | None:
        """Where a slot's stream stood after the last batch that arrived."""
        return self._memories[slot].place

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker is not None and worker.pid > 0]
