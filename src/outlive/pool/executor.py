"""The pool: a `concurrent.futures.Executor` that no task can break.

Reads   its arguments.
Writes  nothing by itself; its manager's thread does.
Never   torch, unless you bring it.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Executor, Future, InvalidStateError
from multiprocessing import util
from typing import Any, Literal

from outlive._forensics.ledger import Incidents, Ledger
from outlive._system.cpus import usable_cpus
from outlive.incident import Incident
from outlive.limits import Limits, budget_of, limits_of
from outlive.pool.bars import bar_of
from outlive.pool.manager import Manager, ManagerSettings
from outlive.pool.mapping import Failures, Mapping
from outlive.pool.work import Item
from outlive.quantities import check_size
from outlive.settings import FaultPolicy, check_listeners, check_number, check_threads

log = logging.getLogger("outlive")

_managers: weakref.WeakSet[Manager] = weakref.WeakSet()
_finished_in = -1  # the process in which they are finished at its end


class _Submitted(Item):
    """A task whose outcome is a future's."""

    __slots__ = ("future",)

    def __init__(self, future: Future[Any], function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__(function, [args], kwargs)
        self.future = future

    def begin(self) -> bool:
        # Again, when it was sent before and its company had to be parted.
        return self.future.running() or self.future.set_running_or_notify_cancel()

    def settle(self, values: list[Any], errors: dict[int, BaseException]) -> None:
        try:
            if errors:
                self.future.set_exception(errors[0])
            else:
                self.future.set_result(values[0])
        except InvalidStateError:
            pass  # somebody else has settled it
        except BaseException:  # of a callback, which futures let pass unless it is an Exception
            log.exception("a callback of %r ended with what is no Exception", self.future)

    def drop(self) -> None:
        if not self.future.cancel():  # it was begun, and had to be parted from its company
            self.fail(CancelledError())

    def part(self, start: int, stop: int) -> Item:
        return self


class Pool(Executor):
    """A process pool whose workers may die in any way. A drop-in for `concurrent.futures.ProcessPoolExecutor`.

    max_workers   how many at most; None: the CPUs that this process may really use. They are started as needed
    mp_context    a multiprocessing context, or the name of a start method
    initializer, initargs  called in each worker before its first task
    retries       how often a task that killed its worker is tried again; 0: no task is ever begun twice; None: as
                  `faults` says, or 1
    task_timeout  seconds a task may take before its worker is ended and it counts as hung; "auto": by what the worker
                  does, as a loader's sample_timeout; None: as long as it likes
    memory_limit  private memory of a worker, such as "2GiB": near it the worker is recycled after its task
    memory_budget  memory of all workers together, such as "24GiB" or "80%"; None: what container or machine leave
    recycle_after  a fresh worker after so many tasks (500) or growth ("1GiB")
    max_tasks_per_child  as in concurrent.futures: the same as recycle_after with a number
    worker_threads  threads that torch, OpenMP, MKL, OpenBLAS, OpenCV and NumExpr may each use in a worker; None: as
                  they like (under fork, torch hangs then if it has worked in this process before)
    faults        a `FaultPolicy` for the rest: retry_on, pauses, limits
    on_incident   a callable, or several, that are given each `Incident` as it happens

    A death, a hang or an exception costs its own task: its future has the error, with `error.incident`.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        mp_context: Any = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        retries: int | None = None,
        task_timeout: float | Literal["auto"] | None = None,
        memory_limit: str | int | None = None,
        memory_budget: str | int | None = None,
        recycle_after: str | int | None = None,
        max_tasks_per_child: int | None = None,
        worker_threads: int | None = 1,
        faults: FaultPolicy | None = None,
        on_incident: Callable[[Incident], object] | Sequence[Callable[[Incident], object]] = (),
    ) -> None:
        if max_workers is None:
            max_workers = max(1, math.floor(usable_cpus()))
        if isinstance(max_workers, bool) or not isinstance(max_workers, int):
            raise TypeError(f"max_workers must be a whole number, got {max_workers!r}")
        check_size("max_workers", max_workers)
        if max_workers <= 0:
            raise ValueError(f"max_workers must be greater than 0, got {max_workers}")
        if initializer is not None and not callable(initializer):
            raise TypeError("initializer must be a callable")
        if max_tasks_per_child is not None:
            if isinstance(max_tasks_per_child, bool) or not isinstance(max_tasks_per_child, int):
                raise TypeError("max_tasks_per_child must be an integer")
            if max_tasks_per_child <= 0:
                raise ValueError("max_tasks_per_child must be >= 1")
            recycle_after = max_tasks_per_child if recycle_after is None else recycle_after
        if faults is not None and not isinstance(faults, FaultPolicy):
            raise TypeError(f'faults must be a FaultPolicy, got {faults!r}; map() takes "skip" and the like')
        if mp_context is None or isinstance(mp_context, str):
            mp_context = multiprocessing.get_context(mp_context)
        self.max_workers = self._max_workers = max_workers  # the latter is what libraries look at
        self._ledger = Ledger(check_listeners(on_incident))
        self._failures = Failures()
        policy = policy_of(faults, retries, task_timeout)
        settings = ManagerSettings(
            mp_context,
            max_workers,
            initializer,
            tuple(initargs),
            policy,
            _limits(memory_limit, recycle_after),
            budget_of(memory_budget),
            at_most_once=policy.retries == 0,
            threads=check_threads(worker_threads),
        )
        self._manager = Manager(settings, self._ledger)
        _finish_at_exit(self._manager)
        self._finalizer = weakref.finalize(self, self._manager.stop)
        self._finalizer.atexit = False  # `_finish_all` sees to it, while threads can still be waited for

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._manager.add([_Submitted(future, fn, args, kwargs)])
        return future

    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int | Literal["auto"] = "auto",
        ordered: bool = True,
        faults: Literal["raise", "skip", "none"] = "raise",
        in_flight: int | None = None,
        progress: bool | str = False,
    ) -> Iterator[Any]:
        """`fn` of each item, or of each row of several iterables; begun at once, a bounded number at a time.

        chunksize  items that are sent to a worker together; "auto": by how long they take
        ordered    False: as they come
        faults     "raise": the first error ends it; "skip": results without the failed, which `failures` then has;
                   "none": None in their place
        in_flight  items that are under way or waiting for you at most, so that an endless iterable needs no more memory
        progress   True, or a name: a bar with what is done, failed and retried, rate and time left
        """
        bar = bar_of(progress, fn, iterables, self._manager)
        mapping = Mapping(self._manager, fn, iterables, chunksize, ordered, faults, in_flight, self._failures, bar=bar)
        return mapping.results(timeout)

    def starmap(self, fn: Callable[..., Any], rows: Iterable[Iterable[Any]], **options: Any) -> Iterator[Any]:
        """`fn(*row)` of each row. Options are those of `map`."""
        mapping = Mapping(
            self._manager,
            fn,
            None,
            options.pop("chunksize", "auto"),
            options.pop("ordered", True),
            options.pop("faults", "raise"),
            options.pop("in_flight", None),
            self._failures,
            rows=rows,
            bar=bar_of(options.pop("progress", False), fn, (rows,), self._manager),
        )
        timeout = options.pop("timeout", None)
        if options:
            raise TypeError(f"starmap() takes no {', '.join(options)}")
        return mapping.results(timeout)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take nothing more; `wait` until what was submitted is done, or drop what has not begun."""
        self._manager.stop(cancel=cancel_futures)
        if wait:
            self._manager.join()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> bool | None:
        """Wait for what was submitted. An exception that leaves the block, or interrupts the wait, ends the pool."""
        try:
            self._manager.stop(end=exc_type is not None)
            self._manager.join()
        except BaseException:
            self._manager.stop(end=True)
            raise
        return None

    @property
    def incidents(self) -> Sequence[Incident]:
        """Everything that went wrong since the pool was made, in order."""
        return Incidents(self._ledger.incidents)

    @property
    def failures(self) -> Failures:
        """The tasks that `map` left out, each with its arguments and its error."""
        return self._failures

    @property
    def _broken(self) -> BaseException | None:
        """What libraries look at: why nothing can be submitted any more."""
        return self._manager.broken

    @property
    def pids(self) -> list[int]:
        """Of the workers that live now."""
        return self._manager.pids


def _limits(memory_limit: Any, recycle_after: Any) -> Limits:
    """A pool counts tasks, not batches or samples."""
    if recycle_after is not None and not isinstance(recycle_after, int):
        try:
            counted = limits_of(None, recycle_after).after_growth_bytes is None
        except ValueError:
            counted = True
        if counted:
            raise ValueError(
                f'recycle_after must be a number of tasks (500) or a growth in memory ("1GiB"), got {recycle_after!r}'
            )
    return limits_of(memory_limit, recycle_after)


_ELSEWHERE = {
    "on_error": 'map(…, faults="skip") has that',
    "on_crash": 'map(…, faults="skip") has that',
    "sample_timeout": "Pool(task_timeout=…) has that",
    "max_bad": "every task has its own outcome, however many fail",
    "breaker_patience": "a pool's workers doubt no source",
    "ranks": "a pool has no ranks",
    "ranks_grace_s": "a pool has no ranks",
}


def policy_of(
    faults: FaultPolicy | None, retries: int | None, task_timeout: float | Literal["auto"] | None
) -> FaultPolicy:
    """Of a pool: a task that kills is left out and its future told; how many do so is the user's affair."""
    if task_timeout not in (None, "auto"):
        check_number("task_timeout", task_timeout, least=0)
        if task_timeout == 0:
            raise ValueError("task_timeout must be more than 0 seconds (None: as long as it likes), got 0")
    given = faults if faults is not None else FaultPolicy(max_restarts=1000, restart_window_s=60.0)
    for field in dataclasses.fields(FaultPolicy):
        if field.name in _ELSEWHERE and getattr(given, field.name) != field.default:
            raise ValueError(f"{field.name} of a FaultPolicy means nothing to a pool: {_ELSEWHERE[field.name]}")
    return FaultPolicy(
        on_error="skip",
        retries=given.retries if retries is None else retries,
        retry_on=given.retry_on,
        backoff_s=given.backoff_s,
        backoff_max_s=given.backoff_max_s,
        jitter=given.jitter,
        sample_timeout=task_timeout,
        hang_floor_s=given.hang_floor_s,
        hang_wait_s=given.hang_wait_s,
        hang_wait_max_s=given.hang_wait_max_s,
        hang_busy_s=given.hang_busy_s,
        max_restarts=given.max_restarts,
        restart_window_s=given.restart_window_s,
        max_bad=None,
    )


def _finish_all() -> None:
    """At interpreter exit: finish what was submitted, as concurrent.futures does; an exception ends it within a second.

    That is: one that ends the program, or a Ctrl-C meanwhile.
    """
    # At a prompt, the last exception is not what ends it.
    failed = getattr(sys, "last_value", None) is not None and not hasattr(sys, "ps1")
    managers = list(_managers)
    try:
        _join_all(managers, end=failed)
    except BaseException:
        _join_all(managers, end=True)
        raise


def _join_all(managers: list[Manager], *, end: bool) -> None:
    for manager in managers:
        manager.stop(end=end)
    for manager in managers:
        manager.join()


def _finish_at_exit(manager: Manager) -> None:
    global _finished_in
    _managers.add(manager)
    if _finished_in != os.getpid():
        # multiprocessing's own children end the processes that they started before they wait for threads.
        _finished_in = os.getpid()
        util.Finalize(None, _finish_all, exitpriority=20)


# Before Python waits for threads: ours would wait for tasks for ever.
threading._register_atexit(_finish_all)  # type: ignore[attr-defined]
