"""The machine and the limits around workers, and whether the kernel killed one for want of memory.

Reads   cgroups (v1 and v2), /proc, /dev/shm, the kernel log where readable; below another root in tests.
Writes  nothing.
Never   blocks or fails: what the system does not tell stays unknown.

The kernel counts its kills and says no names (the log does, but few may read it). So kills are *claimed*: each one that
was counted belongs to one worker that died of SIGKILL, and grows stale when none comes for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import time
from collections import deque
from dataclasses import dataclass

from outlive._system import cgroups
from outlive.evidence import Oom, Surroundings

STALE_S = 10.0  # a process with much memory takes a while to die after its kill was counted
LOOK_EVERY_S = 1.0
_MOST_UNCLAIMED = 64
_MOST_RECORDS = 4096  # of the kernel log, at one time
_RECORD_ROOM = 8192
_PRINTED_LATE_S = 0.001  # the kernel writes its log right after the kill
FIRST_PID_NAMESPACE = "pid:[4026531836]"
_NAMES_PID = (re.compile(r"Killed process (\d+)\b"), re.compile(r"oom-kill:.*\bpid=(\d+)"))
_SENTENCE = re.compile(r"(?:oom-kill:|Memory cgroup out of memory|Out of memory).*")
_LIMITS = {
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "cpu": resource.RLIMIT_CPU,
    "fsize": resource.RLIMIT_FSIZE,
    "as": resource.RLIMIT_AS,
    "data": resource.RLIMIT_DATA,
    "stack": resource.RLIMIT_STACK,
    "memlock": resource.RLIMIT_MEMLOCK,
}


# ---------------------------------------------------------------- cgroups


@dataclass(frozen=True)
class Group:
    """A folder of the memory controller."""

    folder: str
    is_v2: bool

    @property
    def kills(self) -> int | None:
        """How many of its processes were killed for want of memory; None: nobody counts."""
        if self.is_v2:
            return self._event("oom_kill")
        return cgroups.counter(f"{self.folder}/memory.oom_control", "oom_kill")

    @property
    def hits(self) -> int | None:
        """How often it stood at its limit and found nothing to give back (v1: or something)."""
        return self._event("oom") if self.is_v2 else cgroups.number(f"{self.folder}/memory.failcnt")

    def _event(self, name: str) -> int | None:
        """Of this group alone; kernels before 5.2 count those of the groups below it as well."""
        count = cgroups.counter(f"{self.folder}/memory.events.local", name)
        return count if count is not None else cgroups.counter(f"{self.folder}/memory.events", name)

    @property
    def limit_bytes(self) -> int | None:
        limit = cgroups.number(f"{self.folder}/{'memory.max' if self.is_v2 else 'memory.limit_in_bytes'}")
        return None if limit is None or limit >= 1 << 60 else limit

    @property
    def used_bytes(self) -> int | None:
        """The most it has ever used, where that is kept; else what it uses now."""
        names = ("memory.peak", "memory.current") if self.is_v2 else ("memory.max_usage_in_bytes",)
        for name in names:
            used = cgroups.number(f"{self.folder}/{name}")
            if used is not None:
                return used
        return None

    @property
    def held_bytes(self) -> int | None:
        """What it uses and cannot give back: without the files that are only cached."""
        used = cgroups.number(f"{self.folder}/{'memory.current' if self.is_v2 else 'memory.usage_in_bytes'}")
        if used is None:
            return None
        prefix, stat = "" if self.is_v2 else "total_", f"{self.folder}/memory.stat"
        return max(0, used - sum(cgroups.counter(stat, f"{prefix}{kind}_file") or 0 for kind in ("active", "inactive")))


def available_bytes(root: str = "/") -> int | None:
    """What the machine can still give."""
    return _kib(table(f"{root}/proc/meminfo").get("MemAvailable"))


def total_bytes(root: str = "/") -> int | None:
    """All the memory that there is for us: the machine's, or the smallest limit of a group above us."""
    machine = _kib(table(f"{root}/proc/meminfo").get("MemTotal"))
    limits = [group.limit_bytes for group in own_groups(root)]
    return min((limit for limit in (machine, *limits) if limit is not None), default=None)


