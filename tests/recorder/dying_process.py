"""A process that dies with the recorder installed, and what it left behind.

Reads   records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import signal
import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from faults.crashes import CODE, WILD, page, run
from outlive._capture import crash, stacks
from outlive._capture.blackbox import BlackBox
from outlive.crashes import CrashRecord

WRITING, SAVED = 1, 3


needs_recorder = pytest.mark.skipif(not crash.AVAILABLE, reason="the recorder was not built: no C compiler")


@dataclass
class DyingProcess:
    """A black box, and a place for stacks, of a process that is to die."""

    mapped: ctypes.Array[ctypes.c_ubyte]
    box: BlackBox
    stack_fd: int
    sleeps: int = 0  # of the last one that died

    def dies(self, act: Callable[[], None], minded: bool = True) -> int:
        """Do something in a forked process until it ends; its exit code, negative for a signal."""
        pid = os.fork()
        if pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.alarm(10)  # a handler that loops must not hold up the tests
                self.box.begin(os.getpid())
                faulthandler.disable()  # pytest's, which would print the death
                if minded:
                    stacks.install(self.stack_fd)
                    crash.install(self.mapped)
                act()
            finally:
                os._exit(0)
        _, status, usage = os.wait4(pid, 0)
        self.sleeps = usage.ru_nvcsw
        return os.waitstatus_to_exitcode(status)

    @property
    def record(self) -> CrashRecord | None:
        return crash.read(self.box)

    @property
    def stack(self) -> str:
        return stacks.read(self.stack_fd)

    @property
    def state(self) -> int:
        return int(struct.unpack_from("<Q", self.box.crash_bytes())[0])


def load_wild() -> None:
    run(page(CODE["load"]), WILD)
