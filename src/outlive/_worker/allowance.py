"""A worker minds its own memory: it leaves in time, or is stopped before the kernel does it.

Reads   /proc/self/statm, and smaps_rollup where that is not enough.
Writes  RLIMIT_DATA of its own process; why it leaves, to the black box.
Never   more than a look every few milliseconds.

What is shared with the zygote (copy on write) or mapped from cells is not its own. The cheap figure counts the former
in full, so it is never too small: only where it reaches a limit is the dear one read.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import time

from outlive._capture.blackbox import BlackBox, Reason
from outlive._capture.vitals import own_bytes
from outlive.limits import Limits

_PAGE = resource.getpagesize()
_LOOK_EVERY_NS = 4_000_000
_DEAR = 50  # a dear look that took so long is not repeated for this many times as long


class Allowance:
    def __init__(self, limits: Limits, box: BlackBox) -> None:
        self._limits = limits
        self._box = box
        self._batches = 0
        self._samples = 0
        self._next_ns = 0
        self._next_dear_ns = 0
        self._first_bytes: int | None = None
        self._own_bytes = self._at_most_then = 0  # at the last dear look
        self._statm = -1
        if limits.memory_bytes is not None or limits.after_growth_bytes is not None:
            with contextlib.suppress(OSError):  # no /proc: then only counts are minded
                self._statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        if limits.memory_bytes is not None:
            self._have_the_kernel_refuse(limits.memory_bytes)

    def _have_the_kernel_refuse(self, memory_bytes: int) -> None:
        """Allocation fails, as MemoryError, where private memory would pass the limit."""
        with contextlib.suppress(OSError, ValueError, IndexError):
            now = int(os.pread(self._statm, 256, 0).split()[5]) * _PAGE
            _, most = resource.getrlimit(resource.RLIMIT_DATA)
            wanted = now + memory_bytes
            if most == resource.RLIM_INFINITY or wanted < most:
                resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))

    def is_spent(self, samples: int) -> bool:
        """After a batch of so many samples: whether it is time to leave. Why stands in the black box then."""
        limits = self._limits
        self._batches += 1
        self._samples += samples
        if limits.after_batches is not None and self._batches >= limits.after_batches:
            self._box.retire(Reason.BATCHES, self._batches, limits.after_batches)
            return True
        if limits.after_samples is not None and self._samples >= limits.after_samples:
            self._box.retire(Reason.SAMPLES, self._samples, limits.after_samples)
            return True
        return self._statm >= 0 and self._is_too_large()

    def _is_too_large(self) -> bool:
        now = time.monotonic_ns()
        if now < self._next_ns:
            return False
        self._next_ns = now + _LOOK_EVERY_NS
        words = os.pread(self._statm, 256, 0).split()
        at_most = (int(words[1]) - int(words[2])) * _PAGE
        soft, growth = self._limits.soft_bytes, self._limits.after_growth_bytes
        if self._first_bytes is None:
            # The first batches warm caches up: growth counts from here on.
            self._first_bytes = at_most
        if growth is not None and at_most - self._first_bytes >= growth:
            self._box.retire(Reason.GROWTH, at_most - self._first_bytes, growth)
            return True
        if soft is None or at_most < soft:
            return False
        # What came since the last dear look is its own for sure; what it copied of the shared is seen by the next one.
        if self._own_bytes + at_most - self._at_most_then < soft and now < self._next_dear_ns:
            return False
        own = own_bytes("self")
        if own is None:
            return False
        self._next_dear_ns = now + _DEAR * (time.monotonic_ns() - now)
        self._own_bytes, self._at_most_then = own, at_most
        if own >= soft:
            self._box.retire(Reason.MEMORY, own, self._limits.memory_bytes or 0)
            return True
        return False

    def stop_if_refused(self, error: BaseException) -> None:
        """Memory was refused: end here, with the sample in hand, as a crash would. It is tried again elsewhere."""
        if self.note_refusal(error):
            os._exit(1)

    def note_refusal(self, error: BaseException) -> bool:
        """Whether it says that memory was refused, by the limit; the black box has it then."""
        limit = self._limits.memory_bytes
        if limit is None or not _is_refusal(error):
            return False
        self._box.retire(Reason.REFUSED, own_bytes("self") or limit, limit)
        return True


def _is_refusal(error: BaseException) -> bool:
    """As Python, NumPy, the system and torch's allocator say it."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
