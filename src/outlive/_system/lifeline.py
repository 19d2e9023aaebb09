"""A pipe through which the kernel kills a process, and what it started, when its launcher goes.

Reads   whether the other end is still there.
Writes  nothing into it: that it closes is the message.
Never   kills by a number that may be somebody else's by now: the kernel keeps the group, not its number.

    launcher: the write end ────────► the read end: process, and a copy in the launcher
       gone, or `cut`                    the kernel sends SIGKILL to the process's group

Other than PR_SET_PDEATHSIG this asks neither who the parent is (under forkserver it is not the launcher) nor which of
its threads forked, and it reaches the whole group.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal

from outlive._system import ownership

_F_SETSIG = getattr(fcntl, "F_SETSIG", 10)


class Lifeline:
    """The launcher's side; made before the process is started."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        fcntl.fcntl(self._read, _F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(self._read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        ownership.own(self)

    def end(self) -> int:
        """A descriptor for the process; close it here once that has been started."""
        return os.dup(self._read)

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

    def abandon(self) -> None:
        """In a fork of the launcher: ours would keep the process alive."""
        for fd in (self._write, self._read):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._read = self._write = -1


def hold(end: int) -> None:
    """In the process, which leads its group: be killed with all of it when the launcher goes; now, if it has gone."""
    fcntl.fcntl(end, fcntl.F_SETOWN, -os.getpgrp())
    poller = select.poll()
    poller.register(end, 0)
    if poller.poll(0):
        os._exit(1)
