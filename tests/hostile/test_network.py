"""Strangers at the ports of outlive: whatever they send, or do not send, they lose their own connection and no more.

Reads   what ranks, and the dashboard, make of it.
Writes  hostile bytes to sockets on the loopback interface.
Never   another machine.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import struct
import threading
from collections.abc import Iterator

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dashboard.server_process import Server, served
from deadlines import wait_until
from outlive._system import bond as bonds
from outlive._system.bond import GAVE_UP, Bond, Fallen
from outlive.dashboard import server
from rank_meeting import Rendezvous, three_ranks

DEADLINE_S = 60.0
HELLO_BYTES = 44  # magic, token, rank


def ends(stranger: socket.socket) -> bool:
    """Whether the other side ends this connection, sooner or later."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionError:
        pass  # likewise
    return True


def are_well(ranks: list[Bond], meeting: Rendezvous) -> bool:
    """Each has the others, and one that comes now gets in and is heard."""
    late = Bond(3, meeting.publish, meeting.find)
    try:
        assert late.await_meeting(DEADLINE_S)
        assert wait_until(lambda: ranks[0].linked_ranks == {1, 2, 3}, DEADLINE_S)
        assert [bond.fallen for bond in ranks] == [None] * 3
    finally:
        late.close()
    return wait_until(lambda: ranks[0].linked_ranks == {1, 2}, DEADLINE_S)


@pytest.fixture(scope="module")
def meeting() -> Rendezvous:
    return Rendezvous()


@pytest.fixture(scope="module")
def ranks(meeting: Rendezvous) -> Iterator[list[Bond]]:
    with three_ranks(meeting) as made:
        yield made


def test_sixty_kilobytes_of_brackets_end_no_rank(ranks: list[Bond], meeting: Rendezvous):
    """No recursion into what a stranger sends, and a limit to its size."""
    for sent in (b"[" * 60_000, b"[" * 60_000 + b"\n", b'{"a":' * 12_000 + b"\n", b"\0" * 1_000_000):
        with meeting.connect() as stranger:
            with contextlib.suppress(ConnectionError):
                stranger.sendall(sent)
            assert ends(stranger)

    assert are_well(ranks, meeting)


def hellos_of_strangers() -> st.SearchStrategy[bytes]:
    """Bytes of any kind, and hellos that are almost right."""
    magic = st.sampled_from([b"outlive2", b"outlive1", b"GET / HT"])
    return st.one_of(
        st.binary(max_size=200),
        st.builds(lambda start, rest: start + rest, magic, st.binary(min_size=36, max_size=5000)),
        st.builds(lambda start: start + b"\0" * 36, magic),
    )


@given(sent=hellos_of_strangers())
@example(sent=b"")
@example(sent=b"outlive2" + b"0" * 64 + b"\0\0\0\3")
@settings(max_examples=300)
def test_a_stranger_that_says_anything_is_dropped(ranks: list[Bond], meeting: Rendezvous, sent: bytes):
    """Who has not the token never becomes a rank, and ends none."""
    with meeting.connect() as stranger:
        with contextlib.suppress(ConnectionError):
            stranger.sendall(sent)
            stranger.shutdown(socket.SHUT_WR)
        assert ends(stranger)

    assert ranks[0].linked_ranks == {1, 2}
    assert [bond.fallen for bond in ranks] == [None] * 3


@given(place=st.integers(0, HELLO_BYTES - 5), bits=st.integers(1, 255))
@settings(max_examples=100)
def test_a_hello_with_one_byte_changed_is_refused(ranks: list[Bond], meeting: Rendezvous, place: int, bits: int):
    """Each byte of the token counts."""
    said = bytearray(b"outlive2" + bytes.fromhex(meeting.found["token"]) + (7).to_bytes(4, "big"))
    assert len(said) == HELLO_BYTES
    said[place] ^= bits
    with meeting.connect() as stranger:
        stranger.sendall(said)
        assert ends(stranger)

    assert ranks[0].linked_ranks == {1, 2}


@given(sent=st.binary(min_size=1, max_size=300))
@settings(max_examples=100)
def test_a_rank_that_sends_nonsense_loses_only_itself(ranks: list[Bond], meeting: Rendezvous, sent: bytes):
    """One that has the token, and another version or a fault: the other ranks hear of its end at most."""
    hello = b"outlive2" + bytes.fromhex(meeting.found["token"]) + (9).to_bytes(4, "big")
    done = bytes([1]) + bytes(6)  # so that its end is no death
    with meeting.connect() as broken:
        with contextlib.suppress(ConnectionError):
            broken.sendall(hello + done + b"\xff" + sent)
            broken.shutdown(socket.SHUT_WR)
        assert ends(broken)

    assert wait_until(lambda: ranks[0].linked_ranks == {1, 2}, DEADLINE_S)
    assert [bond.fallen for bond in ranks] == [None] * 3


