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
import multiprocessing
import os
import select
import time
import weakref
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing import util as multiprocessing_util
from typing import Any

from outlive import records as r
from outlive._capture import blackbox, stacks
from outlive._capture.blackbox import BlackBox
from outlive._forensics import guard, unpicklable
from outlive._system import channel as channels
from outlive._system import memory, nameless, ownership, processes, starting, threads
from outlive._system.channel import Channel, Frame
from outlive._system.lifeline import Lifeline
from outlive._system.starting import Family
from outlive._transport.leases import CellTable
from outlive._transport.wire import Kind
from outlive._worker import failures, loop
from outlive.engines import messages, watching
from outlive.engines import payload as payloads
from outlive.engines.exchange import Exchange, News
from outlive.engines.local import zygote
from outlive.engines.payload import Payload
from outlive.engines.watch import WatchSettings
from outlive.engines.workers import Worker
from outlive.evidence import Evidence
from outlive.incident import Exit, Failure, Stage

log = logging.getLogger("outlive")

_WRITABLE = int(select.EPOLLOUT)
_SILENT_EXIT_S = 1.0  # a worker that hung up must be reported dead within this time, or it is killed
_MOST_NAMED = 256
_SILENT_ZYGOTE_S = 5.0  # and a zygote that does not even answer to that

_open_engines: weakref.WeakSet[LocalEngine] = weakref.WeakSet()


def _close_all() -> None:
    """At interpreter exit, with iterators alive."""
    for engine in list(_open_engines):
        engine.close(grace_s=0.1)


# Registered after multiprocessing's own, so it runs before that one terminates our zygotes.
assert multiprocessing_util
atexit.register(_close_all)


