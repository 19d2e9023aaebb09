"""Whatever a worker sends, it can only lose itself: the trainer, its pool and the other workers go on.

Reads   what a trainer makes of bytes, of real messages that were changed, and of real workers that send them.
Writes  such messages.
Never   a message that asks for gigabytes: the address space of the process is limited meanwhile.
"""

from __future__ import annotations

import gc
import os
import pickle
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from hostile.engine_of_pairs import BATCHES, FAILURE, FRAMES, SAYINGS, Message, Trainer
from outlive import DataLoader, Pool
from outlive import records as r
from outlive._system import memory
from outlive._system.channel import HEADER, HEADER_SIZE, Channel, Frame
from outlive._transport import wire
from outlive._transport.wire import Kind
from outlive.engines import messages
from outlive.evidence import Evidence, MemorySample, Seen, Surroundings, ThreadSeen, Worked
from outlive.incident import InHand, Stage
from outlive.pool.failing import Raised, TaskCrashedError
from outlive.pool.jobs import Results
from outlive.records import Outcome

_ROOM = 2 << 30  # address space that a test may take: a pickle that was changed may ask for anything


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def close_all(messages: list[Message]) -> None:
    for _, descriptors in messages:
        for fd in descriptors:
            os.close(fd)


def tell(*stories: list[Message]) -> tuple[Trainer, set[int]]:
    """A trainer that has heard each story of slot 0, and then a batch of slot 1; and which slots it has lost."""
    trainer = Trainer()
    for story in stories:
        trainer.send(0, story)
        trainer.hear()
    right = bytearray(FRAMES["a small batch"][0][0])
    kind_and_rest = HEADER.unpack_from(right)
    HEADER.pack_into(right, 0, *kind_and_rest[:4], 1, kind_and_rest[5])  # task 1 is slot 1's
    trainer.send(1, [(bytes(right), [])])
    trainer.hear()
    assert trainer.runner.concluded[1].outcome is Outcome.DELIVERED
    assert 1 not in trainer.engine.lost
    lost = set(trainer.engine.lost)
    trainer.close()
    return trainer, lost


@pytest.fixture(autouse=True)
def _no_descriptor_is_left() -> Iterator[None]:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    yield
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


HOSTILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)


# ---------------------------------------------------------------- any bytes


@HOSTILE
@given(data=st.binary(min_size=1, max_size=300), descriptors=st.integers(0, 3))
def test_any_bytes_cost_the_worker_that_sent_them_and_nothing_else(data, descriptors):
    """Whatever user code writes to our descriptor, with descriptors of its own or without."""
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(descriptors)]

    tell([(data, opened)])

    close_all([(b"", opened)])


HEADERS = st.builds(
    HEADER.pack,
    st.one_of(st.integers(0, 200), st.integers(0, 2**32 - 1)),
    st.sampled_from([*map(int, Kind), 0, 255]),
    st.integers(0, 4),
    st.sampled_from([0, 0, 0, 1, 2, 65535]),
    st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1)),
    st.one_of(st.integers(-3, 300), st.integers(-(2**63), 2**63 - 1)),
)


@HOSTILE
@given(messages=st.lists(st.tuples(HEADERS, st.binary(max_size=120), st.integers(0, 3)), min_size=1, max_size=4))
def test_right_headers_with_wrong_bodies_cost_their_worker(messages):
    """Numbers of tasks, cells and sizes as they come; bodies too long, too short, and of no meaning."""
    story = [(head + body, [memory.create(70_000) for _ in range(count)]) for head, body, count in messages]

    tell(story)

    close_all(story)


# ---------------------------------------------------------------- real messages, changed


@st.composite
def changed(draw: st.DrawFn) -> list[Any]:
    """What is done to a real message: which one, and how."""
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from([*BATCHES, *(kind.name.lower() for kind in SAYINGS), "ready", "survived"]),
                st.sampled_from(["as it is", "bytes", "header", "cut", "longer", "no descriptors", "more descriptors"]),
                st.integers(0, 10**6),
                st.integers(0, 255),
                st.sampled_from([0, 1, -1, 2, 4, 10**6, 2**31, 2**62, -(2**63)]),
            ),
            min_size=1,
            max_size=4,
        )
    )


