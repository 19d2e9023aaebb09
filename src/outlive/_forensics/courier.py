"""Carries things away on a thread of its own, so that who hands them over never waits: to the journal, to a webhook.

Reads   what is posted.
Writes  through the function that delivers.
Never   blocks or raises into who posts, keeps more than `capacity` things, or carries one twice: a fork of the process
        begins with nothing in hand.

    post ──► waiting ──► in hand ──► delivered          full: the oldest that waits is dropped, and counted
                  thread: starts at a post, ends when idle
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from outlive._system import ownership

log = logging.getLogger("outlive")

T = TypeVar("T")

EXIT_S = 2.0  # how long the end of the process may be held up, by all couriers together

_couriers: weakref.WeakSet[Courier[object]] = weakref.WeakSet()
_flushes_exit_of = -1  # the process whose end is flushed


class Courier(Generic[T]):
    """One queue and, while there is something in it, one thread."""

    def __init__(
        self,
        name: str,
        deliver: Callable[[Sequence[T]], None],
        *,
        capacity: int,
        at_once: int = 1,
        idle_s: float = 0.1,
    ) -> None:
        self.name = name
        self.deliver = deliver
        self._capacity = capacity
        self._at_once = at_once
        self._idle_s = idle_s
        self.abandon()

    def abandon(self) -> None:
        """Begin anew: in a fork, what waits is the parent's to carry, its thread is not here, its lock may be held."""
        self._changed = threading.Condition()
        self._waiting: deque[T] = deque()
        self._in_hand = 0
        self._thread: threading.Thread | None = None
        self.leaving = threading.Event()  # the process ends: who waits before another try should not
        self.dropped = 0

    def post(self, thing: T) -> None:
        """Take it, and return at once."""
        with self._changed:
            while len(self._waiting) >= self._capacity:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(thing)
            self._changed.notify_all()
            if self._thread is None:
                self._start()

    def flush(self, deadline_s: float) -> bool:
        """Wait until all is carried away; False: it is not."""
        with self._changed:
            if self._thread is None and self._waiting:
                self._start()
            return self._changed.wait_for(lambda: not self._waiting and not self._in_hand, deadline_s)

    def _start(self) -> None:
        ownership.own(self)  # again each time: a fork forgets what its parent owned
        _flush_at_exit(self)
        thread = threading.Thread(target=self._carry, name=self.name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            log.debug("no thread for %s now; the next post tries again", self.name, exc_info=True)
        else:
            self._thread = thread

    def _carry(self) -> None:
        while True:
            with self._changed:
                if not self._changed.wait_for(lambda: self._waiting, self._idle_s):
                    self._thread = None
                    return
                things = [self._waiting.popleft() for _ in range(min(self._at_once, len(self._waiting)))]
                self._in_hand = len(things)
            try:
                self.deliver(things)
            except Exception:
                log.debug("%s could not deliver", self.name, exc_info=True)
            with self._changed:
                self._in_hand = 0
                self._changed.notify_all()


def flush_all(deadline_s: float) -> bool:
    """Wait until every courier has carried away what it has; False: one has not."""
    give_up_at = time.monotonic() + deadline_s
    return all(courier.flush(max(0.0, give_up_at - time.monotonic())) for courier in list(_couriers))


def _flush_at_exit(courier: Courier[T]) -> None:
    global _flushes_exit_of
    _couriers.add(courier)  # type: ignore[arg-type]
    if _flushes_exit_of != os.getpid():
        # Not atexit: processes that multiprocessing forked do not run that, and a rank may be one.
        from multiprocessing import util

        _flushes_exit_of = os.getpid()
        util.Finalize(None, _flush_all, exitpriority=10)


def _flush_all() -> None:
    give_up_at = time.monotonic() + EXIT_S
    for courier in list(_couriers):
        courier.leaving.set()
        if not courier.flush(max(0.0, give_up_at - time.monotonic())):
            log.debug("%s did not finish before the process ended", courier.name)
