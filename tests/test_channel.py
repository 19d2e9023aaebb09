"""A socket that carries whole messages and descriptors, whatever the kernel makes of the bytes on the way.

Reads   what one end receives.
Writes  what the other end sends, whole, in pieces, too much of it, or half of it.
Never   a sleep: a socket pair in one process is ready when it is ready.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deadlines import Deadline
from outlive._system import channel as channels
from outlive._system import memory
from outlive._system.channel import HEADER_SIZE, INLINE_LIMIT, Channel, Frame


@contextmanager
def connected(*, blocking: bool = False, owned: bool = False) -> Iterator[tuple[Channel, Channel]]:
    """Two ends; the first one blocks if it is told to."""
    with ExitStack() as stack:
        one, other = channels.pair()
        ends = Channel(one, blocking=blocking, owned=owned), Channel(other, blocking=False, owned=owned)
        for end in ends:
            stack.callback(end.close)
        yield ends


def drain(channel: Channel) -> list[Frame]:
    """Everything that can be read now."""
    frames: list[Frame] = []
    while not channel.closed:
        frames += channel.receive()
        if channel.drained:
            break
    return frames


def plain(frames: list[Frame]) -> list[tuple[int, int, int, bytes]]:
    return [(frame.kind, frame.seq, frame.extra, bytes(frame.body)) for frame in frames]


MESSAGES = [(1, 0, 0, b""), (2, 7, -1, b"abc"), (200, -(1 << 62), 1 << 62, bytes(range(40))), (3, 1, 2, b"x")]


def as_bytes(messages: list[tuple[int, int, int, bytes]]) -> bytes:
    """What these messages are on the wire."""
    one, other = channels.pair()
    with other:
        sender = Channel(one, blocking=True, owned=False)
        for kind, seq, extra, body in messages:
            sender.send(kind, seq, extra, [body])
        sender.close()
        return b"".join(iter(lambda: other.recv(1 << 20), b""))


def test_messages_arrive_whole_and_in_order():
    """Kind, numbers and body, empty bodies too; several in one read."""
    with connected() as (sender, receiver):
        for kind, seq, extra, body in MESSAGES:
            sender.send(kind, seq, extra, [body])

        assert plain(drain(receiver)) == MESSAGES


def test_a_body_in_parts_arrives_as_one():
    """Bytes, bytearrays and memoryviews are joined on the way."""
    with connected() as (sender, receiver):
        sender.send(5, parts=[b"ab", bytearray(b"cd"), memoryview(b"xefx")[1:3], b""])

        [frame] = drain(receiver)

    assert frame.body == b"abcdef"
    assert isinstance(frame.body, bytearray)


def test_nothing_is_received_when_nothing_was_sent():
    """An empty socket is drained, not closed."""
    with connected() as (_, receiver):
        assert receiver.receive() == []
        assert (receiver.drained, receiver.closed) == (True, False)


@pytest.mark.parametrize("at", range(1, len(as_bytes(MESSAGES))))
def test_messages_arrive_whole_when_the_stream_is_cut_at_any_byte(at):
    """The half that came first is kept back until the rest is there."""
    data = as_bytes(MESSAGES)
    one, other = channels.pair()
    receiver = Channel(other, blocking=False, owned=False)
    with one:
        one.sendall(data[:at])
        first = plain(drain(receiver))
        one.sendall(data[at:])
        second = plain(drain(receiver))
    receiver.close()

    assert first + second == MESSAGES
    assert first == MESSAGES[: len(first)]


@settings(max_examples=60)
@given(st.lists(st.integers(1, 12), max_size=60))
def test_messages_arrive_whole_when_the_stream_comes_in_crumbs(sizes):
    """Any number of cuts."""
    data = as_bytes(MESSAGES)
    one, other = channels.pair()
    receiver = Channel(other, blocking=False, owned=False)
    received = []
    with one:
        for size in [*sizes, len(data)]:
            one.sendall(data[:size])
            data = data[size:]
            received += plain(drain(receiver))
    receiver.close()

    assert received == MESSAGES


@pytest.mark.parametrize("missing", range(1, HEADER_SIZE + 4))
def test_half_a_message_is_dropped_when_its_sender_died_over_it(missing):
    """What came whole before it counts; the rest is never handed on."""
    data = as_bytes([(1, 2, 3, b"whole"), (4, 5, 6, b"body")])
    one, other = channels.pair()
    receiver = Channel(other, blocking=False, owned=False)
    with one:
        one.sendall(data[:-missing])
    frames = drain(receiver)
    receiver.close()

    assert plain(frames) == [(1, 2, 3, b"whole")]
    assert receiver.closed


def test_descriptors_of_half_a_message_are_closed_with_the_channel():
    """A sender that dies between descriptor and body leaves nothing open here."""
    data = as_bytes([(4, 5, 6, b"body")])
    with_one_descriptor = data[:5] + b"\x01" + data[6:]  # the header's count
    one, other = channels.pair()
    receiver = Channel(other, blocking=False, owned=False)
    fd = memory.create(10)
    with one:
        socket.send_fds(one, [with_one_descriptor[:-2]], [fd])
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))
    drain(receiver)
    during = len(os.listdir("/proc/self/fd"))
    receiver.close()

    assert during == before + 1
    assert len(os.listdir("/proc/self/fd")) == before - 1


@pytest.mark.parametrize("size", [INLINE_LIMIT - 1, INLINE_LIMIT, INLINE_LIMIT + 1, 5 << 20])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_big_body_arrives_as_it_was_sent(size, parts):
    """Over INLINE_LIMIT in a memory file of its own, which shows neither to the sender nor to the receiver."""
    body = os.urandom(1 << 10) * (size >> 10) + b"!" * (size & 1023)
    cut = [body[i * size // parts : (i + 1) * size // parts] for i in range(parts)]
    before = os.listdir("/proc/self/fd")
    with connected() as (sender, receiver):
        sender.send(9, 8, 7, cut)
        sender.send(10, 0, 0, [b"after"])

        frames = drain(receiver)

    assert plain(frames) == [(9, 8, 7, body), (10, 0, 0, b"after")]
    assert frames[0].handles == ()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("count", [1, 8, 9, 60, 200])
def test_descriptors_arrive_in_order_and_stay_open_here(count):
    """Each message gets its own; they are not inherited by programs that are started later."""
    files = [memory.create(8 + n) for n in range(count)]
    with connected() as (sender, receiver):
        sender.send(1, parts=[b"none"])
        sender.send(2, parts=[b"all"], handles=tuple(files))
        sender.send(3, parts=[b"last"], handles=(files[-1],))

        none, all_, last = drain(receiver)

    sizes = [os.fstat(fd).st_size for fd in all_.handles]
    inheritable = [os.get_inheritable(fd) for fd in all_.handles]
    for fd in (*all_.handles, *last.handles, *files):
        os.close(fd)
    assert sizes == [8 + n for n in range(count)]
    assert not any(inheritable)
    assert (none.handles, len(last.handles)) == ((), 1)


def test_descriptors_and_a_big_body_travel_together():
    """The body's own memory file is not taken for one of them."""
    fd = memory.create(77)
    with connected() as (sender, receiver):
        sender.send(1, parts=[b"x" * (INLINE_LIMIT + 1)], handles=(fd,))

        [frame] = drain(receiver)

    size = os.fstat(frame.handles[0]).st_size
    os.close(fd)
    os.close(frame.handles[0])
    assert (size, len(frame.body)) == (77, INLINE_LIMIT + 1)


