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
from dataclasses import dataclass

from holdfast._capture.blackbox import BlackBox
from holdfast.statistics import Load

WINDOW = 5  # looks, which are a second apart
_TICK_NS = 1_000_000_000 // (os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100)


@dataclass(frozen=True)
class _Look:
    at_ns: int
    ran_ns: int  # the main thread
    queued_ns: int  # the main thread, for a CPU
    cpu_ns: int  # all threads
    idle_ns: int
    on_disk: bool


class LoadMeter:
    """Of one worker."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._looks: deque[_Look] = deque(maxlen=WINDOW + 1)

    def look(self, now: float, box: BlackBox) -> Load | None:
        """Shares since the first look that is remembered; None: there is but this one. Raises what reading raises."""
        at_ns = int(now * 1e9)
        ran, queued = read(f"/proc/{self._pid}/schedstat").split()[:2]
        fields = read(f"/proc/{self._pid}/stat").rpartition(b")")[2].split()
        cpu_ns = (int(fields[11]) + int(fields[12])) * _TICK_NS
        self._looks.append(_Look(at_ns, int(ran), int(queued), cpu_ns, box.idle_ns(at_ns), fields[0] == b"D"))
        return shares(self._looks)


def shares(looks: deque[_Look]) -> Load | None:
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


def read(path: str) -> bytes:
    """A small file, without the layers of `open`: they cost more than the kernel does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 8192)
    finally:
        os.close(fd)
