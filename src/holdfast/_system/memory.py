"""Shared memory without a name: made, mapped, and gone with its last descriptor.

Reads   nothing.
Writes  anonymous memory files (memfd).
Never   /dev/shm, nor anything that a killed process could leave behind.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

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


def create(size: int, name: str = "holdfast") -> int:
    """A descriptor of `size` bytes of fresh, zeroed shared memory."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, size: int | None = None) -> ctypes.Array[ctypes.c_ubyte]:
    """The memory behind a descriptor, mapped for as long as anything looks at it; the descriptor may be closed.

    Not through `mmap.mmap`: that keeps a descriptor of its own for each map, and a consumer that keeps
    a thousand batches would run out of them.
    """
    size = os.fstat(fd).st_size if size is None else size
    address = _libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if address in (None, ctypes.c_void_p(-1).value):
        number = ctypes.get_errno()
        raise OSError(number, f"cannot map {size} bytes of shared memory: {os.strerror(number)}")
    mapped = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(mapped, _libc.munmap, address, size).atexit = False
    return mapped
