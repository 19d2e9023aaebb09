"""Shared memory with a name, for systems without memfd: made, attached by name, and its name taken away at once.

Reads   nothing.
Writes  named segments; a name exists from the making until whoever it was made for has attached it.
Never   a name for longer than that: what is left after a kill is swept, by the secret and the process number in it.

A published segment is the exception: it keeps its name, for workers that start later, until its maker withdraws it.
Python's resource tracker knows of it, and takes the name away when the maker and all that it started are dead.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import itertools
import mmap
import multiprocessing
import os
import re
import sys
from collections.abc import Callable
from multiprocessing import resource_tracker
from typing import Any

from outlive._system.nameless import Handle, map_descriptor, map_whole

_WINDOWS = sys.platform == "win32"
if not _WINDOWS:
    import _posixshmem

_OWN = re.compile(r"/outlive-\d+-([0-9a-f]+)-\d+[a-z]?")
_numbers = itertools.count()
_kept: dict[str, mmap.mmap] = {}  # Windows: a segment goes with its last map, so its maker keeps one


def create(size: int, name: str = "outlive") -> Handle:
    """The name of `size` bytes of fresh, zeroed shared memory."""
    while True:
        kind = name.rpartition("-")[2][:1]  # cell, box, message
        handle = f"/{_prefix_of(os.getpid())}{next(_numbers)}{kind}"
        try:
            if _WINDOWS:
                _kept[handle] = mmap.mmap(-1, max(1, size), tagname=handle)  # type: ignore[call-arg]
                return handle
            fd = _posixshmem.shm_open(handle, os.O_CREAT | os.O_EXCL | os.O_RDWR, mode=0o600)
        except FileExistsError:  # left by a dead process that had our number
            continue
        try:
            os.ftruncate(fd, max(1, size))
        except BaseException:
            _posixshmem.shm_unlink(handle)
            raise
        finally:
            os.close(fd)
        return handle


def _prefix_of(pid: int) -> str:
    """What names begin with that a process gives. macOS allows 31 characters.

    The secret that processes started by `multiprocessing` have in common is in it: a process of another container, or
    of another program, may have the same number, and its memory must not be swept.
    """
    return f"outlive-{pid}-{_secret()}-"


def _secret() -> str:
    return hashlib.sha256(b"outlive" + multiprocessing.current_process().authkey).hexdigest()[:6]


def attach(handle: Handle, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory behind a name, mapped for as long as anything looks at it."""
    return _attach(handle, size, map_descriptor)


def _attach(
    handle: Handle, size: int | None, mapped: Callable[[int, int | None], ctypes.Array[ctypes.c_ubyte]]
) -> ctypes.Array[ctypes.c_ubyte]:
    if _WINDOWS:
        assert size is not None
        return (ctypes.c_ubyte * size).from_buffer(mmap.mmap(-1, size, tagname=str(handle)))  # type: ignore[call-arg]
    fd = _posixshmem.shm_open(str(handle), os.O_RDWR, mode=0o600)
    try:
        return mapped(fd, size)
    finally:
        os.close(fd)


def attach_whole(handle: Handle, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """Attach memory that another process made: ValueError where there is less of it than was said, NoRoomError where
    this process has no room for it."""
    return _attach(handle, size, map_whole)


def adopt(handle: Handle, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """The same, and take its name away."""
    try:
        return attach_whole(handle, size)
    finally:
        discard(handle)


def let_go(handle: Handle) -> None:
    """The memory was handed on: whoever adopts it takes the name away."""
    _kept.pop(str(handle), None)


def discard(handle: Handle) -> None:
    """Take a name away; whoever has attached the memory keeps it."""
    _kept.pop(str(handle), None)
    if not _WINDOWS:
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink(str(handle))


def is_own(handle: Handle) -> bool:
    """Whether a handle that came may be one of ours: it is used, and taken away, only then."""
    found = _OWN.fullmatch(str(handle))
    return found is not None and found[1] == _secret()


def sweep(pid: int) -> None:
    """Take away the names that a dead process had given and nobody adopted. Only Linux lists them."""
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/shm"):
            if name.startswith(_prefix_of(pid)):
                discard(f"/{name}")


def publish(handle: Handle, size: int) -> None:
    """Many will attach this memory, now and later, by its name. Room is taken at once: a full /dev/shm is an
    OSError here, and would be the death of whoever writes there (SIGBUS) later.
    """
    if _WINDOWS:
        return
    fd = _posixshmem.shm_open(str(handle), os.O_RDWR, mode=0o600)
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, max(1, size))
    except BaseException:
        discard(handle)
        raise
    finally:
        os.close(fd)
    resource_tracker.register(str(handle), "shared_memory")


def withdraw(handle: Handle) -> None:
    """The name goes, if we gave it; whoever has attached the memory keeps it."""
    if str(handle).startswith(f"/{_prefix_of(os.getpid())}"):
        discard(handle)
        if not _WINDOWS:
            resource_tracker.unregister(str(handle), "shared_memory")


def ticket(handle: Handle) -> Any:
    """What a pickle carries of a handle: the name."""
    return handle


def redeem(ticket: Any, mark: bytes, size: int) -> Handle | None:
    """The name, if the memory behind it begins with `mark`; None where there is none any more."""
    try:
        return ticket if bytes(attach(ticket, size)[: len(mark)]) == mark else None
    except OSError:
        return None