def own_groups(root: str = "/") -> list[Group]:
    """The memory groups that this process is in, innermost first, as far up as can be seen from here."""
    return [Group(folder.path, folder.is_v2) for folder in cgroups.own_folders("memory", root)]


# ---------------------------------------------------------------- the kernel log


class KernelLog:
    """What the kernel writes from now on about kills; nothing where it may not be read, or counts other pids."""

    def __init__(self, root: str = "/") -> None:
        self._fd = -1
        self._named: dict[int, tuple[float, str]] = {}
        try:
            # In a namespace of pids our numbers are not the kernel's: somebody else's death might bear one of them.
            if os.readlink(f"{root}/proc/self/ns/pid") == FIRST_PID_NAMESPACE:
                self._fd = os.open(f"{root}/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
                os.lseek(self._fd, 0, os.SEEK_END)
        except OSError:
            self.close()  # few may; the counters are left

    @property
    def readable(self) -> bool:
        return self._fd >= 0

    def look(self, now: float) -> None:
        for _ in range(_MOST_RECORDS if self._fd >= 0 else 0):
            try:
                record = os.read(self._fd, _RECORD_ROOM)
            except BrokenPipeError:
                continue  # it was written over before we came: on with the next one
            except OSError:
                break
            if not record:
                break
            if b"Killed process" in record or b"oom-kill:" in record:
                self._take(record.decode("utf-8", "replace"), now)
        for pid in [pid for pid, (seen, _) in self._named.items() if now - seen > STALE_S]:
            del self._named[pid]

    def _take(self, text: str, now: float) -> None:
        for line in text.splitlines():
            named = next(filter(None, (pattern.search(line) for pattern in _NAMES_PID)), None)
            sentence = _SENTENCE.search(line)
            if named and sentence:
                pid = int(named[1])
                before = self._named.get(pid, (now, ""))[1]
                self._named[pid] = (now, f"{before}\n{sentence[0]}".strip())

    def take(self, pid: int) -> str:
        """What was written about this pid; it is told once."""
        return self._named.pop(pid, (0.0, ""))[1]

    @property
    def others(self) -> int:
        """How many are named whom nobody has asked about."""
        return len(self._named)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


# ---------------------------------------------------------------- the watch


class OomWatch:
    """Kept by the workers' parent: counts from when it is made, and says at a death what belongs to it."""

    def __init__(self, root: str = "/") -> None:
        self._root = root
        self._groups = own_groups(root)
        self._hits = [group.hits or 0 for group in self._groups]
        self._machine = self._machine_kills()
        self._counted = self._kills()
        self._unclaimed: deque[float] = deque(maxlen=_MOST_UNCLAIMED)  # when each was seen
        self._next = 0.0
        self.log = KernelLog(root)

    @property
    def unclaimed(self) -> int:
        """Kills by the kernel that no death was explained with yet."""
        return len(self._unclaimed)

    def look(self, now: float) -> None:
        """As often as you like: a kill that is seen now is not taken for somebody's who dies much later."""
        if now >= self._next:
            self._next = now + LOOK_EVERY_S
            self._note(now)

    def surroundings(self, pid: int, *, killed: bool, sender: int | None = None) -> Surroundings:
        """Around a worker that has just died and is not yet reaped; `killed`: of SIGKILL."""
        memory = table(f"{self._root}/proc/meminfo")
        shm = room(f"{self._root}/dev/shm")
        return Surroundings(
            oom=self._oom(pid) if killed else Oom(),
            available_bytes=_kib(memory.get("MemAvailable")),
            total_bytes=_kib(memory.get("MemTotal")),
            pressure=cgroups.text(f"{self._root}/proc/pressure/memory").partition("\n")[0],
            shm_bytes=shm[0],
            shm_free_bytes=shm[1],
            limits=limits_of(pid),
            sender=command_of(sender, self._root) if sender else "",
        )

    def close(self) -> None:
        self.log.close()

    def _oom(self, pid: int) -> Oom:
        claimed, said = self._claim(pid, time.monotonic())
        machine = self._machine_kills()
        since = None if machine is None else machine - (self._machine or 0)
        self._machine = machine
        group, hits = self._limiting()
        by_group = self._group_kills() is not None
        return Oom(
            group_kills=int(claimed) if by_group else None,
            machine_kills=since if by_group or since is None else int(claimed),
            limit_hits=hits,
            group_limit_bytes=group.limit_bytes if group else None,
            group_used_bytes=group.used_bytes if group else None,
            group=group.folder if group else "",
            log=said,
        )

    def _claim(self, pid: int, now: float) -> tuple[bool, str]:
        """Whether one of the kills that were counted is this one's, and what the log says of it."""
        self._note(now)
        said = self.log.take(pid)
        if not said and self._unclaimed and self.log.readable:
            time.sleep(_PRINTED_LATE_S)
            self.log.look(now)
            said = self.log.take(pid)
        if not said and len(self._unclaimed) <= self.log.others:
            return False, ""
        if self._unclaimed:
            self._unclaimed.popleft()
        return True, said

    def _note(self, now: float) -> None:
        count = self._kills()
        if count is not None:
            self._unclaimed.extend([now] * min(max(0, count - (self._counted or 0)), _MOST_UNCLAIMED))
            self._counted = count
        while self._unclaimed and now - self._unclaimed[0] > STALE_S:
            self._unclaimed.popleft()
        self.log.look(now)

    def _kills(self) -> int | None:
        """Of our own group, where that is counted: a kill elsewhere on the machine is none of ours."""
        kills = self._group_kills()
        return kills if kills is not None else self._machine_kills()

    def _group_kills(self) -> int | None:
        return self._groups[0].kills if self._groups else None

    def _machine_kills(self) -> int | None:
        return cgroups.counter(f"{self._root}/proc/vmstat", "oom_kill")

    def _limiting(self) -> tuple[Group | None, int | None]:
        """The innermost group that has stood at its limit since we began; else the one with the smallest limit."""
        limited = [(group, group.limit_bytes, before) for group, before in zip(self._groups, self._hits)]
        smallest = None
        for group, limit, before in limited:
            if limit is None:
                continue
            hits = (group.hits or 0) - before
            if hits > 0:
                return group, hits
            if smallest is None or limit < smallest[1]:
                smallest = (group, limit)
        return (smallest[0], 0) if smallest else (None, None)


# ---------------------------------------------------------------- small readers


def limits_of(pid: int) -> dict[str, int]:
    """Soft limits of a process, dead or alive, until it is reaped; «cpu_hard» is the one that kills."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError, ValueError):  # another user's, or gone
        for name, number in _LIMITS.items():
            soft, hard = resource.prlimit(pid, number)
            found[name] = soft
            if name == "cpu":
                found["cpu_hard"] = hard
    return found


def command_of(pid: int, root: str = "/") -> str:
    """What a process was started as; empty where it is gone, or not ours to see."""
    words = cgroups.text(f"{root}/proc/{pid}/cmdline").replace("\0", " ").strip()
    words = words or cgroups.text(f"{root}/proc/{pid}/comm").strip()
    return words if len(words) <= 100 else words[:99] + "…"


def table(path: str) -> dict[str, int]:
    """Lines of «name value», or «name: value kB»."""
    rows = (line.split() for line in cgroups.text(path).splitlines())
    return {row[0].rstrip(":"): int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


def _kib(value: int | None) -> int | None:
    return None if value is None else value * 1024


def room(path: str) -> tuple[int | None, int | None]:
    try:
        found = os.statvfs(path)
    except OSError:
        return None, None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
