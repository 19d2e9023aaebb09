"""What the trainer holds of each worker: its end of things, what arrived from it, what outlives it.

Reads   nothing by itself; the engine does.
Writes  nothing.
Never   a process: handles and memories only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlive._capture.blackbox import COPIES, BlackBox, Reason
from outlive._system import processes
from outlive._system.address_space import need_of, no_room_text, require_room
from outlive._system.channel import Channel, Frame
from outlive._transport import packing, wire
from outlive._transport.leases import CellTable, Hold
from outlive._worker.loop import Restored
from outlive.engines import messages
from outlive.evidence import NO_EVIDENCE, Evidence
from outlive.incident import Failure
from outlive.quantities import in_words
from outlive.statistics import StuckWorker


class Result:
    """A batch that has arrived: opened when its turn comes."""

    __slots__ = ("_body", "_hold", "_parcel", "_table")

    def __init__(self, frame: Frame, table: CellTable) -> None:
        self._body = bytearray(frame.body) if isinstance(frame.body, memoryview) else frame.body
        self._table = table
        self._parcel = packing.adopt(self._body, frame.extra, frame.handles, table)
        self._hold = Hold(table)  # an interrupted opening must not give the cells back

    @property
    def side(self) -> wire.Side:
        return self._parcel.side

    @property
    def nbytes(self) -> int:
        """What it takes of memory, about."""
        return len(self._body) + sum(place[2] for place in (*self._parcel.buffers, *self._parcel.places))

    def open(self) -> Any:
        """The batch; NoRoomError where this process has no room for it just now."""
        try:
            return packing.unpack(self._parcel, self._body, self._table, self._hold)
        except MemoryError:
            need, table = need_of(len(self._body)) + self.nbytes, self._table
            require_room(need, no_room_text(table.maps, table.bytes_mapped))
            raise

    def discard(self) -> None:
        packing.discard(self._parcel, self._table, self._hold)


@dataclass(frozen=True)
class Stand:
    """Where a slot stands after one of its batches: enough for another worker, of another job even, to go on there."""

    random_at_start: bytes | None = None
    random_now: bytes | None = None
    place: bytes | None = None
    dataset: bytes | None = None
    steps: tuple[tuple[int, frozenset[int]], ...] = ()
    iterations: int = 0
    epochs: int = 0  # that began before this one, also those before `dataset` was kept
    earlier: tuple[Restored, ...] = ()


@dataclass
class Memory:
    """What outlives a slot's worker: enough for the next one to go on where it was."""

    last_seq: int | None = None
    place: bytes | None = None
    random_at_start: bytes | None = None
    random_now: bytes | None = None
    dataset: bytes | None = None
    steps: tuple[tuple[int, frozenset[int]], ...] = ()
    iterations: int = 0  # epochs that began since `dataset` was kept, of which no more is known
    earlier: tuple[Restored, ...] = ()  # those after them, each as it was left
    epochs: int = 0
    begun: Stand = Stand()  # where it stood when this epoch began here
    places: dict[int, bytes] = field(default_factory=dict)  # by batch, of the last that arrived
    random_states: dict[int, bytes] = field(default_factory=dict)  # by batch, where no living worker's box has them
    waiting: int = 2  # so many batches may have arrived and not have had their turn

    def arrived(self, seq: int, place: bytes | None) -> None:
        """A batch has arrived: this is where its slot stands now."""
        self.last_seq = seq
        if place is not None:
            self.place, self.steps = place, ()
            self.places[seq] = place
            if len(self.places) > self.waiting:
                del self.places[next(iter(self.places))]

    def keep_random(self, states: Mapping[int, bytes]) -> None:
        self.random_states.update(states)
        for batch in sorted(self.random_states)[: -self.waiting - COPIES]:
            del self.random_states[batch]

    def set_out(self, stand: Stand) -> None:
        """Begin where another life of this slot stood."""
        self.begun = stand
        self.random_at_start, self.random_now, self.place = stand.random_at_start, stand.random_now, stand.place
        self.dataset, self.steps, self.iterations = stand.dataset, stand.steps, stand.iterations
        self.earlier, self.epochs = stand.earlier, stand.epochs

    def begin_epoch(self, note: Any, place: bytes | None, dataset: bytes | None, again: bool) -> None:
        """`place`, `dataset`: what this epoch begins with, where the end of the one before it told. `again`: else a
        replacement takes what that one took. `note`: of that one.
        """
        left = Restored(0, note, self.random_at_start, self.random_now, self.place, None, self.steps)
        if self.random_now is not None:
            self.random_at_start = self.random_now
        # Not yet: iter(dataset) may draw before the first batch of this epoch arrives.
        self.random_now = self.last_seq = None
        self.place = place
        self.steps = ()
        self.epochs += 1
        if again:
            self.earlier = (*self.earlier, left)
        elif place is None and dataset is None:
            self.iterations, self.earlier = self.iterations + len(self.earlier) + 1, ()
        else:
            self.dataset, self.iterations, self.earlier = dataset, 0, ()
        self.places.clear()
        self.random_states.clear()
        self.begun = Stand(place=place)

    def keep_dataset(self, dataset: bytes) -> None:
        """The dataset as this epoch begins. b"": it cannot be kept."""
        if dataset:
            self.dataset, self.iterations, self.earlier = dataset, 0, ()
        else:  # or there would be more to repeat with every epoch
            self.iterations += len(self.earlier[:-1])
            self.earlier = self.earlier[-1:]

    def stand_after(self, batch: int, newest: tuple[int, bytes] | None) -> Stand:
        """Where the slot stood after this batch, which had its turn. `newest`: the last random state up to it that a
        living worker's box has."""
        known = [*self.random_states.items(), *([newest] if newest is not None else [])]
        random_now = max((pair for pair in known if pair[0] <= batch), default=(0, self.begun.random_now))[1]
        place = max((pair for pair in self.places.items() if pair[0] <= batch), default=(0, self.begun.place))[1]
        stepped = batch >= 0 and (self.last_seq is None or self.last_seq <= batch)
        steps = self.steps if stepped else self.begun.steps if place is self.begun.place else ()
        return Stand(
            self.random_at_start, random_now, place, self.dataset, steps, self.iterations, self.epochs, self.earlier
        )


