"""Finds what a test left behind: processes, threads, descriptors, shared memory.

Reads   /proc, /dev/shm and the interpreter's threads, of this process and its descendants.
Writes  nothing; on request reaps zombies, and kills what leaked once it is reported.
Never   judges what was there before the test, or what another pytest-xdist worker made.

A snapshot is taken before the test. After it, `wait_for_leaks` looks again until nothing is new or the deadline has
passed: a process that is on its way out is no leak.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

POLL_S = 0.02
DEADLINE_S = 3.0
_LONGEST_S = 60.0  # however busy the machine is
_COURIERS_S = 60.0

_WATCHED_DESCRIPTOR = re.compile(r"/memfd:|socket:|pipe:|pidfd:|anon_inode:\[(pidfd|eventfd|eventpoll)\]")
_SHM = Path("/dev/shm")
_MADE_BY = re.compile(r"outlive-(\d+)-")  # how outlive names memory where it needs names
_PR_SET_CHILD_SUBREAPER = 36
_LISTS_CHILDREN = Path("/proc/thread-self/children").exists()  # Linux, unless it was built without


@dataclass(frozen=True)
class Descriptor:
    number: int
    target: str
    inode: int


@dataclass(frozen=True)
class Snapshot:
    """What this process owns at one moment, less what belongs to the standard library."""

    processes: frozenset[psutil.Process]
    threads: frozenset[threading.Thread]
    descriptors: frozenset[Descriptor]
    shm_entries: frozenset[str]


@dataclass(frozen=True)
class Leaks:
    """What is in one snapshot and was not in an earlier one."""

    processes: list[psutil.Process]
    threads: list[threading.Thread]
    descriptors: list[Descriptor]
    shm_entries: list[str]

    def __bool__(self) -> bool:
        return bool(self.processes or self.threads or self.descriptors or self.shm_entries)

    def describe(self) -> str:
        lines = [f"process     {_describe_process(process)}" for process in self.processes]
        lines += [f"thread      {thread.name!r}{' (daemon)' if thread.daemon else ''}" for thread in self.threads]
        lines += [f"descriptor  {item.number} → {item.target}" for item in self.descriptors]
        lines += [f"shm         {_SHM / name}" for name in self.shm_entries]
        return "\n".join(lines)

    def kill_processes(self) -> None:
        """One leak fails one test: left alive, it would slow or break the tests that follow."""
        for process in self.processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                pass  # It left by itself after it was reported.
        psutil.wait_procs(self.processes, timeout=DEADLINE_S)


def adopt_orphans() -> None:
    """Make orphaned descendants children of this process, so that a worker that outlives its parent is seen.

    Without this they go to init, where nothing tells them from another xdist worker's or a stranger's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap_zombies() -> None:
    """Clear dead orphans away between tests; by then nobody asks for the exit status of a test's own child either."""
    for process in _descendants():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.NoSuchProcess, ChildProcessError):
            pass  # Whoever started it was faster.


def take_snapshot() -> Snapshot:
    return Snapshot(
        processes=frozenset(_living_descendants()),
        threads=frozenset(threading.enumerate()),
        descriptors=frozenset(_open_descriptors()),
        shm_entries=frozenset(_own_shm_entries()),
    )


def wait_for_leaks(before: Snapshot, deadline_s: float = DEADLINE_S) -> Leaks:
    """Answer what is new since `before` and stays; empty as soon as nothing is."""
    leaks = _new_since(before)
    if leaks:
        # Only now: a full collection takes longer than all the rest, and most tests leave no cycles that own anything.
        gc.collect()
        _wait_for_couriers(leaks)
        patience = Patience(deadline_s)
        stayed = set(leaks.shm_entries)
        while leaks := _staying(_new_since(before), stayed):
            if patience.is_over(process.pid for process in leaks.processes):
                break
            time.sleep(POLL_S)
    return leaks


class Patience:
    """A deadline that measures what processes do, and not what the machine does to them.

    On a busy machine, a process that is about to end may get no CPU for seconds. A bound in seconds is then either
    exceeded by sound code or so wide that it lets slow code pass. So the clock of this deadline stands still

    - while a process that is waited for, or this one, is ready to run and has no CPU. Linux counts that time;
    - while nobody looks: each look counts as two pauses between looks at most. This process may have been stopped,
      or the host of this virtual machine may have been busy.

    On an idle machine these are plain seconds. Where a system does not count, the second rule alone holds.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._spent_s = self._held_up_s = 0.0
        self._looked_at = time.monotonic()
        self._give_up_at = self._looked_at + max(seconds, _LONGEST_S)
        self._starved_s: dict[str, float] = _starved_s([os.getpid()])  # by thread, since it began

    def is_over(self, pids: Iterable[int]) -> bool:
        """Look: whether these processes have had their time. Call it every POLL_S."""
        now, starved_s = time.monotonic(), _starved_s([os.getpid(), *pids])
        # The longest of all: threads that wait for a CPU at the same time do not wait longer together.
        held_up_s = max((s - self._starved_s.get(thread, s) for thread, s in starved_s.items()), default=0.0)
        # Linux adds a wait when it ends, so it may be longer than the time since the last look: the rest is kept.
        self._held_up_s += held_up_s
        passed_s = now - self._looked_at
        excused_s = min(passed_s, self._held_up_s)
        self._held_up_s -= excused_s
        self._spent_s += min(passed_s - excused_s, 2 * POLL_S)
        self._looked_at, self._starved_s = now, starved_s
        return self._spent_s >= self._seconds or now >= self._give_up_at


def _starved_s(pids: Iterable[int]) -> dict[str, float]:
    """How long each thread of these processes was ready to run and had no CPU."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError, ValueError, IndexError):  # gone by now, or a system that does not say
            for thread in os.listdir(f"/proc/{pid}/task"):
                found[thread] = int(Path(f"/proc/{pid}/task/{thread}/schedstat").read_text().split()[1]) / 1e9
    return found


