"""What a worker does with its time, as its watchman sees it: computes, wants a CPU, waits, or has nothing to do.

Reads   /proc/PID/schedstat and /proc/PID/stat; the black box, for how long it had no task.
Writes  shares of the last seconds to the black box, where the trainer finds them.
Never   asks the worker: one that is starved would not answer.

    one second  ├── on a CPU ──┼── starved ──┼── waiting ──┼── idle ──┤
                   schedstat: ran, queued       the rest      black box

A waiting worker has a task and sleeps: it reads, or somebody else has to answer, or it waits for a lock. «Disk» is how
often it was found asleep in the kernel without being able to wake (state D): that is what waiting for disks looks like.
"""

from __future__ import annotations

import os
from collections import deque
from typing import NamedTuple

from outlive._capture.blackbox import BlackBox
from outlive.statistics import Load

WINDOW_S = 5.0
_FEWEST = 2  # looks, however long ago the first of them was
_TICK_NS = 1_000_000_000 // (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)


class LoadReading(NamedTuple):
    at_ns: int
    ran_ns: int  # the main thread
    queued_ns: int  # the main thread, for a CPU
    cpu_ns: int  # all threads
    idle_ns: int
    on_disk: bool


class LoadMeter:
    """Of one worker."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._looks: deque[LoadReading] = deque()

    def look(self, now: float, box: BlackBox, fields: list[bytes]) -> Load | None:
        """Shares since the first look that is remembered; None: there is but this one.

        `fields`: of its stat file, which the caller needs too.
        """
        at_ns, looks = int(now * 1e9), self._looks
        cpu_ns = (int(fields[11]) + int(fields[12])) * _TICK_NS
        ran, queued = self._scheduled(cpu_ns)
        looks.append(LoadReading(at_ns, ran, queued, cpu_ns, box.idle_ns(at_ns), fields[0] == b"D"))
        while len(looks) > _FEWEST and at_ns - looks[1].at_ns >= WINDOW_S * 1e9:
            looks.popleft()
        return shares(looks)

    def _scheduled(self, cpu_ns: int) -> tuple[int, int]:
        """How long its main thread ran and was queued; where nobody keeps that (gVisor), as if it had never queued."""
        try:
            ran, queued = read(f"/proc/{self.pid}/schedstat").split()[:2]
        except OSError:
            return cpu_ns, 0
        return int(ran), int(queued)


def shares(looks: deque[LoadReading]) -> Load | None:
    first, last = looks[0], looks[-1]
    span = last.at_ns - first.at_ns
    if span <= 0:
        return None

    def share(before: int, after: int) -> float:
        return min(1.0, max(0.0, (after - before) / span))

    ran = share(first.ran_ns, last.ran_ns)
    starved = min(1.0 - ran, share(first.queued_ns, last.queued_ns))
    idle = min(1.0 - ran - starved, share(first.idle_ns, last.idle_ns))
    # Threads of its own work while the main thread waits for them: that is no waiting.
    on_cpu = max(ran, (last.cpu_ns - first.cpu_ns) / span)
    waiting = max(0.0, 1.0 - min(1.0, on_cpu) - starved - idle)
    disk = sum(look.on_disk for look in looks) / len(looks)
    return Load(on_cpu, starved, waiting, idle, disk, span / 1e9)


def stat_fields(pid: int) -> list[bytes]:
    """What /proc/PID/stat says after the name: state, parent, …"""
    return read(f"/proc/{pid}/stat").rpartition(b")")[2].split()


def read(path: str) -> bytes:
    """A small file, without the layers of `open`: they cost more than the kernel does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)
