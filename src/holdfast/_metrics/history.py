"""The event file: a line of JSON for each thing that happened to a job, and for how it stands now and then.

Reads   the file and the one before it, from where a reader was.
Writes  lines at the end; at a certain size the file becomes the earlier one, and another begins.
Never   keeps a descriptor: a fork would inherit it.

Ticks are a second apart at first, and further apart the longer the job runs: a long run's history has as much room as
a short one's.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from holdfast._metrics import runtime

MOST_BYTES = 4 << 20  # of one file
TICK_S = 1.0
_TICKS = 2000  # a run's ticks are at least a so manieth part of its length apart


class Writer:
    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._path = folder / runtime.EVENTS
        self._earlier = folder / runtime.EARLIER
        self._most = most_bytes
        self._size = 0
        self.number = 0

    def write(self, events: list[dict[str, Any]]) -> None:
        """Each gets a number and, unless it has one, a time."""
        lines = []
        for event in events:
            self.number += 1
            lines.append(json.dumps({"n": self.number, "time": time.time(), **event}, separators=(",", ":")) + "\n")
        body = "".join(lines).encode("utf-8", "replace")
        if self._size and self._size + len(body) > self._most:
            os.replace(self._path, self._earlier)
            self._size = 0
        fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(fd, body)
        finally:
            os.close(fd)
        self._size += len(body)


def next_tick(began: float, now: float) -> float:
    return now + max(TICK_S, (now - began) / _TICKS)


class Reader:
    """Reads on where it was, as long as it is asked for what comes next."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._place = (0, 0, 0)  # the file's inode, how far, and the number of the last event before that

    def events(self, after: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        inode, at, last = self._place
        found: list[dict[str, Any]] = []
        if last != after or not self._is_current(inode):
            self._take(self._folder / runtime.EARLIER, 0, after, limit, found)
            at = 0
        if len(found) < limit:
            inode, at = self._take(self._folder / runtime.EVENTS, at, after, limit, found)
        reached = found[-1]["n"] if found else after
        self._place = (inode, at, reached)
        return found, reached

    def has_news(self) -> bool:
        """Whether there is more than was read: a look at the file's size."""
        inode, at, _ = self._place
        try:
            found = os.stat(self._folder / runtime.EVENTS)
        except OSError:
            return inode != 0
        return (found.st_ino, found.st_size) != (inode, at)

    def _is_current(self, inode: int) -> bool:
        try:
            return os.stat(self._folder / runtime.EVENTS).st_ino == inode
        except OSError:
            return False

    def _take(self, path: Path, at: int, after: int, limit: int, found: list[dict[str, Any]]) -> tuple[int, int]:
        """Whole lines from there on; a half one, of a writer that is at it or was killed, is left."""
        try:
            with open(path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                file.seek(at)
                for line in file:
                    if len(found) >= limit or not line.endswith(b"\n"):
                        break
                    at += len(line)
                    try:
                        event = json.loads(line)
                        if event["n"] > after:
                            found.append(event)
                    except (ValueError, KeyError, TypeError):
                        continue  # the line that a full disk cut short, and what was written behind it
                return inode, at
        except OSError:
            return 0, at
