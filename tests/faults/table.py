"""The faults as data: what goes wrong, when, and what evidence it must leave.

Reads   marker files, to know whether a fault that fires once has fired.
Writes  marker files; otherwise it ruins the process that it is called in.
Never   a class or function that a spawned worker could not import by name.

A `Fault` is a kind of death, error or hang. A `PlantedFault` is a fault at a place: it fires always (poison), or
only in the first worker that reaches it (transient). `Moment` says where in a worker's work it fires. A new kind of
death is a new row of FAULTS: every moment, policy and start method comes with it.
"""

from __future__ import annotations

import enum
import os
import pickle
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outlive import WorkerCrashedError, WorkerHungError
from outlive.incident import IncidentKind
from outlive.testing.deaths import (
    call_abort,
    call_os_exit,
    call_sys_exit,
    divide_by_zero,
    execute_illegal,
    kill_self,
    loop_with_gil,
    overflow_stack,
    read_null,
    read_truncated_map,
    sleep_for_ever,
    stop_self,
    wait_for_lock,
    without_core,
)

TORN = "the picture is torn"


class Moment(enum.Enum):
    """When in a worker's work a fault fires."""

    GETITEM = "__getitem__"
    GETITEMS = "__getitems__"
    NEXT = "__next__"
    COLLATE = "collate_fn"
    SENDING = "sending"
    INIT = "worker_init_fn"


@dataclass(frozen=True)
class FaultSite:
    """A moment, and the kind of dataset."""

    moment: Moment
    stream: bool = False

    @property
    def in_sample(self) -> bool:
        """Whether the black box names the sample in hand; else it must be searched among those of its batch."""
        return self.moment in (Moment.GETITEM, Moment.NEXT)

    def __str__(self) -> str:
        return f"{'stream-' if self.stream else ''}{self.moment.value.strip('_')}"


# Where a sample is in hand, alone or among those of its batch; worker_init_fn stands apart, for it has none.
SITES = (
    FaultSite(Moment.GETITEM),
    FaultSite(Moment.GETITEMS),
    FaultSite(Moment.COLLATE),
    FaultSite(Moment.SENDING),
    FaultSite(Moment.NEXT, stream=True),
    FaultSite(Moment.COLLATE, stream=True),
    FaultSite(Moment.SENDING, stream=True),
)
INIT_SITES = (FaultSite(Moment.INIT), FaultSite(Moment.INIT, stream=True))


# ---------------------------------------------------------------- exceptions


class HoldsLock(Exception):
    """An exception that cannot be pickled: it has a lock in it."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class WantsMore(Exception):
    """An exception that cannot be made from one text."""

    def __init__(self, path: str, *, offset: int) -> None:
        super().__init__(f"{path} at {offset}: {TORN}")


def raise_plain() -> None:
    raise ValueError(TORN)


def raise_unpicklable() -> None:
    raise HoldsLock(TORN)


def raise_odd_arguments() -> None:
    raise WantsMore("18204.png", offset=7)


def raise_local_class() -> None:
    class OnlyKnownHere(Exception):
        pass

    raise OnlyKnownHere(TORN)


def raise_memory_error() -> None:
    bytearray(1 << 62)


class NoException(BaseException):
    """What `except Exception` does not catch; it ends a worker of torch's, too."""


def raise_base_exception() -> None:
    raise NoException(TORN)


# ---------------------------------------------------------------- results


def return_function() -> Any:
    return lambda: None


def return_lock() -> Any:
    return threading.Lock()


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Fault:
    """A row: what to do to the process, and what the trainer must learn of it."""

    name: str
    fire: Callable[[], Any]
    kind: IncidentKind
    raises: tuple[type[BaseException], ...]  # any of these, in the trainer, under faults="raise"
    signal: int | None = None
    code: int | None = None
    type_name: str | None = None  # of the exception, as the worker saw it
    leaves_stack: bool = True
    needs_timeout: bool = False  # a hang that "auto" does not act on at once: it is neither stopped nor locked
    spares: tuple[Moment, ...] = ()  # moments at which it can do no harm

    @property
    def hangs(self) -> bool:
        return self.kind is IncidentKind.HANG

    @property
    def says_torn(self) -> bool:
        return self.fire in (raise_plain, raise_unpicklable, raise_odd_arguments, raise_local_class)

    @property
    def kills(self) -> bool:
        """Whether a worker is lost."""
        return self.kind is not IncidentKind.EXCEPTION


def _exception(name: str, fire: Callable[[], Any], raises: type[BaseException], type_name: str | None = None) -> Fault:
    return Fault(name, fire, IncidentKind.EXCEPTION, (raises,), type_name=type_name or raises.__name__)


def _result(name: str, fire: Callable[[], Any]) -> Fault:
    # Which of them pickle raises differs between versions of Python.
    raises = (TypeError, AttributeError, pickle.PicklingError)
    return Fault(name, fire, IncidentKind.EXCEPTION, raises, spares=(Moment.INIT,))


def _death(name: str, fire: Callable[[], Any], **evidence: Any) -> Fault:
    return Fault(name, fire, IncidentKind.CRASH, (WorkerCrashedError,), **evidence)


def _hang(name: str, fire: Callable[[], Any], **evidence: Any) -> Fault:
    return Fault(name, fire, IncidentKind.HANG, (WorkerHungError,), **evidence)


FAULTS = {
    fault.name: fault
    for fault in (
        _exception("exception", raise_plain, ValueError),
        _exception("unpicklable-exception", raise_unpicklable, HoldsLock),
        _exception("odd-exception", raise_odd_arguments, RuntimeError, "WantsMore"),
        _exception("local-exception", raise_local_class, RuntimeError, "OnlyKnownHere"),
        _exception("memory-error", raise_memory_error, MemoryError),
        _result("function-as-result", return_function),
        _result("lock-as-result", return_lock),
        _death("base-exception", raise_base_exception, code=1, leaves_stack=False),
        _death("sys-exit", call_sys_exit, code=4, leaves_stack=False),
        _death("os-exit", call_os_exit, code=3, leaves_stack=False),
        _death("sigkill", kill_self, signal=signal.SIGKILL, leaves_stack=False),
        _death("sigsegv", read_null, signal=signal.SIGSEGV),
        _death("sigill", execute_illegal, signal=signal.SIGILL),
        _death("sigbus", read_truncated_map, signal=signal.SIGBUS),
        _death("abort", call_abort, signal=signal.SIGABRT),
        _death("sigfpe", divide_by_zero, signal=signal.SIGFPE),
        _death("stack-overflow", overflow_stack, signal=signal.SIGSEGV),
        _hang("gil-loop", loop_with_gil, needs_timeout=True),
        _hang("sleep", sleep_for_ever, needs_timeout=True),
        _hang("deadlock", wait_for_lock),
        _hang("sigstop", stop_self, leaves_stack=False),
    )
}


@dataclass(frozen=True)
class PlantedFault:
    """A fault at a place. With `marker` it fires so many times only, in whichever processes make those files first."""

    fault: str
    marker: str | None = None
    times: int = 1

    def __call__(self) -> Any:
        """Fire if it is due; what it returns belongs into the result."""
        if self.marker is not None and not any(_is_first(f"{self.marker}.{n}") for n in range(self.times)):
            return None
        without_core()
        return FAULTS[self.fault].fire()


def _is_first(marker: str) -> bool:
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True
