"""What a process has started that left its group: daemons, sessions of their own. Held by handle, to be ended later.

Reads   /proc.
Writes  SIGKILL, by handle.
Never   a process that is nobody's child of ours: its parent is asked for again once there is a handle.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from outlive._system import ownership, processes
from outlive._system.descriptors import children_of

_MOST = 1000
_MOST_LOOKS = 10
_EXECUTED_WITHIN_S = 1.0
_PF_KTHREAD = 0x200000
_ENV_END = 48  # of /proc/PID/stat, behind the name


def _is_marked(pid: str, mark: str) -> bool | None:
    """Whether this is in its environment; None: it has none yet, because it is in the middle of `execve`."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            environment = file.read()
        if not environment and _is_being_executed(pid):
            return None
        return mark.encode() in environment.split(b"\0")
    except (OSError, ValueError, IndexError):  # gone, or another user's
        return False


def _is_being_executed(pid: str) -> bool:
    """Whether its new program has no stack yet: `Popen` of its parent may have returned already."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    is_zombie, is_of_kernel = fields[0] == b"Z", bool(int(fields[6]) & _PF_KTHREAD)
    return not is_zombie and not is_of_kernel and int(fields[_ENV_END]) == 0


class Offspring:
    def __init__(self) -> None:
        self._handles: dict[int, int] = {}  # by pid
        ownership.own(self)

    def note(self, pid: int) -> None:
        """Look for descendants outside of its group, while it lives: once it has gone, nobody knows whose they were."""
        waiting = [(pid, child) for child in children_of(pid)]
        seen = 0
        while waiting and seen < _MOST:
            parent, child = waiting.pop()
            seen += 1
            waiting += [(child, grandchild) for grandchild in children_of(child)]
            with contextlib.suppress(OSError):
                if child not in self._handles and os.getpgid(child) != pid:
                    handle = os.pidfd_open(child)
                    if processes.parent_of(child) == parent:
                        self._handles[child] = handle
                    else:
                        os.close(handle)

    def end_marked(self, mark: str) -> None:
        """End what has this in its environment: of a process that has gone, nothing else tells whose they are."""
        give_up_at = time.monotonic() + _EXECUTED_WITHIN_S
        for _ in range(_MOST_LOOKS):  # one that is being ended may have forked meanwhile
            unknown = self._find(mark, os.listdir("/proc"))
            while unknown and time.monotonic() < give_up_at:
                time.sleep(0.001)
                unknown = self._find(mark, unknown)
            if not self._handles:
                return
            self.end()

    def _find(self, mark: str, names: list[str]) -> list[str]:
        """Hold those of these processes that have the mark. Return those that cannot be told yet."""
        unknown = []
        for name in names:
            if not name.isdigit() or int(name) == os.getpid():
                continue
            marked = _is_marked(name, mark)
            if marked is None:
                unknown.append(name)
            if not marked:
                continue
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(int(name))
                if int(name) not in self._handles and _is_marked(name, mark):  # the pid is still the one that was seen
                    self._handles[int(name)] = handle
                else:
                    os.close(handle)
        return unknown

    def end(self) -> None:
        for handle in self._handles.values():
            with contextlib.suppress(OSError):  # gone already
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        self.abandon()

    def abandon(self) -> None:
        for handle in self._handles.values():
            with contextlib.suppress(OSError):
                os.close(handle)
        self._handles = {}
