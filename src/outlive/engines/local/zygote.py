"""The zygote: one single-threaded process that holds the job and forks every worker.

Reads   requests from the trainer; black boxes; its children's ends.
Writes  to the trainer who was started, who ended and how, who seems to hang.
Never   runs the user's code, beyond importing and loading the job; never outlives the trainer.

Workers die with the zygote (PR_SET_PDEATHSIG, sound because it has one thread); the zygote leaves
when the trainer hangs up or dies. It adopts what its workers leave behind and takes it along.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import os
import resource
import select
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from outlive._capture import crash
from outlive._capture.blackbox import BlackBox
from outlive._capture.last_words import LastWords, Listener
from outlive._capture.vitals import Vitals
from outlive._fleet import growth
from outlive._forensics.kin import Kin
from outlive._forensics.surroundings import OomWatch
from outlive._system import lifeline, nameless, processes, starting, threads
from outlive._system.channel import Channel, Frame
from outlive._system.starting import Family
from outlive._transport import wire
from outlive._transport.wire import Kind
from outlive._worker import failures
from outlive.engines import payload as payloads
from outlive.engines import watching
from outlive.engines.local import solo
from outlive.engines.local.budget import Budget
from outlive.engines.lone_wait import LoneWait
from outlive.engines.payload import Payload
from outlive.engines.watch import UsualTimes, WatchSettings
from outlive.engines.watching import Watched, look_after
from outlive.evidence import Evidence, Seen, Surroundings, Worked
from outlive.incident import Stage

LEAVE_GRACE_S = 1.0  # how long a busy worker may take to finish when the trainer hangs up
FORK_PATIENCE_S = 1.0
_NO_PROCESS = (
    "\n(no process can be started: raise the limit with `ulimit -u`, or the container's of processes or memory)"
)

Entry = Callable[[Channel, Any, int, Any, int], None]


@dataclass
class Child:
    slot: int
    incarnation: int
    pid: int
    handle: int
    box: BlackBox
    box_fd: int  # for whoever watches this job from outside: he opens it through /proc
    stack_fd: int
    words: LastWords | None
    vitals: Vitals
    watched: Watched = field(default_factory=Watched)
    lone: LoneWait = field(default_factory=LoneWait)
    condemned: bool = False
    killed_at: float | None = None  # by us
    seconds: float = 0.0
    seen: Seen | None = None  # how it hung


def main(
    sock: socket.socket, payload: Payload, entry: Entry, settings: WatchSettings, family: Family, end: int | None
) -> None:
    """The zygote's whole life, in a process of its own. `end`: of the trainer's lifeline, where there is something to
    import and load, which may take long: that ends with the trainer at once."""
    processes.lead_own_group()
    processes.adopt_orphans()
    processes.name_thread("outlive-zygote")
    for number in (signal.SIGINT, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    # Somebody's SIGTERM makes us leave in order, too: what the workers have started goes first.
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGTERM, lambda *_: None)
    channel = Channel(sock, blocking=True, owned=True)
    unforkable = ""
    try:
        if payload.is_pickled:
            payload.warm()
            unforkable = "are such" if payload.alone else payloads.unforkable(sock.fileno())
            if not unforkable:
                payload.keep_loaded()
    except BaseException as error:
        channel.send(Kind.UNLOADABLE, 0, 0, [wire.dump(failures.capture(error, Stage.STARTING))])
        os._exit(1)
    importlib.import_module("numpy.random")  # every worker seeds it, and NumPy loads it when it is first asked for
    # What is here now is shared with every worker: keep the collector from writing to it.
    gc.freeze()
    starting.settle()
    if end is not None:
        lifeline.let_go(end)
        os.close(end)
    Zygote(channel, payload, entry, settings, family, (woken, wake), unforkable).serve()
    os._exit(0)


def _fork_patiently() -> int:
    """Fork; at a limit of processes or memory, which may pass, try for a second before it is an error."""
    deadline = time.monotonic() + FORK_PATIENCE_S
    while True:
        try:
            return os.fork()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


class Zygote:
    def __init__(
        self,
        channel: Channel,
        payload: Payload,
        entry: Entry,
        settings: WatchSettings,
        family: Family,
        wake: tuple[int, int],
        unforkable: str,
    ) -> None:
        self._channel = channel
        self._payload = payload
        self._entry = entry
        self._settings = settings
        self._family = family
        self._children: dict[int, Child] = {}  # by pid
        self._stuck: dict[int, Child] = {}  # likewise; they were killed and do not end, and others have their slots
        self._trainer = -1
        self._poller = select.poll()
        self._poller.register(channel.fileno(), select.POLLIN)
        self._wake = wake
        self._usual = UsualTimes()
        self._in_a_hurry = False  # somebody was looked at, which takes a while; others may need it as well
        self._unforkable = unforkable  # why workers get an interpreter of their own
        self._poller.register(wake[0], select.POLLIN)
        self._listener = Listener(self._poller)
        self._oom = OomWatch()
        self._budget = Budget(settings.memory_budget)
        self._grew: set[int] = set()  # slots whose growth was told: once is enough
        # Workers with an interpreter of their own have nothing at the same address.
        trainer = [] if payload.is_pickled else [os.getppid()]  # of which this process is a fork, then
        own = threads.others_here()  # of a spawned one: what its imports started
        self._kin = (
            None
            if unforkable
            else Kin(
                payload.load_if_here,
                settings.left_behind or own[0],
                lambda: [*self._children, *trainer],
                settings.left_native or own[1],
            )
        )

    def serve(self) -> None:
        self._channel.send(Kind.LOADED, os.getpid(), parts=[b"" if self._payload.alone else self._unforkable.encode()])
        while True:
            interval = self._settings.interval_s * 1000 if self._children else 5000
            interval = 0 if self._in_a_hurry else interval
            ready = self._poller.poll(interval)
            if not ready:
                watching.prepare()
            for fd, _ in ready:
                if fd == self._trainer or (fd == self._wake[0] and self._was_told_to_leave()):
                    self._leave(grace_s=0.0)
                    return
                if not self._listener.attend(fd) and fd == self._channel.fileno():
                    for frame in self._channel.receive():
                        if frame.kind == Kind.LEAVE:
                            self._leave(frame.extra / 1000)
                            return
                        self._obey(frame)
                    if self._channel.closed:
                        self._leave(LEAVE_GRACE_S)
                        return
            self._reap()
            self._give_up_corpses()
            self._watch()

    def _was_told_to_leave(self) -> bool:
        """Whether the signal that woke us is SIGTERM: others may be the trainer's own affair."""
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in os.read(self._wake[0], 64)
        return False

    # ------------------------------------------------------------ requests

    def _obey(self, frame: Frame) -> None:
        if frame.kind == Kind.HELLO:
            self._trainer = int(frame.handles[0])
            self._poller.register(self._trainer, select.POLLIN)
        elif frame.kind == Kind.FORK:
            self._fork(frame)
        elif frame.kind == Kind.KILL and frame.seq in self._children:
            self._kill(self._children[frame.seq])

    def _kill(self, child: Child) -> None:
        processes.kill_group(child.pid)
        processes.kill(child.pid)
        child.killed_at = child.killed_at or time.monotonic()

    def _fork(self, frame: Frame) -> None:
        slot, incarnation = frame.seq, frame.extra
        descriptors = tuple(map(int, frame.handles))
        socket_fd, bell_fd, box_fd, stack_fd = descriptors
        zygote = os.getpid()
        words: LastWords | None = None
        try:
            words = self._listener.pipe()
            pid = _fork_patiently()
        except OSError as error:
            for fd in descriptors:
                os.close(fd)
            if words is not None:
                words.close()
            failure = failures.capture(error, Stage.STARTING, advice=_NO_PROCESS)
            self._channel.send(Kind.UNFORKED, slot, incarnation, [wire.dump(failure)])
            return
        if pid == 0:
            processes.die_with_parent(zygote)
            processes.lead_own_group()
            self._become_worker(slot, descriptors, words)
        with contextlib.suppress(OSError):
            os.setpgid(pid, pid)  # whichever of the two comes first
        os.close(socket_fd)
        os.close(bell_fd)
        handle = os.pidfd_open(pid)
        box = BlackBox(nameless.attach(box_fd))
        vitals = Vitals(pid, time.monotonic(), box)
        self._children[pid] = Child(slot, incarnation, pid, handle, box, box_fd, stack_fd, words, vitals)
        if words is not None:
            self._listener.add(words)
        self._poller.register(handle, select.POLLIN)
        self._channel.send(Kind.FORKED, pid, slot, [wire.dump((incarnation, box_fd, stack_fd))])

    def _become_worker(self, slot: int, descriptors: tuple[int, ...], words: LastWords | None) -> None:
        """In the child: never returns."""
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            for fd in self._wake:
                os.close(fd)
            if words is not None:
                words.speak()
            self._listener.close()
            self._oom.close()
            for child in (*self._children.values(), *self._stuck.values()):
                os.close(child.handle)
                os.close(child.box_fd)
                os.close(child.stack_fd)
            if self._unforkable:
                solo.become(slot, (*descriptors, self._trainer), self._payload, self._entry, self._family, os.getppid())
            processes.name_thread(f"outlive-w{slot}")
            socket_fd, bell_fd, box_fd, stack_fd = descriptors
            channel = Channel(socket.socket(fileno=socket_fd), blocking=True, owned=True, bell=bell_fd)
            args = (channel, nameless.adopt(box_fd), stack_fd, self._payload.load, slot)
            code = self._family.become(slot, self._entry, args, self._trainer)
        except BaseException:  # nobody above us to tell: the zygote's frames are not ours
            traceback.print_exc()
        finally:
            os._exit(code)

    # ------------------------------------------------------------ ends

    def _reap(self) -> None:
        """Report every child that ended, and end what it leaves behind."""
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            around = None
            if ended.si_pid in self._children:
                around = self._surroundings(self._children[ended.si_pid], ended)
                # The group before the leader is reaped: until then its pid cannot be anybody else's.
                processes.kill_group(ended.si_pid)
            pid, status, usage = os.wait4(ended.si_pid, 0)
            child = self._stuck.pop(pid, None)
            if child is not None:  # at last
                if child.words is not None:
                    self._listener.farewell(child.words)
                self._forget(child)
            child = self._children.pop(pid, None)
            if child is not None:
                watching.learn(child.watched, child.box, self._usual)
                evidence = self._evidence(child, usage, around)
                self._forget(child)
                # It hung only if our SIGKILL is what ended it: it may have been dead already.
                hung = child.condemned and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
                report = (child.slot, child.incarnation, status, hung, child.seconds, evidence, None)
                self._channel.send(Kind.EXITED, pid, 0, [wire.dump(report)])

    def _give_up_corpses(self) -> None:
        """Report workers that were killed and do not end as if they had: what waits in the kernel runs no code any
        more, and their slots are wanted."""
        for pid, child in list(self._children.items()):
            if child.killed_at is None or processes.has_ended(child.handle):
                continue
            if not processes.resists(pid, child.killed_at):
                continue
            from outlive._forensics import hanging

            child.seen = hanging.see_corpse(pid, child.seen)
            self._stuck[pid] = self._children.pop(pid)
            place = hanging.drive_of(child.seen)
            evidence = self._evidence(child, None, None)
            status = int(signal.SIGKILL)
            report = (child.slot, child.incarnation, status, child.condemned, child.seconds, evidence, place)
            self._channel.send(Kind.EXITED, pid, 0, [wire.dump(report)])

    def _surroundings(self, child: Child, ended: os.waitid_result) -> Surroundings | None:
        """Around a worker that ended otherwise than it should; before it is reaped, for its limits go with it."""
        by_signal = ended.si_code != os.CLD_EXITED
        if not by_signal and ended.si_status == 0:
            return None
        killed = by_signal and ended.si_status == signal.SIGKILL and not child.condemned
        sender = crash.sender_of(child.box) if by_signal else None
        return self._oom.surroundings(child.pid, killed=killed, sender=sender)

    def _evidence(self, child: Child, usage: resource.struct_rusage | None, around: Surroundings | None) -> Evidence:
        """What is known of a worker that has just ended, beside what its black box says. `usage`: None where it will
        not end."""
        vitals = child.vitals
        worked = Worked(
            memory=vitals.samples(time.monotonic()),
            peak_resident_bytes=usage.ru_maxrss * 1024 if usage is not None else None,
            cpu_s=usage.ru_utime + usage.ru_stime if usage is not None else None,
            descriptors=vitals.descriptors,
            threads=vitals.threads,
        )
        said = self._listener.farewell(child.words) if child.words is not None and usage is not None else ""
        inherited = None if self._unforkable else crash.inherited(child.box)
        return Evidence(worked, child.seen, around, last_words=said, inherited=inherited)

    def _forget(self, child: Child) -> None:
        self._poller.unregister(child.handle)
        os.close(child.handle)
        os.close(child.box_fd)
        os.close(child.stack_fd)
        child.box.release()

    # ------------------------------------------------------------ leaving

    def _leave(self, grace_s: float) -> None:
        """End everything; idle workers have seen the trainer hang up and leave by themselves."""
        self._end_all(grace_s)
        self._listener.finish()

    def _end_all(self, grace_s: float) -> None:
        deadline = time.monotonic() + grace_s
        while self._children and time.monotonic() < deadline:
            poller = select.poll()
            for child in self._children.values():
                poller.register(child.handle, select.POLLIN)
            poller.poll(max(0.0, deadline - time.monotonic()) * 1000)
            self._reap()
        for pid in list(self._children):
            processes.kill_group(pid)
            processes.kill(pid)
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            rest = [pid for pid in processes.children() if pid not in self._stuck]
            if not rest:
                return
            for pid in rest:
                if pid not in self._children:
                    processes.kill(pid)
            with contextlib.suppress(ChildProcessError):
                pid, _ = os.waitpid(-1, os.WNOHANG)
                if pid:
                    ended = self._children.pop(pid, None)
                    if ended is not None and ended.words is not None:
                        self._listener.farewell(ended.words)
                else:
                    time.sleep(0.002)

    def _tell_growth(self, child: Child) -> None:
        """Say once of a slot that its worker's memory grows and grows."""
        samples = [
            growth.Sample(seen.batches, seen.resident_bytes, seen.private_bytes, seen.cell_bytes or 0)
            for seen in child.vitals.kept
            if seen.private_bytes is not None
        ]
        found = growth.growth_of(samples)
        if found is None:
            return
        self._grew.add(child.slot)
        worked = Worked(memory=child.vitals.samples(time.monotonic()), batches_done=child.box.batches_done)
        evidence = Evidence(worked, growth=replace(found, limit_bytes=self._settings.memory_limit))
        self._channel.send(Kind.GREW, child.pid, child.slot, [wire.dump((child.incarnation, evidence))])

    # ------------------------------------------------------------ hangs

    def _watch(self) -> None:
        now = time.monotonic()
        self._oom.look(now)
        self._in_a_hurry = False
        workers = len(self._children)
        for child in self._children.values():
            looked = child.vitals.look(now, child.box.batches_done, workers)
            if looked and child.vitals.kept[-1].private_bytes is not None and child.slot not in self._grew:
                self._tell_growth(child)
        told = self._budget.look(now, {child.slot: child.vitals.footprint_bytes for child in self._children.values()})
        if told is not None:
            self._channel.send(Kind.MEMORY, parts=[wire.dump(dataclasses.astuple(told))])
        for child in self._children.values():
            if child.condemned:
                continue
            settings, usual, kin = self._settings, self._usual, self._kin
            lone = child.lone.look(child.box, child.pid, child.stack_fd, settings, kin)
            found = lone or look_after(child.watched, child.box, child.pid, child.stack_fd, settings, usual, kin)
            if found.suspected is not None:
                body = wire.dump((child.incarnation, *found.suspected))
                self._channel.send(Kind.SUSPECTED, child.pid, child.slot, [body])
            if found.condemned_after_s is not None and not processes.has_ended(child.handle):
                child.condemned = True
                child.seconds = found.condemned_after_s
                child.seen = found.seen
                self._kill(child)
            if found.suspected is not None or found.condemned_after_s is not None:
                self._in_a_hurry = True
                return  # first to whoever calls or has ended, then to the next one that hangs
