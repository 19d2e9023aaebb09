"""What every place for workers has in common: what is sent to a worker, and what is made of what it sends.

Reads   frames from workers, their black boxes.
Writes  frames to workers.
Never   starts, waits for or ends a process: that is for the engine which builds on this.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from outlive import records as r
from outlive._capture import crash, stacks
from outlive._capture.blackbox import COPIES, TIMES, BlackBox, Reason
from outlive._system import memory, processes
from outlive._system.address_space import NoRoomError, no_room_text
from outlive._system.channel import Frame
from outlive._transport import wire
from outlive._transport.wire import Kind
from outlive._worker import loop
from outlive.engines import messages
from outlive.engines.workers import Memory, Result, Stand, Worker, still_there, why_ended, why_recycled
from outlive.evidence import CreepKind, Evidence, Worked
from outlive.incident import Decision, Exit, InHand, Stage
from outlive.records import Event
from outlive.statistics import Load, StuckWorker, in_kernel_words

log = logging.getLogger("outlive")

News = tuple[Event, Any]

_RESULT = int(Kind.RESULT)
_BATCH_STAGES = (Stage.FETCHING, Stage.FETCHING_MANY, Stage.COLLATING)
_SCRIBBLED = "It wrote to a socket of outlive's, a descriptor that is not its own, and was killed for it.\n"


class Exchange:
    """The part of an engine that speaks with workers."""

    def __init__(self, slots: int) -> None:
        self._workers: list[Worker | None] = [None] * slots
        self._memories = [Memory() for _ in range(slots)]
        self._epoch = 0
        self._epoch_note: Any = None
        self._epoch_open: set[int] = set()  # slots that have yet to say that they began the epoch
        self._pending: list[News] = []
        self._crept: set[tuple[int, CreepKind]] = set()  # slots of which it was told: once is enough
        self._cells: dict[int, int] = {}  # every cell that is mapped here, and its size
        self._times = [0] * TIMES  # how long batches took, of workers that are gone
        self._hung: dict[int, int] = {}  # batches that hung a worker, and the sample in hand; -1: all of them were
        self._stuck: list[StuckWorker] = []
        self._no_room = False  # for something that came
        self._far_ahead = False  # more batches may wait for their turn than a black box has random states

    @property
    def imports_main(self) -> bool:
        """Whether workers, or what they come from, import the main module again."""
        raise NotImplementedError

    @property
    def job(self) -> Any:
        """What workers are to do, as the front door gave it."""
        raise NotImplementedError

    def launch(self, workers: int | None = None) -> None:
        """Start what workers come from; raises what pickling the job raises. `workers`: as many will be wanted."""
        raise NotImplementedError

    def wake_by(self, fd: int) -> None:
        """Have `wait_ready` return when this descriptor can be read; whoever wrote to it reads it."""
        raise NotImplementedError

    def start_worker(self, slot: int, incarnation: int) -> None:
        raise NotImplementedError

    def renew_workers(self, times: int = 1) -> r.WorkersRenewed | r.RenewalFailed:
        """Have workers come from a cleaner process than a fork of this one; `times`: by so many steps."""
        raise AssertionError("nothing here is forked from this process")

    def wait_ready(self, timeout_s: float | None) -> Any:
        raise NotImplementedError

    def take_events(self, ready: Any) -> Sequence[News]:
        raise NotImplementedError

    def close(self, grace_s: float = 1.0) -> None:
        raise NotImplementedError

    def _release(self, worker: Worker) -> None:
        raise NotImplementedError

    def _mind_congestion(self, worker: Worker) -> None:
        """What was sent does not fit into the socket just now: see that it is sent on."""
        raise NotImplementedError

    # ------------------------------------------------------------ to workers

    def _welcome(self, worker: Worker) -> None:
        """Tell a worker that was just started where its slot stands."""
        kept = self._memories[worker.slot]
        restored = loop.Restored(
            self._epoch,
            self._epoch_note,
            kept.random_at_start,
            kept.random_now,
            kept.place,
            kept.dataset,
            kept.steps,
            kept.iterations,
            kept.earlier,
        )
        worker.channel.send(Kind.RESTORE, parts=[wire.dump(restored)])
        self._workers[worker.slot] = worker

    def send_task(self, slot: int, incarnation: int, seq: int, body: bytes | list[Any], probe: bool) -> None:
        worker = self._worker(slot, incarnation)
        if worker is None:
            return
        if self._hung and seq in self._hung:
            worker.box.note_hung(seq, self._hung[seq])
        freed = worker.table.take_freed()
        extra = len(freed) | (loop.PROBE if probe else 0)
        parts: list[Any] = body if isinstance(body, list) else [body]
        worker.tasks.append((seq, probe))
        worker.channel.send(Kind.TASK, seq, extra, [wire.pack_numbers(freed), *parts] if freed else parts)
        if worker.channel.congested:
            self._mind_congestion(worker)
        if self._cells:
            self._return_cells()

    def _return_cells(self) -> None:
        """Tell workers early which cells are free again, so that they make no others. It wakes nobody."""
        for worker in self._workers:
            if worker is not None and worker.table.has_freed and not worker.channel.congested:
                freed = worker.table.take_freed()
                worker.channel.send_quietly(Kind.FREED, len(freed), [wire.pack_numbers(freed)])
                if worker.channel.congested:
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

    def dismiss_worker(self, slot: int, incarnation: int) -> None:
        worker = self._worker(slot, incarnation)
        if worker is not None:
            worker.channel.send(Kind.DISMISS)
            if worker.channel.congested:
                self._mind_congestion(worker)

    def answer_doubt(self, answer: r.AnswerDoubt) -> None:
        worker = self._worker(answer.slot, answer.incarnation)
        if worker is not None:
            worker.channel.send(Kind.SOURCE, parts=[wire.dump(answer)])

    def step_over(self, slot: int, count: int, killers: frozenset[int]) -> None:
        kept = self._memories[slot]
        kept.steps = (*kept.steps, (count, killers))

    def begin_epoch(self, epoch: int, note: Any) -> None:
        """Have the living workers begin another epoch, and those to come begin with it."""
        before, self._epoch, self._epoch_note = self._epoch_note, epoch, note
        self._hung.clear()
        for slot, worker in enumerate(self._workers):
            self._keep_random(slot)
            kept = self._memories[slot]
            kept.begin_epoch(before, *self.job.next_epoch(kept.place))
            if worker is not None and worker.status is None:
                self._epoch_open.add(slot)
                worker.channel.send(Kind.EPOCH, epoch, parts=[wire.dump(note)])

    @property
    def epoch(self) -> int:
        return self._epoch

    @property
    def epoch_note(self) -> Any:
        return self._epoch_note

    @property
    def epoch_begun(self) -> bool:
        return not self._epoch_open

    def _worker(self, slot: int, incarnation: int) -> Worker | None:
        messages.require(0 <= slot < len(self._workers))
        worker = self._workers[slot]
        return worker if worker is not None and worker.incarnation == incarnation else None

    # ------------------------------------------------------------ from workers

    def _receive(self, worker: Worker, news: list[News]) -> None:
        self._no_room |= messages.take_all(worker.channel, functools.partial(self._take_frame, worker), news)

    def _take_untaken(self) -> None:
        """Take what waits for room; raises if there is none still. Nothing is lost by that."""
        if self._no_room:
            self._no_room = False
            self._read_waiting(self._pending)
            if self._no_room:
                raise NoRoomError(no_room_text(len(self._cells), self.cell_bytes()))

    def _read_waiting(self, news: list[News]) -> None:
        for worker in self._workers:
            if worker is not None and worker.channel.waits:
                self._read_worker(worker, news)

    def _read_worker(self, worker: Worker, news: list[News]) -> None:
        raise NotImplementedError

    def _take_frame(self, worker: Worker, frame: Frame, news: list[News]) -> None:
        slot, incarnation, kept = worker.slot, worker.incarnation, self._memories[worker.slot]
        kind, seq = frame.kind, frame.seq
        if kind == _RESULT:
            result = Result(frame, worker.table)
            worker.did(seq)
            side = result.side
            if side is not wire.NOTHING_BESIDE:
                messages.check(side, wire.Side)
            if slot not in self._epoch_open:  # else it belongs to the epoch before
                kept.arrived(seq, side.place)
                if self._far_ahead:
                    kept.keep_random(worker.box.random_states(seq))
            news.append((r.TaskFinished(slot, incarnation, seq, side.failures), result))
            return
        if frame.handles:
            for handle in frame.handles:
                memory.discard(handle)
            raise messages.ForeignMessageError
        if kind == Kind.READY:
            messages.require(not worker.ready)
            worker.ready = True
            if slot not in self._epoch_open and kept.earlier:
                kept.keep_dataset(bytes(frame.body))
            news.append((r.WorkerReady(slot, incarnation, bool(frame.extra)), None))
        elif kind == Kind.SURVIVED:
            worker.did(seq, probe=True)
            news.append((r.TaskFinished(slot, incarnation, seq), None))
        elif kind in (Kind.EMPTY, Kind.ENDED, Kind.ERROR):
            said = messages.body_of(frame)
            failure, side = said if kind == Kind.ERROR else (None, said)
            ended = kind == Kind.ENDED or (kind == Kind.ERROR and bool(frame.extra))
            worker.did(seq, ended=ended, probe=None if kind != Kind.EMPTY else False)
            messages.require(self.job.may_end or not ended)
            if slot not in self._epoch_open:  # else it belongs to the epoch before
                kept.arrived(seq, side.place)
            if failure is not None:
                news.append((r.TaskErrored(slot, incarnation, seq, failure, side.failures, ended), None))
            else:
                empty = kind == Kind.EMPTY
                news.append((r.TaskFinished(slot, incarnation, seq, side.failures, empty=empty, ended=ended), None))
        elif kind in (Kind.ASK, Kind.RETRIED, Kind.DOUBT, Kind.PROBED):
            said = messages.body_of(frame)
            messages.require(worker.has(seq))
            if kind == Kind.ASK:
                news.append((r.DecisionAsked(slot, incarnation, worker.pid, seq, said), None))
            elif kind == Kind.RETRIED:
                news.append((r.TaskRetried(slot, incarnation, seq, said), None))
            elif kind == Kind.DOUBT:
                news.append((r.SourceDoubted(slot, incarnation, worker.pid, seq, *said), None))
            else:
                news.append((r.SourceProbed(slot, incarnation, worker.pid, seq, *said), None))
        elif kind == Kind.UNPREPARED:
            messages.require(not worker.ready or slot in self._epoch_open)
            worker.unprepared = messages.body_of(frame)
        elif kind == Kind.UNSENT:
            worker.unsent = messages.body_of(frame)
        elif kind == Kind.CREPT:
            creep = messages.body_of(frame)
            if (slot, creep.kind) not in self._crept:
                self._crept.add((slot, creep.kind))
                evidence = Evidence(Worked(batches_done=worker.box.batches_done), creep=creep)
                news.append((r.WorkerGrew(slot, incarnation, worker.pid, evidence), None))
        elif kind == Kind.EPOCH_BEGUN:
            messages.require(slot in self._epoch_open and seq <= self._epoch)
            if seq < self._epoch:  # that one was left before it had begun everywhere
                return
            self._epoch_open.discard(slot)
            kept.keep_dataset(bytes(frame.body))
        else:
            raise messages.ForeignMessageError

    def _bury_one(self, worker: Worker, news: list[News]) -> None:
        """A worker has ended: what it had still sent comes first, then how it ended."""
        worker.channel.drained = worker.channel.closed
        while not worker.channel.drained:
            self._receive(worker, news)
        if worker.channel.waits:
            return  # it is done again when there was room for that
        if worker.unprepared is not None:
            news.append((r.PreparationFailed(worker.slot, worker.incarnation, worker.pid, worker.unprepared), None))
        else:
            news.append((self._exit_event(worker), None))
        self._keep_random(worker.slot)
        if worker.slot not in self._epoch_open:
            self._memories[worker.slot].keep_random(worker.box.random_states())
        self._epoch_open.discard(worker.slot)
        self._keep_times(worker)
        self._workers[worker.slot] = None
        self._release(worker)

    def _exit_event(self, worker: Worker) -> r.WorkerExited:
        in_hand = worker.box.in_hand()
        if worker.channel.garbled or self._is_damaged(worker, in_hand):
            # Which sample of its first unfinished batch did that is to be found out.
            in_hand = InHand(Stage.AT_WORK, -1, -1, in_hand.seconds)
        elif worker.hung:
            in_hand = InHand(in_hand.stage, in_hand.batch, in_hand.position, worker.seconds)
            self._hung[in_hand.batch] = in_hand.position if in_hand.stage is Stage.FETCHING else -1
        seen = worker.evidence.seen
        # Where it did not answer, what was written is of something else that it did long before.
        silent = worker.hung and seen is not None and not seen.stack_answered
        stack = "" if silent else stacks.read(worker.stack_fd)
        return r.WorkerExited(
            worker.slot,
            worker.incarnation,
            worker.pid,
            Exit() if worker.lost else Exit.from_wait_status(worker.status or 0),
            in_hand,
            stack=(_SCRIBBLED if worker.channel.garbled else "")
            + (stacks.without_repeats(stack) if worker.hung else stack),
            evidence=self._evidence(worker),
            hung=worker.hung,
            recycled=why_recycled(worker),
            blameless=worker.lost or (worker.channel.torn and not worker.channel.garbled),
            unsent=worker.unsent,
        )

    def _is_damaged(self, worker: Worker, in_hand: InHand) -> bool:
        """Whether a black box says what cannot be: that a worker starts which had started, or another batch than its
        first."""
        if in_hand.stage in (Stage.STARTING, Stage.PREPARING):
            return worker.ready and worker.slot not in self._epoch_open
        return in_hand.stage in _BATCH_STAGES and not worker.has(in_hand.batch)

    def _evidence(self, worker: Worker) -> Evidence:
        """What its watchman knows, and what its black box says."""
        box, known = worker.box, worker.evidence
        reason, reached, bound = box.retired
        refused = reason is Reason.REFUSED
        worked = replace(
            known.worked,
            recent_batches=box.recent_batches,
            batches_done=box.batches_done,
            left_by_exit=box.left_by_exit,
        )
        return replace(
            known,
            worked=worked,
            crash=crash.read(box),
            recorder=crash.could_record(box),
            ended_because=why_ended(worker),
            over_limit_bytes=reached if refused else known.over_limit_bytes,
            memory_limit_bytes=bound if refused else known.memory_limit_bytes,
        )

    def _keep_random(self, slot: int) -> None:
        worker, kept = self._workers[slot], self._memories[slot]
        if worker is not None and kept.last_seq is not None:
            state = worker.box.random_state(kept.last_seq)
            if state is not None:  # None: the last batch that arrived was an earlier incarnation's
                kept.random_now = state

    # ------------------------------------------------------------ where slots stand

    def expect(self, waiting: int) -> None:
        """So many batches of a slot may have arrived before their turn: what is known of them is kept till then."""
        self._far_ahead = waiting > COPIES - 4
        for kept in self._memories:
            kept.waiting = waiting + 2

    def set_out(self, epoch: int, note: Any, stands: Mapping[int, Stand]) -> None:
        """Before anybody is started: slots begin where others stood."""
        self._epoch, self._epoch_note = epoch, note
        self._hung.clear()
        for slot, stand in stands.items():
            self._memories[slot].set_out(stand)

    def begin_at(self, slot: int, stand: Stand) -> None:
        """A slot that nobody works for begins the epoch that was just begun there."""
        if self._workers[slot] is None:
            self._memories[slot].set_out(replace(stand, random_at_start=self._memories[slot].random_at_start))

    def stand_of(self, slot: int, batch: int) -> Stand:
        """Where a slot stood after a batch that had its turn; below 0: where it began this epoch."""
        worker = self._workers[slot]
        newest = None
        if worker is not None and slot not in self._epoch_open:
            newest = worker.box.random_state_upto(batch)
        return self._memories[slot].stand_after(batch, newest)

    # ------------------------------------------------------------ looking

    def look(self, slot: int) -> tuple[int | None, InHand | None]:
        """Pid and what is in hand, as the black box says now."""
        worker = self._workers[slot]
        if worker is None:
            return None, None
        try:
            # The worker writes its pid into its box before the zygote's word of it is read here.
            pid = worker.pid if worker.pid > 0 else worker.box.pid
            return (pid if pid > 0 else None), worker.box.in_hand()
        except ValueError:  # another thread is just putting it away
            return None, None

    def limit_s(self, slot: int) -> float | None:
        """After how long what a slot's worker has in hand is taken for hung; None: never."""
        worker = self._workers[slot]
        try:
            return None if worker is None else worker.box.limit_s
        except ValueError:  # as above
            return None

    def load_of(self, slot: int) -> tuple[Load | None, int | None, int | None]:
        """What a slot's worker did with the last seconds, its descriptors and its threads, as far as anybody looked."""
        worker = self._workers[slot]
        if worker is None:
            return None, None, None
        try:
            return worker.box.load, *worker.box.counts
        except ValueError:  # as above
            return None, None, None

    def _note_stuck(self, slot: int, pid: int, place: str) -> None:
        self._stuck.append(StuckWorker(slot, pid, place, processes.born(pid)))

    @property
    def stuck(self) -> tuple[StuckWorker, ...]:
        """Workers that were killed and are still there, in the kernel."""
        return still_there(self._stuck)

    def _tell_stuck(self) -> None:
        """At the end: what is left, and why."""
        if stuck := self.stuck:
            log.warning(
                "%s (%s): SIGKILL was sent, and takes effect when that answers or is unmounted by force",
                in_kernel_words(stuck),
                ", ".join(f"pid {worker.pid}" for worker in stuck),
            )

    def box_of(self, slot: int) -> tuple[BlackBox, tuple[int, int, int]] | None:
        """A slot's black box, and who else has it and the stacks open: process and descriptors."""
        worker = self._workers[slot]
        return None if worker is None else (worker.box, worker.held)

    def _keep_times(self, worker: Worker) -> None:
        self._times = [kept + new for kept, new in zip(self._times, worker.box.times)]

    def times(self) -> list[int]:
        """How long batches took to fetch, collate and send, as a black box has it, of all workers so far."""
        total = self._times
        for worker in list(self._workers):
            if worker is not None:
                with contextlib.suppress(ValueError):  # as above
                    total = [kept + new for kept, new in zip(total, worker.box.times)]
        return list(total)

    @property
    def cells(self) -> int:
        """How many are mapped here."""
        return len(self._cells)

    def place_of(self, slot: int) -> bytes | None:
        """Where a slot's stream stood after the last batch that arrived."""
        return self._memories[slot].place

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._workers if worker is not None and worker.pid > 0]

    def cell_bytes(self, slot: int | None = None) -> int:
        """Shared memory in cells: of a slot's worker, or all that is mapped here."""
        if slot is None:
            return sum(list(self._cells.values()))
        worker = self._workers[slot]
        return 0 if worker is None else worker.table.bytes_held