def apply(messages: list[Message], how: str, at: int, byte: int, number: int) -> list[Message]:
    [(data, descriptors)] = messages
    content = bytearray(data)
    if how == "bytes":
        content[at % len(content)] = byte
    elif how == "header":
        fields = list(HEADER.unpack_from(content))
        which = at % len(fields)
        fields[which] = number & (0xFFFFFFFF, 0xFF, 0xFF, 0xFFFF)[which] if which < 4 else number
        HEADER.pack_into(content, 0, *fields)
    elif how == "cut":
        del content[max(1, at % len(content)) :]
    elif how == "longer":
        content += bytes([byte]) * (at % 100 + 1)
    elif how == "no descriptors":
        return [(data, [])]
    elif how == "more descriptors":
        return [(data, [*descriptors, *(descriptors or [0]) * (1 + at % 3)])]
    return [(bytes(content), descriptors)]


@settings(HOSTILE, max_examples=300)
@given(changed())
def test_real_messages_that_were_changed_cost_at_most_their_worker(changes):
    """A byte, a number of the header, the length, the descriptors; several messages after each other."""
    tell(*[apply(FRAMES[name], how, at, byte, number) for name, how, at, byte, number in changes])


# ---------------------------------------------------------------- what is right in form, and cannot be


def frame(kind: int, seq: int = 0, extra: int = 0, body: bytes = b"", count: int = 0, flags: int = 0) -> Message:
    return HEADER.pack(len(body), kind, count, flags, seq, extra) + body, []


def parcel(made: Any = (), dropped: Any = (), buffers: Any = (), places: Any = (), side: Any = None) -> bytes:
    value = wire.Parcel(list(made), list(dropped), list(buffers), list(places), side or wire.NOTHING_BESIDE)
    return b"".join(bytes(part) for part in wire.parcel_parts(value)) + pickle.dumps(None)


# One pickle of seven bytes beside the batch, and room for two thousand million values in its memo.
ASKS = struct.pack("<qqqqq", 0, 0, 0, 0, 7) + b"Nr\xff\xff\xff\x7f."

