"""Looks at the file that a worker had mapped where a bus error struck: how long it is now, and what room its disk has.

Reads   the file's size, its file system, /proc/mounts.
Writes  nothing.
Never   opens the file: opening a pipe or a device may block, or do something.
"""

from __future__ import annotations

import contextlib
import os
import stat

from outlive.crashes import SIGBUS, CrashRecord
from outlive.evidence import MappedFile

_DELETED = " (deleted)"


def look(crash: CrashRecord | None) -> MappedFile | None:
    """The file behind the address of a bus error; None where there is no such thing."""
    if crash is None or crash.signal != SIGBUS or crash.address is None:
        return None
    region = crash.region_of(crash.address)
    if region is None or not region.path.startswith("/"):
        return None
    offset = region.offset + crash.address - region.start
    if region.path.endswith(_DELETED):
        return MappedFile(region.path.removesuffix(_DELETED), deleted=True, offset_bytes=offset)
    try:
        found = os.stat(region.path)
    except OSError:  # gone by now, or in a namespace of the worker's own
        return MappedFile(region.path, deleted=True, offset_bytes=offset)
    free = None
    with contextlib.suppress(OSError):
        room = os.statvfs(region.path)
        free = room.f_bavail * room.f_frsize
    size = found.st_size if stat.S_ISREG(found.st_mode) else None
    return MappedFile(region.path, False, size, offset, _file_system(region.path), free)


def _file_system(path: str) -> str:
    """Its kind, «ext4»; empty: nobody knows."""
    try:
        with open("/proc/self/mounts", encoding="utf-8", errors="surrogateescape") as file:
            mounts = [line.split(" ") for line in file]
    except OSError:
        return ""
    best, kind = "", ""
    for _, point, found, *_ in mounts:
        point = point.replace("\\040", " ")
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):  # of two on one place the later one is seen
            best, kind = point, found
    return kind
