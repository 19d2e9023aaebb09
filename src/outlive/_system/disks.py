"""Which file system is full, when somebody could not write.

Reads   the exception, the local variables of its frames for paths and files, and file systems that these are on.
Writes  nothing.
Never   a file system that has nothing to do with it: one of a server that is away might never answer.
"""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from outlive.evidence import SHORT_OF, Full

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_SAID = re.compile(  # by those who hide the system's own error: the C library, torch, NumPy, torch.save
    r"No space left on device|Disk quota exceeded|\d+ requested and \d+ written"
    r"|inline_container\.cc:\d+\] \. unexpected pos"
)
_MOST_PATHS = 64


def is_about_room(error: BaseException, text: str) -> bool:
    return (isinstance(error, OSError) and error.errno in _NO_ROOM) or _SAID.search(text) is not None


def full_one(error: BaseException, text: str) -> Full | None:
    """The file system that had no room for what this exception is about; None: nobody can say which one it was.

    Where none is full (any more: a file that was too large for it may be gone) it is the one that was likely used.
    """
    used = list(_used(error, text))[:_MOST_PATHS]
    seen: dict[str, Full] = {}
    for path in used or (tempfile.gettempdir(), os.getcwd(), "/dev/shm"):
        mount = _mount_of(path)
        if mount in seen:
            continue
        try:
            found = os.statvfs(mount)
        except OSError:
            continue
        free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        no_files = found.f_files > 0 and found.f_favail == 0
        seen[mount] = Full(mount, size, free, no_files and free >= SHORT_OF)
        if no_files or free < SHORT_OF:
            return seen[mount]
    return seen.get(_mount_of(used[0])) if used else None


def _used(error: BaseException, text: str) -> Iterator[str]:
    """Where it was writing, the likeliest first: as the error says, then as the frames' variables do, from within."""
    for name in (getattr(error, "filename", None), getattr(error, "filename2", None)):
        if isinstance(name, str):
            yield name
    if "shared memory" in text:
        yield "/dev/shm"
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        frames.append(traceback.tb_frame)
        traceback = traceback.tb_next
    for frame in reversed(frames):
        yield from filter(None, map(_path_in, list(frame.f_locals.values())))


def _path_in(value: Any) -> str:
    """A path that an object is, or a file's; empty: it is neither."""
    try:
        if not isinstance(value, (str, os.PathLike)):
            value = value.name if hasattr(value, "read") or hasattr(value, "write") else ""
        path = os.fspath(value)
        return path if isinstance(path, str) and os.path.isabs(path) and "\0" not in path else ""
    except Exception:  # somebody's own __getattr__ or __fspath__
        return ""


def _mount_of(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.ismount(path):
        path = os.path.dirname(path)
    return path
