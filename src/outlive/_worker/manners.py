"""Whether a worker gives way to the trainer when it is woken: it does while nothing but the trainer wakes it.

Reads   how often it had to wait, as the kernel counts it.
Writes  its own scheduling policy.
Never   a policy that somebody else has chosen; never another share of the processor.

A worker that takes its samples from memory is woken by the trainer alone, on whose core it may land: interrupting it
there costs small batches a third of their rate. One that waits for a disk or the network must be back at once when
what it waited for has come, or a busy machine makes every read as long as somebody else's time slice.
"""

from __future__ import annotations

import contextlib
import os

try:
    import resource
except ImportError:  # Windows, where nobody gives way
    resource = None  # type: ignore[assignment]

_EVERY = 32  # tasks between two looks
_OWN_WAITS = 2.5  # per task: for the next one, now and then for room to write


class Manners:
    def __init__(self) -> None:
        self._tasks = 0
        self._waits = 0
        self._minds = resource is not None and hasattr(os, "sched_setscheduler")
        if self._minds:
            self._policy = os.SCHED_OTHER
            self._waits = _waits()

    def task_done(self) -> None:
        self._tasks += 1
        if self._tasks < _EVERY or not self._minds:
            return
        waits = _waits()
        own = waits - self._waits <= _OWN_WAITS * self._tasks
        self._tasks, self._waits = 0, waits
        wanted = os.SCHED_BATCH if own else os.SCHED_OTHER
        if wanted != self._policy:
            self._set(wanted)

    def _set(self, wanted: int) -> None:
        try:
            self._minds = os.sched_getscheduler(0) == self._policy  # else somebody has chosen
            if self._minds:
                os.sched_setscheduler(0, wanted, os.sched_param(0))
                self._policy = wanted
        except OSError:  # some containers forbid it: slower by a few percent, nothing else
            self._minds = False


def _waits() -> int:
    """How often this thread gave up the processor because it had nothing to do."""
    with contextlib.suppress(OSError):
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
    return 0
