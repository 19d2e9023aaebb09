"""A worker's memory, descriptors, threads and use of its time over its life, as its watchman sees them.

Reads   /proc/PID, at most once a second.
Writes  what the trainer may want to know at any time to the worker's black box.
Never   more than half a percent of a processor for all workers together: what is dear to read is read less often.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass

from holdfast._capture.blackbox import BlackBox
from holdfast._capture.load import LoadMeter, read
from holdfast.evidence import MemorySample

INTERVAL_S = 1.0
_CHILDHOOD_S = 0.3  # looking takes a lock of the process that is looked at: not while it starts
_MOST_SAMPLES = 240
_FIGURES = re.compile(rb"^(VmRSS|VmHWM|RssShmem|Threads):\s*(\d+)", re.M)
_DEAR = 200  # dear looks that took so long are not repeated for this many times as long


@dataclass(frozen=True)
class Sample:
    """One look at a worker."""

    at: float
    batches: int  # it had done
    resident_bytes: int
    private_bytes: int | None  # None: too dear to know this time
    cell_bytes: int


class Vitals:
    """Of one worker; `look` as often as you like."""

    def __init__(self, pid: int, born: float = 0.0, box: BlackBox | None = None) -> None:
        self._pid = pid
        self._box = box
        self._load = LoadMeter(pid)
        self.kept: list[Sample] = []
        self._every = 1  # of so many looks one is kept: a long life is told in as many samples as a short one
        self._looks = 0
        self._next = born + (_CHILDHOOD_S if born else 0.0)
        self._next_private = 0.0
        self.descriptors: int | None = None
        self.threads: int | None = None
        self.peak_bytes: int | None = None
        self._resident_bytes = self._cell_bytes = 0
        self._known = (0, 0)  # when its private memory was last known: that, and what was resident

    def look(self, now: float, batches: int = 0, workers: int = 1) -> bool:
        """Look, if it is time to; whether there is a new sample. `workers`: so many share the time for it."""
        if now < self._next:
            return False
        self._next = now + INTERVAL_S
        try:
            status = _status(self._pid)
            resident = status["VmRSS"] * 1024
            self.peak_bytes = status["VmHWM"] * 1024
            self.threads = status["Threads"]
            self.descriptors = len(os.listdir(f"/proc/{self._pid}/fd"))
            if self._box is not None:
                self._box.note_counts(self.descriptors, self.threads)
                load = self._load.look(now, self._box)
                if load is not None:
                    self._box.note_load(load)
        except (OSError, KeyError, ValueError, IndexError):
            return False  # it is gone, or going
        self._resident_bytes, self._cell_bytes = resident, status.get("RssShmem", 0) * 1024
        self._looks += 1
        if self._looks % self._every:
            return False
        self.kept.append(Sample(now, batches, resident, self._private(now, workers), self._cell_bytes))
        if len(self.kept) > _MOST_SAMPLES:
            del self.kept[1::2]
            self._every *= 2
        return True

    def _private(self, now: float, workers: int) -> int | None:
        if now < self._next_private:
            return None
        begun = time.thread_time()  # not the clock: on a busy machine that counts what others do
        private = own_bytes(self._pid)
        self._next_private = now + _DEAR * workers * (time.thread_time() - begun)
        if private is not None:
            self._known = (private, self._resident_bytes)
        return private

    @property
    def footprint_bytes(self) -> int:
        """About what the machine would have back without it, cells included: what came since the last dear look is
        taken for its own."""
        private, resident = self._known
        return max(0, private + self._resident_bytes - resident) + self._cell_bytes

    def samples(self, now: float) -> tuple[MemorySample, ...]:
        return tuple(MemorySample(round(now - s.at, 3), s.resident_bytes, s.private_bytes) for s in self.kept)


def _status(pid: int) -> dict[str, int]:
    return {name.decode(): int(value) for name, value in _FIGURES.findall(read(f"/proc/{pid}/status"))}


def own_bytes(pid: int | str) -> int | None:
    """What would be free if the process went (USS), without cells, which are counted by themselves.

    A cell that only the worker has touched yet is private to the kernel: shared memory is taken off.
    """
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            sizes = {line.partition(b":")[0]: int(line.split()[1]) for line in list(file)[1:]}
    except (OSError, ValueError, IndexError):
        return None
    private = sizes.get(b"Private_Clean", 0) + sizes.get(b"Private_Dirty", 0) + sizes.get(b"Private_Hugetlb", 0)
    return 1024 * max(0, private - sizes.get(b"Pss_Shmem", 0))
