"""What the descriptors of another process are: a path, a pipe and who has its other end, a socket and its peer.

Reads   /proc/PID: links of descriptors, tables of sockets, mounts.
Writes  nothing.
Never   the file itself: a file system that does not answer would hold us up as well.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
from collections.abc import Iterator

_LISTENING = "0A"
_MOST_DESCENDANTS = 64
_MOST_SOCKETS = 20_000  # a busy host has more, and the kernel takes its time to list them
_REMOTE = ("nfs", "cifs", "smb", "fuse", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "9p", "afs")


def describe(pid: int, fd: int) -> str:
    """«/data/a.bin», «tcp 10.0.0.3:443», «a pipe from process 812 (ffmpeg)»; "" where nobody knows."""
    try:
        link = os.readlink(f"/proc/{pid}/fd/{fd}")
    except OSError:
        return ""
    if link.startswith("socket:["):
        return _socket(pid, link[len("socket:[") : -1])
    if link.startswith("pipe:["):
        return _pipe(pid, link)
    if link.startswith("anon_inode:"):
        return link.removeprefix("anon_inode:").strip("[]")
    return describe_path(pid, link)


def describe_path(pid: int, path: str) -> str:
    """A path, with its file system where that is somewhere else."""
    try:
        with open(f"/proc/{pid}/mounts") as file:
            mounts = [line.split()[:3] for line in file]
    except OSError:
        return path
    best = max(
        (m for m in mounts if len(m) == 3 and (path == m[1] or path.startswith(m[1].rstrip("/") + "/"))),
        key=lambda m: len(m[1]),
        default=None,
    )
    if best is not None and best[2].startswith(_REMOTE):
        return f"{path} (on {best[2]} {best[0]})"
    return path


def epoll_members(pid: int, fd: int) -> list[int]:
    """The descriptors that an epoll descriptor waits for."""
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}") as file:
            return [int(line.split()[1]) for line in file if line.startswith("tfd:")]
    except (OSError, ValueError, IndexError):
        return []


def describe_process(pid: int) -> str:
    """«process 812 (ffmpeg -i a.mp4)»."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")
        if not words:
            with open(f"/proc/{pid}/comm") as file:
                words = file.read().strip()
    except OSError:
        return f"process {pid}"
    words = " ".join(words.split())
    return f"process {pid} ({words if len(words) <= 60 else words[:59] + '…'})"


def holder_of_awaited_lock(pid: int) -> str:
    """Who holds the lock on a file that a process waits for; "" where the kernel does not say."""
    holders: dict[str, str] = {}
    try:
        with open("/proc/locks") as file:
            for line in file:  # «7: FLOCK ADVISORY WRITE 812 …», and under it «7: -> FLOCK ADVISORY WRITE 815 …»
                number, *words = line.split()
                if words[0] != "->":
                    holders.setdefault(number, words[3])
                elif words[4] == str(pid) and number in holders:
                    return describe_process(int(holders[number]))
    except (OSError, IndexError, ValueError):
        pass  # with less detail
    return ""


def children_of(pid: int) -> list[int]:
    """Children of all threads of a process."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as file:
                found += [int(word) for word in file.read().split()]
    except (OSError, ValueError):
        pass  # gone meanwhile, or a kernel without this file: then with less detail
    return found


def _pipe(pid: int, link: str) -> str:
    waiting, seen = children_of(pid), 0
    while waiting and seen < _MOST_DESCENDANTS:
        child = waiting.pop(0)
        seen += 1
        try:
            links = [os.readlink(f"/proc/{child}/fd/{name}") for name in os.listdir(f"/proc/{child}/fd")]
        except OSError:
            continue
        if link in links:
            return f"a pipe to or from {describe_process(child)}"
        waiting += children_of(child)
    return "a pipe"


def _socket(pid: int, inode: str) -> str:
    for family in ("tcp", "tcp6", "udp", "udp6"):
        for fields in _table(pid, family):
            if len(fields) > 9 and fields[9] == inode:
                kind = family[:3]
                if fields[3] == _LISTENING and kind == "tcp":
                    return f"{kind} listening on {_address(fields[1])}"
                return f"{kind} {_address(fields[2])}"
    for fields in _table(pid, "unix"):
        if len(fields) > 6 and fields[6] == inode:
            return f"unix socket {fields[7]}" if len(fields) > 7 else "a unix socket"
    return "a socket"


def _table(pid: int, name: str) -> Iterator[list[str]]:
    try:
        with open(f"/proc/{pid}/net/{name}") as file:
            for line in itertools.islice(file, 1, _MOST_SOCKETS):
                yield line.split()
    except OSError:
        return  # no such family here


def _address(text: str) -> str:
    """«0100007F:1F90» → «127.0.0.1:8080»."""
    host, _, port = text.partition(":")
    words = [int(host[i : i + 8], 16) for i in range(0, len(host), 8)]
    packed = b"".join(struct.pack("=I", word) for word in words)
    if len(packed) == 4:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"
