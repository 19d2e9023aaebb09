"""The life of a worker: prepare, then take tasks one by one until the trainer hangs up.

Reads   tasks from its socket.
Writes  results to its socket, what it is doing and what it dies of to its black box, stacks to its stack file.
Never   decides what a fault means beyond its plain policy; never outlives its zygote.

    STARTING → PREPARING → (FORWARDING) → IDLE ⇄ FETCHING → COLLATING → SENDING
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from outlive._capture import crash, stacks
from outlive._capture.blackbox import BlackBox, Reason
from outlive._system import memory, processes
from outlive._system.channel import Body, Channel, Frame
from outlive._transport import packing, wire
from outlive._transport.cells import Arena
from outlive._transport.wire import Kind, SendingFailedError
from outlive._worker import failures
from outlive._worker.allowance import Allowance
from outlive._worker.creep import Creep
from outlive._worker.manners import Manners
from outlive._worker.randomness import Randomness
from outlive.incident import Decision, Failure, Stage
from outlive.limits import Limits
from outlive.orders import AnswerDoubt

T = TypeVar("T")

_LEAVE_S = 0.3  # for threads and processes of the user's to end, when a worker leaves before the others
_SHORT_NS = 5_000_000  # batches that take less are timed now and then
_TIMED_OF_SHORT = 16
_LONGEST_SLEEP_S = 0.05  # between two looks whether the trainer is still there
_MOST_TOLD = 16_384  # characters of a failure to send
PROBE = 1 << 32  # in a task frame's `extra`, above the number of freed cells


@dataclass(frozen=True)
class Restored:
    """What a worker is told before its first task."""

    epoch: int = 0
    epoch_note: Any = None  # what the job needs to know about this epoch
    random_at_start: bytes | None = None  # random state when the epoch began, None: as seeded
    random_now: bytes | None = None  # random state after the last batch that arrived
    place: bytes | None = None  # where a stream stood after the last batch that arrived
    dataset: bytes | None = None  # the dataset as it was when a later epoch began, where it had a state of its own
    steps: tuple[tuple[int, frozenset[int]], ...] = ()  # batches to leave behind: samples, and those that kill
    iterations: int = 0  # how often iter(dataset) was called since `dataset` was kept, and no more is known
    earlier: tuple[Restored, ...] = ()  # epochs that began after those, each as it was left


class Job(Protocol):
    """What a front door has workers do. Lives in the zygote; one copy wakes up in each worker."""

    can_skip: bool
    may_end: bool  # a worker may have no more to do before the epoch is over
    limits: Limits

    def prepare(self, desk: Desk, slot: int, restored: Restored) -> None: ...
    def begin_epoch(self, note: Any) -> bytes:
        """Begin another epoch; answers with what a replacement needs of the dataset's own state, b"" for nothing."""
        ...

    def next_epoch(self, place: bytes | None) -> tuple[bytes | None, bytes | None, bool]:
        """Asked in the trainer: what the epoch after the one left at this place begins with, place or dataset; and
        whether a replacement is to take first what was taken up to there.
        """
        ...

    def run(self, seq: int, body: memoryview, probe: bool) -> None: ...


class StreamEnded(Exception):
    """A job's stream has nothing more to give."""


class TaskFailed(Exception):
    """A task's failure is to be raised in the trainer."""

    def __init__(self, failure: Failure, ended: bool = False) -> None:
        self.failure = failure
        self.ended = ended


