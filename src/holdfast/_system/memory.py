"""Shared memory without a name: made, mapped, and gone with its last descriptor.

Reads   nothing.
Writes  anonymous memory files (memfd).
Never   /dev/shm, nor anything that a killed process could leave behind.
"""

from __future__ import annotations

import mmap
import os


def create(size: int, name: str = "holdfast") -> int:
    """A descriptor of `size` bytes of fresh, zeroed shared memory."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd


def attach(fd: int, size: int | None = None) -> mmap.mmap:
    """The memory behind a descriptor, mapped; the descriptor may be closed afterwards."""
    return mmap.mmap(fd, os.fstat(fd).st_size if size is None else size)
