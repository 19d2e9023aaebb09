"""What the future of a task that failed carries.

Reads   incidents.
Writes  messages: who, how, doing what, what was done about it, what you can do.
Never   torch.

A death or a hang costs its own task: the error is also `BrokenProcessPool`, so that the `except` clauses people already
have go on working, though nothing is broken.
"""

from __future__ import annotations

import pickle
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from outlive import errors
from outlive._worker import failures
from outlive.incident import Incident, IncidentKind
from outlive.settings import FaultPolicy

try:
    from concurrent.futures.process import _RemoteTraceback as RemoteTraceback
except ImportError:  # a name of Python's own that it may change

    class RemoteTraceback(Exception):  # type: ignore[no-redef]
        """The traceback that a task had in its worker."""

        def __init__(self, tb: str) -> None:
            self.tb = tb

        def __str__(self) -> str:
            return self.tb


class TaskCrashedError(errors.WorkerCrashedError, BrokenProcessPool):
    """A task killed every worker that took it."""


class TaskTimeoutError(errors.WorkerHungError, BrokenProcessPool, FutureTimeoutError):
    """A task took longer than `task_timeout` in every worker that took it."""


class PoolBrokenError(errors.WorkerStartError, BrokenProcessPool):
    """No worker can be started, or too many die: the pool has given up, and so every task that it had."""


class UnpicklableResultError(errors.OutliveError, pickle.PicklingError, RuntimeError):
    """A task did its work, and what it returned cannot travel."""


class UnreadableResultError(errors.OutliveError, BrokenProcessPool):
    """A task did its work, and what it returned cannot be unpickled here; `__cause__` says why."""


class UnreadableTaskError(errors.OutliveError, BrokenProcessPool):
    """What was sent could not be unpickled in the worker: a module or a class that it has not got, say."""


class Raised:
    """An exception on its way from a worker: itself where it pickles, and its text in any case."""

    __slots__ = ("message", "pickled", "text", "type_name")

    def __init__(self, error: BaseException, text: str, dumps: Any) -> None:
        self.type_name, self.text = type(error).__name__, text
        self.message = failures.text_of(error)
        try:
            self.pickled: bytes | None = dumps(error)
        except Exception:  # it holds a lock, a socket, …: its name and text travel
            self.pickled = None

    def __getstate__(self) -> tuple[Any, ...]:
        return self.type_name, self.message, self.text, self.pickled

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.type_name, self.message, self.text, self.pickled = state

    def rebuilt(self) -> BaseException:
        """The exception as it was; where it cannot be put together again, a RuntimeError that says what it was."""
        error: Any = None
        if self.pickled is not None:
            try:
                error = pickle.loads(self.pickled)
            except BaseException:  # an odd __init__, or a class that only the worker has
                error = None
        if not isinstance(error, BaseException):
            error = RuntimeError(f"{self.type_name}: {self.message}")
        error.__cause__ = RemoteTraceback(f'\n"""\n{self.text}"""')  # type: ignore[arg-type]
        return error  # type: ignore[no-any-return]


def error_of(incident: Incident) -> errors.WorkerCrashedError:
    """For a task that killed, or hung in, as many workers as it may."""
    kind = TaskTimeoutError if incident.kind is IncidentKind.HANG else TaskCrashedError
    return kind(errors.task_message(incident), incident)


def unreadable(error: BaseException) -> UnreadableResultError:
    """For a result that came, and cannot be put together again."""
    what = f"{type(error).__name__}: {failures.text_of(error)}"
    told = UnreadableResultError(f"the task's result cannot be unpickled here: {what}")
    told.__cause__ = error
    return told


def broken_message(text: str, policy: FaultPolicy) -> str:
    """For a pool whose workers die again and again without a task in hand: a task's deaths are its own affair."""
    what, _, _ = text.partition(":")
    most = max(1000, 10 * policy.max_restarts)
    return (
        f"{what}, with no task of theirs to blame\n\n"
        "  state    what had not ended is given up\n"
        "  next     pool.incidents   how each of them ended: something on this machine ends them, or an initializer's "
        "thread\n"
        f"           Pool(faults=FaultPolicy(max_restarts={most}))   to bear more of it\n"
    )
