"""Control groups, v1 and v2: which ones this process is in, and what their small files say.

Reads   /proc/self/mountinfo, /proc/self/cgroup, files of the groups; below another root in tests.
Writes  nothing.
Never   fails: what is not there, or may not be read, is empty or None.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Folder:
    """One group, as a folder of a controller."""

    path: str
    is_v2: bool


def own_folders(controller: str, root: str = "/") -> list[Folder]:
    """The groups of this process, innermost first, as far up as can be seen from here."""
    mounts: dict[bool, tuple[str, str]] = {}  # by version: which group is mounted, and where
    for line in text(f"{root}/proc/self/mountinfo").splitlines():
        place, _, kind = line.partition(" - ")
        words, options = place.split(), kind.split()
        if len(words) < 5 or len(options) < 3:
            continue
        if options[0] == "cgroup2" or (options[0] == "cgroup" and controller in options[2].split(",")):
            mounts.setdefault(options[0] == "cgroup2", (words[3], words[4]))
    is_v2 = False not in mounts
    if is_v2 not in mounts:
        return []
    mounted, at = mounts[is_v2]
    path = _own_path(controller, root, is_v2)
    # In a container the path may be the host's, and what is mounted here its end, or a part of it.
    inner = path[len(mounted.rstrip("/")) :] if (path + "/").startswith(mounted.rstrip("/") + "/") else ""
    parts = [part for part in inner.split("/") if part]
    if ".." in parts:
        parts = []
    top = f"{root.rstrip('/')}{at}"
    return [Folder("/".join([top, *parts[:depth]]), is_v2) for depth in range(len(parts), -1, -1)]


def _own_path(controller: str, root: str, is_v2: bool) -> str:
    for line in text(f"{root}/proc/self/cgroup").splitlines():
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if (hierarchy == "0") if is_v2 else (controller in controllers.split(",")):
            return path
    return "/"


def text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""


def number(path: str) -> int | None:
    """What a file of one number says; None: it is not there, or says «max»."""
    found = text(path).strip()
    return int(found) if found.isdigit() else None


def counter(path: str, name: str) -> int | None:
    """Of a file with lines of «name value»."""
    found = re.search(rf"^{name} (\d+)$", text(path), re.M)
    return int(found[1]) if found else None