class LocalEngine(Exchange):
    def __init__(self, context: Any, job: Any, slots: int, watch: WatchSettings) -> None:
        super().__init__(slots)
        self._context = context  # a multiprocessing context, or the module
        self._job = job
        self._watch = watch
        self._family = Family.here(context, slots)
        self._renewed = 0  # steps away from forks of this process
        self._takes_main = True  # what is not forked imports the main module
        self._process: Any = None
        self._lifeline: Lifeline | None = None  # of a zygote that imports and loads
        self._control: Channel | None = None
        self._zygote_pid = -1
        self._loaded = False
        self._unloadable: Failure | None = None
        self._poller = select.epoll()
        self._by_fd: dict[int, Worker] = {}
        self._ended = False  # somebody's end was reported and is to be acted on
        self._hung_up: set[int] = set()  # slots whose worker has closed its socket and is not yet reported dead
        self._owner = os.getpid()
        self.closed = False
        ownership.own(self)
        _open_engines.add(self)

    # ------------------------------------------------------------ requests

    @property
    def imports_main(self) -> bool:
        return self._takes_main and bool(self._context.get_start_method() != "fork")

    @property
    def job(self) -> Any:
        return self._job

    def wake_by(self, fd: int) -> None:
        self._poller.register(fd, select.EPOLLIN)

    def launch(self, workers: int | None = None) -> None:
        """Start the zygote; raises what pickling the job raises."""
        try:
            self._launch()
        except Exception as error:
            if self._takes_main or not payloads.main_is_importable() or guard.unguarded_line():
                raise
            # The main module is written to be imported, and something in it does not travel by value.
            self._takes_main = True
            try:
                self._launch()
            except Exception:
                self._takes_main = False
                raise error from None

    def _launch(self) -> None:
        if not self.imports_main:
            watching.prepare()  # a fork has it then, and imports nothing that a thread of ours is about to import
        payload = Payload(self._job, by_value=not self._takes_main, alone=self._renewed > 1)
        ours, theirs = channels.pair()
        control = Channel(ours, blocking=False, owned=True)
        handle = os.pidfd_open(os.getpid())
        lifeline = Lifeline() if self._context.get_start_method() != "fork" else None
        end = lifeline.end() if lifeline is not None else None
        try:
            process = self._context.Process(
                target=zygote.main,
                args=(theirs, payload, loop.main, self._watch_now(), self._family, end),
                name="outlive-zygote",
            )
            process.daemon = True
            starting.start(process, end, imports_main=self._takes_main)
            control.send(Kind.HELLO, handles=(handle,))
        except BaseException:
            control.close()
            if lifeline is not None:
                lifeline.cut()
            raise
        finally:
            theirs.close()
            os.close(handle)
            if end is not None:
                os.close(end)
        self._process, self._control, self._loaded, self._unloadable = process, control, False, None
        self._cut_lifeline()
        self._lifeline = lifeline
        self._zygote_pid = process.pid
        self._poller.register(control.fileno(), select.EPOLLIN)

    def _watch_now(self) -> WatchSettings:
        """With the names of the threads that a fork leaves behind, and with them whatever they hold."""
        if self._context.get_start_method() != "fork":
            return self._watch
        left_behind, left_native = threads.others_here()
        return replace(self._watch, left_behind=left_behind[:_MOST_NAMED], left_native=left_native)

    def renew_workers(self, times: int = 1) -> r.WorkersRenewed | r.RenewalFailed:
        """Have workers come from a cleaner process than a fork of this one; `times`: by so many steps. First a new
        interpreter that has nothing of this process but the job, then one for each worker.

        Where there was a zygote already, the new one is started before it is ended: the job may not be such as can be
        sent. Its workers end with it, and what they have sent is read as ever.
        """
        before = self._context, self._takes_main, self._renewed
        if self._context.get_start_method() == "fork":
            self._context, self._takes_main = multiprocessing.get_context("spawn"), False
        else:
            times += 1
        self._renewed += times
        done = r.WorkersRenewed(alone=self._renewed > 1)
        if self._control is None:
            return done
        old = self._control, self._process
        try:
            self.launch()
        except BaseException as error:
            by_value = not self._takes_main
            self._control, self._process = old
            self._context, self._takes_main, self._renewed = before
            if not isinstance(error, Exception):
                raise
            return r.RenewalFailed(f"{type(error).__name__}: {error}", unpicklable.find(self._job, by_value=by_value))
        self._put_away(*old, wait_s=0.0)
        self._lose_workers(None)
        return done

    def start_worker(self, slot: int, incarnation: int) -> None:
        try:
            self._start_worker(slot, incarnation)
        except OSError as error:  # no descriptor or process to be had just now: a failed start, like others
            advice = ""
            if error.errno in (errno.EMFILE, errno.ENFILE):
                advice = "\n(this process has no descriptor left: raise the limit with `ulimit -n`)"
            failure = failures.capture(error, Stage.STARTING, advice=advice)
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
            box_fd = nameless.descriptor(blackbox.SIZE, "outlive-box")
            always.callback(os.close, box_fd)
            stack_fd = nameless.descriptor(stacks.SIZE, "outlive-stacks")
            on_error.callback(os.close, stack_fd)
            box = BlackBox(nameless.attach(box_fd))
            box.assign(slot, incarnation)
            worker = Worker(slot, incarnation, channel, box, stack_fd, table=CellTable(self._cells))
            worker.held = (self._zygote_pid, -1, -1)  # as which descriptors, it will say
            control.send(Kind.FORK, slot, incarnation, handles=(theirs.fileno(), bell, box_fd, stack_fd))
            on_error.pop_all()
        self._welcome(worker)
        self._by_fd[channel.fileno()] = worker
        self._poller.register(channel.fileno(), select.EPOLLIN)

    def _mind_congestion(self, worker: Worker) -> None:
        if worker.registered:
            self._poller.modify(worker.channel.fileno(), select.EPOLLIN | select.EPOLLOUT)

    # ------------------------------------------------------------ events

    def wait_ready(self, timeout_s: float | None) -> Any:
        """Wait until something has happened, `timeout_s` at most. May be interrupted without harm."""
        self._take_untaken()
        if self._pending or self._ended:
            timeout_s = 0.0
        elif self._hung_up:
            timeout_s = min(timeout_s if timeout_s is not None else 0.2, 0.2)
        self._return_cells()
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

    def _read_waiting(self, news: list[News]) -> None:
        if self._control is not None and self._control.waits:
            self._read_control(news)
        super()._read_waiting(news)

    def _read_control(self, news: list[News]) -> None:
        control = self._control
        assert control is not None
        # As with a worker: the zygote loses itself, and its workers with it.
        self._no_room |= messages.take_all(control, self._take_frame_of_zygote, news)
        if control.congested:
            control.flush()
        if control.closed:
            self._zygote_died(news)

    def _take_frame_of_zygote(self, frame: Frame, news: list[News]) -> None:
        kind, number = frame.kind, frame.seq
        if frame.handles:
            for handle in frame.handles:
                memory.discard(handle)
            raise messages.ForeignMessageError
        if kind == Kind.LOADED:
            self._loaded = True
            self._cut_lifeline()
            if frame.body:
                log.warning(
                    "importing the main module or the dataset's modules %s, which forked workers cannot share: "
                    "each worker is started with an interpreter of its own (do it in worker_init_fn or lazily "
                    "for faster starts)",
                    bytes(frame.body).decode(),
                )
            return
        said = messages.body_of(frame)
        if kind == Kind.UNLOADABLE:
            self._unloadable = said
        elif kind == Kind.MEMORY:
            news.append((r.MemoryTold(*said), None))
        elif kind == Kind.UNFORKED:
            worker = self._worker(number, frame.extra)
            if worker is not None:
                worker.unprepared, worker.status = said, 0
                self._ended = True
        elif kind == Kind.EXITED:
            slot, incarnation, status, hung, seconds, evidence, place = said
            worker = self._worker(slot, incarnation)
            messages.require(number > 1)
            if place is not None:
                self._note_stuck(slot, number, place)
            if worker is not None:
                worker.pid, worker.status, worker.hung, worker.seconds = number, status, hung, seconds
                worker.evidence = evidence
                self._ended = True
        else:
            slot, (incarnation, *more) = frame.extra, said
            worker = self._worker(slot, incarnation)
            messages.require(number > 1)  # it is a process that we may have to kill
            if kind == Kind.FORKED and worker is not None:
                worker.pid, worker.held = number, (self._zygote_pid, *more)
            elif kind == Kind.SUSPECTED:
                in_hand, stack, seen, again = more
                event = r.WorkerSuspected(slot, incarnation, number, in_hand, stack, Evidence(seen=seen), again)
                news.append((event, None))
            elif kind == Kind.GREW:
                news.append((r.WorkerGrew(slot, incarnation, number, more[0]), None))

    def _zygote_died(self, news: list[News]) -> None:
        """Its workers die with it. A new one is made when the next worker is to be started."""
        code = self._put_zygote_away(wait_s=1.0)
        failure: Failure | None = None
        if not self._loaded:
            ended = Exit(signal=-code) if code is not None and code < 0 else Exit(code=code)
            text = f"the process that workers are forked from {ended.words}"
            failure = self._unloadable or Failure("", text, "", None, Stage.STARTING)
        self._lose_workers(failure)

    def _lose_workers(self, failure: Failure | None) -> None:
        """Their zygote is gone. `failure`: why there was never one that could fork."""
        for worker in self._workers:
            if worker is None or worker.status is not None:
                continue
            if worker.pid > 0:
                processes.kill_group(worker.pid)
            worker.unprepared = failure or worker.unprepared
            worker.status, worker.lost = 0, True
            self._ended = True

    def _bury(self, news: list[News]) -> None:
        """Turn every reported death into an event, after what the dead worker had still sent."""
        now = time.monotonic()
        self._ended = False
        for worker in list(self._workers):
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
            self._bury_one(worker, news)
        self._ended |= self._no_room  # something that an ended worker has sent may wait

    # ------------------------------------------------------------ ending

    def _unregister(self, worker: Worker) -> None:
        if worker.registered:
            self._poller.unregister(worker.channel.fileno())
            worker.registered = False

    def _release(self, worker: Worker) -> None:
        worker.table.abandon()
        self._unregister(worker)
        self._hung_up.discard(worker.slot)
        self._by_fd.pop(worker.channel.fileno(), None)
        worker.channel.close()
        worker.box.release()
        os.close(worker.stack_fd)

    def _cut_lifeline(self) -> None:
        """A zygote that still imports or loads goes at once; another has let go of it."""
        if self._lifeline is not None:
            self._lifeline.cut()
            self._lifeline = None

    def _put_zygote_away(self, wait_s: float) -> int | None:
        """Join the zygote, by force if need be; its exit code."""
        self._cut_lifeline()
        control, process = self._control, self._process
        self._control = self._process = None
        return self._put_away(control, process, wait_s)

    def _put_away(self, control: Channel | None, process: Any, wait_s: float) -> int | None:
        if control is not None:
            self._poller.unregister(control.fileno())
            control.close()
        if process is None:
            return None
        processes.wait_for_end(process.pid, wait_s)
        if process.exitcode is None and not processes.has_ended(process.sentinel):
            processes.kill(process.pid)
            process.join(1.0)
        if process.exitcode is None and processes.has_ended(process.sentinel):
            # A trainer that ignores SIGCHLD: the kernel has reaped it, and nobody will ever know how it ended.
            process._popen.returncode = 0
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
        killed = True
        try:
            for slot, worker in enumerate(self._workers):
                if worker is not None:
                    self._workers[slot] = None
                    self._keep_times(worker)
                    self._release(worker)
            if self._control is not None:
                self._control.send(Kind.LEAVE, extra=int(grace_s * 1000))
                killed = self._put_zygote_away(grace_s + 2.5) != 0
        finally:
            # Where an interrupt came in between: the zygote sees this end, and ends everything in order by itself.
            control, self._control = self._control, None
            if control is not None:
                control.close()
        if killed:
            self._kill_groups(pids)
        self._poller.close()
        self._tell_stuck()

    def _kill_groups(self, pids: list[int]) -> None:
        """End what workers have left in their process groups."""
        for pid in pids:
            if processes.parent_of(pid) in (self._zygote_pid, 1, -1):  # -1: gone, but its group may not be
                processes.kill_group(pid)

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