class Desk:
    """What a job may use while it works: black box, arena, random state, the trainer's ear."""

    def __init__(self, channel: Channel, box: BlackBox, arena: Arena) -> None:
        self.box = box
        self.arena = arena
        self.randomness = Randomness()
        self.last_random: bytes = b""
        self.dealt_with: list[Failure] = []  # failures of this batch that the policy took care of
        self.place: bytes | None = None  # where the stream stands after this batch
        self.dataset = b""  # what earlier epochs made of it, where this worker had to repeat them
        self.samples = 0  # of this batch
        self.timed = False  # this batch's stages are: of short ones not all, for looking at the clock takes time, too
        self.collating_ns = self.sending_ns = 0  # since when it is, where it is timed
        self._untimed = sys.maxsize if os.environ.get("OUTLIVE_BOARD") == "0" else 0  # batches before the next that is
        self._weight = 1
        self.epoch = 0
        self.allowance: Allowance | None = None
        self._channel = channel
        self._packer = packing.Packer(arena)
        self._waiting: deque[Frame] = deque()
        self._thread = threading.get_ident()
        arena.news = self._freed_meanwhile

    def send_batch(self, seq: int, batch: Any) -> None:
        """Pack and send a finished batch; raises what pickling raises, with nothing sent."""
        packed = self._packer.pack(batch, self._side())
        self._settle(seq)
        self.send(Kind.RESULT, seq, packed.inline, packed.parts, packed.handles)
        self.arena.finish(packed.cells)

    def send(
        self,
        kind: Kind,
        seq: int = 0,
        extra: int = 0,
        parts: Sequence[Any] = (),
        handles: tuple[memory.Handle, ...] = (),
    ) -> None:
        """Send what is ready to be sent; where that fails, this process ends, and a fresh one does its work."""
        try:
            self._channel.send(kind, seq, extra, parts, handles)
        except Exception as error:
            raise SendingFailedError from error

    def begin_task(self) -> int:
        """A batch begins; when, if it is one that is timed."""
        self._untimed -= 1
        if self._untimed >= 0:
            self.timed = False
            return 0
        self.timed = True
        self.collating_ns = self.sending_ns = 0
        return time.monotonic_ns()

    def end_task(self, begun_ns: int) -> None:
        now = time.monotonic_ns()
        sending = self.sending_ns or now
        collating = self.collating_ns or sending
        self.box.note_times(collating - begun_ns, sending - collating, now - sending, self._weight)
        self._weight = 1 if now - begun_ns >= _SHORT_NS else _TIMED_OF_SHORT
        self._untimed = self._weight - 1

    def send_empty(self, seq: int) -> None:
        self._settle(seq)
        self.send(Kind.EMPTY, seq, 0, [wire.dump(self._side())])

    def can_pack(self, batch: Any) -> None:
        """Raise what packing this batch would raise."""
        self._packer.pack(batch)

    def rewind(self) -> None:
        """Back to the random state after the last batch that was sent."""
        self.randomness.set(self.last_random)

    def ask(self, seq: int, failure: Failure) -> Decision:
        """Ask the trainer, which has the user's callable; tasks that come meanwhile are kept."""
        self.box.enter(Stage.WAITING, seq, failure.position)
        return Decision(bytes(self._consult(Kind.ASK, seq, failure, Kind.ANSWER)).decode())

    def tell_retry(self, seq: int, failure: Failure) -> None:
        """At once, not with the batch: whoever dies at the next attempt cannot tell any more."""
        self.send(Kind.RETRIED, seq, 0, [wire.dump(failure)])

    def doubt(self, seq: int, doubt: tuple[Any, ...]) -> AnswerDoubt:
        """Tell the trainer that it may be the source that fails, or failed, and hear what to do."""
        self.box.enter(Stage.WAITING, seq)
        return self._heard(self._consult(Kind.DOUBT, seq, tuple(doubt), Kind.SOURCE))

    def tell_probe(self, seq: int, found: tuple[Any, ...]) -> AnswerDoubt:
        """Tell the trainer what a probe showed, and hear what to do."""
        return self._heard(self._consult(Kind.PROBED, seq, tuple(found), Kind.SOURCE))

    def _heard(self, body: Body) -> AnswerDoubt:
        answer: AnswerDoubt = wire.load(body)
        return answer

    def pause(self, seconds: float) -> None:
        """Wait so long, and leave when the trainer hangs up meanwhile."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _LONGEST_SLEEP_S))
            self._waiting.extend(self._channel.receive(wait=False))
            if self._channel.closed:
                raise EOFError

    def leave(self) -> None:
        """Make room for a fresh worker, which does what this one has in hand."""
        self.box.retire(Reason.SOURCE, 0, 0)
        processes.leave_within(_LEAVE_S)
        raise EOFError

    def _consult(self, kind: Kind, seq: int, question: Any, answer: Kind) -> Body:
        self.send(kind, seq, 0, [wire.dump(question)])
        held: deque[Frame] = deque()
        while True:
            frame = self.next_frame()
            if frame.kind == answer:
                self._waiting.extendleft(reversed(held))
                return frame.body
            held.append(frame)

    def _side(self) -> wire.Side:
        if not self.dealt_with and self.place is None:
            return wire.NOTHING_BESIDE
        return wire.Side(tuple(self.dealt_with), self.place)

    def _settle(self, seq: int) -> None:
        self.box.finished()
        self.box.enter(Stage.DELIVERING, seq)  # no user code from here on, and a full socket is no hang
        state = self.randomness.read()
        self.last_random = state
        self.box.keep_random_state(seq, state)

    def _freed_meanwhile(self) -> list[int]:
        """Cells that came back while a task was worked on: by messages that wait in the socket or behind others."""
        if threading.get_ident() != self._thread:  # user code that collates in a thread of its own
            return []
        waiting = self._waiting
        waiting.extend(self._channel.receive(wait=False))
        freed = [frame for frame in waiting if frame.kind == Kind.FREED]
        for frame in freed:
            waiting.remove(frame)
        return [number for frame in freed for number in wire.unpack_numbers(frame.body, frame.extra)]

    def keep(self, frames: Sequence[Frame]) -> None:
        self._waiting.extend(frames)

    def next_frame(self) -> Frame:
        if not self._waiting:
            while not self._waiting:
                self._waiting.extend(self._channel.receive())
                if self._channel.closed:
                    raise EOFError
            self.box.note_idle()
        return self._waiting.popleft()


def main(
    channel: Channel,
    mapped: ctypes.Array[ctypes.c_ubyte],
    stack_fd: int,
    load: Callable[[], Job],
    slot: int,
    early: Sequence[Frame] = (),
) -> None:
    """Run in a process of its own until the trainer closes the channel. `mapped`: the black box's memory; `early`:
    what the trainer has sent already."""
    box = BlackBox(mapped)
    box.begin(os.getpid())
    stacks.install(stack_fd)
    crash.install(mapped)  # after the stacks: it comes first, and passes the signal on to them
    processes.be_killed_first()
    arena = Arena()
    desk = Desk(channel, box, arena)
    desk.keep(early)
    try:
        frame = desk.next_frame()
        restored = wire.load(frame.body)
        desk.epoch = restored.epoch

        def prepare() -> Job:
            job = load()
            job.prepare(desk, slot, restored)
            return job

        job = _prepared(desk, prepare)
        if job is None:
            return
        crash.reinstall()  # worker_init_fn may have brought handlers of its own
        allowance = desk.allowance = Allowance(job.limits, box) if job.limits.any else None
        manners = Manners()
        creep = Creep(box, lambda told: desk.send(Kind.CREPT, parts=[wire.dump(told)]))
        desk.last_random = desk.randomness.read()
        desk.send(Kind.READY, extra=int(job.can_skip), parts=[desk.dataset])
        while True:
            box.enter(Stage.IDLE)
            frame = desk.next_frame()
            if frame.kind == Kind.TASK:
                _run_task(desk, job, frame)
                manners.task_done()
                spent = allowance is not None and allowance.is_spent(desk.samples)
                if spent or creep.is_too_much() or _is_asked(box):
                    box.enter(Stage.LEAVING)
                    processes.leave_within(_LEAVE_S)
                    return
            elif frame.kind == Kind.EPOCH:
                desk.place = None
                desk.epoch = frame.seq
                box.forget_random_states()  # the trainer has them; batches are numbered anew
                box.forget_batches()
                kept = _prepared(desk, functools.partial(job.begin_epoch, wire.load(frame.body)))
                if kept is None:
                    return
                desk.last_random = desk.randomness.read()
                desk.send(Kind.EPOCH_BEGUN, frame.seq, parts=[kept])
            elif frame.kind == Kind.FREED:
                arena.give_back(wire.unpack_numbers(frame.body, frame.extra))
            elif frame.kind == Kind.REST:
                arena.forget()
            elif frame.kind == Kind.DISMISS:
                box.retire(Reason.DISMISSED, 0, 0)
                box.enter(Stage.LEAVING)
                processes.leave_within(_LEAVE_S)
                return
    except EOFError:
        box.enter(Stage.LEAVING)
    except SendingFailedError as failed:
        box.enter(Stage.DELIVERING, box.in_hand().batch)
        channel.send(Kind.UNSENT, parts=[wire.dump(_own_failure(failed.__cause__ or failed))])
    except BaseException as error:
        if isinstance(error, SystemExit):
            box.note_exit()
        stacks.note(stack_fd, error)
        raise


def _own_failure(error: BaseException) -> Failure:
    """What is told of a failure to send: little enough to be sent without a descriptor or memory."""
    failure = failures.capture(error, Stage.DELIVERING)
    message, traceback = failure.message[:_MOST_TOLD], failure.traceback[-_MOST_TOLD:]
    return replace(failure, message=message, traceback=traceback)


def _prepared(desk: Desk, prepare: Callable[[], T]) -> T | None:
    """What `prepare` returns; None when it raised, which the trainer is then told."""
    desk.box.enter(Stage.PREPARING)
    try:
        return prepare()
    except Exception as error:
        failure = failures.capture(error, Stage.PREPARING)
        desk.box.enter(Stage.LEAVING)
        desk.send(Kind.UNPREPARED, 0, 0, [wire.dump(failure)])
        return None


def _run_task(desk: Desk, job: Job, frame: Frame) -> None:
    seq = frame.seq
    freed = frame.extra & 0xFFFFFFFF
    probe = bool(frame.extra & PROBE)
    if freed:
        desk.arena.give_back(wire.unpack_numbers(frame.body, freed))
    desk.dealt_with.clear()
    desk.arena.begin()
    desk.box.take_up(seq)
    begun_ns = desk.begin_task()
    try:
        job.run(seq, memoryview(frame.body)[8 * freed :], probe)
    except StreamEnded:
        desk._settle(seq)
        desk.send(Kind.ENDED, seq, 0, [wire.dump(desk._side())])
    except TaskFailed as failed:
        desk._settle(seq)
        desk.send(Kind.ERROR, seq, int(failed.ended), [wire.dump((failed.failure, desk._side()))])
    else:
        if probe:
            desk.send(Kind.SURVIVED, seq)
            return
    if begun_ns:
        desk.end_task(begun_ns)
    desk.box.count_done()


def _is_asked(box: BlackBox) -> bool:
    if not box.is_asked_to_leave:
        return False
    box.retire(Reason.ASKED, 0, 0)
    return True
