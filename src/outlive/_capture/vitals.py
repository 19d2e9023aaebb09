"""A worker's memory, descriptors, threads and use of its time over its life, as its watchman sees them.

Reads   /proc/PID, at most once a second.
Writes  what the trainer may want to know at any time to the worker's black box.
Never   more than half a percent of a processor for all workers together: what is dear to read is read less often.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from dataclasses import dataclass

from outlive._capture.blackbox import BlackBox
from outlive._capture.load import LoadMeter, read, stat_fields
from outlive.evidence import MemorySample

INTERVAL_S = 1.0
_AT_ONCE = 4  # so many workers are looked at every second; more of them take turns
_CHILDHOOD_S = 0.3  # looking takes a lock of the process that is looked at: not while it starts
_MOST_SAMPLES = 240
_LEAST_SLOPE_S = 5.0
_SHARED = re.compile(rb"^RssShmem:\s*(\d+)", re.M)
REST_PER_DEAR_LOOK = 200  # times as long as a dear look took, before the next one; twice that in large fleets
_FIRST_LOOK_S = 0.02  # what the look before the first one is said to have taken
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


@dataclass(frozen=True)
class Sample:
    """One look at a worker."""

    at: float
    batches: int  # it had done
    resident_bytes: int
    private_bytes: int | None  # None: too dear to know this time
    cell_bytes: int | None  # as above


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
        self._dear_look_s = _FIRST_LOOK_S
        self.descriptors: int | None = None
        self.threads: int | None = None
        self._resident_bytes = 0
        self._known = (0, 0)  # when its private memory was last known: that and its cells, and what was resident

    def look(self, now: float, batches: int = 0, workers: int = 1) -> bool:
        """Look, if it is time to; whether there is a new sample. `workers`: so many share the time for it."""
        if now < self._next:
            return False
        self._next = now + INTERVAL_S * max(1.0, workers / _AT_ONCE)
        try:
            fields = stat_fields(self._pid)
            resident, self.threads = int(fields[21]) * _PAGE, int(fields[17])
            self.descriptors = descriptors_of(self._pid)
            if self._box is not None:
                self._box.note_counts(self.descriptors, self.threads)
                load = self._load.look(now, self._box, fields)
                if load is not None:
                    self._box.note_load(load)
        except (OSError, ValueError, IndexError):
            return False  # it is gone, or going
        self._resident_bytes = resident
        self._looks += 1
        if not resident or self._looks % self._every:
            return False
        self.kept.append(Sample(now, batches, resident, *self._dear(now, workers)))
        if len(self.kept) > _MOST_SAMPLES:
            del self.kept[1::2]
            self._every *= 2
        return True

    def _dear(self, now: float, workers: int) -> tuple[int | None, int | None]:
        """Private memory, and cells."""
        if now < self._next_private:
            return None, None
        begun = time.thread_time()  # not the clock: on a busy machine that counts what others do
        private, cells = own_bytes(self._pid), shared_bytes(self._pid)
        took = time.thread_time() - begun
        # The lesser of two looks in a row. A virtual machine counts time that its host took as time of the thread: one
        # look that "took" a second must not leave a leak unseen for minutes.
        cost, self._dear_look_s = min(took, self._dear_look_s), took
        rest = REST_PER_DEAR_LOOK * min(2.0, max(1.0, workers / _AT_ONCE))
        self._next_private = now + rest * workers * cost
        if private is not None:
            self._known = (private + (cells or 0), self._resident_bytes)
            if self._box is not None:
                self._box.note_memory(self._resident_bytes, private, cells or 0, self._slope(now, private))
        return private, cells

    def _slope(self, now: float, private: int) -> int:
        """Bytes that became private per second, since it had warmed up: what a leak costs, if it is one."""
        for sample in self.kept[len(self.kept) // 5 :]:
            if sample.private_bytes is not None and now - sample.at >= _LEAST_SLOPE_S:
                return round((private - sample.private_bytes) / (now - sample.at))
        return 0

    @property
    def footprint_bytes(self) -> int:
        """About what the machine would have back without it, cells included: what came since the last dear look is
        taken for its own."""
        own, resident = self._known
        return max(0, own + self._resident_bytes - resident)

    def samples(self, now: float) -> tuple[MemorySample, ...]:
        return tuple(MemorySample(round(now - s.at, 3), s.resident_bytes, s.private_bytes) for s in self.kept)


def descriptors_of(pid: int) -> int:
    """How many it has open. The folder's size is their number since Linux 6.2; before that it is 0."""
    return os.stat(f"/proc/{pid}/fd").st_size or len(os.listdir(f"/proc/{pid}/fd"))


def shared_bytes(pid: int) -> int | None:
    """Of shared memory, what it has touched: its cells."""
    with contextlib.suppress(OSError):
        found = _SHARED.search(read(f"/proc/{pid}/status"))
        return int(found[1]) * 1024 if found else None
    return None


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