# ---------------------------------------------------------------- a side that does not read


def test_sending_does_not_wait_when_the_other_side_does_not_read():
    """What does not fit waits here, and goes when there is room; in order."""
    body = b"x" * 30_000
    with connected() as (sender, receiver):
        for seq in range(40):
            sender.send(1, seq, 0, [body])
        assert sender.congested

        received = []
        while len(received) < 40:
            received += [(frame.seq, len(frame.body)) for frame in drain(receiver)]
            sender.flush()

        assert not sender.congested
    assert received == [(seq, 30_000) for seq in range(40)]


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.sampled_from([0, 10, 5_000, INLINE_LIMIT, INLINE_LIMIT + 10]), st.integers(0, 2), st.booleans()),
        min_size=1,
        max_size=25,
    )
)
def test_everything_arrives_once_and_in_order_however_reading_and_writing_interleave(steps):
    """Sizes, descriptors and pauses of the reader as they come."""
    files = [memory.create(100 + n) for n in range(2)]
    received: list[tuple[int, int, list[int]]] = []

    def take(receiver: Channel) -> None:
        for frame in drain(receiver):
            sizes = [os.fstat(fd).st_size for fd in frame.handles]
            received.append((frame.seq, len(frame.body), sizes))
            for fd in frame.handles:
                os.close(fd)

    with connected() as (sender, receiver):
        for seq, (size, count, reads) in enumerate(steps):
            sender.send(1, seq, 0, [b"x" * size], tuple(files[:count]))
            if reads:
                take(receiver)
                sender.flush()
        while sender.congested:
            take(receiver)
            sender.flush()
        take(receiver)
    for fd in files:
        os.close(fd)

    sent = [(seq, size, [100, 101][:count]) for seq, (size, count, _) in enumerate(steps)]
    assert received == sent


