"""A socket between two processes that carries whole messages and descriptors.

Reads   frames from the socket; half a frame is kept back until the rest has come.
Writes  frames; what does not fit now waits in an outbox, if the channel does not block.
Never   a lock that the other side could hold, nor half a message handed on as a whole one.

    frame = length, kind, descriptors, flags, seq, extra  |  body

A body over INLINE_LIMIT travels in a memory file of its own, its descriptor in the frame.

The bell is an eventfd that the end which does not block rings after each write, and the end which blocks
waits on. Waking by the socket itself is «synchronous» in Linux: the kernel takes the waker to be about to
sleep, and puts the woken process onto its core, where it interrupts it. That cost 40 % of small batches.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from holdfast._system import memory, ownership

Bytes: TypeAlias = bytes | bytearray | memoryview

HEADER = struct.Struct("<IBBHqq")
HEADER_SIZE = HEADER.size
INLINE_LIMIT = 1 << 16
_SPILLED = 1
# Plain ints: flags of the enum kind cost microseconds each.
_RECEIVE_FLAGS = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT)
_CUT_OFF = int(socket.MSG_CTRUNC)
_RECEIVE_SIZE = 1 << 18
_DESCRIPTOR_SPACE = socket.CMSG_SPACE(253 * 4)  # the most that Linux passes at once


class Frame(NamedTuple):
    kind: int
    seq: int
    extra: int
    body: bytearray
    descriptors: tuple[int, ...]


class Channel:
    """One end of a connected pair of sockets."""

    def __init__(self, sock: socket.socket, *, blocking: bool, owned: bool, bell: int = -1) -> None:
        self._socket = sock
        self._blocking = blocking
        sock.setblocking(blocking)
        self._bell = bell  # ours to close; -1: none
        self._alarm: select.poll | None = None
        if blocking:
            self._alarm = select.poll()
            # The bell, and besides only that the other end hung up; without a bell, whatever comes.
            self._alarm.register(sock.fileno(), 0 if bell >= 0 else select.POLLIN)
            if bell >= 0:
                self._alarm.register(bell, select.POLLIN)
        self.closed = False  # everything that the other end ever sent has been read
        self.drained = False  # nothing more to read just now
        self.torn = False  # a message came without its descriptors: nothing after it can be trusted
        self.garbled = False  # bytes came that are no message of ours: somebody else wrote them
        self._broken = False  # nothing can be sent any more; what was sent to us is still to be read
        self._view = memoryview(bytearray(_RECEIVE_SIZE))
        self._rest = bytearray()
        self._descriptors: deque[int] = deque()
        self._outbox: deque[tuple[bytes, tuple[int, ...]]] = deque()
        if owned:
            ownership.own(self)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def congested(self) -> bool:
        return bool(self._outbox)

    # ------------------------------------------------------------ sending

    def send(
        self, kind: int, seq: int = 0, extra: int = 0, parts: Sequence[Bytes] = (), descriptors: tuple[int, ...] = ()
    ) -> None:
        """Send one message. Descriptors stay open here and are duplicated in flight."""
        size = 0
        for part in parts:
            size += len(part)
        if size <= INLINE_LIMIT:
            header = HEADER.pack(size, kind, len(descriptors), 0, seq, extra)
            self._write([header, *parts], descriptors)
            return
        fd = memory.create(size, "holdfast-message")
        try:
            offset = 0
            for part in parts:
                with memoryview(part) as whole:
                    view = whole.cast("B")
                    while len(view):
                        written = os.pwrite(fd, view, offset)
                        offset += written
                        view = view[written:]
            header = HEADER.pack(0, kind, len(descriptors) + 1, _SPILLED, seq, extra)
            self._write([header], (fd, *descriptors))
        finally:
            os.close(fd)

    def _write(self, parts: list[Bytes], descriptors: tuple[int, ...]) -> None:
        if self._broken:
            return
        if self._outbox:
            self._keep(b"".join(parts), descriptors)
            return
        try:
            if descriptors:
                rights = array.array("i", descriptors)
                sent = self._socket.sendmsg(parts, [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            else:
                sent = self._socket.sendmsg(parts)
        except BlockingIOError:
            self._keep(b"".join(parts), descriptors)
            return
        except (BrokenPipeError, ConnectionResetError):
            # The other side died; whoever waits for it learns that from its exit, not from this write.
            self._broken = True
            return
        self._ring()
        total = sum(map(len, parts))
        if sent < total:
            rest = b"".join(parts)[sent:]
            if self._blocking:
                try:
                    self._socket.sendall(rest)
                except (BrokenPipeError, ConnectionResetError):
                    self._broken = True
            else:
                self._outbox.append((rest, ()))

    def _ring(self) -> None:
        if self._bell >= 0 and not self._blocking:
            os.eventfd_write(self._bell, 1)

    def _keep(self, data: bytes, descriptors: tuple[int, ...]) -> None:
        self._outbox.append((data, tuple(os.dup(fd) for fd in descriptors)))

    def flush(self) -> None:
        """Send what waits in the outbox, as far as it goes without blocking."""
        while self._outbox:
            data, descriptors = self._outbox.popleft()
            try:
                if descriptors:
                    rights = array.array("i", descriptors)
                    sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                else:
                    sent = self._socket.send(data)
            except BlockingIOError:
                self._outbox.appendleft((data, descriptors))
                return
            except (BrokenPipeError, ConnectionResetError):
                sent = len(data)
                self._broken = True
            for fd in descriptors:
                os.close(fd)
            self._ring()
            if sent < len(data):
                self._outbox.appendleft((data[sent:], ()))

    # ------------------------------------------------------------ receiving

    def receive(self) -> list[Frame]:
        """The whole messages that one read brings.

        [] also for half a message, for nothing just now (`drained`) and at the end (`closed`).
        """
        while True:
            try:
                count, ancillary, flags, _ = self._socket.recvmsg_into([self._view], _DESCRIPTOR_SPACE, _RECEIVE_FLAGS)
                break
            except BlockingIOError:
                if self._alarm is None:
                    self.drained = True
                    return []
                self._wait(self._alarm)
            except ConnectionResetError:
                count, ancillary, flags = 0, [], 0
                break
        if count == 0:
            self.closed = self.drained = True
            return []
        self.drained = False
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                rights = array.array("i")
                rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
                self._descriptors.extend(rights)
        if flags & _CUT_OFF:
            # This process is at its limit of descriptors and some were dropped: which message
            # lacks which one cannot be told any more, so none of them is taken for whole.
            self.torn = self.closed = self.drained = True
            return []
        if self._rest:
            self._rest += self._view[:count]
            with memoryview(self._rest) as rest:
                frames, used = self._split(rest, len(rest))
            del self._rest[:used]
        else:
            frames, used = self._split(self._view, count)
            if used < count:
                self._rest += self._view[used:count]
        return frames

    def _wait(self, alarm: select.poll) -> None:
        """Wait until something was sent, or the other end has hung up."""
        for fd, _ in alarm.poll():
            if fd == self._bell:
                # Before the socket is read again: what comes after that rings again.
                os.eventfd_read(self._bell)

    def _split(self, view: memoryview, count: int) -> tuple[list[Frame], int]:
        frames = []
        start = 0
        while count - start >= HEADER_SIZE:
            size, kind, descriptors, flags, seq, extra = HEADER.unpack_from(view, start)
            if size > INLINE_LIMIT or descriptors > len(self._descriptors) or not kind:
                self.garble()
                break
            end = start + HEADER_SIZE + size
            if end > count:
                break
            fds: tuple[int, ...] = ()
            if descriptors:
                fds = tuple(self._descriptors.popleft() for _ in range(descriptors))
            if flags & _SPILLED:
                body = _read_spilled(fds[0])
                fds = fds[1:]
            else:
                body = bytearray(view[start + HEADER_SIZE : end])
            frames.append(Frame(kind, seq, extra, body, fds))
            start = end
        return frames, start

    def garble(self) -> None:
        """What came is no message of ours: somebody wrote to a descriptor that is not his. Nothing more is read."""
        self.garbled = self.torn = self.closed = self.drained = True

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        self.closed = self.drained = self._broken = True
        for _, descriptors in self._outbox:
            for fd in descriptors:
                os.close(fd)
        self._outbox.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._socket.close()
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1

    def abandon(self) -> None:
        self.close()


def _read_spilled(fd: int) -> bytearray:
    try:
        size = os.fstat(fd).st_size
        body = bytearray(size)
        with memoryview(body) as view:
            offset = 0
            while offset < size:
                got = os.preadv(fd, [view[offset:]], offset)
                if not got:
                    break
                offset += got
        return body
    finally:
        os.close(fd)


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def bell() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
