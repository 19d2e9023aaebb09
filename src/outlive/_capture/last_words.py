"""The last lines that workers write to standard error: kept, and passed on to where they would have gone.

Reads   (zygote) a pipe per worker, which is the worker's descriptor 2.
Writes  (zygote) what came to the standard error that it inherited, byte for byte.
Never   blocks the zygote: where nobody reads, the worker waits at a full pipe, as it would have without us.

    worker, descriptor 2 ──pipe──► zygote: keeps the last 8 KiB ──► the trainer's standard error

`Listener` is the zygote's side of it, `LastWords` one worker's pipe, `Echo` where everything goes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import socket
import stat

KEPT_BYTES = 8192
_CHUNK = 1 << 16
_STDERR = 2
_LAST_PATIENCE_S = 2.0
_PAGE = 4096  # what a pipe takes as one piece
_FEW = 256  # bytes that a terminal which is ready takes


class Echo:
    """Where standard error goes, written without ever blocking; shared by all pipes of a zygote."""

    def __init__(self) -> None:
        self._fd = -1
        self._put = self._write  # how some bytes are passed on; how many were
        self._socket: socket.socket | None = None
        self._lock: tuple[int, int] | None = None  # a pipe of our own, through which bytes pass into another's
        self.pending = b""
        with contextlib.suppress(OSError):  # it is closed: workers keep it as it is
            self._open(os.fstat(_STDERR).st_mode)

    def _open(self, mode: int) -> None:
        if stat.S_ISSOCK(mode):
            self._socket = socket.socket(fileno=os.dup(_STDERR))
            self._fd, self._put = self._socket.fileno(), self._send
            return
        if not stat.S_ISREG(mode):
            # Opened again, for the flag belongs to the opening: the trainer's own writes must go on blocking.
            flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
            with contextlib.suppress(OSError):  # another user's, as under `su`, or there is no /proc
                self._fd = os.open(f"/proc/self/fd/{_STDERR}", flags)
                return
            if stat.S_ISFIFO(mode):
                self._lock, self._put = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC), self._splice
            else:
                self._put = self._write_when_ready
        self._fd = os.dup(_STDERR)

    @property
    def usable(self) -> bool:
        return self._fd >= 0

    def fileno(self) -> int:
        return self._fd

    def write(self, data: bytes) -> None:
        """Pass on what there is; what does not fit now stays in `pending`."""
        self.pending += data
        while self.pending:
            try:
                written = self._put(self.pending)
            except BlockingIOError:
                return
            except OSError:  # nobody is there any more, or the disk is full: nobody can be told either
                self.pending = b""
                return
            self.pending = self.pending[written:]

    def _write(self, data: bytes) -> int:
        return os.write(self._fd, data)

    def _send(self, data: bytes) -> int:
        assert self._socket is not None
        return self._socket.send(data, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)

    def _splice(self, data: bytes) -> int:
        """Into a pipe whose writers wait: without waiting all the same, which the call says and not the opening."""
        assert self._lock is not None
        reading, writing = self._lock
        size = os.write(writing, data[:_PAGE])
        try:
            passed = os.splice(reading, self._fd, size, flags=os.SPLICE_F_NONBLOCK)
        except OSError:
            os.read(reading, size)
            raise
        if passed < size:
            os.read(reading, size - passed)
        return passed

    def _write_when_ready(self, data: bytes) -> int:
        """To a terminal: a few bytes while it says that it takes some."""
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        if not poller.poll(0):
            raise BlockingIOError
        return os.write(self._fd, data[:_FEW])

    def finish(self) -> None:
        """Pass on the rest, for as long as somebody reads it or may still come to."""
        if not self.usable:
            return
        poller = select.poll()
        poller.register(self._fd, select.POLLOUT)
        while self.pending and poller.poll(_LAST_PATIENCE_S * 1000):
            self.write(b"")

    def close(self) -> None:
        """In a worker: it is the zygote's."""
        for fd in self._lock or ():
            os.close(fd)
        self._lock = None
        if self._socket is not None:
            self._socket.close()
        elif self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


class LastWords:
    """One worker's pipe."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._kept = b""
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self._read, fcntl.F_SETFL, os.O_NONBLOCK)

    def fileno(self) -> int:
        return self._read

    def speak(self) -> None:
        """In the worker: standard error is the pipe from now on."""
        os.dup2(self._write, _STDERR)
        self.close()

    def listen(self) -> None:
        """In the zygote, after the fork."""
        os.close(self._write)
        self._write = -1

    def hear(self, *, last: bool = False) -> bool:
        """Take and pass on what was written; whether more can come.

        While nobody reads ours, nothing is taken: the worker waits. Unless it has ended, and this is the `last` time.
        """
        while last or not self._echo.pending:
            try:
                data = os.read(self._read, _CHUNK)
            except BlockingIOError:
                return True
            if not data:
                return False
            self._kept = (self._kept + data)[-KEPT_BYTES:]
            self._echo.write(data)
        return True

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")

    def close(self) -> None:
        for fd in (self._read, self._write):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._read = self._write = -1


class Listener:
    """The zygote's side: listens to every worker while somebody reads what they say."""

    def __init__(self, poller: select.poll) -> None:
        self._poller = poller
        self._echo = Echo()
        self._by_fd: dict[int, LastWords] = {}
        self._waiting = False  # for somebody to read ours

    def pipe(self) -> LastWords | None:
        """For a worker that is about to be forked; none where standard error cannot be passed on."""
        return LastWords(self._echo) if self._echo.usable else None

    def add(self, words: LastWords) -> None:
        """Hear the worker out: it was forked."""
        words.listen()
        self._by_fd[words.fileno()] = words
        if not self._waiting:
            self._poller.register(words.fileno(), select.POLLIN)

    def attend(self, fd: int) -> bool:
        """Do what this ready descriptor asks for; whether it is one of ours."""
        if fd in self._by_fd:
            self._hear(self._by_fd[fd])
        elif fd == self._echo.fileno():
            self._echo.write(b"")
            self._mind_the_reader()
        else:
            return False
        return True

    def _hear(self, words: LastWords) -> None:
        if not words.hear():
            self._drop(words)  # it closed its standard error
        self._mind_the_reader()

    def _mind_the_reader(self) -> None:
        """Nobody reads ours: nobody is listened to until somebody does."""
        waiting = bool(self._echo.pending)
        if waiting == self._waiting:
            return
        self._waiting = waiting
        for fd in self._by_fd:
            if waiting:
                self._poller.unregister(fd)
            else:
                self._poller.register(fd, select.POLLIN)
        if waiting:
            self._poller.register(self._echo.fileno(), select.POLLOUT)
        else:
            self._poller.unregister(self._echo.fileno())

    def _drop(self, words: LastWords) -> None:
        if self._by_fd.pop(words.fileno(), None) is not None and not self._waiting:
            self._poller.unregister(words.fileno())

    def farewell(self, words: LastWords) -> str:
        """The end of what a worker has said that is no more; all of it is, or will be, passed on."""
        words.hear(last=True)
        self._drop(words)
        words.close()
        self._mind_the_reader()
        return words.text

    def finish(self) -> None:
        """Before we leave."""
        self._echo.finish()

    def close(self) -> None:
        """In a worker: these are the zygote's."""
        self._echo.close()
        for words in self._by_fd.values():
            words.close()
