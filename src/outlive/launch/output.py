"""What ranks print: passed on line by line, with their number in front, the last lines kept.

Reads   two pipes per rank, which are its descriptors 1 and 2.
Writes  this process's sys.stdout and sys.stderr, so that notebooks and redirections have it, too.
Never   cuts a line in two, nor loses what a rank said before it died.

    rank, descriptor 1 ──pipe──► «[rank 1] epoch 3» ──► sys.stdout      whoever is in join() reads; a thread does
    rank, descriptor 2 ──pipe──► «[rank 1] warning» ──► sys.stderr      where the caller may be anywhere else
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import select
import sys
import threading
from typing import Any

from outlive._capture.last_words import KEPT_BYTES
from outlive._system import ownership

_CHUNK = 1 << 16
_LONGEST_LINE = 1 << 16
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r(?!\n))")
_STREAMS = ("stdout", "stderr")


class Voice:
    """One stream of one rank, in the launcher."""

    def __init__(self, rank: int, stream: str, kept: bytearray) -> None:
        self.stream = stream
        self._kept = kept  # both streams of a rank share it: what it said last, as it came
        self.read, self._write = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self.read, fcntl.F_SETFL, os.O_NONBLOCK)
        self._prefix = f"[rank {rank}] ".encode()
        self._begun = b""  # a line whose end has not come yet
        ownership.own(self)

    def end(self) -> int:
        """The rank's end of it; close it here once the rank has been started."""
        fd, self._write = self._write, -1
        return fd

    def hear(self) -> None:
        """Take and pass on what there is."""
        while self.read >= 0:
            try:
                data = os.read(self.read, _CHUNK)
            except BlockingIOError:
                return
            if not data:
                self.close()
                return
            self._say(data)

    def _say(self, data: bytes) -> None:
        data = self._begun + data
        # A carriage return at the very end may have its line feed still to come.
        lines = _LINE.findall(data, 0, len(data) - data.endswith(b"\r"))
        self._begun = data[sum(map(len, lines)) :]
        if len(self._begun) > _LONGEST_LINE:
            lines.append(self._begun + b"\n")
            self._begun = b""
        self._tell(lines)

    def _tell(self, lines: list[bytes]) -> None:
        if lines:
            self._kept += b"".join(lines)
            del self._kept[:-KEPT_BYTES]
            pass_on(self.stream, b"".join(self._prefix + line for line in lines))

    def close(self) -> None:
        """The rank says nothing more: what it had begun to say ends here."""
        begun, self._begun = self._begun, b""
        self._tell([begun + b"\n"] if begun else [])
        self.abandon()

    def abandon(self) -> None:
        for fd in (self.read, self._write):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self.read = self._write = -1


def pass_on(stream: str, data: bytes) -> None:
    """To this process's own stream, whatever stands there now."""
    target: Any = getattr(sys, stream, None)
    if target is None:
        return
    try:
        if hasattr(target, "buffer"):
            target.flush()
            target.buffer.write(data)
        else:
            target.write(data.decode("utf-8", "replace"))
        target.flush()
    except (OSError, ValueError):
        return  # closed, or nobody reads it any more: nobody can be told either


class Pump:
    """All voices of a group. Without its thread, `descriptors` are for the caller to wait for, and to `attend` to."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self._voices: dict[int, Voice] = {}  # by descriptor
        self._thread: threading.Thread | None = None
        self._leaving = False
        self._bell = -1
        ownership.own(self)

    def add(self, voice: Voice) -> None:
        with self.lock:
            self._voices[voice.read] = voice
        self._ring()

    def descriptors(self) -> list[int]:
        return [] if self._thread is not None else list(self._voices)

    def attend(self, fd: int) -> bool:
        """Hear whom this ready descriptor is of; whether it is one of ours."""
        with self.lock:
            voice = self._voices.get(fd)
            if voice is None:
                return False
            voice.hear()
            if voice.read < 0:
                del self._voices[fd]
            return True

    def farewell(self, voices: list[Voice]) -> None:
        """Their rank has ended: hear the rest of it. What it has started, and still speaks, is heard no more."""
        for voice in voices:
            self.attend(voice.read)
            with self.lock:
                if self._thread is None and self._voices.pop(voice.read, None) is not None:
                    voice.close()

    # ------------------------------------------------------------ a thread of its own

    def start_thread(self) -> None:
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="outlive-output", daemon=True)
        self._thread.start()

    def _ring(self) -> None:
        if self._bell >= 0:
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        while not self._leaving:
            poller = select.poll()
            poller.register(self._bell, select.POLLIN)
            for fd in list(self._voices):
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll():
                if not self.attend(fd) and fd == self._bell:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._bell)

    def close(self) -> None:
        """All ranks have ended."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._leaving = True
            self._ring()
            thread.join()
            os.close(self._bell)
            self._bell = -1
        self.farewell(list(self._voices.values()))

    def abandon(self) -> None:
        """In a fork of the launcher: these are not ours, and the thread is not here."""
        for voice in self._voices.values():
            voice.abandon()
        self._voices = {}
        self.lock = threading.Lock()
        self._thread = None
        if self._bell >= 0:
            os.close(self._bell)
            self._bell = -1


def redirect(ends: dict[str, int]) -> None:
    """In a rank: descriptors 1 and 2 are these pipes from now on, and whole lines go there at once."""
    for number, name in enumerate(_STREAMS, start=1):
        end = ends.pop(name, -1)
        if end < 0:
            continue
        stream: Any = getattr(sys, name)
        with contextlib.suppress(Exception):
            stream.flush()
        os.dup2(end, number)
        os.close(end)
        try:
            same = stream.fileno() == number
        except Exception:  # a notebook's own, after a fork: it would talk to the kernel in our place
            same = False
        if same and hasattr(stream, "reconfigure"):
            stream.reconfigure(line_buffering=True)
        else:
            setattr(sys, name, open(number, "w", buffering=1, errors="backslashreplace", closefd=False))  # noqa: SIM115
    _by_line()


def _by_line() -> None:
    """Native code, too: C's stdout would keep 4 KiB back, and lose them in a crash."""
    with contextlib.suppress(Exception):  # another C library: its output comes later, that is all
        libc = ctypes.CDLL(None)
        libc.setvbuf(ctypes.c_void_p.in_dll(libc, "stdout"), None, 1, 0)
