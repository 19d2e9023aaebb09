"""A socket between two processes that carries whole messages, and handles of shared memory.

Reads   frames from the socket; half a frame is kept back until the rest has come.
Writes  frames; what does not fit now waits in an outbox, if the channel does not block.
Never   a lock that the other side could hold, nor half a message handed on as a whole one.

    frame = length, kind, handles, flags, seq, extra  |  body

A body over INLINE_LIMIT travels in shared memory of its own, whose handle is in the frame; the end that blocks, a
worker's, reads it there. Handles are descriptors here, and travel beside the bytes; in `portable_channel` they are
names.

The bell is an eventfd that the end which does not block rings after each write, and the end which blocks
waits on. Waking by the socket itself is «synchronous» in Linux: the kernel takes the waker to be about to
sleep, and puts the woken process onto its core, where it interrupts it. With small batches that cost a
third of the rate.
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

from outlive._system import memory, ownership
from outlive._system.address_space import NoRoomError
from outlive._system.memory import Handle

Bytes: TypeAlias = bytes | bytearray | memoryview
Body: TypeAlias = bytearray | memoryview  # to be written to, either

HEADER = struct.Struct("<IBBHqq")
HEADER_SIZE = HEADER.size
_SIZE = struct.Struct("<q")
INLINE_LIMIT = 1 << 16
_MOST_BYTES = INLINE_LIMIT + (1 << 13)  # of a body, names of shared memory included
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
    body: Body
    handles: tuple[Handle, ...]


class Channel:
    """One end of a connected pair of sockets."""

    def __init__(self, sock: socket.socket, *, blocking: bool, owned: bool, bell: int = -1) -> None:
        self._socket = sock
        self._blocking = blocking
        sock.setblocking(blocking)
        self.bell = bell  # ours to close; -1: none
        if blocking:
            self._listen()
        self.closed = False  # everything that the other end ever sent has been read
        self.drained = False  # nothing more to read just now
        self.torn = False  # a message came without its descriptors: nothing after it can be trusted
        self.starved = False  # the next message waits until this process has room for it
        self.untaken: deque[Frame] = deque()  # messages that were read and wait for the same
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
        self, kind: int, seq: int = 0, extra: int = 0, parts: Sequence[Bytes] = (), handles: tuple[Handle, ...] = ()
    ) -> None:
        """Send one message. Handles stay ours, and are duplicated in flight."""
        size = 0
        for part in parts:
            size += len(part)
        if size <= INLINE_LIMIT:
            self._send(HEADER.pack(size, kind, len(handles), 0, seq, extra), parts, handles)
            return
        spilled = memory.create(size, "outlive-message")
        try:
            with memoryview(memory.attach(spilled, size)).cast("B") as room:
                offset = 0
                for part in parts:
                    with memoryview(part) as whole:
                        view = whole.cast("B")
                        room[offset : offset + len(view)] = view
                        offset += len(view)
            header = HEADER.pack(_SIZE.size, kind, len(handles) + 1, _SPILLED, seq, extra)
            self._send(header, [_SIZE.pack(size)], (spilled, *handles))
        except BaseException:
            memory.discard(spilled)
            raise
        memory.let_go(spilled)

    def _send(self, header: bytes, parts: Sequence[Bytes], handles: tuple[Handle, ...]) -> None:
        self._write([header, *parts], tuple(map(int, handles)))

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

    def send_quietly(self, kind: int, extra: int, parts: Sequence[Bytes]) -> None:
        """Send something that is read with the next message, and wakes nobody."""
        bell, self.bell = self.bell, -1
        try:
            self.send(kind, 0, extra, parts)
        finally:
            self.bell = bell

    def _ring(self) -> None:
        if self.bell >= 0 and not self._blocking:
            os.eventfd_write(self.bell, 1)

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

    def receive(self, *, wait: bool = True) -> list[Frame]:
        """The whole messages that one read brings; an end that blocks waits for them, unless told not to.

        [] also for half a message, for nothing just now (`drained`) and at the end (`closed`). Nothing more is read
        while a message waits for room.
        """
        if self.starved:
            return self._take_rest()
        while True:
            try:
                count = self._read()
                break
            except BlockingIOError:
                if not (self._blocking and wait):
                    self.drained = True
                    return []
                self._wait()
            except ConnectionResetError:
                count = 0
                break
            except OSError:  # no memory for what comes with it
                self.torn = True
                count = 0
                break
        if count == 0:
            self.closed = self.drained = True
            return []
        self.drained = False
        if self.torn:
            self.closed = self.drained = True
            return []
        if self._rest:
            self._rest += self._view[:count]
            frames = self._take_rest()
        else:
            frames, used = self._split(self._view, count)
            if used < count:
                self._rest += self._view[used:count]
        return frames

    def _take_rest(self) -> list[Frame]:
        """The whole messages among what was read before."""
        self.starved = self.drained = False
        with memoryview(self._rest) as rest:
            frames, used = self._split(rest, len(rest))
        del self._rest[:used]
        return frames

    @property
    def waits(self) -> bool:
        """Whether something that came waits until this process has room for it."""
        return self.starved or bool(self.untaken)

    def _read(self) -> int:
        """Read once into the view, without waiting; how many bytes came."""
        count, ancillary, flags, _ = self._socket.recvmsg_into([self._view], _DESCRIPTOR_SPACE, _RECEIVE_FLAGS)
        for _, kind, data in ancillary:
            if kind == socket.SCM_RIGHTS:
                rights = array.array("i")
                rights.frombytes(data[: len(data) - len(data) % rights.itemsize])
                self._descriptors.extend(rights)
        if flags & _CUT_OFF:
            # This process is at its limit of descriptors and some were dropped: which message
            # lacks which one cannot be told any more, so none of them is taken for whole.
            self.torn = True
        return count

    def _listen(self) -> None:
        # The bell, and besides only that the other end hung up; without a bell, whatever comes.
        self._alarm = select.poll()
        self._alarm.register(self._socket.fileno(), 0 if self.bell >= 0 else select.POLLIN)
        if self.bell >= 0:
            self._alarm.register(self.bell, select.POLLIN)

    def _wait(self) -> None:
        """Wait until something was sent, or the other end has hung up."""
        for fd, _ in self._alarm.poll():
            if fd == self.bell:
                # Before the socket is read again: what comes after that rings again.
                os.eventfd_read(self.bell)

    def _split(self, view: memoryview, count: int) -> tuple[list[Frame], int]:
        frames = []
        start = 0
        while count - start >= HEADER_SIZE:
            size, kind, count_of, flags, seq, extra = HEADER.unpack_from(view, start)
            if size > _MOST_BYTES or not kind or flags > _SPILLED or not self._has_handles(count_of):
                self.garble()
                break
            end = start + HEADER_SIZE + size
            if end > count:
                if len(self._descriptors) > count_of:
                    self.garble()
                break
            body: Body = bytearray(view[start + HEADER_SIZE : end])
            handles: tuple[Handle, ...] = ()
            if count_of or flags:
                try:
                    handles = self._take_handles(count_of, body)
                    if flags & _SPILLED:
                        body, handles = self._read_spilled(handles, body)
                except ValueError:
                    self.garble()
                    break
                except (OSError, MemoryError) as error:  # it cannot be taken over
                    if isinstance(error, NoRoomError) and not self._blocking:
                        self._put_back(handles)
                        self.starved = self.drained = True
                        break
                    self.tear()
                    break
            frames.append(Frame(kind, seq, extra, body, handles))
            start = end
        if self._descriptors and start == count:  # no message has them
            self.garble()
        return frames, start

    def _has_handles(self, count: int) -> bool:
        """Whether as many came as a message says."""
        return count <= len(self._descriptors)

    def _take_handles(self, count: int, body: Body) -> tuple[Handle, ...]:
        """The handles of a message, taken out of its body if they are there; ValueError where they are not ours."""
        return tuple(self._descriptors.popleft() for _ in range(count))

    def _put_back(self, handles: tuple[Handle, ...]) -> None:
        """Handles of a message that is read again later."""
        self._descriptors.extendleft(map(int, reversed(handles)))

    def _read_spilled(self, handles: tuple[Handle, ...], told: Body) -> tuple[Body, tuple[Handle, ...]]:
        """The body that a handle leads to, and the other handles. All of them are kept where there is no room here."""
        waiting = handles
        try:
            if not handles or len(told) != _SIZE.size:
                raise ValueError("not a valid message")
            room = memoryview(memory.attach_whole(handles[0], _SIZE.unpack(told)[0])).cast("B")
            # A worker may trust its trainer not to write there any more; nobody may trust a worker.
            whole = room if self._blocking else _copied(room)
            waiting = handles[1:]
            memory.discard(handles[0])
            return whole, waiting
        except BaseException as error:
            if self._blocking or not isinstance(error, NoRoomError):
                for handle in waiting:
                    memory.discard(handle)
            raise

    def garble(self) -> None:
        """What came is no message of ours: somebody wrote to a descriptor that is not his. Nothing more is read."""
        self.garbled = True
        self.tear()

    def tear(self) -> None:
        """What comes cannot be taken over: nothing more is read."""
        self.torn = self.closed = self.drained = True
        self._drop_untaken()

    def _drop_untaken(self) -> None:
        self.starved = False
        while self.untaken:
            for handle in self.untaken.popleft().handles:
                memory.discard(handle)

    # ------------------------------------------------------------ ending

    def close(self) -> None:
        self.closed = self.drained = self._broken = True
        self._drop_untaken()
        for _, descriptors in self._outbox:
            for fd in descriptors:
                os.close(fd)
        self._outbox.clear()
        while self._descriptors:
            os.close(self._descriptors.popleft())
        self._socket.close()
        if self.bell >= 0:
            os.close(self.bell)
            self.bell = -1

    def abandon(self) -> None:
        self.close()


def _copied(room: memoryview) -> bytearray:
    try:
        return bytearray(room)
    except MemoryError:
        raise NoRoomError from None


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


def bell() -> int:
    return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
