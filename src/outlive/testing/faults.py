"""The catalogue of faults: what can be done to a worker, as small objects that say it.

Reads   nothing.
Writes  nothing but what the fault is about, to the process in which it fires.
Never   needs torch: a fault is also a task for a pool, `pool.submit(Segfault())`.

A fault is called to fire it. `Faulty` calls it at its sample; `modifiers` say when and how often.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from outlive.quantities import parse_bytes
from outlive.settings import check_number
from outlive.testing import deaths

MOMENTS = ("start", "fetch", "collate", "send")


class InjectedError(Exception):
    """What `Raise()` raises unless it is told otherwise."""


class Fault:
    """Something that goes wrong in a worker. `name` is its word on the command line of `outlive chaos`."""

    name: ClassVar[str] = ""
    deadly: ClassVar[bool] = True  # the process does not go on by itself
    notice: ClassVar[str] = "death"  # the kind of incident that it must lead to: «death», «exception», or none
    hangs: ClassVar[bool] = False
    permanent: bool = True  # it fires whenever its sample is tried

    @property
    def moment(self) -> str:
        """When it fires: one of MOMENTS."""
        return "fetch"

    @property
    def plain(self) -> Fault:
        """The fault without what was said about when and how often."""
        return self

    def due(self, key: str) -> Fault | None:
        """What is to be fired at this sample, now; a fault that fires once has then had its turn."""
        return self

    def fire(self) -> Any:
        raise NotImplementedError

    def __call__(self) -> Any:
        """Do it, to this process. What it returns, if it returns, is to be in the sample."""
        deaths.without_core()
        return self.fire()


# ---------------------------------------------------------------- exceptions


@dataclass(frozen=True)
class Raise(Fault):
    """Raise an exception: an instance, or a type."""

    error: BaseException | type[BaseException] = field(default_factory=lambda: InjectedError("injected"))

    name: ClassVar[str] = "raise"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = "exception"

    def __post_init__(self) -> None:
        is_type = isinstance(self.error, type) and issubclass(self.error, BaseException)
        if not is_type and not isinstance(self.error, BaseException):
            raise TypeError(f"Raise takes an exception or a type of exceptions, got {self.error!r}")

    def fire(self) -> Any:
        # Without the traceback of an earlier time, which would keep those samples alive.
        raise self.error if isinstance(self.error, type) else self.error.with_traceback(None)


class Locked:
    """Like an object with a lock in it: it does not go through pickle, once."""

    def __reduce__(self) -> Any:
        raise UnpicklableError("cannot pickle '_thread.lock' object")


class UnpicklableError(InjectedError, TypeError):
    """What `Unpicklable` raises when its batch is pickled: of the type that pickle raises, too."""


@dataclass(frozen=True)
class Unpicklable(Fault):
    """Have something in the batch that cannot be pickled. It fires while the batch is sent."""

    name: ClassVar[str] = "unpicklable"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = "exception"

    @property
    def moment(self) -> str:
        return "send"

    def fire(self) -> Any:
        return Locked()


# ---------------------------------------------------------------- deaths


@dataclass(frozen=True)
class Segfault(Fault):
    """Read address 0 (SIGSEGV)."""

    name: ClassVar[str] = "segv"

    def fire(self) -> Any:
        deaths.read_null()


@dataclass(frozen=True)
class IllegalInstruction(Fault):
    """Execute an instruction that no CPU has (SIGILL)."""

    name: ClassVar[str] = "ill"

    def fire(self) -> Any:
        deaths.execute_illegal()


@dataclass(frozen=True)
class BusError(Fault):
    """Read a mapped file that was truncated (SIGBUS)."""

    name: ClassVar[str] = "bus"

    def fire(self) -> Any:
        deaths.read_truncated_map()


@dataclass(frozen=True)
class Abort(Fault):
    """Call abort() (SIGABRT)."""

    name: ClassVar[str] = "abort"

    def fire(self) -> Any:
        deaths.call_abort()


@dataclass(frozen=True)
class DivideByZero(Fault):
    """Divide integers by zero in native code (SIGFPE)."""

    name: ClassVar[str] = "fpe"

    def fire(self) -> Any:
        deaths.divide_by_zero()


@dataclass(frozen=True)
class StackOverflow(Fault):
    """Recurse in native code until the stack is used up (SIGSEGV)."""

    name: ClassVar[str] = "stack"

    def fire(self) -> Any:
        deaths.overflow_stack()


@dataclass(frozen=True)
class Kill(Fault):
    """Send a signal to this process, SIGKILL unless told otherwise."""

    signal: int | str = signal.SIGKILL

    name: ClassVar[str] = "kill"

    def __post_init__(self) -> None:
        object.__setattr__(self, "signal", signal_number(self.signal))

    def fire(self) -> Any:
        deaths.kill_self(int(self.signal))


@dataclass(frozen=True)
class OutOfMemory(Fault):
    """Take memory until a limit or the kernel stops it. Bounded: at `size` it ends itself by SIGKILL, as the kernel's
    OOM killer would."""

    size: str | int = "64MiB"

    name: ClassVar[str] = "oom"

    def __post_init__(self) -> None:
        parse_bytes("size", self.size)

    def fire(self) -> Any:
        deaths.run_out_of_memory(parse_bytes("size", self.size))


@dataclass(frozen=True)
class Exit(Fault):
    """Leave the process with a code, by os._exit; `cleanly`: by sys.exit."""

    code: int = 3
    cleanly: bool = False

    name: ClassVar[str] = "exit"

    def __post_init__(self) -> None:
        check_number("code", self.code, least=0, whole=True)
        if self.code > 255:
            raise ValueError(f"an exit code is between 0 and 255, got {self.code}")

    def fire(self) -> Any:
        if self.cleanly:
            deaths.call_sys_exit(self.code)
        deaths.call_os_exit(self.code)


@dataclass(frozen=True)
class CloseDescriptors(Fault):
    """Close every descriptor of the process but the standard streams: its connections are gone."""

    name: ClassVar[str] = "close-descriptors"

    def fire(self) -> Any:
        deaths.close_descriptors()


# ---------------------------------------------------------------- hangs


@dataclass(frozen=True)
class Hang(Fault):
    """Sleep for ever."""

    name: ClassVar[str] = "hang"
    hangs: ClassVar[bool] = True

    def fire(self) -> Any:
        deaths.sleep_for_ever()


@dataclass(frozen=True)
class Deadlock(Fault):
    """Wait for a lock that this thread holds itself."""

    name: ClassVar[str] = "deadlock"
    hangs: ClassVar[bool] = True

    def fire(self) -> Any:
        deaths.wait_for_lock()


@dataclass(frozen=True)
class Spin(Fault):
    """Compute for ever: in Python, or, `native`, in machine code with the GIL held."""

    native: bool = False

    name: ClassVar[str] = "spin"
    hangs: ClassVar[bool] = True

    def fire(self) -> Any:
        (deaths.loop_with_gil if self.native else deaths.loop_in_python)()


@dataclass(frozen=True)
class Stop(Fault):
    """Be stopped, as by SIGSTOP from a debugger or a scheduler, and by nobody continued."""

    name: ClassVar[str] = "stop"
    hangs: ClassVar[bool] = True

    def fire(self) -> Any:
        deaths.stop_self()


# ---------------------------------------------------------------- what does not end a worker


@dataclass(frozen=True)
class Slow(Fault):
    """Take so many seconds longer."""

    seconds: float = 1.0

    name: ClassVar[str] = "slow"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_number("seconds", self.seconds, least=0)

    def fire(self) -> Any:
        time.sleep(self.seconds)


@dataclass(frozen=True)
class Leak(Fault):
    """Keep so much memory until the worker ends."""

    size: str | int = "16MiB"

    name: ClassVar[str] = "leak"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        parse_bytes("size", self.size)

    def fire(self) -> Any:
        deaths.leak_memory(parse_bytes("size", self.size))


@dataclass(frozen=True)
class LeakDescriptors(Fault):
    """Open files and never close them."""

    count: int = 10

    name: ClassVar[str] = "leak-descriptors"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_number("count", self.count, least=1, whole=True)

    def fire(self) -> Any:
        deaths.leak_descriptors(self.count)


@dataclass(frozen=True)
class LeaveProcesses(Fault):
    """Start processes, in sessions of their own, and forget them. They end by themselves after ten minutes."""

    count: int = 2

    name: ClassVar[str] = "leave-processes"
    deadly: ClassVar[bool] = False
    notice: ClassVar[str] = ""

    def __post_init__(self) -> None:
        check_number("count", self.count, least=1, whole=True)
        if self.count > 100:
            raise ValueError(f"LeaveProcesses leaves at most 100 processes, got {self.count}")

    def fire(self) -> Any:
        deaths.leave_processes(self.count)


CATALOGUE: dict[str, Callable[..., Fault]] = {
    kind.name: kind
    for kind in (
        *(Raise, Unpicklable, Segfault, IllegalInstruction, BusError, Abort, DivideByZero, StackOverflow, Kill),
        *(OutOfMemory, Exit, CloseDescriptors, Hang, Deadlock, Spin, Stop, Slow, Leak, LeakDescriptors, LeaveProcesses),
    )
}
ALIASES = {
    **{"segfault": "segv", "sigsegv": "segv", "sigill": "ill", "sigbus": "bus", "sigabrt": "abort", "sigfpe": "fpe"},
    **{"sigkill": "kill", "sigstop": "stop", "exception": "raise", "error": "raise", "sleep": "hang"},
    **{"stack-overflow": "stack", "out-of-memory": "oom", "illegal-instruction": "ill", "bus-error": "bus"},
}


def signal_number(value: Any) -> int:
    """9, «SIGKILL» or «KILL»."""
    if isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else f"SIG{value.upper()}"
        found = getattr(signal, name, None)
        if not isinstance(found, signal.Signals):
            raise ValueError(f"{value!r} is no signal; write SIGKILL, SIGTERM, …")
        return int(found)
    check_number("signal", value, least=1, whole=True)
    return int(value)
