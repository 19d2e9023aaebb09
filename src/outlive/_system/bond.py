"""Ranks of a job that tell each other when one fails: a socket from each to rank 0, and a thread that reads it.

Reads   what other ranks say; the end of their sockets, which says that they are gone.
Writes  what this rank says, at once, from whichever thread says it.
Never   a word while all goes well, after the ranks have met. Never the death of a rank for a failure of its own.

    rank 2 ──hello: the job's token, 2──► rank 0 ──welcome──► rank 2
    rank 2 ──gave up: …──► rank 0 ──rank 2 gave up: …──► ranks 1, 3, …

How they find rank 0 is the caller's: `publish` shows its address to the others, `find` looks for it. A rank that is
done says so, and its end means nothing; one that ends without it is gone.

Anyone who reaches rank 0's port may connect. Without the token a connection can only lose itself: it has `HELLO_S` to
say a hello of a fixed size, and where too many wait, the one that has waited longest goes.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import logging
import multiprocessing.util
import os
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from outlive.printable import printable

log = logging.getLogger("outlive")
HELLO_S = 5.0  # for a connection to say who it is
MOST_STRANGERS = 64  # connections that have not said it yet
_REST_S = 1.0  # before connections are taken again, where there was no descriptor for one
_LONGEST_TEXT = 2000  # bytes. All that a link is ever told fits an empty socket buffer, so no write waits
_MEETING_S = 10.0  # for a rank that has something to say before it has met the others
_CONNECT_S = 3.0
_JOIN_S = 60.0  # for rank 0 to answer, once it is known where it is
_LOOK_S = (0.05, 1.0)  # between looks for rank 0's address: at first, at most
_READ_BYTES = 4096
_MAGIC = b"outlive2"
_TOKEN_BYTES = 32
_HELLO = struct.Struct(f"!8s{_TOKEN_BYTES}sI")  # magic, token, rank
_FRAME = struct.Struct("!BIH")  # what, of which rank, bytes of text that follow
DONE, GONE, GAVE_UP, FAILED = "done", "gone", "gave up", "failed"
_WELCOME = "welcome"
_KINDS = (_WELCOME, DONE, GONE, GAVE_UP, FAILED)


@dataclass(frozen=True)
class Fallen:
    """A rank that failed."""

    rank: int
    how: str
    said: str = ""

    @property
    def words(self) -> str:
        """«rank 3 gave up: TooManyFaultsError: …»."""
        if self.how == GONE:
            return f"rank {self.rank} is gone: {self.said or 'its process ended without a word'}"
        return f"rank {self.rank} {self.how}: {self.said}"


class Bond:
    """This rank's tie to the others. `fallen` is the first of them that failed."""

    def __init__(
        self,
        rank: int,
        publish: Callable[[bytes], None],
        find: Callable[[], bytes | None],
        *,
        hosts: tuple[str, ...] = ("127.0.0.1",),
        heard: Callable[[Fallen], None] = lambda fallen: None,
    ) -> None:
        self.rank = rank
        self.fallen: Fallen | None = None
        self._said: Fallen | None = None  # by this rank
        self._news: list[Fallen] = []  # what the others are to know: a word of this rank; of rank 0 the first two
        self._heard = heard  # called by the thread
        self._find = find
        self._links: dict[socket.socket, _Link] = {}  # in the order in which they came
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._met = threading.Event()
        self._closing = threading.Event()
        self._wakes, self._awake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        self._listens_at: float | None = None  # it rests until then
        self._pause = 0.0  # before the next look for rank 0
        self._tried = 0  # of the hosts where it may be
        self._join_until: float | None = None
        self._token = b""
        if rank == 0:
            self._listen(hosts, publish)
        self._thread = threading.Thread(target=self._live, name="outlive-ranks", daemon=True)
        self._thread.start()
        self._owner = os.getpid()
        # Not atexit: that does not run in a process of multiprocessing's.
        self._finalizer = multiprocessing.util.Finalize(None, self.close, exitpriority=100)

    # ------------------------------------------------------------ telling

    def tell(self, how: str, said: str) -> None:
        """Say that this rank has failed; the first word counts. Waits for the ranks to have met, for a while."""
        with self._lock:
            if self._said is not None or os.getpid() != self._owner:
                return
            self._said = Fallen(self.rank, how, said)
        self._met.wait(_MEETING_S)
        self._spread(self._said)

    def await_meeting(self, seconds: float) -> bool:
        """Whether this rank is tied to rank 0, waiting a little for it."""
        return self._met.wait(seconds)

    def await_fallen(self, seconds: float) -> Fallen | None:
        """Which other rank failed, waiting a little for the word of it."""
        with self._changed:
            self._changed.wait_for(lambda: self.fallen is not None, seconds)
            return self.fallen

    @property
    def linked_ranks(self) -> frozenset[int]:
        """Ranks at the other ends of this one's connections: all others for rank 0, rank 0 for the others."""
        with self._lock:
            return frozenset(link.rank for link in self._links.values() if link.is_met and link.rank is not None)

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """Say that this rank is done, and let go."""
        if os.getpid() != self._owner or self._closing.is_set():
            return
        self._closing.set()
        self._take_leave()
        with contextlib.suppress(OSError):  # it woke by itself, and has let go already
            self._wakes.send(b"x")
        self._finalizer.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _spread(self, news: Fallen) -> None:
        """Each rank needs to know of one other that fell: two words are enough for all."""
        with self._lock:
            if len(self._news) < 2 and news.rank not in (known.rank for known in self._news):
                self._news.append(news)
            for link in self._links.values():
                self._tell_news(link)

    def _tell_news(self, link: _Link) -> None:
        if link.rank is None or link.is_told:
            return
        news = next((each for each in self._news if each.rank != link.rank), None)
        if news is not None:
            link.is_told = True
            link.say(news)

    def _take_leave(self) -> None:
        """Say that the end of these sockets is no death."""
        with self._lock:
            for link in self._links.values():
                if link.rank is not None:
                    link.say(Fallen(self.rank, DONE))

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        try:
            while not self._closing.is_set():
                if self.rank != 0 and not self._links and not self._met.is_set():
                    self._join()
                    continue
                for key, _ in self._selector.select(self._patience_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._awake and key.fileobj in self._links:
                        self._read(key.data)
                self._drop_late()
        except Exception as error:  # a rank is no worse off than without it
            if not self._closing.is_set():
                log.warning("rank %d hears no more of other ranks' failures: %r", self.rank, error)
                self._take_leave()
        finally:
            with self._lock:
                for link in self._links.values():
                    link.socket.close()
                self._links.clear()
            for end in (self._listener, self._awake, self._wakes):
                if end is not None:
                    end.close()
            self._selector.close()

    def _patience_s(self) -> float | None:
        """Until something is to be done that no socket tells of."""
        times = [link.since + HELLO_S for link in self._strangers()[:1]]
        times += [self._listens_at] if self._listens_at is not None else []
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _drop_late(self) -> None:
        now = time.monotonic()
        for link in self._strangers():
            if now >= link.since + HELLO_S:
                self._drop(link)
        if self._listener is not None and self._listens_at is not None and now >= self._listens_at:
            self._listens_at = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _strangers(self) -> list[_Link]:
        """Connections that have not said who they are, the oldest first."""
        return [link for link in self._links.values() if link.rank is None]

    def _listen(self, hosts: tuple[str, ...], publish: Callable[[bytes], None]) -> None:
        local = all(host.startswith("127.") or host == "localhost" for host in hosts)
        self._listener = socket.create_server(("127.0.0.1" if local else "", 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        port = self._listener.getsockname()[1]
        publish(json.dumps({"hosts": list(hosts), "port": port, "token": self._token.hex()}).encode())
        self._met.set()

    def _join(self) -> None:
        """Find rank 0, connect to it and say hello. Until it answers, its end means nothing: it is tried again."""
        problem: object = "it closes connections at once"
        first, longest = _LOOK_S
        while not self._closing.wait(self._pause):
            self._pause = min(max(first, 2 * self._pause), longest)
            told = self._find()
            if told is None:
                continue
            address = json.loads(told)
            now = time.monotonic()
            self._join_until = self._join_until or now + _JOIN_S
            if now >= self._join_until:
                raise ConnectionError(f"rank 0 cannot be reached at {', '.join(address['hosts'])}: {problem!r}")
            hosts = address["hosts"][self._tried :] + address["hosts"][: self._tried]
            for host in hosts:
                try:
                    end = socket.create_connection((host, address["port"]), _CONNECT_S)
                    end.sendall(_HELLO.pack(_MAGIC, bytes.fromhex(address["token"]), self.rank))
                except OSError as error:
                    problem = error
                    continue
                self._tried = address["hosts"].index(host) + 1  # if it is another's, the next one comes first
                with self._lock:
                    link = self._add(end)
                    link.rank = 0
                    self._tell_news(link)
                return

    def _add(self, end: socket.socket) -> _Link:
        end.setblocking(False)
        link = self._links[end] = _Link(end, time.monotonic())
        self._selector.register(end, selectors.EVENT_READ, link)
        return link

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            end, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has gone again
        except OSError as error:
            self._make_room(error)
            return
        with self._lock:
            link = self._add(end)
        self._read(link)  # a rank says hello at once: it is not counted among strangers, however many there are
        strangers = self._strangers()
        if len(strangers) > MOST_STRANGERS:
            self._read(strangers[0])
            if strangers[0].rank is None:
                self._drop(strangers[0])

    def _make_room(self, error: OSError) -> None:
        """There is no descriptor for a connection: a stranger gives way, or others come later."""
        strangers = self._strangers()
        if strangers:
            self._drop(strangers[0])
            return
        log.debug("rank 0 takes no connections for %g s: %s", _REST_S, error)
        assert self._listener is not None
        self._selector.unregister(self._listener)  # it would be ready again and again
        self._listens_at = time.monotonic() + _REST_S

    def _read(self, link: _Link) -> None:
        ended: str | None = None
        try:
            got = link.socket.recv(_READ_BYTES)
            ended = None if got else ""
            link.rest += got
        except BlockingIOError:
            return
        except OSError as error:  # of a process that is killed with something unread the kernel resets it
            ended = "" if error.errno in (errno.ECONNRESET, errno.EPIPE) else f"its connection failed: {error.strerror}"
        try:
            self._take_all(link)
        except Exception as error:
            self._drop(link, error)
            return
        if ended is not None:
            self._drop(link, ended=ended)

    def _take_all(self, link: _Link) -> None:
        """Every frame that is complete."""
        if link.rank is None:
            if len(link.rest) < _HELLO.size:
                return
            magic, token, rank = _HELLO.unpack(link.take(_HELLO.size))
            if not hmac.compare_digest(magic + token, _MAGIC + self._token):
                raise ValueError("it does not know this job's token")
            with self._lock:
                link.rank, link.is_met = rank, True
                link.say(Fallen(0, _WELCOME))
                self._tell_news(link)
        while len(link.rest) >= _FRAME.size:
            kind, rank, length = _FRAME.unpack_from(link.rest)
            how = _KINDS[kind]
            if length > _LONGEST_TEXT:
                raise ValueError(f"a message of {length} bytes")
            if len(link.rest) < _FRAME.size + length:
                return
            said = link.take(_FRAME.size + length)[_FRAME.size :].decode(errors="replace")
            self._take(link, Fallen(rank if link.rank == 0 else link.rank, how, printable(said)))

    def _take(self, link: _Link, word: Fallen) -> None:
        if word.how == _WELCOME:
            link.is_met = True
            self._met.set()
        elif word.how == DONE:
            link.is_done = True
        else:
            self._hear(word)

    def _drop(self, link: _Link, problem: Exception | None = None, *, ended: str = "") -> None:
        """Close a connection. Of a rank that is its end, unless something is wrong with what it sent."""
        with self._lock:
            if problem is not None and link.rank is not None:
                link.say(Fallen(self.rank, DONE))
            self._selector.unregister(link.socket)
            del self._links[link.socket]
            link.socket.close()
        if link.rank is None or not link.is_met or self._closing.is_set():
            return
        if problem is not None:
            log.warning(
                "rank %d hears no more of rank %d: what it sent makes no sense (%r)", self.rank, link.rank, problem
            )
        elif not link.is_done:
            self._hear(Fallen(link.rank, GONE, ended))

    def _hear(self, fallen: Fallen) -> None:
        if fallen.rank == self.rank:
            return
        if self.rank == 0:
            self._spread(fallen)
        with self._changed:
            if self.fallen is not None:
                return
            self.fallen = fallen
            self._changed.notify_all()
        self._heard(fallen)


@dataclass(eq=False)
class _Link:
    """A socket to another rank, or to a stranger: `rank` is None until it has said who it is."""

    socket: socket.socket
    since: float
    rank: int | None = None
    rest: bytes = b""
    is_met: bool = False  # both know who the other is
    is_told: bool = False  # of a rank that failed
    is_done: bool = False

    def take(self, size: int) -> bytes:
        taken, self.rest = self.rest[:size], self.rest[size:]
        return taken

    def say(self, word: Fallen) -> None:
        text = word.said.encode(errors="replace")[:_LONGEST_TEXT]
        with contextlib.suppress(OSError):  # it is gone itself, which its end tells
            self.socket.send(_FRAME.pack(_KINDS.index(word.how), word.rank, len(text)) + text)


def wait_while(still: Callable[[], bool], seconds: float, pause: float = 0.5) -> bool:
    """Whether something stayed true so long."""
    deadline = time.monotonic() + seconds
    while still():
        if time.monotonic() >= deadline:
            return True
        time.sleep(min(pause, seconds / 4))
    return False
