"""An engine without processes: its workers are the other ends of socket pairs, in the hands of the test.

Reads   what its workers are sent.
Writes  whatever bytes and descriptors a test likes, to the trainer's end.
Never   a process.
"""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from outlive._capture import blackbox
from outlive._capture.blackbox import BlackBox
from outlive._fleet.machine import Machine
from outlive._fleet.runner import Runner
from outlive._system import channel as channels
from outlive._system import nameless
from outlive._system.channel import Channel
from outlive._transport import wire
from outlive._transport.cells import Arena
from outlive._transport.leases import CellTable
from outlive._transport.packing import Packer
from outlive._transport.wire import Kind
from outlive.engines.exchange import Exchange, News
from outlive.engines.workers import Worker
from outlive.evidence import Creep, CreepKind
from outlive.incident import Decision, Failure, Incident, Stage
from outlive.records import Plan, TaskSubmitted
from outlive.settings import FaultPolicy

FAILURE = Failure("ValueError", "bad", "Traceback", None, Stage.FETCHING, 1, Decision.SKIP, culprits=(1,))

Message = tuple[bytes, list[int]]  # bytes, and the descriptors that travel with them


class Job:
    may_end = True
    can_skip = False

    def next_epoch(self, place: bytes | None) -> tuple[None, None, bool]:
        return None, None, False


class EngineOfPairs(Exchange):
    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.ends: list[socket.socket] = []
        self.lost: set[int] = set()

    job = Job()  # type: ignore[assignment]

    def start_worker(self, slot: int, incarnation: int) -> None:
        ours, theirs = channels.pair()
        box, stacks = nameless.descriptor(blackbox.SIZE), nameless.descriptor(1)
        channel = Channel(ours, blocking=False, owned=False)
        worker = Worker(slot, incarnation, channel, BlackBox(nameless.adopt(box)), stacks, pid=4000 + slot)
        worker.table = CellTable(self._cells)
        self.ends.append(theirs)
        self._welcome(worker)

    def wait_ready(self, timeout_s: float | None) -> Any:
        self._take_untaken()

    def _read_worker(self, worker: Worker, news: list[News]) -> None:
        self._receive(worker, news)

    def take_events(self, ready: Any) -> Sequence[News]:
        news, self._pending = self._pending, []
        for worker in self._workers:
            if worker is None:
                continue
            worker.channel.drained = worker.channel.closed
            while not worker.channel.drained:
                self._receive(worker, news)
            if worker.channel.torn:
                self.lost.add(worker.slot)
        return news

    def close(self, grace_s: float = 0.0) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.channel.close()
                worker.box.release()
                os.close(worker.stack_fd)
        for end in self.ends:
            end.close()


class Door:
    """A front door that keeps what it is told."""

    def __init__(self) -> None:
        self.incidents: list[Incident] = []

    def encode(self, seq: int, plan: Plan) -> bytes:
        return b""

    def explain(self, incident: Incident) -> Incident:
        return incident

    def incident_happened(self, incident: Incident) -> None:
        self.incidents.append(incident)

    def quarantine(self, seq: int, positions: tuple[int, ...], incident: Incident) -> None: ...

    def decide(self, incident: Incident) -> Decision:
        return Decision.SKIP

    def probes(self, good_batch: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return (), ()


class Trainer:
    """A runner over two workers without a process: slot 0 is at odd tasks, slot 1 at even ones."""

    def __init__(self) -> None:
        self.engine = EngineOfPairs(2)
        self.door = Door()
        self.machine = Machine(2, FaultPolicy("skip", max_bad=None))
        self.runner = Runner(self.engine, self.machine, self.door)  # type: ignore[arg-type]
        self.runner.begin()
        for seq in range(6):
            self.runner.tell(TaskSubmitted(seq, seq % 2, 4))

    def send(self, slot: int, messages: Sequence[Message]) -> None:
        end = self.engine.ends[slot]
        end.setblocking(False)
        for data, descriptors in messages:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
            try:
                end.sendmsg([data], rights)
            except (BlockingIOError, BrokenPipeError):  # more than fits, or nobody reads it any more
                break

    def hear(self) -> None:
        """Take what has come, and open what was delivered, as a loader does."""
        self.runner.wait(0)
        for concluded in self.runner.concluded.values():
            if concluded.payload is not None:
                try:
                    concluded.payload.open()
                except Exception:  # a batch that cannot be unpickled is one error of that batch
                    concluded.payload.discard()

    def close(self) -> None:
        self.runner.concluded.clear()
        self.engine.close()


def _frames() -> dict[str, list[Message]]:
    """Real messages of a worker in slot 0, whose tasks are 0, 2 and 4, by what they are."""
    found: dict[str, list[Message]] = {}

    def note(name: str, kind: int, seq: int = 0, extra: int = 0, parts: Sequence[Any] = (), handles: Any = ()) -> None:
        one, other = channels.pair()
        with other:
            sender = Channel(one, blocking=True, owned=False)
            sender.send(kind, seq, extra, parts, handles)
            data, descriptors, _, _ = socket.recv_fds(other, 1 << 20, 16)
            sender.close()
        found[name] = [(data, list(descriptors))]

    side = wire.Side((FAILURE,), b"place")
    note("ready", Kind.READY, extra=1)
    arena = Arena()
    packer = Packer(arena)
    for name, batch in BATCHES.items():
        arena.begin()
        packed = packer.pack(batch, side if name == "a small batch" else wire.NOTHING_BESIDE)
        note(name, Kind.RESULT, 0, packed.inline, packed.parts, packed.handles)
        arena.finish(packed.cells)
    for kind, said in SAYINGS.items():
        note(kind.name.lower(), kind, 0, 0, [wire.dump(said)])
    note("survived", Kind.SURVIVED)
    note("epoch begun", Kind.EPOCH_BEGUN, 0, 0, [b"kept"])
    return found


def _batches() -> dict[str, Any]:
    whole = torch.arange(40_000)
    return {
        "a small batch": {"a": torch.arange(5), "b": ["x", 3]},
        "a batch in a cell": [torch.zeros(50_000), np.ones(30_000)],
        "views of a storage": [whole[100:110], whole[105:120], whole[30_000::7]],
        "a large pickle": ["x" * 100_000],
    }


BATCHES = _batches()
SAYINGS: dict[Kind, Any] = {
    Kind.EMPTY: wire.Side((FAILURE,)),
    Kind.ENDED: wire.Side(),
    Kind.ERROR: (FAILURE, wire.Side((FAILURE,), b"place")),
    Kind.ASK: FAILURE,
    Kind.RETRIED: FAILURE,
    Kind.UNPREPARED: FAILURE,
    Kind.UNSENT: FAILURE,
    Kind.DOUBT: (FAILURE, ("1", "2"), (0, 1), False, 0.0),
    Kind.PROBED: (True, (1, 2), None, (), False),
    Kind.CREPT: Creep(CreepKind.THREADS, 9, 1, 1.0, 8),
}
FRAMES = _frames()  # made once: what travels with them is copied by the kernel each time
