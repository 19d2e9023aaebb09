"""What a process has started that left its group: daemons, sessions of their own. Held by handle, to be ended later.

Reads   /proc.
Writes  SIGKILL, by handle.
Never   a process that is nobody's child of ours: its parent is asked for again once there is a handle.
"""

from __future__ import annotations

import contextlib
import os
import signal

from outlive._system import ownership, processes
from outlive._system.descriptors import children_of

_MOST = 1000
_MOST_LOOKS = 10


def _is_marked(pid: str, mark: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark.encode() in file.read().split(b"\0")
    except OSError:  # gone, or somebody else's
        return False


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
        for _ in range(_MOST_LOOKS):  # one that is being ended may have forked meanwhile
            self._find(mark)
            if not self._handles:
                return
            self.end()

    def _find(self, mark: str) -> None:
        for name in os.listdir("/proc"):
            if not name.isdigit() or int(name) == os.getpid() or not _is_marked(name, mark):
                continue
            with contextlib.suppress(OSError):
                handle = os.pidfd_open(int(name))
                if int(name) not in self._handles and _is_marked(name, mark):  # the pid is still the one that was seen
                    self._handles[int(name)] = handle
                else:
                    os.close(handle)

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
