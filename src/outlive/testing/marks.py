"""Marks that outlive a process: who was first, in whatever process, with whatever start method.

Reads   a nameless file of the process that made them (a memfd), by way of /proc; elsewhere a temporary file.
Writes  a line into it.
Never   a lock, which a killed process would keep; never anything that must be swept: memory goes with its process.

Whoever wants to be counted appends a line (which the kernel does in one piece) and then looks how many lines stand
before it.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import weakref
from typing import Any

_tickets = itertools.count()


class Marks:
    """A list of marks, shared by all processes that have a copy of this object."""

    def __init__(self, path: str | None = None) -> None:
        self.path = path if path is not None else self._made()

    def _made(self) -> str:
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("outlive-marks")
            weakref.finalize(self, _close, os.getpid(), fd)
            return f"/proc/{os.getpid()}/fd/{fd}"
        file, path = tempfile.mkstemp(prefix="outlive-marks-")
        os.close(file)
        weakref.finalize(self, _unlink, os.getpid(), path)
        return path

    def place(self, name: str) -> int:
        """Make a mark of this name; how many of it there were before."""
        own = f"{os.getpid()}-{next(_tickets)}"
        fd = self._open(os.O_RDWR | os.O_APPEND)
        try:
            os.write(fd, f"{name}\t{own}\n".encode())
            lines = _read(fd).splitlines()
        finally:
            os.close(fd)
        same = [line for line in lines if line.partition("\t")[0] == name]
        return same.index(f"{name}\t{own}")

    def note(self, line: str) -> None:
        """A line that is only to be read."""
        fd = self._open(os.O_WRONLY | os.O_APPEND)
        try:
            os.write(fd, f"{line}\n".encode())
        finally:
            os.close(fd)

    def lines(self) -> list[str]:
        fd = self._open(os.O_RDONLY)
        try:
            return _read(fd).splitlines()
        finally:
            os.close(fd)

    def _open(self, flags: int) -> int:
        try:
            return os.open(self.path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise RuntimeError(
                f"the marks of this fault are gone with the process that made it ({self.path}: {error.strerror}); "
                "make the fault in the process that runs the loader, or in one that lives as long"
            ) from None

    def __getstate__(self) -> Any:
        return self.path

    def __setstate__(self, path: str) -> None:
        self.path = path


def _read(fd: int) -> str:
    return os.pread(fd, os.fstat(fd).st_size, 0).decode()


def _close(owner: int, fd: int) -> None:
    if os.getpid() == owner:
        try:
            os.close(fd)
        except OSError:
            pass  # somebody has closed everything


def _unlink(owner: int, path: str) -> None:
    if os.getpid() == owner:
        try:
            os.unlink(path)
        except OSError:
            pass  # swept by somebody else
