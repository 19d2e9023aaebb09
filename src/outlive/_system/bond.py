"""Ranks of a job that tell each other when one fails: a socket from each to rank 0, and a thread that reads it.

Reads   what other ranks say; the end of their sockets, which says that they are gone.
Writes  what this rank says, at once, from whichever thread says it.
Never   a word while all goes well, after the ranks have met.

    rank 2 ──{"rank": 2, "how": "gave up", …}──► rank 0 ──the same──► ranks 1, 3, …

How they find rank 0 is the caller's: `publish` shows its address to the others, `find` looks for it. A rank that is
done says so, and its end means nothing; one that ends without it is gone.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import multiprocessing.util
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

log = logging.getLogger("outlive")
_LONGEST_LINE = 1 << 16
_LONGEST_TEXT = 4000
_MEETING_S = 10.0  # for a rank that has something to say before it has met the others
_CONNECT_S = 3.0
_LOOK_S = (0.05, 1.0)  # between looks for rank 0's address: at first, at most
DONE, GONE, GAVE_UP, FAILED = "done", "gone", "gave up", "failed"


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
            return f"rank {self.rank} is gone: its process ended without a word"
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
        self._heard = heard  # called by the thread
        self._find = find
        self._links: dict[socket.socket, _Link] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._met = threading.Event()
        self._closing = threading.Event()
        self._wakes, self._awake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._awake, selectors.EVENT_READ)
        self._listener: socket.socket | None = None
        if rank == 0:
            self._token = secrets.token_hex(16)
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
            self._said = Fallen(self.rank, how, said[:_LONGEST_TEXT])
        self._met.wait(_MEETING_S)
        self._send(self._said)

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
            return frozenset(link.rank for link in self._links.values() if link.rank is not None)

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        """Say that this rank is done, and let go."""
        if os.getpid() != self._owner or self._closing.is_set():
            return
        self._closing.set()
        self._send(Fallen(self.rank, DONE))
        with contextlib.suppress(OSError):  # it woke by itself, and has let go already
            self._wakes.send(b"x")
        self._finalizer.cancel()
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _send(self, word: Fallen, but: int | None = None) -> None:
        line = (json.dumps(asdict(word)) + "\n").encode()
        with self._lock:
            for link in list(self._links.values()):
                if link.rank is not None and link.rank != but:
                    try:
                        link.socket.sendall(line)
                    except OSError:
                        pass  # it is gone itself, which its end tells

    # ------------------------------------------------------------ the thread

    def _live(self) -> None:
        try:
            if self._listener is None:
                self._meet()
            while not self._closing.is_set():
                for key, _ in self._selector.select():
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is not self._awake:
                        self._read(key.data)
        except Exception as error:  # a rank is no worse off than without it
            if not self._closing.is_set():
                log.warning("rank %d hears no more of other ranks' failures: %r", self.rank, error)
        finally:
            for link in list(self._links.values()):
                link.socket.close()
            for end in (self._listener, self._awake, self._wakes):
                if end is not None:
                    end.close()
            self._selector.close()

    def _listen(self, hosts: tuple[str, ...], publish: Callable[[bytes], None]) -> None:
        local = all(host.startswith("127.") or host == "localhost" for host in hosts)
        self._listener = socket.create_server(("127.0.0.1" if local else "", 0), backlog=1024)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        port = self._listener.getsockname()[1]
        publish(json.dumps({"hosts": list(hosts), "port": port, "token": self._token}).encode())
        self._met.set()

    def _meet(self) -> None:
        """Find rank 0 and connect to it."""
        pause, longest = _LOOK_S
        while (told := self._find()) is None:
            if self._closing.wait(pause):
                return
            pause = min(2 * pause, longest)
        address = json.loads(told)
        problem: Exception | None = None
        for host in address["hosts"]:
            try:
                end = socket.create_connection((host, address["port"]), _CONNECT_S)
            except OSError as error:
                problem = error
                continue
            hello = {"token": address["token"], "rank": self.rank}
            end.sendall((json.dumps(hello) + "\n").encode())
            end.setblocking(True)
            with self._lock:
                self._add(end).rank = 0
            self._met.set()
            return
        raise ConnectionError(f"rank 0 cannot be reached at {', '.join(address['hosts'])}: {problem!r}")

    def _add(self, end: socket.socket) -> _Link:
        link = self._links[end] = _Link(end)
        self._selector.register(end, selectors.EVENT_READ, link)
        return link

    def _accept(self) -> None:
        assert self._listener is not None
        end, _ = self._listener.accept()
        end.settimeout(_CONNECT_S)  # for writes: a rank that is stopped must not stop this one
        with self._lock:
            self._add(end)

    def _read(self, link: _Link) -> None:
        try:
            got = link.socket.recv(_LONGEST_LINE)
        except OSError:
            got = b""
        link.rest += got
        *lines, link.rest = link.rest.split(b"\n")
        for line in lines:
            try:
                self._take(link, json.loads(line))
            except (ValueError, KeyError, TypeError):
                got = b""  # not one of ours
        if not got or len(link.rest) > _LONGEST_LINE:
            self._drop(link)

    def _take(self, link: _Link, word: dict[str, Any]) -> None:
        if link.rank is None:
            if not hmac.compare_digest(str(word["token"]), self._token):
                raise ValueError("another job's")
            with self._lock:
                link.rank = int(word["rank"])
            for known in (self.fallen, self._said):  # from before it came
                if known is not None:
                    link.socket.sendall((json.dumps(asdict(known)) + "\n").encode())
            return
        said = Fallen(int(word["rank"]), str(word["how"]), str(word["said"]))
        if said.how == DONE:
            link.is_done = True
            return
        self._hear(said, link)

    def _drop(self, link: _Link) -> None:
        with self._lock:
            self._selector.unregister(link.socket)
            del self._links[link.socket]
            link.socket.close()
        if link.rank is not None and not link.is_done and not self._closing.is_set():
            self._hear(Fallen(link.rank, GONE), link)

    def _hear(self, fallen: Fallen, link: _Link) -> None:
        if fallen.rank == self.rank:
            return
        if self.rank == 0:
            self._send(fallen, but=link.rank)
        with self._changed:
            if self.fallen is not None:
                return
            self.fallen = fallen
            self._changed.notify_all()
        self._heard(fallen)


@dataclass
class _Link:
    """A socket to another rank; `rank` is None until it has said who it is."""

    socket: socket.socket
    rank: int | None = None
    rest: bytes = b""
    is_done: bool = False


def wait_while(still: Callable[[], bool], seconds: float, pause: float = 0.5) -> bool:
    """Whether something stayed true so long."""
    deadline = time.monotonic() + seconds
    while still():
        if time.monotonic() >= deadline:
            return True
        time.sleep(min(pause, seconds / 4))
    return False