WRONG = {
    "a result of another worker's task": [frame(Kind.RESULT, 1, 0, parcel())],
    "a result of a task that comes later": [frame(Kind.RESULT, 2, 0, parcel())],
    "a result of no task": [frame(Kind.RESULT, 77, 0, parcel())],
    "a result below zero": [frame(Kind.RESULT, -1, 0, parcel())],
    "the same result twice": [frame(Kind.RESULT, 0, 0, parcel())] * 2,
    "a probe that was none": [frame(Kind.SURVIVED)],
    "a region below zero": [frame(Kind.RESULT, 0, -40, parcel())],
    "a region past the end": [frame(Kind.RESULT, 0, 10**9, parcel())],
    "a cell that does not exist": [frame(Kind.RESULT, 0, 0, parcel(places=[(5, 0, 8)]))],
    "a place outside of the message": [frame(Kind.RESULT, 0, 0, parcel(places=[(wire.INLINE, 0, 8)]))],
    "a place within itself": [frame(Kind.RESULT, 0, 0, parcel(places=[(wire.WITHIN, 0, 0)]))],
    "a place within none": [frame(Kind.RESULT, 0, 0, parcel(places=[(wire.DENSE, 3, 0)]))],
    "a buffer within a place": [
        frame(Kind.RESULT, 0, 40, bytes(40) + parcel(buffers=[(wire.WITHIN, 0, 0)], places=[(wire.INLINE, 0, 8)]))
    ],
    "a place of another kind": [frame(Kind.RESULT, 0, 0, parcel(places=[(-9, 0, 0)]))],
    "a cell without a descriptor": [frame(Kind.RESULT, 0, 0, parcel(made=[(1, 65536)]))],
    "failures that are none": [frame(Kind.RESULT, 0, 0, parcel(side=wire.Side(("what",))))],
    "a place that is no bytes": [frame(Kind.RESULT, 0, 0, parcel(side=wire.Side((), 5)))],
    "a side that is none": [frame(Kind.EMPTY, 0, 0, wire.dump(7))],
    "an error that is none": [frame(Kind.ERROR, 0, 0, wire.dump(("x", wire.Side())))],
    "an error of three": [frame(Kind.ERROR, 0, 0, wire.dump((FAILURE, wire.Side(), 1)))],
    "an error of no task": [frame(Kind.ERROR, 9, 0, wire.dump((FAILURE, wire.Side())))],
    "a question about no task": [frame(Kind.ASK, 3, 0, wire.dump(FAILURE))],
    "a doubt that is none": [frame(Kind.DOUBT, 0, 0, wire.dump((FAILURE,)))],
    "a probe of the wrong types": [frame(Kind.PROBED, 0, 0, wire.dump((1, 2, 3, 4, 5)))],
    "growth that is none": [frame(Kind.CREPT, 0, 0, wire.dump("growth"))],
    "ready twice": [frame(Kind.READY)] * 2,
    "unprepared after ready": [frame(Kind.READY), frame(Kind.UNPREPARED, 0, 0, wire.dump(FAILURE))],
    "an epoch that did not begin": [frame(Kind.EPOCH_BEGUN, 0)],
    "what only a trainer says": [frame(Kind.TASK, 0, 0, b"")],
    "what only a zygote says": [frame(Kind.EXITED, 0, 0, wire.dump((0, 1, 0, False, 0.0, None)))],
    "a length of four gigabytes": [(HEADER.pack(2**32 - 1, Kind.RESULT, 0, 0, 0, 0), [])],
    "a body elsewhere, and no descriptor": [frame(Kind.RESULT, 0, 0, bytes(8), flags=1)],
    "a pickle that asks for gigabytes": [frame(Kind.CREPT, 0, 0, b"Nr\xff\xff\xff\x7f.")],
    "a pickle beside a result that does": [
        (HEADER.pack(len(ASKS), Kind.RESULT, 0, 0, 0, 0) + ASKS, []),
    ],
    "a pickle that raises": [frame(Kind.CREPT, 0, 0, b"cos\n_exit\n(ttR.")],
    "a pickle that ends Python": [frame(Kind.CREPT, 0, 0, b"csys\nexit\n(tR.")],
}


@pytest.mark.parametrize("what", WRONG)
def test_what_a_worker_cannot_mean_costs_that_worker(what):
    """In form it is a message of ours; the worker that sends it is lost, and no other."""
    assert tell(WRONG[what])[1] == {0}


@pytest.mark.parametrize("size", [65_536, 1 << 40, -1])
def test_shared_memory_that_is_smaller_than_was_said_is_not_touched(size):
    """The trainer would die of a bus error. Of a cell, and of a body that travels in memory of its own."""
    small = memory.create(4096)
    cell = HEADER.pack(len(body := parcel(made=[(1, size)])), Kind.RESULT, 1, 0, 0, 0) + body
    spilled = HEADER.pack(8, Kind.RESULT, 1, 1, 0, 0) + size.to_bytes(8, "little", signed=True)

    lost = [tell([(message, [small])])[1] for message in (cell, spilled)]

    os.close(small)
    assert lost == [{0}, {0}]


def test_shared_memory_that_no_machine_has_is_not_waited_for():
    """It can be made, as nothing is in it; there will never be room for it."""
    size = 1 << 46
    huge = memory.create(size)
    cell = HEADER.pack(len(body := parcel(made=[(1, size)])), Kind.RESULT, 1, 0, 0, 0) + body
    spilled = HEADER.pack(8, Kind.RESULT, 1, 1, 0, 0) + size.to_bytes(8, "little")

    lost = [tell([(message, [huge])])[1] for message in (cell, spilled)]

    os.close(huge)
    assert lost == [{0}, {0}]


