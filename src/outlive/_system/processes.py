"""Processes as Linux has them: handles, groups, who dies with whom, who waits for what.

Reads   /proc.
Writes  signals, only to processes that we started or adopted.
Never   a pid that may have been given to somebody else: a handle (pidfd) is asked first.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import select
import signal
import sys
import threading
import time
from dataclasses import dataclass

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PF_EXITING = 4
_libc = ctypes.CDLL(None, use_errno=True)
_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, -1)
_FUTEX_PRIVATE = 128  # set where only threads of the same process may wake
_MOST_DESCENDANTS = 64
_TICKS = os.sysconf("SC_CLK_TCK")


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


def wait_for_end(pid: int, timeout_s: float) -> None:
    """Wait for a child that is not reaped yet. A sentinel tells its end only once its own children have ended, too."""
    with contextlib.suppress(OSError):  # it is gone
        handle = os.pidfd_open(pid)
        try:
            poller = select.poll()
            poller.register(handle, select.POLLIN)
            poller.poll(timeout_s * 1000)
        finally:
            os.close(handle)


def be_killed_first() -> None:
    """Where memory runs out, have the kernel take this process rather than one that cannot be replaced."""
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as file:
        if int(file.read()) < OOM_SCORE:
            file.seek(0)
            file.write(str(OOM_SCORE))


def leave_within(seconds: float) -> None:
    """End in order, but in so many seconds at most: Python waits for threads and processes, and some never end."""
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    waits = multiprocessing.active_children() or any(not thread.daemon for thread in others)
    if hasattr(signal, "setitimer") and waits:
        signal.signal(signal.SIGALRM, _leave_now)
        signal.setitimer(signal.ITIMER_REAL, seconds)


def _leave_now(*_: object) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or somebody's own: nobody is left to read it
            stream.flush()
    os._exit(0)


CORPSE_S = 1.0  # from SIGKILL to the end of a process; one that takes longer waits in the kernel, perhaps for ever
EXITING_S = 10.0  # unless it is on its way out: much memory takes a while to be given back


def resists(pid: int, killed_at: float) -> bool:
    """Whether a process that was sent SIGKILL then, and has not ended, is to be waited for no longer."""
    passed_s = time.monotonic() - killed_at
    return passed_s >= (EXITING_S if passed_s >= CORPSE_S and is_exiting(pid) else CORPSE_S)


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


def born(pid: int) -> int | None:
    """When a process began, in ticks: with its pid this names it. None when it is gone."""
    try:
        fields = _stat(str(pid))
        return None if fields[0] in (b"Z", b"X") and _has_one_thread(fields) else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def _has_one_thread(fields: list[bytes]) -> bool:
    return int(fields[17]) <= 1  # else another one is yet to end


@dataclass(frozen=True)
class Activity:
    """What the threads of a process do: together, at one moment."""

    stopped: bool = False
    stuck: bool = False  # each thread waits, without a timeout, for what only a thread of this process can release
    shared: tuple[int, ...] = ()  # as above, but for these words of memory, in which other processes share
    runs: bool = False  # a thread is on a processor, or waits for one
    cpu_s: float = 0.0  # processor time, with that of the processes that it started
    pulse: tuple[tuple[int, int], ...] = ()  # of each thread, how long it ran: the same again if none woke up


def activity(pid: int) -> Activity | None:
    """None when the process is gone."""
    try:
        threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")))
    except OSError:
        return None
    stopped = runs = False
    waits: list[int | None] = []  # for each thread that waits for a lock: the word that others share, None for none
    pulse = []
    for thread in threads:
        try:
            fields = _stat(f"{pid}/task/{thread}")
        except (OSError, IndexError):
            continue
        pulse.append((thread, _ran_ns(pid, thread, fields)))
        stopped |= fields[0] in (b"T", b"t")
        runs |= fields[0] == b"R"
        if fields[0] == b"S":
            waits += _awaited_locks(pid, thread)
    locked = bool(pulse) and len(waits) == len(pulse)
    shared = tuple(sorted({address for address in waits if address is not None}))
    return Activity(
        stopped=stopped,
        stuck=locked and not shared,
        shared=shared if locked else (),
        runs=runs,
        cpu_s=_cpu_s(pid),
        pulse=tuple(pulse),
    )


def _stat(whose: str) -> list[bytes]:
    """From the state on, which is the first."""
    with open(f"/proc/{whose}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _ran_ns(pid: int, thread: int, fields: list[bytes]) -> int:
    try:
        with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
            return int(file.read().split()[0])
    except (OSError, IndexError, ValueError):  # a kernel that does not count them: then in ticks
        return int(fields[11]) + int(fields[12])


def _cpu_s(pid: int) -> float:
    """Of a process and all that it has started, as far as they are still its descendants."""
    ticks, waiting = 0, [pid]
    for number in range(_MOST_DESCENDANTS):
        if number >= len(waiting):
            break
        try:
            ticks += sum(map(int, _stat(str(waiting[number]))[11:15]))
            for thread in os.listdir(f"/proc/{waiting[number]}/task"):
                with open(f"/proc/{waiting[number]}/task/{thread}/children", "rb") as file:
                    waiting += map(int, file.read().split())
        except (OSError, IndexError, ValueError):
            continue  # gone meanwhile, or a kernel without this file
    return ticks / _TICKS


def _awaited_locks(pid: int, thread: int) -> list[int | None]:
    """The lock that a thread waits for without a timeout: its word where other processes share in it, else None; no
    item where it waits for nothing of that kind."""
    try:
        with open(f"/proc/{pid}/task/{thread}/syscall") as file:
            # number, address, operation, value, timeout, …: a wait with a timeout ends by itself
            words = file.read().split()
            if words[0] != str(_FUTEX) or int(words[4], 16):
                return []
            address, private = int(words[1], 16), int(words[2], 16) & _FUTEX_PRIVATE
    except (OSError, IndexError, ValueError):
        return []
    return [address if not private and _is_shared(pid, address) else None]


def _is_shared(pid: int, address: int) -> bool:
    """Whether what lies there may be another process's as well."""
    try:
        with open(f"/proc/{pid}/maps") as file:
            for line in file:
                span, permissions, _ = line.split(None, 2)
                begin, _, end = span.partition("-")
                if int(begin, 16) <= address < int(end, 16):
                    return permissions[3] == "s"
    except (OSError, ValueError, IndexError):
        pass
    return True  # nobody knows
