"""A channel for systems that cannot pass descriptors: handles are names, and travel inside the message.

Reads   frames, as any channel.
Writes  frames; names of shared memory come first in their bodies, 32 bytes each.
Never   a descriptor of another process.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence

from outlive._system import memory
from outlive._system.channel import HEADER, Body, Bytes, Channel
from outlive._system.memory import Handle

_NAME_SIZE = 32


class PortableChannel(Channel):
    def _send(self, header: bytes, parts: Sequence[Bytes], handles: tuple[Handle, ...]) -> None:
        if handles:
            size, *rest = HEADER.unpack(header)
            names = b"".join(str(handle).encode().ljust(_NAME_SIZE) for handle in handles)
            header, parts = HEADER.pack(size + len(names), *rest), [names, *parts]
        self._write([header, *parts], ())

    def _write(self, parts: list[Bytes], descriptors: tuple[int, ...]) -> None:
        data = b"".join(parts)
        if not self._blocking:
            super()._write([data], ())
            return
        view = memoryview(data)
        while len(view) and not self._broken:
            try:
                view = view[self._socket.send(view) :]
            except BlockingIOError:
                select.select([], [self._socket], [])
            except (BrokenPipeError, ConnectionResetError, ConnectionAbortedError):
                self._broken = True

    def _listen(self) -> None:
        # Reading never waits; waiting is done by `select`, which all systems have for sockets.
        self._socket.setblocking(False)

    def _wait(self) -> None:
        select.select([self._socket], [], [])

    def _read(self) -> int:
        return self._socket.recv_into(self._view)

    def _has_handles(self, count: int) -> bool:
        return True

    def _take_handles(self, count: int, body: Body) -> tuple[Handle, ...]:
        assert isinstance(body, bytearray)
        names = bytes(body[: count * _NAME_SIZE])
        del body[: count * _NAME_SIZE]
        taken = tuple(names[at : at + _NAME_SIZE].decode().strip() for at in range(0, len(names), _NAME_SIZE))
        # Whoever takes one over takes its name away: it is never the name of what is not ours.
        if len(names) != count * _NAME_SIZE or not all(map(memory.is_own, taken)):
            raise ValueError("not valid handles")
        return taken

    def _put_back(self, handles: tuple[Handle, ...]) -> None:
        """They are still in the bytes that were read."""

    def abandon(self) -> None:
        self.untaken.clear()  # their names are the parent's to take away
        super().abandon()


def pair() -> tuple[socket.socket, socket.socket]:
    return socket.socketpair()