def test_descriptors_that_wait_are_closed_with_the_channel():
    """Copies in the outbox are nobody's when the channel goes."""
    fd = memory.create(10)
    before = len(os.listdir("/proc/self/fd"))
    with connected() as (sender, _):
        for _ in range(40):
            sender.send(1, 0, 0, [b"x" * 30_000], (fd,))
        assert sender.congested
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(fd)


# ---------------------------------------------------------------- ends


def test_what_was_sent_before_a_death_is_read_before_the_end_is_seen():
    """Finished batches are not lost with their worker."""
    with connected() as (sender, receiver):
        for seq in range(20):
            sender.send(1, seq, 0, [b"x" * 5_000])
        sender.close()

        frames = drain(receiver)

    assert [frame.seq for frame in frames] == list(range(20))
    assert receiver.closed


def test_sending_to_a_dead_process_is_no_error_and_its_messages_can_still_be_read():
    """Whoever waits for them learns of it elsewhere."""
    with connected() as (ours, theirs):
        theirs.send(1, 5, 0, [b"last words"])
        theirs.close()
        for _ in range(3):
            ours.send(2, 0, 0, [b"x" * 100_000])
        ours.flush()

        frames = drain(ours)

        assert plain(frames) == [(1, 5, 0, b"last words")]
        assert not ours.congested
        assert ours.closed


def test_messages_for_a_dead_process_are_dropped():
    """The outbox does not grow for ever."""
    with connected() as (ours, theirs):
        for _ in range(40):
            ours.send(1, 0, 0, [b"x" * 30_000])
        theirs.close()
        ours.flush()

        assert not ours.congested


def test_a_blocking_sender_is_released_without_an_error_when_the_reader_goes():
    """A worker in the middle of a message, and the trainer leaves."""
    raised: list[BaseException] = []
    with connected(blocking=True) as (worker, trainer):

        def send_much() -> None:
            try:
                for _ in range(100):
                    worker.send(1, 0, 0, [b"x" * 60_000])
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=send_much)
        thread.start()
        poller = select.poll()
        poller.register(worker.fileno(), select.POLLOUT)
        while poller.poll(0):
            pass  # until the socket is full and the sender waits
        trainer.close()
        thread.join(10)

        assert not thread.is_alive()
    assert raised == []


def test_a_channel_whose_bytes_are_not_ours_is_torn():
    """Somebody wrote to a descriptor that is not his: nothing after it is believed."""
    one, other = channels.pair()
    receiver = Channel(other, blocking=False, owned=False)
    with one:
        one.sendall(as_bytes([(1, 2, 3, b"ours")]) + b"printf debugging goes here, to the wrong descriptor")
        frames = drain(receiver)
    receiver.close()

    assert plain(frames) == [(1, 2, 3, b"ours")]
    assert receiver.torn


def test_a_forked_process_gives_up_the_channels_of_its_parent():
    """Else workers would not see the trainer die while a fork of it lives."""
    with connected(owned=True) as (ours, theirs):
        numbers = ours.fileno(), theirs.fileno()
        pid = os.fork()
        if pid == 0:
            gone = 0
            for number in numbers:
                try:
                    os.fstat(number)
                except OSError:
                    gone += 1
            os._exit(gone)
        _, status = os.waitpid(pid, 0)
        ours.send(1, 0, 0, [b"still here"])

        assert os.waitstatus_to_exitcode(status) == 2
        assert plain(drain(theirs)) == [(1, 0, 0, b"still here")]


