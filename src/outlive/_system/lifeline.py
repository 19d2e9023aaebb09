"""A pipe through which the kernel kills a process, and what it started, when its launcher goes.

Reads   whether the other end is still there.
Writes  nothing into it: that it closes is the message.
Never   kills by a number that may be somebody else's by now: the kernel keeps the group, not its number.

    launcher: the write end ────────► the read end: process, and a copy in the launcher
       gone, or `cut`                    the kernel sends SIGKILL to the process's group

Other than PR_SET_PDEATHSIG this asks neither who the parent is (under forkserver it is not the launcher) nor which of
its threads forked, and it reaches the whole group.

A new interpreter takes its end before it imports anything, see `starting`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
from multiprocessing import reduction
from typing import Any

from outlive._system import ownership

_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)


class Lifeline:
    """The launcher's side; made before the process is started."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self._read, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self._read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        ownership.own(self)

    def end(self) -> End:
        """A descriptor for the process; close it here once that has been started."""
        return End(os.dup(self._read))

    def bind(self, pid: int) -> None:
        """The process was started: from now on it goes with us, even before it can `hold` by itself."""
        with contextlib.suppress(OSError):  # it has ended, and somebody has reaped it
            fcntl.fcntl(self._read, fcntl.F_SETOWN, pid)
            # It may have been faster: then what it set was undone just now. If it is slower, what it sets comes last.
            if os.getpgid(pid) == pid:
                fcntl.fcntl(self._read, fcntl.F_SETOWN, -pid)

    def cut(self) -> None:
        """Kill the process and what is left of its group, now."""
        for fd in (self._write, self._read):  # in this order: the signal needs a reader
            if fd >= 0:
                os.close(fd)
        self._read = self._write = -1

    def release(self) -> None:
        """Let the process live on without it."""
        let_go(self._read)
        self.cut()

    def abandon(self) -> None:
        """In a fork of the launcher: ours would keep the process alive."""
        for fd in (self._write, self._read):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._read = self._write = -1


class End(int):
    """A descriptor on its way into a process. However often it is pickled, it is sent once, and is a number there."""

    _sent: Any = None

    def __reduce__(self) -> Any:
        if self._sent is None:
            self._sent = reduction.DupFd(int(self))
        return type(self._sent).detach, (self._sent,)


# `hold` for an interpreter that can import nothing of ours yet, and leads no group.
HOLD = """
import fcntl, os, select
if server is not None:
    os.close(server)
os.set_inheritable(end, False)
os.setpgid(0, 0)
fcntl.fcntl(end, fcntl.F_SETOWN, -os.getpid())
poller = select.poll()
poller.register(end, 0)
if poller.poll(0):
    os._exit(1)
"""


def hold(end: int) -> None:
    """In the process, which leads its group: be killed with all of it when the launcher goes; now, if it has gone."""
    fcntl.fcntl(end, fcntl.F_SETOWN, -os.getpgrp())
    poller = select.poll()
    poller.register(end, 0)
    if poller.poll(0):
        os._exit(1)


def let_go(end: int) -> None:
    """In the process: from now on it watches its launcher itself."""
    fcntl.fcntl(end, fcntl.F_SETOWN, 0)