@pytest.mark.parametrize("then", ["there is room", "it is closed", "the next message is none"])
@pytest.mark.parametrize("how", ["a cell", "a body"])
def test_what_the_trainer_has_no_room_for_waits_and_costs_nothing(how, then):
    """Its descriptor stays open, and is closed with the channel: the fixture above counts them."""
    size = _ROOM + (64 << 20)
    shared = memory.create(size)
    if how == "a cell":
        body, flags = parcel(made=[(1, size)], places=[(1, 0, 8)]), 0
    else:
        body, flags = size.to_bytes(8, "little"), 1
    trainer = Trainer()
    trainer.send(0, [(HEADER.pack(len(body), Kind.RESULT, 1, flags, 0, 0) + body, [shared])])
    os.close(shared)
    if then == "the next message is none":
        trainer.send(0, [frame(Kind.SURVIVED)])

    trainer.hear()
    for _ in range(2):
        with pytest.raises(MemoryError, match="ulimit -v"):
            trainer.hear()

    assert trainer.engine.lost == set()
    assert not trainer.runner.concluded
    assert not trainer.runner.torn
    if then != "it is closed" and how == "a cell":
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        trainer.hear()
        assert set(trainer.runner.concluded) == {0}
        assert trainer.engine.lost == ({0} if then == "the next message is none" else set())
    trainer.close()


def test_a_cell_that_was_not_given_back_holds_no_second_batch():
    """What the trainer still looks at would change under its eyes."""
    cell = memory.create(65_536)
    first, again = parcel(made=[(1, 65_536)], places=[(1, 0, 8)]), parcel(places=[(1, 0, 8)])
    story = [(HEADER.pack(len(first), Kind.RESULT, 1, 0, 0, 0) + first, [cell]), frame(Kind.RESULT, 2, 0, again)]
    drops = [story[0], frame(Kind.RESULT, 2, 0, parcel(dropped=[1]))]

    lost = [tell(each)[1] for each in (story, drops)]

    os.close(cell)
    assert lost == [{0}, {0}]


def test_right_messages_cost_nothing():
    """Else the tests above would say little."""
    told = [FRAMES[name] for name in ("ready", "retried", "ask", "doubt", "crept", "a small batch")]

    trainer, lost = tell(*told)

    assert lost == set()
    assert [incident.action for incident in trainer.door.incidents][:1] == ["retried"]
    assert isinstance(trainer.machine.tasks[2].plan(), r.Plan)


# ---------------------------------------------------------------- what a zygote says

SAID_BY_ZYGOTES: dict[Kind, tuple[Any, ...]] = {
    Kind.FORKED: (1, 5, 6),
    Kind.EXITED: (
        *(0, 1, 9, False, 0.5),
        Evidence(Worked(memory=(MemorySample(0.1, 5),)), surroundings=Surroundings()),
        "nas:/export",
    ),
    Kind.SUSPECTED: (
        *(1, InHand(Stage.FETCHING, 3, 4, 1.5), "stack"),
        Seen((ThreadSeen(7, arguments=(2**64 - 1,)),)),
        True,
    ),
    Kind.GREW: (1, Evidence()),
    Kind.MEMORY: (True, 0, 1, 2, 3),
}


@pytest.mark.parametrize("kind", SAID_BY_ZYGOTES)
def test_a_zygotes_report_is_refused_when_one_part_of_it_is_of_another_type(kind):
    """Else it would be acted on, with that, somewhere in the trainer."""
    said = SAID_BY_ZYGOTES[kind]

    def read(value: Any) -> Any:
        return messages.body_of(Frame(kind, 4000, 0, bytearray(wire.dump(value)), ()))

    assert read(said) == said
    for at, part in enumerate(said):
        for wrong in ([], object, float("nan"), *([2**80] if type(part) is int else [])):
            with pytest.raises(messages.ForeignMessageError):
                read((*said[:at], wrong, *said[at + 1 :]))
    for value in (said[1:], (*said, 0), list(said), None):
        with pytest.raises(messages.ForeignMessageError):
            read(value)


# ---------------------------------------------------------------- real workers


def own_channel() -> Channel:
    """A worker's way to its trainer, as a library that looks for sockets might find it."""
    return next(thing for thing in gc.get_objects() if isinstance(thing, Channel) and thing.bell >= 0)