# ---------------------------------------------------------------- the bell


@contextmanager
def with_bell() -> Iterator[tuple[Channel, Channel]]:
    """A worker's end, which waits for its bell, and the trainer's, which rings it."""
    with ExitStack() as stack:
        one, other = channels.pair()
        bell = channels.bell()
        waiting = Channel(one, blocking=True, owned=False, bell=os.dup(bell))
        ringing = Channel(other, blocking=False, owned=False, bell=bell)
        stack.callback(waiting.close)
        stack.callback(ringing.close)
        yield waiting, ringing


@contextmanager
def reader_of(channel: Channel) -> Iterator[tuple[list[Frame], threading.Thread]]:
    """A thread that reads until the channel is closed, and what it has read."""
    frames: list[Frame] = []

    def read() -> None:
        while not channel.closed:
            frames.extend(channel.receive())

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield frames, thread
    finally:
        thread.join(10)


def is_asleep(thread: threading.Thread) -> bool:
    with open(f"/proc/self/task/{thread.native_id}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "S"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(10)
    while not condition():
        assert not deadline.passed, "it never came to be"
        os.sched_yield()


def test_a_reader_that_sleeps_is_woken_by_the_bell():
    """However often it falls asleep: every message wakes it."""
    with with_bell() as (waiting, ringing), reader_of(waiting) as (frames, thread):
        for number in range(1, 51):
            wait_until(lambda: is_asleep(thread))
            ringing.send(1, number)
            wait_until(lambda number=number: len(frames) == number)
        ringing.close()

    assert [frame.seq for frame in frames] == list(range(1, 51))
    assert not thread.is_alive()


def test_a_reader_that_sleeps_is_woken_when_the_other_end_dies():
    """A trainer that is killed rings no bell: that it hung up is enough."""
    one, other = channels.pair()
    bell = channels.bell()
    channel = Channel(one, blocking=True, owned=False, bell=bell)
    with contextlib.closing(channel) as waiting, reader_of(waiting) as (frames, thread):
        wait_until(lambda: is_asleep(thread))
        other.close()
        thread.join(10)

        assert not thread.is_alive()
        assert (frames, waiting.closed) == ([], True)


def test_what_waited_in_the_outbox_wakes_the_reader():
    """A message that did not fit at first is not forgotten in the socket when the rest is sent."""
    with with_bell() as (waiting, ringing):
        count = 0
        while not ringing.congested:
            ringing.send(1, count, parts=[bytes(60_000)])
            count += 1
        with reader_of(waiting) as (frames, thread):
            wait_until(lambda: is_asleep(thread))
            while ringing.congested:
                ringing.flush()
            wait_until(lambda: len(frames) == count)
            ringing.close()

    assert [frame.seq for frame in frames] == list(range(count))


def test_a_quiet_message_wakes_no_reader_and_comes_with_the_next():
    """What can wait must not cost a wake-up."""
    with with_bell() as (waiting, ringing), reader_of(waiting) as (frames, thread):
        wait_until(lambda: is_asleep(thread))
        ringing.send_quietly(7, 1, [b"later"])
        quiet = not select.select([ringing.bell], [], [], 0)[0]
        ringing.send(1, 2)
        wait_until(lambda: len(frames) == 2)
        ringing.close()

    assert quiet
    assert [(frame.kind, frame.seq) for frame in frames] == [(7, 0), (1, 2)]


def test_a_bell_for_what_was_read_already_harms_nothing():
    """Two messages may come with one read; the second ring then finds nothing, and the third message is read."""
    with with_bell() as (waiting, ringing):
        ringing.send(1, 1)
        ringing.send(1, 2)
        got = waiting.receive()
        with reader_of(waiting) as (frames, thread):
            wait_until(lambda: is_asleep(thread))
            ringing.send(1, 3)
            wait_until(lambda: len(frames) == 1)
            ringing.close()

    assert [frame.seq for frame in got + frames] == [1, 2, 3]