@dataclass
class Worker:
    slot: int
    incarnation: int
    channel: Channel
    box: BlackBox
    stack_fd: int
    pid: int = -1
    table: CellTable = field(default_factory=CellTable)
    status: int | None = None
    hung: bool = False
    seconds: float = 0.0
    hung_up_at: float | None = None
    asked_to_end: bool = False
    unprepared: Failure | None = None
    unsent: Failure | None = None
    evidence: Evidence = NO_EVIDENCE  # what its watchman knows, when it has ended
    lost: bool = False  # its zygote is gone, and its status with it
    registered: bool = True
    ready: bool = False
    tasks: deque[tuple[int, bool]] = field(default_factory=deque)  # sent, in order, and whether they are probes
    held: tuple[int, int, int] = (0, -1, -1)  # who has its box and its stacks open, and as which descriptors

    def has(self, seq: int) -> bool:
        """Whether this task is in hand."""
        return bool(self.tasks) and self.tasks[0][0] == seq

    def did(self, seq: int, *, probe: bool | None = False, ended: bool = False) -> None:
        """Note that the task in hand is done; ForeignMessageError where it has another one in hand.

        `probe`: what it must have been; None: either. `ended`: no other task will be done in this epoch.
        """
        messages.require(self.has(seq) and probe in (None, self.tasks[0][1]))
        if ended:
            self.tasks.clear()
        else:
            self.tasks.popleft()


def why_recycled(worker: Worker) -> str:
    """Why a worker has left of its own accord; empty if it has not."""
    reason, reached, bound = worker.box.retired
    if worker.status != 0 or reason in (Reason.NONE, Reason.REFUSED):
        return ""
    if reason is Reason.DISMISSED:
        return "it was asked to leave"
    if reason is Reason.ASKED:
        return "a viewer of the job asked for a fresh one"
    if reason is Reason.SOURCE:
        return "the source of its samples is gone, and a fresh worker may be the first to reach it"
    if reason is Reason.BATCHES:
        return f"it has done {reached} batches"
    if reason is Reason.SAMPLES:
        return f"it has done {reached} samples, of {bound} that it may"
    if reason is Reason.GROWTH:
        return f"its memory has grown by {in_words(reached)}, of {in_words(bound)} that it may"
    if reason in (Reason.DESCRIPTORS, Reason.THREADS):
        what = "open descriptors" if reason is Reason.DESCRIPTORS else "threads"
        return f"it has {reached} {what}, of {bound} that it may, and they become more and more"
    return f"its memory has reached {in_words(reached)} of {in_words(bound)}"


def why_ended(worker: Worker) -> str:
    """Why we killed it, if we did."""
    if worker.channel.garbled:
        return "it wrote to a socket of outlive's, a descriptor that is not its own"
    if worker.channel.torn:
        return "the trainer could not take over what it sent, for want of descriptors or memory"
    if worker.asked_to_end:
        return "it closed its socket to the trainer, a descriptor that is not its own, and went on"
    return ""


def still_there(stuck: Sequence[StuckWorker]) -> tuple[StuckWorker, ...]:
    """Those that have not ended since."""
    return tuple(worker for worker in stuck if worker.born and processes.born(worker.pid) == worker.born)
