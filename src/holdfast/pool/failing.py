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

from holdfast import errors
from holdfast.incident import Incident, IncidentKind

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


class UnpicklableResultError(errors.HoldfastError, RuntimeError):
    """A task did its work, and what it returned cannot travel."""


class UnreadableTaskError(errors.HoldfastError, BrokenProcessPool):
    """What was sent could not be unpickled in the worker: a module or a class that it has not got, say."""


class Raised:
    """An exception on its way from a worker: itself where it pickles, and its text in any case."""

    __slots__ = ("message", "pickled", "text", "type_name")

    def __init__(self, error: BaseException, text: str, dumps: Any) -> None:
        self.type_name, self.text = type(error).__name__, text
        try:
            self.message = str(error)
        except Exception as broken:  # a user's __str__ may itself fail
            self.message = f"<its __str__ raised {type(broken).__name__}>"
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
