"""What the trainer holds of each worker: its end of things, what arrived from it, what outlives it.

Reads   nothing by itself; the engine does.
Writes  nothing.
Never   a process: handles and memories only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from holdfast._capture.blackbox import BlackBox
from holdfast._system.channel import Channel, Frame
from holdfast._transport import packing, wire
from holdfast._transport.cells import CellTable
from holdfast.evidence import NO_EVIDENCE, Evidence
from holdfast.incident import Failure


class Result:
    """A batch that has arrived: opened when its turn comes."""

    __slots__ = ("_body", "_parcel", "_roots", "_table")

    def __init__(self, frame: Frame, table: CellTable) -> None:
        self._body = bytearray(frame.body) if isinstance(frame.body, memoryview) else frame.body
        self._table = table
        self._roots: dict[int, Any] = {}  # leases: an interrupted opening must not give the cells back
        self._parcel = packing.adopt(self._body, frame.extra, frame.handles, table)

    @property
    def side(self) -> wire.Side:
        return self._parcel.side

    @property
    def nbytes(self) -> int:
        """What it takes of memory, about."""
        return len(self._body) + sum(place[2] for place in (*self._parcel.buffers, *self._parcel.places))

    def open(self) -> Any:
        return packing.unpack(self._parcel, self._body, self._table, self._roots)

    def discard(self) -> None:
        packing.discard(self._parcel, self._table, self._roots)


@dataclass
class Memory:
    """What outlives a slot's worker: enough for the next one to go on where it was."""

    last_seq: int | None = None
    place: bytes | None = None
    random_at_start: bytes | None = None
    random_now: bytes | None = None
    dataset: bytes | None = None
    steps: tuple[tuple[int, frozenset[int]], ...] = ()
    iterations: int = 0  # epochs that began since `dataset` was kept

    def arrived(self, seq: int, place: bytes | None) -> None:
        """A batch has arrived: this is where its slot stands now."""
        self.last_seq = seq
        if place is not None:
            self.place, self.steps = place, ()


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
    evidence: Evidence = NO_EVIDENCE  # what its watchman knows, when it has ended
    lost: bool = False  # its zygote is gone, and its status with it
    registered: bool = True