def say_garbage() -> None:
    socket.socket(fileno=os.dup(own_channel().fileno())).sendall(os.urandom(HEADER_SIZE * 3))


MISDEEDS = {
    "a task that it has not": lambda: own_channel().send(Kind.RESULT, 77, 0, [parcel()]),
    "an early end": lambda: own_channel().send(Kind.ENDED, 1, 0, [wire.dump(wire.Side())]),
    "a cell that does not exist": lambda: own_channel().send(Kind.RESULT, 1, 0, [parcel(places=[(5, 0, 8)])]),
    "a pickle that ends Python": lambda: own_channel().send(Kind.CREPT, 0, 0, [b"csys\nexit\n(tR."]),
    "descriptors that belong to nothing": lambda: socket.send_fds(
        socket.socket(fileno=os.dup(own_channel().fileno())), [HEADER.pack(0, Kind.READY, 0, 0, 0, 0)], [0, 1, 2]
    ),
    "bytes by chance": say_garbage,
}


class Misbehaves(Dataset[int]):
    """Sample 6 has its worker send what is no message."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 6:
            MISDEEDS[self.what]()
        return index


@pytest.mark.parametrize("what", MISDEEDS)
def test_a_worker_that_sends_what_is_no_message_costs_the_sample_that_did_it(what):
    """It is killed and replaced; every other sample arrives, and nothing is raised."""
    loader = DataLoader(Misbehaves(what), batch_size=4, num_workers=1, multiprocessing_context="fork", faults="skip")

    assert [int(number) for batch in loader for number in batch] == [n for n in range(12) if n != 6]
    assert set(loader.quarantine) == {6}


def misbehave(number: int) -> int:
    if number == 6:
        MISDEEDS["a task that it has not"]()
    return number


def test_a_pools_worker_that_sends_what_is_no_message_costs_the_task_that_did_it():
    """That future has an error of its own; every other task goes on."""
    with Pool(1, "fork") as pool:
        futures = [pool.submit(misbehave, number) for number in range(12)]

        assert [future.result() for future in futures if future is not futures[6]] == [n for n in range(12) if n != 6]
        assert isinstance(futures[6].exception(), TaskCrashedError)


@pytest.mark.parametrize(
    ("results", "right"),
    [
        (Results([[0, 2], range(3, 5)], [1, 2, 3, 4], {1: Raised(ValueError(), "", pickle.dumps)}, [5]), True),
        (Results([[0]], []), False),
        (Results([["0"]], [1]), False),
        (Results([[6]], [1]), False),
        (Results(rest=[-1]), False),
        (Results(raised={0: ValueError()}), False),
        (Results(seconds=float("nan")), False),
    ],
)
def test_a_pool_takes_only_results_that_can_be_those_of_its_tasks(results, right):
    """A position that its chunk has not, or values without one, would break the pool's own thread."""
    assert results.fit(6) is right


class DiesOnce(Dataset[int]):
    """Sample 6 kills the first worker that takes it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 6 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return index


REPORTS = {
    "other types": lambda dump, report: dump(("a", "b", "c", "d", "e", "f", "g")),
    "a slot that does not exist": lambda dump, report: dump((-1, *report[1:])),
    "no pickle": lambda dump, report: b"what",
}


@pytest.mark.parametrize("what", REPORTS)
def test_a_zygote_that_sends_what_is_no_message_is_replaced(what, tmp_path, monkeypatch):
    """Its workers go with it, no sample is blamed, and every sample arrives."""
    dump = wire.dump

    def garbled(value: Any) -> bytes:
        if type(value) is tuple and len(value) == 7 and not (tmp_path / "garbled").exists():  # how a worker ended
            (tmp_path / "garbled").touch()
            return REPORTS[what](dump, value)
        return dump(value)

    monkeypatch.setattr(wire, "dump", garbled)
    loader = DataLoader(DiesOnce(tmp_path), batch_size=4, num_workers=2, multiprocessing_context="fork")

    assert [int(number) for batch in loader for number in batch] == list(range(12))
    assert (tmp_path / "garbled").exists()
    assert len(loader.quarantine) == 0