def _wait_for_couriers(leaks: Leaks) -> None:
    """Let outlive's own threads write to the journal what the test has posted. They end by themselves afterwards.

    The disk decides how long that takes: on a busy one, a commit takes seconds. At the end of a program nothing waits
    longer than `courier.EXIT_S` for it.
    """
    courier = sys.modules.get("outlive._forensics.courier")
    if courier is not None and leaks.threads:
        courier.flush_all(_COURIERS_S)


def complaint(before: Snapshot) -> str:
    """What is new since `before` and stays, in words; empty: nothing. The processes among it are killed."""
    leaks = wait_for_leaks(before, DEADLINE_S)
    if not leaks:
        return ""
    report = leaks.describe()
    leaks.kill_processes()
    return f"left behind {DEADLINE_S:g} s after the test:\n{report}\nClose it in the test"


def _staying(leaks: Leaks, stayed: set[str]) -> Leaks:
    """Without names in /dev/shm that come and go: others on this machine make and unlink them all the time."""
    stayed.intersection_update(leaks.shm_entries)
    return replace(leaks, shm_entries=sorted(stayed))


def _new_since(before: Snapshot) -> Leaks:
    now = take_snapshot()
    processes = now.processes - before.processes
    shm_entries = now.shm_entries - before.shm_entries
    return Leaks(
        processes=sorted(processes, key=lambda process: process.pid),
        threads=sorted(now.threads - before.threads, key=lambda thread: thread.name),
        descriptors=sorted(now.descriptors - before.descriptors, key=lambda item: item.number),
        shm_entries=sorted(shm_entries - held_by_strangers(shm_entries)),
    )


def _living_descendants() -> list[psutil.Process]:
    living = []
    for process in _descendants():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and not _is_of_standard_library(process):
                living.append(process)
        except psutil.NoSuchProcess:
            pass  # Gone between the listing and the look, which is what we want of it.
    return living


def _descendants() -> list[psutil.Process]:
    if not _LISTS_CHILDREN:
        return psutil.Process().children(recursive=True)
    while True:
        try:
            pids = _pids_below(os.getpid())
            break
        except FileNotFoundError:
            pass  # one of them has ended, and its children are ours now: look again
    found = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            found.append(psutil.Process(pid))
    return found


def _pids_below(pid: int) -> list[int]:
    children = _children_of(pid)
    while (again := _children_of(pid)) != children:
        children = again  # while one ends, the kernel may leave out others: read until it says the same twice
    return [*children, *(below for child in children for below in _pids_below(child))]


def _children_of(pid: int) -> list[int]:
    """Without asking each process of the machine for its parent, which takes 50 times as long."""
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # this thread has just ended
            found += Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
    return [int(child) for child in found]


def _is_of_standard_library(process: psutil.Process) -> bool:
    """Whether this is multiprocessing's resource tracker or fork server, which live as long as the interpreter."""
    # A fork server's children carry its command line: only its pid tells it from a worker that leaked.
    if process.pid == _stdlib_field("multiprocessing.forkserver", "_forkserver", "_forkserver_pid"):
        return True
    return any("multiprocessing.resource_tracker import main" in argument for argument in process.cmdline())


def _open_descriptors() -> list[Descriptor]:
    if sys.platform != "linux":
        return []
    allowed = {
        _stdlib_field("multiprocessing.resource_tracker", "_resource_tracker", "_fd"),
        _stdlib_field("multiprocessing.forkserver", "_forkserver", "_forkserver_alive_fd"),
    }
    found = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
            if number not in allowed and _WATCHED_DESCRIPTOR.match(target):
                found.append(Descriptor(number, target, os.fstat(number).st_ino))
        except OSError:
            pass  # The descriptor of the listing itself, or one that another thread has just closed.
    return found


def _stdlib_field(module: str, instance: str, field: str) -> int | None:
    """A private field of a multiprocessing singleton, without importing what the test did not."""
    return getattr(getattr(sys.modules.get(module), instance, None), field, None)


def _own_shm_entries() -> list[str]:
    found = []
    for entry in os.scandir(_SHM) if _SHM.is_dir() else ():
        try:
            if entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                found.append(entry.name)
        except FileNotFoundError:
            pass  # Unlinked since the listing.
    return found


def held_by_strangers(names: frozenset[str]) -> set[str]:
    """Those of the new entries that a process which is not ours has mapped, or is named in: another xdist worker's, in
    general."""
    # By inode: a named semaphore is mapped under the temporary name it was made with.
    inodes: dict[int, str] = {}
    for name in names:
        with contextlib.suppress(OSError):
            inodes[(_SHM / name).stat().st_ino] = name
    if not inodes:
        return set()
    family = {os.getpid(), *(process.pid for process in _descendants())}
    strangers = [pid for pid in psutil.pids() if pid not in family]
    held = {name for name in names if (made := _MADE_BY.match(name)) and int(made[1]) in strangers}
    for pid in strangers:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(errors="replace")
        except OSError:
            continue  # Gone, or another user's and then not the owner of our entries.
        mapped = (int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if "/dev/shm/" in line)
        held |= {inodes[inode] for inode in mapped if inode in inodes}
    return held


def _describe_process(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline()) or process.name()
        return f"{process.pid} (child of {process.ppid()}, {process.status()}): {command[:200]}"
    except psutil.NoSuchProcess:
        return f"{process.pid} (left while this was written)"
