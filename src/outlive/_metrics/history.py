"""The event file: a line of JSON for each thing that happened to a job, and for how it stands now and then.

Reads   the file and the one before it, from where a reader was.
Writes  lines at the end; at a certain size the file becomes the earlier one, and another begins.
Never   keeps a descriptor: a fork would inherit it.

Ticks are a second apart at first, and further apart the longer the job runs: a long run's history has as much room as
a short one's.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any, BinaryIO

from outlive._metrics import runtime
from outlive._metrics.fold import is_sound

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
        self._read = (-1, -1)  # which file was last read, and of what size
        self._looked: dict[int, int] = {}  # by inode, how far lines have been looked at
        self.unreadable = 0  # lines that are no events, or not as this version writes them

    def events(self, after: int, limit: int) -> tuple[list[dict[str, Any]], int]:
        inode, at, last = self._place
        found: list[dict[str, Any]] = []
        with contextlib.suppress(OSError), open(self._folder / runtime.EVENTS, "rb") as file:
            current = os.fstat(file.fileno())
            self._read = current.st_ino, current.st_size
            if last != after or current.st_ino != inode:
                at = 0
                with contextlib.suppress(OSError), open(self._folder / runtime.EARLIER, "rb") as earlier:
                    self._take(earlier, 0, after, limit, found)
            if len(found) < limit:
                inode, at = current.st_ino, self._take(file, at, after, limit, found)
        reached = found[-1]["n"] if found else after
        self._place = (inode, at, reached)
        return found, reached

    def has_news(self) -> bool:
        """Whether the file has changed since it was read, if only by half a line that will never be whole."""
        try:
            current = os.stat(self._folder / runtime.EVENTS)
        except OSError:
            return False
        return (current.st_ino, current.st_size) != self._read

    def _take(self, file: BinaryIO, at: int, after: int, limit: int, found: list[dict[str, Any]]) -> int:
        """Whole lines from there on; a half one, of a writer that is at it or was killed, is left."""
        file.seek(at)
        inode = os.fstat(file.fileno()).st_ino
        looked = self._looked.get(inode, 0)
        for line in file:
            if len(found) >= limit or not line.endswith(b"\n"):
                break
            at += len(line)
            event = _event(line)
            if event is None:
                self.unreadable += at > looked
            elif event["n"] > after:
                found.append(event)
        other = [pair for pair in self._looked.items() if pair[0] != inode][-1:]
        self._looked = {**dict(other), inode: max(looked, at)}
        return at


def _event(line: bytes) -> dict[str, Any] | None:
    """None: the line that a full disk cut short, and what was written behind it; or one of another version."""
    try:
        event: dict[str, Any] = runtime.parse(line)
    except ValueError:
        return None
    return event if is_sound(event) else None
