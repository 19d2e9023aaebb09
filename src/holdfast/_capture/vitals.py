"""A worker's memory, descriptors and threads over its life, as its watchman sees them.

Reads   /proc/PID, at most once a second.
Writes  nothing.
Never   more than a thousandth of a processor: what is dear to read is read less often.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from holdfast.evidence import MemorySample

INTERVAL_S = 1.0
_MOST_SAMPLES = 240
_DEAR = 1000  # a look that took so long is not repeated for this many times as long


@dataclass(frozen=True)
class _Sample:
    at: float
    resident_bytes: int
    private_bytes: int | None


class Vitals:
    """Of one worker; `look` as often as you like."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._samples: list[_Sample] = []
        self._every = 1  # of so many looks one is kept: a long life is told in as many samples as a short one
        self._looks = 0
        self._next = 0.0
        self._next_private = 0.0
        self.descriptors: int | None = None
        self.threads: int | None = None
        self.peak_bytes: int | None = None

    def look(self, now: float) -> None:
        if now < self._next:
            return
        self._next = now + INTERVAL_S
        try:
            status = _status(self._pid)
            resident = status["VmRSS"] * 1024
            self.peak_bytes = status["VmHWM"] * 1024
            self.threads = status["Threads"]
            self.descriptors = len(os.listdir(f"/proc/{self._pid}/fd"))
        except (OSError, KeyError, ValueError):
            return  # it is gone, or going
        self._looks += 1
        if self._looks % self._every:
            return
        self._samples.append(_Sample(now, resident, self._private(now)))
        if len(self._samples) > _MOST_SAMPLES:
            del self._samples[1::2]
            self._every *= 2

    def _private(self, now: float) -> int | None:
        if now < self._next_private:
            return None
        begun = time.perf_counter()
        private = private_bytes(self._pid)
        self._next_private = now + _DEAR * (time.perf_counter() - begun)
        return private

    def samples(self, now: float) -> tuple[MemorySample, ...]:
        return tuple(MemorySample(round(now - s.at, 3), s.resident_bytes, s.private_bytes) for s in self._samples)


def _status(pid: int) -> dict[str, int]:
    with open(f"/proc/{pid}/status", "rb") as file:
        found = {}
        for line in file:
            name, _, value = line.partition(b":")
            if name in (b"VmRSS", b"VmHWM", b"Threads"):
                found[name.decode()] = int(value.split()[0])
        return found


def own_bytes(pid: int | str) -> int | None:
    """The same without shared memory that nobody else has touched yet: cells are counted by themselves."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            sizes = {line.partition(b":")[0]: int(line.split()[1]) for line in list(file)[1:]}
    except (OSError, ValueError, IndexError):
        return None
    private = sizes.get(b"Private_Clean", 0) + sizes.get(b"Private_Dirty", 0) + sizes.get(b"Private_Hugetlb", 0)
    return 1024 * max(0, private - sizes.get(b"Pss_Shmem", 0))


def private_bytes(pid: int) -> int | None:
    """What would be free if the process went: its private pages, clean and dirty (USS)."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return 1024 * sum(int(line.split()[1]) for line in file if line.startswith(b"Private_"))
    except (OSError, ValueError, IndexError):
        return None