def test_what_another_rank_says_steers_no_terminal():
    """It ends in an error message, and on standard error."""
    meeting = Rendezvous()
    with three_ranks(meeting) as ranks:
        ranks[2].tell(GAVE_UP, "ValueError: \x1b[2J\r\u202eowned \udcff" + "x" * 100_000)
        heard = [bond.await_fallen(DEADLINE_S) for bond in ranks[:2]]

    for fallen in heard:
        assert fallen is not None
        assert fallen.words.startswith(r"rank 2 gave up: ValueError: \x1b[2J\r\u202eowned ?x")
        assert fallen.words.isprintable()
        assert len(fallen.words) < 3000


@contextlib.contextmanager
def descriptors(limit: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def next_descriptor() -> int:
    number = os.dup(0)
    os.close(number)
    return number


def test_ranks_get_in_past_hundreds_of_silent_connections(ranks: list[Bond], meeting: Rendezvous):
    """The oldest silent one is dropped for the newest; descriptors of the trainer are left for others."""
    with descriptors(next_descriptor() + 900), contextlib.ExitStack() as strangers:
        silent = [strangers.enter_context(meeting.connect()) for _ in range(600)]
        assert are_well(ranks, meeting)
        assert ends(silent[0])

        silent[-1].setblocking(False)
        with pytest.raises(BlockingIOError):  # it has its seconds
            silent[-1].recv(1)


def test_a_connection_that_drips_is_dropped_in_time(ranks: list[Bond], meeting: Rendezvous, monkeypatch):
    """A byte now and then does not prolong its seconds."""
    monkeypatch.setattr(bonds, "HELLO_S", 0.2)
    with meeting.connect() as silent, meeting.connect() as dripping:
        with contextlib.suppress(ConnectionError):
            dripping.sendall(b"outlive2")

        assert ends(silent)
        assert ends(dripping)
    assert are_well(ranks, meeting)


def test_no_rank_is_called_dead_when_rank_0_has_no_descriptor_left(ranks: list[Bond], meeting: Rendezvous, caplog):
    """It takes connections again later, and is not busy in the meantime."""
    caplog.set_level(logging.DEBUG, "outlive")
    with socket.socket() as waiting:
        with descriptors(next_descriptor()):
            with pytest.raises(OSError, match="Too many open files"):
                socket.socket()
            waiting.connect((meeting.found["hosts"][0], meeting.found["port"]))
            assert wait_until(lambda: "takes no connections" in caplog.text, DEADLINE_S)
        assert [bond.fallen for bond in ranks] == [None] * 3
        assert are_well(ranks, meeting)


def test_a_failure_of_the_channel_is_logged_and_is_no_death(monkeypatch, caplog):
    """Rank 0 lets go of the others: they have lost a messenger, and no rank."""
    meeting = Rendezvous()
    with three_ranks(meeting) as ranks, caplog.at_level(logging.WARNING, "outlive"):
        with monkeypatch.context() as broken:
            broken.setattr(socket.socket, "accept", no_memory)
            with contextlib.suppress(ConnectionError):
                meeting.connect().close()
            assert wait_until(lambda: [bond.linked_ranks for bond in ranks] == [frozenset()] * 3, DEADLINE_S)

        assert [bond.fallen for bond in ranks] == [None] * 3
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("rank 0 hears no more of other ranks' failures: MemoryError(")


def no_memory(listener: socket.socket) -> None:
    raise MemoryError("as it may be anywhere")


def test_a_stranger_in_the_place_of_rank_0_is_no_death():
    """A port may be another program's by now: it is not believed before it answers, and rank 0 is looked for again."""
    meeting = Rendezvous()
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        impostor.settimeout(DEADLINE_S)
        port = impostor.getsockname()[1]
        meeting.publish(b'{"hosts": ["127.0.0.1"], "port": %d, "token": "%s"}' % (port, b"00" * 32))
        bond = Bond(1, meeting.publish, meeting.find)
        try:
            for answer in (b"", b"SSH-2.0-OpenSSH_9.2p1\r\n"):
                end, _ = impostor.accept()
                with contextlib.suppress(ConnectionError):
                    end.sendall(answer)
                end.close()
            with contextlib.closing(Bond(0, meeting.publish, meeting.find)) as right:
                assert bond.await_meeting(DEADLINE_S)
                assert bond.fallen is None
                right.tell(GAVE_UP, "why")
                assert bond.await_fallen(DEADLINE_S) == Fallen(0, GAVE_UP, "why")
        finally:
            bond.close()


# ---------------------------------------------------------------- the dashboard


@pytest.fixture(scope="module")
def dash() -> Iterator[Server]:
    with served() as found:
        yield found


def connected(stack: contextlib.ExitStack, dash: Server, sent: bytes) -> socket.socket:
    """A stranger who says that, and no more."""
    stranger = stack.enter_context(socket.create_connection((dash.host, dash.port), DEADLINE_S))
    with contextlib.suppress(OSError):
        stranger.settimeout(0.05)  # one that reads nothing may come to stand still
        stranger.sendall(sent)
    stranger.settimeout(DEADLINE_S)
    return stranger


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", id="half a request"),
        pytest.param(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\nx", id="half a body"),
        pytest.param(b"GET /api/stream HTTP/1.1\r\nHost: localhost\r\n\r\n", id="a stream without the token"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 40_000, id="answers that are not read"),
    ],
)
def test_connections_of_strangers_shut_no_visitor_out(dash: Server, sent: bytes):
    """However many there are: for a new one the one goes that has waited longest."""
    count = 30 if len(sent) > 10_000 else 200
    with contextlib.ExitStack() as strangers, socket.create_connection((dash.host, dash.port), DEADLINE_S) as visitor:
        visitor.sendall(dash.request("/api/stream"))
        assert b" 200 " in visitor.recv(4096)
        made = [connected(strangers, dash, sent) for _ in range(count)]

        assert [dash.ask("/api/jobs").status for _ in range(5)] == [200] * 5
        if count > 100:
            assert ends(made[0])
        visitor.settimeout(DEADLINE_S)
        assert visitor.recv(4096)  # one who was let in stays


