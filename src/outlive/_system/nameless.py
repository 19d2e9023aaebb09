"""Shared memory without a name: made, mapped, and gone with its last descriptor.

Reads   nothing.
Writes  anonymous memory files (memfd).
Never   /dev/shm, nor anything that a killed process could leave behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from multiprocessing import context, reduction
from typing import Any, TypeAlias

from outlive._system.address_space import NoRoomError, machine_bytes

Handle: TypeAlias = int | str  # here a descriptor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_REMOVE = getattr(mmap, "MADV_REMOVE", -1)
_MOST = machine_bytes()


def create(size: int, name: str = "outlive") -> Handle:
    return descriptor(size, name)


def descriptor(size: int, name: str = "outlive") -> int:
    """A descriptor of `size` bytes of fresh, zeroed shared memory."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(handle: Handle, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory behind a handle, mapped for as long as anything looks at it; the handle may be let go."""
    return map_descriptor(int(handle), size)


def attach_whole(handle: Handle, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """Attach memory that another process made: ValueError where there is less of it than was said, NoRoomError where
    this process has no room for it."""
    return map_whole(int(handle), size)


def adopt(handle: Handle, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """The same, and let go of the handle, which came with it."""
    try:
        return attach_whole(handle, size)
    finally:
        os.close(int(handle))


def let_go(handle: Handle) -> None:
    """The memory was attached, and its handle handed on: here it is needed no longer."""
    os.close(int(handle))


def discard(handle: Handle) -> None:
    """Nobody was, or will be, told of this memory."""
    os.close(int(handle))


def is_own(handle: Handle) -> bool:
    """Whether a handle that came may be one of ours: a descriptor that came along is the receiver's, whatever it is."""
    return isinstance(handle, int)


def punch(mapped: ctypes.Array[ctypes.c_ubyte], at: int, size: int) -> int:
    """Give whole pages of attached memory back to the system, for all who have it attached; how many bytes it took."""
    done = _REMOVE >= 0 and _libc.madvise(ctypes.addressof(mapped) + at, size, _REMOVE) == 0
    return size if done else 0


def sweep(pid: int) -> None:
    """What a dead process had made and not handed on. Nothing, here: it went with its descriptors."""


def publish(handle: Handle, size: int) -> None:
    """Many will attach this memory, now and later. Nothing to do: it goes with the last descriptor of it."""


def withdraw(handle: Handle) -> None:
    """We attach it no more, nor hand it on."""
    os.close(int(handle))


def ticket(handle: Handle) -> Any:
    """What a pickle carries of a handle: our number for it, and a copy where a process is being started with it."""
    started = context.get_spawning_popen() is not None
    return os.getpid(), int(handle), reduction.DupFd(int(handle)) if started else None


def redeem(ticket: Any, mark: bytes, size: int) -> Handle | None:
    """A handle of our own for memory that begins with `mark`; None where the ticket leads to it no longer."""
    pid, number, copy = ticket
    if copy is not None:
        # Not closed where it is another's by now: this ticket was redeemed before, and its number given anew.
        with contextlib.suppress(OSError, IndexError, TypeError):
            fd = int(copy.detach())
            if os.pread(fd, len(mark), 0) == mark:
                os.set_inheritable(fd, False)
                return fd
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.pread(fd, len(mark), 0) == mark:
            return fd
    except OSError:
        pass  # a pipe, a terminal: not ours, then
    os.close(fd)
    return None


def map_whole(fd: int, size: int | None) -> ctypes.Array[ctypes.c_ubyte]:
    """Map memory of another process's: who touches what is not there would die of it."""
    if size is not None and not 0 < size <= min(os.fstat(fd).st_size, _MOST):
        raise ValueError(f"no shared memory of {size} bytes")
    try:
        return map_descriptor(fd, size)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise NoRoomError from error


def map_descriptor(fd: int, size: int | None, writable: bool = True) -> ctypes.Array[ctypes.c_ubyte]:
    """Not through `mmap.mmap`: that keeps a descriptor of its own for each map, and a consumer that keeps
    a thousand batches would run out of them.
    """
    size = os.fstat(fd).st_size if size is None else size
    access = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
    address = _libc.mmap(None, size, access, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of shared memory: {os.strerror(number)}")
    mapped = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return mapped
