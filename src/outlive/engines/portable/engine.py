"""Runs workers where there is neither fork nor memfd: each is spawned, and one more waits in reserve.

Reads   what workers send; their black boxes; how their processes end.
Writes  tasks to workers.
Never   waits for a process that may be stuck: everything it waits for has an end or a deadline.

A spawned worker needs seconds to import the user's modules. The reserve has done so before it is needed: when a worker
dies, the reserve takes its slot at once and another one is started. Nobody watches while the trainer is not in next():
there is no zygote here, and no thread of ours in the trainer.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing import connection
from typing import Any

from outlive import records as r
from outlive._capture import blackbox
from outlive._capture.blackbox import BlackBox
from outlive._system import memory, ownership, processes, starting
from outlive._system import portable_channel as channels
from outlive._system.portable_channel import PortableChannel
from outlive._system.starting import Family
from outlive._transport.leases import CellTable
from outlive._transport.wire import Kind
from outlive._worker import failures
from outlive.engines import watching
from outlive.engines.exchange import Exchange, News
from outlive.engines.payload import Payload
from outlive.engines.portable import worker as portable_worker
from outlive.engines.watch import UsualTimes, WatchSettings
from outlive.engines.watching import Watched, look_after
from outlive.engines.workers import Worker
from outlive.evidence import Evidence
from outlive.incident import Stage

_LEAVE_GRACE_S = 1.0
_ENDING_S = 1.0  # from a closed sentinel to a process that has ended
_CONGESTED_S = 0.01

_open_engines: weakref.WeakSet[PortableEngine] = weakref.WeakSet()


def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close(grace_s=0.1)


atexit.register(_close_all)


@dataclass
class Process:
    """A spawned process that fills a slot, or waits to."""

    process: Any
    channel: PortableChannel
    box: BlackBox
    box_handle: memory.Handle
    stack_fd: int
    stack_path: str
    watched: Watched
    killed_at: float | None = None
    stuck: bool = False  # it was killed, and waits in the kernel

    def end(self) -> None:
        """By force, with what it started in its group."""
        processes.kill_group(self.process.pid)
        self.process.kill()
        self.killed_at = self.killed_at or time.monotonic()


class PortableEngine(Exchange):
    def __init__(self, context: Any, job: Any, slots: int, watch: WatchSettings) -> None:
        super().__init__(slots)
        method = context.get_start_method()
        self._context = context if method in ("spawn", "forkserver") else multiprocessing.get_context("spawn")
        self._family = Family.here(self._context, slots)
        self._payload = Payload(job)
        self._watch = watch
        self._processes: dict[int, Process] = {}  # by slot
        self._reserve: list[Process] = []
        self._bells: list[int] = []  # descriptors that wake us
        self._usual = UsualTimes()
        self._look_at = 0.0
        self._owner = os.getpid()
        self.closed = False
        ownership.own(self)
        _open_engines.add(self)

    # ------------------------------------------------------------ starting

    @property
    def imports_main(self) -> bool:
        return True

    @property
    def job(self) -> Any:
        return self._payload.load_if_here()

    def wake_by(self, fd: int) -> None:
        self._bells.append(fd)

    def launch(self, workers: int | None = None) -> None:
        """Start as many as there will be; raises what pickling the job raises."""
        for _ in range(len(self._workers) if workers is None else workers):
            self._reserve.append(self._spawn())
        watching.prepare()

    def _spawn(self) -> Process:
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as always:
            ours, theirs = channels.pair()
            always.enter_context(theirs)
            channel = PortableChannel(ours, blocking=False, owned=True)
            on_error.callback(channel.close)
            box = memory.create(blackbox.SIZE, "outlive-box")
            on_error.callback(memory.discard, box)
            stack_fd, stack_path = tempfile.mkstemp(prefix="outlive-stacks-")
            on_error.callback(os.close, stack_fd)
            on_error.callback(os.unlink, stack_path)
            view = BlackBox(memory.attach(box, blackbox.SIZE))
            process = self._context.Process(
                target=portable_worker.main,
                args=(theirs, box, stack_path, self._payload, self._family),
                name="outlive-worker",
            )
            process.daemon = True  # here: none of them is waited for when this process ends
            starting.start(process)
            on_error.pop_all()
        return Process(process, channel, view, box, stack_fd, stack_path, Watched())

    def start_worker(self, slot: int, incarnation: int) -> None:
        try:
            taken = self._reserve.pop(0) if self._reserve else self._spawn()
        except OSError as error:
            failure = failures.capture(error, Stage.STARTING)
            self._pending.append((r.PreparationFailed(slot, incarnation, -1, failure), None))
            return
        table = CellTable(self._cells)
        worker = Worker(slot, incarnation, taken.channel, taken.box, taken.stack_fd, taken.process.pid, table)
        self._processes[slot] = taken
        taken.watched = Watched()
        taken.channel.send(Kind.ASSIGN, slot, incarnation)
        self._welcome(worker)

    def _fill_reserve(self) -> None:
        """One in reserve, once all who were asked for are at work; not before, they would share the processor."""
        if self._reserve or self.closed or any(w is None or w.box.is_starting for w in self._workers):
            return
        with contextlib.suppress(OSError):  # no process to be had: then the next death takes longer
            self._reserve.append(self._spawn())

    # ------------------------------------------------------------ events

    def wait_ready(self, timeout_s: float | None) -> Any:
        """Wait until something has happened, `timeout_s` at most. May be interrupted without harm."""
        self._take_untaken()
        limit = 0.0 if self._pending else self._watch.interval_s
        if any(worker is not None and worker.channel.congested for worker in self._workers):
            limit = min(limit, _CONGESTED_S)
        self._return_cells()
        things: list[Any] = list(self._bells)
        for worker in self._workers:
            if worker is not None:
                things.append(self._processes[worker.slot].process.sentinel)
                if not worker.channel.closed:
                    things.append(worker.channel)
        return set(connection.wait(things, limit if timeout_s is None else min(limit, timeout_s)))

    def take_events(self, ready: Any) -> Sequence[News]:
        """What has happened."""
        news, self._pending = self._pending, []
        look = not ready or time.monotonic() >= self._look_at  # also while others are busy all the time
        for worker in list(self._workers):
            if worker is None:
                continue
            held = self._processes[worker.slot]
            process = held.process
            if worker.channel.congested:
                worker.channel.flush()
            if worker.channel in ready and not worker.channel.closed:
                self._read_worker(worker, news)
            # Children of its own may keep its sentinel open: then it is asked for now and then.
            if process.sentinel in ready or (look and process.exitcode is not None):
                worker.asked_to_end |= not self._has_ended(held)
                processes.kill_group(process.pid)
                code = process.exitcode
                worker.status = 0 if code is None else (-code if code < 0 else code << 8)
                self._bury_one(worker, news)
            elif look and worker.channel.closed:
                self._end_if_deaf(worker, held)
        if look:
            self._look_after_all(news)
            self._fill_reserve()
            self._look_at = time.monotonic() + self._watch.interval_s
        return news

    def _read_worker(self, worker: Worker, news: list[News]) -> None:
        self._receive(worker, news)
        if worker.channel.torn:
            self._processes[worker.slot].end()

    def _end_if_deaf(self, worker: Worker, held: Process) -> None:
        """A worker that closed its socket, and goes on: nothing will ever come of it."""
        now = time.monotonic()
        worker.hung_up_at = worker.hung_up_at or now
        if now - worker.hung_up_at > _ENDING_S:
            worker.asked_to_end = True
            held.end()

    def _has_ended(self, held: Process) -> bool:
        """Whether a worker whose sentinel is ready has ended by itself; where it has not, it is ended now.

        The sentinel is a descriptor of the worker's: user code may have closed it, and go on. To wait then, even with
        a timeout, would be to wait for ever.
        """
        give_up_at = time.monotonic() + _ENDING_S
        while held.process.exitcode is None:
            held.process.join(0)
            if time.monotonic() > give_up_at:
                held.end()
                held.process.join()
                return False
            time.sleep(0.001)
        return True

    def _mind_congestion(self, worker: Worker) -> None:
        """`wait_ready` looks at every channel."""

    def _look_after_all(self, news: list[News]) -> None:
        """Look for hangs, as the zygote does elsewhere."""
        for worker in self._workers:
            if worker is None:
                continue
            held = self._processes[worker.slot]
            if held.killed_at is not None and processes.resists(worker.pid, held.killed_at):
                self._give_up_corpse(worker, held, news)
            if worker.hung:
                continue
            found = look_after(held.watched, worker.box, worker.pid, worker.stack_fd, self._watch, self._usual)
            if found.suspected is not None:
                in_hand, stack, seen, again = found.suspected
                about = Evidence(seen=seen)
                event = r.WorkerSuspected(worker.slot, worker.incarnation, worker.pid, in_hand, stack, about, again)
                news.append((event, None))
            if found.condemned_after_s is not None:
                worker.hung, worker.seconds = True, found.condemned_after_s
                worker.evidence = replace(worker.evidence, seen=found.seen)
                held.end()

    def _give_up_corpse(self, worker: Worker, held: Process, news: list[News]) -> None:
        """Report a worker that was killed and does not end as if it had: what waits in the kernel runs no code."""
        if held.process.exitcode is not None:
            return  # it is reported with the next look
        from outlive._forensics import hanging

        seen = hanging.see_corpse(worker.pid, worker.evidence.seen)
        worker.evidence = replace(worker.evidence, seen=seen)
        worker.status = signal.SIGKILL
        if not held.stuck:  # else it was done before, and what it sent had to wait
            self._note_stuck(worker.slot, worker.pid, hanging.drive_of(seen))
        held.stuck = True
        multiprocessing.process._children.discard(held.process)  # type: ignore[attr-defined]  # joined at exit, for ever
        self._bury_one(worker, news)

    # ------------------------------------------------------------ ending

    def _release(self, worker: Worker) -> None:
        worker.table.abandon()
        self._put_away(self._processes.pop(worker.slot))

    def _put_away(self, held: Process, *, by_force: bool = True) -> None:
        pid = held.process.pid
        if by_force:
            processes.kill_group(pid)
        memory.discard(held.box_handle)
        with contextlib.suppress(OSError):
            os.unlink(held.stack_path)
        held.channel.close()
        held.box.release()
        os.close(held.stack_fd)
        if held.process.exitcode is None and not held.stuck:
            held.process.kill()
            held.process.join(2.0)
        with contextlib.suppress(ValueError):  # it will not end: then nobody can close it
            held.process.close()
        memory.sweep(pid)

    def close(self, grace_s: float = _LEAVE_GRACE_S) -> None:
        """End every process; idle workers leave by themselves, busy ones get `grace_s`."""
        if self.closed or os.getpid() != self._owner:
            return
        self.closed = True
        all_held = [*self._processes.values(), *self._reserve]
        self._processes.clear()
        self._reserve.clear()
        for slot, worker in enumerate(self._workers):
            if worker is not None:
                worker.table.abandon()
            self._workers[slot] = None
        for held in all_held:
            held.channel.close()
        deadline = time.monotonic() + grace_s
        for held in all_held:
            held.process.join(max(0.0, deadline - time.monotonic()))
        for held in all_held:
            self._put_away(held)
        self._tell_stuck()

    def abandon(self) -> None:
        """In a fork of the trainer: nothing here is ours."""
        self.closed = True
        for held in (*self._processes.values(), *self._reserve):
            with contextlib.suppress(OSError):
                os.close(held.stack_fd)
        self._processes.clear()
        self._reserve.clear()
        for slot in range(len(self._workers)):
            self._workers[slot] = None