def test_a_stranger_has_only_some_seconds(monkeypatch):
    """One that says nothing, one that goes on and on with its headers, and one that was refused and asks again."""
    monkeypatch.setattr(server, "WAIT_S", 0.3)
    monkeypatch.setattr(server, "LINGER_S", 0.0)
    ended = threading.Event()
    refused = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with server.listen("127.0.0.1", 0) as listener, contextlib.ExitStack() as strangers:
        told = {"token": "of sixteen or more", "lives": lambda: not ended.is_set()}
        serving = threading.Thread(target=server.serve, args=(listener, "127.0.0.1"), kwargs=told)
        serving.start()
        try:
            address = listener.getsockname()
            silent, dripping, asking = (
                strangers.enter_context(socket.create_connection(address, DEADLINE_S)) for _ in range(3)
            )
            dripping.sendall(b"GET / HTTP/1.1\r\n")
            assert ends(silent)
            assert wait_until(lambda: is_cut(dripping, b"a: b\r\n"), DEADLINE_S)
            assert wait_until(lambda: is_cut(asking, refused), DEADLINE_S)
        finally:
            ended.set()
            serving.join()


def is_cut(stranger: socket.socket, sent: bytes) -> bool:
    """Whether nothing more can be said."""
    try:
        stranger.sendall(sent)
    except ConnectionError:
        return True
    return False


@given(sent=st.one_of(st.binary(max_size=400), st.binary(max_size=400).map(lambda rest: b"GET / HTTP/1.1\r\n" + rest)))
@example(sent=b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 20_000)
@example(sent=b"GET /" + b"%2e" * 30_000 + b" HTTP/1.1\r\n\r\n")
@example(sent=b"\0" * 200_000)
@settings(max_examples=200)
def test_whatever_a_stranger_sends_the_dashboard_goes_on(dash: Server, sent: bytes):
    """It is answered with a refusal, or cut."""
    stranger = socket.create_connection((dash.host, dash.port), DEADLINE_S)
    with stranger, contextlib.suppress(ConnectionError):
        stranger.sendall(sent)
        stranger.shutdown(socket.SHUT_WR)
        answer = stranger.recv(4096)
        assert not answer or answer.split()[1][:1] == b"4"

    assert dash.process.poll() is None


@pytest.mark.parametrize(
    "path",
    ["/", "/static/app.js", "/api/jobs", "/api/jobs/x/events", "/api/stream", "/metrics", "/api/incidents", "/nowhere"],
)
def test_nothing_is_served_without_the_token(dash: Server, path: str):
    """Not even whether it exists."""
    answers = [dash.ask(path, knows_token=False), dash.ask(f"{path}?token=", knows_token=False)]

    assert [answer.status for answer in answers] == [401, 401]


def test_connections_that_are_reset_before_they_are_accepted_leave_nothing_behind(dash: Server):
    """They are gone when the server looks, and others may have their ports."""
    process = psutil.Process(dash.process.pid)
    dash.process.send_signal(signal.SIGSTOP)
    try:
        assert wait_until(lambda: process.status() == psutil.STATUS_STOPPED, DEADLINE_S)
        for _ in range(200):
            with socket.create_connection((dash.host, dash.port), DEADLINE_S) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    finally:
        dash.process.send_signal(signal.SIGCONT)

    assert dash.ask("/api/jobs").status == 200
    assert wait_until(lambda: all(each.status == "LISTEN" for each in process.net_connections("tcp")), DEADLINE_S)
