"""Processes as Linux has them: handles, groups, who dies with whom, who waits for what.

Reads   /proc.
Writes  signals, only to processes that we started or adopted.
Never   a pid that may have been given to somebody else: a handle (pidfd) is asked first.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)


OOM_SCORE = 300  # as if a worker had 30 % of all memory beside its own


def die_with_parent(parent: int) -> None:
    """Be killed when the thread that forked us ends; leave now if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of what our children leave behind, so that nothing escapes."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def name_thread(name: str) -> None:
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def lead_own_group() -> None:
    """Leave the terminal's group: its Ctrl-C is the trainer's to handle, and our children can be ended as one."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)


def has_ended(handle: int) -> bool:
    """Whether the process behind a pidfd, or a sentinel, has ended."""
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(0))


def be_killed_first() -> None:
    """Where memory runs out, have the kernel take this process rather than one that cannot be replaced."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < OOM_SCORE:
            file.seek(0)
            file.write(str(OOM_SCORE))


def leave_within(seconds: float) -> None:
    """End in order, but in so many seconds at most: Python waits for threads, and some never end."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if hasattr(signal, "setitimer") and any(not thread.daemon for thread in others):
        signal.signal(signal.SIGALRM, _leave_now)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _leave_now(*_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or somebody's own: nobody is left to read it
            stream.flush()
    os._exit(0)


def kill_group(leader: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """Pids of all our children, adopted ones included."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except OSError:
        me = os.getpid()
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and parent_of(int(name)) == me]


def parent_of(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return -1


def is_exiting(pid: int) -> bool:
    """Whether a process is on its way out. Its files and connections close a while before its handle tells."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return bool(int(file.read().rpartition(b")")[2].split()[6]) & _PF_EXITING)
    except (OSError, IndexError, ValueError):
        return False


@dataclass(frozen=True)
class Activity:
    """What the threads of a process do: together, at one moment."""

    stopped: bool
    all_wait_for_locks: bool
    cpu_ticks: int


def activity(pid: int) -> Activity | None:
    """None when the process is gone."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return None
    stopped = False
    locked = bool(threads)
    ticks = 0
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            continue
        state = fields[0]
        ticks += int(fields[11]) + int(fields[12])
        if state in (b"T", b"t"):
            stopped = True
        if not (state == b"S" and _waits_for_lock(pid, thread)):
            locked = False
    return Activity(stopped=stopped, all_wait_for_locks=locked, cpu_ticks=ticks)


def _waits_for_lock(pid: int, thread: str) -> bool:
    try:
        with open(f"/proc/{pid}/task/{thread}/syscall") as file:
            # number, address, operation, value, timeout, …: a wait with a timeout ends by itself
            words = file.read().split()
            return words[0] == str(_FUTEX) and int(words[4], 16) == 0
    except (OSError, IndexError, ValueError):
        return False
