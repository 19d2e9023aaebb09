"""A rank's life, in its own process: equip, load, call, and say how it ended.

Reads   what it was handed.
Writes  its black box, its stacks, its report; environment variables, as torchrun sets them.
Never   outlives its launcher: the lifeline is the first thing it takes.

    starting ──► preparing: unpickles fn and args ──► running: fn(rank, *args) ──► leaving
        an exception ──► report, bell, exit code 1        sys.exit(n) ──► n        a fatal signal ──► black box
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing import process, reduction
from types import TracebackType
from typing import Any

from outlive._capture import crash, stacks
from outlive._capture.blackbox import BlackBox
from outlive._system import lifeline, nameless, processes, starting
from outlive._worker import failures
from outlive._worker.allowance import Allowance
from outlive.incident import Failure, Stage
from outlive.launch import output
from outlive.launch.call import Call
from outlive.limits import Limits

INTERRUPTED = 130  # as a shell has it
_MOST_TEXT = 1 << 20
_OWN_FOLDER = os.path.dirname(__file__)


class Handed:
    """Descriptors on their way into a rank, by name."""

    def __init__(self, **descriptors: int) -> None:
        self._descriptors: dict[str, Any] = descriptors

    def add(self, name: str, descriptor: int) -> None:
        self._descriptors[name] = descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {n: fd if isinstance(fd, lifeline.End) else reduction.DupFd(fd) for n, fd in self._descriptors.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._descriptors = state

    def take(self) -> dict[str, int]:
        """In the rank: they are its own now, and none of its children's."""
        taken = {n: fd if isinstance(fd, int) else int(fd.detach()) for n, fd in self._descriptors.items()}
        for fd in taken.values():
            os.set_inheritable(fd, False)
        return taken

    def close(self) -> None:
        """In the launcher, after the start."""
        for fd in self._descriptors.values():
            os.close(fd)


@dataclass(frozen=True)
class Orders:
    """What a rank is told, beside what to call."""

    rank: int
    launcher: int  # its pid
    environment: dict[str, str]
    memory_bytes: int | None = None
    dies_with_parent: bool = False  # the launcher's main thread is its parent


def main(handed: Handed, call: Call, orders: Orders) -> None:
    """The target of a rank's process."""
    starting.settle()
    taken = handed.take()
    processes.lead_own_group()
    lifeline.hold(taken["lifeline"])
    if orders.dies_with_parent:
        processes.die_with_parent(orders.launcher)
    signal.set_wakeup_fd(-1)  # a fork has the launcher's: our signals would wake it up
    output.redirect(taken)
    mapped = nameless.adopt(taken["box"])
    box = BlackBox(mapped)
    stacks.install(taken["stacks"])
    crash.install(mapped)  # after the stacks: it comes first, and passes the signal on to them
    box.begin(os.getpid())  # from here on it may be asked for its stacks
    _name(orders.rank)
    os.environ.update(orders.environment)
    rank = _Rank(box, taken, orders)
    rank.run(call)


def _name(rank: int) -> None:
    processes.name_thread(f"outlive-r{rank}")


class _Rank:
    def __init__(self, box: BlackBox, taken: dict[str, int], orders: Orders) -> None:
        self._box = box
        self._taken = taken
        self._orders = orders
        self._allowance: Allowance | None = None

    def run(self, call: Call) -> None:
        box = self._box
        stage = Stage.PREPARING
        try:
            box.enter(stage)
            fn, args = call.load()
            crash.reinstall()  # what was imported may have brought handlers of its own
            if self._orders.memory_bytes is not None:
                self._allowance = Allowance(Limits(self._orders.memory_bytes), box)
            stage = Stage.RUNNING
            box.enter(stage)
            fn(self._orders.rank, *args)
            box.enter(Stage.LEAVING)
        except SystemExit as error:
            box.note_exit()
            stacks.note(self._taken["stacks"], error)
            if error.code not in (None, 0):
                self._report(None)
            raise
        except KeyboardInterrupt as error:
            stacks.note(self._taken["stacks"], error)
            self._report(None)
            sys.exit(INTERRUPTED)
        except BaseException as error:
            now = time.monotonic_ns()
            if self._allowance is not None:
                self._allowance.note_refusal(error)
            self._report(captured(error, stage), now)
            sys.exit(1)

    def _report(self, failure: Failure | None, now: int | None = None) -> None:
        """Leave what happened, then ring: the process may take long to end, or wait for a thread for ever."""
        now = time.monotonic_ns() if now is None else now
        with open(self._taken["report"], "wb", closefd=False) as file:
            pickle.dump((now, failure), file)
        os.eventfd_write(self._taken["bell"], 1)


def captured(error: BaseException, stage: Stage) -> Failure:
    """The exception as text, without our own frames; whatever its class does to prevent it."""
    try:
        failure = failures.capture(error.with_traceback(_users(error.__traceback__)), stage)
    except BaseException as problem:
        failure = Failure(type(error).__name__, f"<its text could not be made: {type(problem).__name__}>", "")
        failure = replace(failure, traceback=f"{failure.type_name}: {failure.message}\n", stage=stage)
    return replace(failure, message=failure.message[:_MOST_TEXT], traceback=failure.traceback[-_MOST_TEXT:])


def _users(frames: TracebackType | None) -> TracebackType | None:
    """From the user's function on."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
        first = first.tb_next
    return first if first is not None else frames


def read_report(report: int) -> tuple[float, Failure | None] | None:
    """In the launcher: when a rank failed, and how, as far as it has said so."""
    data = os.pread(report, 8 * _MOST_TEXT, 0)
    try:
        now, failure = pickle.loads(data)
        return now / 1e9, failure if isinstance(failure, Failure) else None
    except Exception:  # nothing, or half of it: the rank was killed while it wrote
        return None


def is_importing_main() -> bool:
    """Whether this process is a child of multiprocessing's that has just begun, and is importing the main module."""
    return bool(getattr(process.current_process(), "_inheriting", False))
