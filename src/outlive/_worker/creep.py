"""A worker minds its descriptors and threads: it tells when they become more and more, and leaves before they run out.

Reads   /proc/self, after a batch; the limits that bind it.
Writes  why it leaves, to the black box.
Never   looks at every batch, unless the last look saw them rise.

The worker does this and not its watchman: that one comes by once a second, and hundreds of files are opened in a tenth
of it. Where /proc counts neither, as outside of Linux, nothing is minded.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence

from outlive import trends
from outlive._capture.blackbox import BlackBox, Reason
from outlive._system import cgroups
from outlive.evidence import Creep as Told
from outlive.evidence import CreepKind

_MOST_STRIDE = 64  # batches between two looks, where nothing rises and there is room
_PER_BATCH = 16  # so many may come with each batch, once they come, before another look sees it
_MOST_POINTS = 64
_RECENT = 8  # looks
_NEAR = 0.8  # of the room there was at the beginning
_MOST_NAMED = 3
_DIGITS = re.compile(r"\d+")


class Gauge:
    """One figure of this process, and what follows from it."""

    kind: CreepKind
    reason: Reason
    tells_at: int  # so many more than at the beginning
    leaves_at: int

    def __init__(self) -> None:
        self.first = self.count()
        self.points: list[trends.Point] = [(0, self.first)]
        self._every = 1  # of so many looks one is kept
        self._looks = 0
        self._fastest = 0.0  # per batch
        self._highest = self._asked_at = self.first
        self._last = (0, self.first)
        self._recent = deque([self.first], maxlen=_RECENT)

    def count(self) -> int:
        raise NotImplementedError

    def limit(self, now: int) -> int | None:
        raise NotImplementedError

    def mostly(self) -> tuple[str, ...]:
        raise NotImplementedError

    def look(self, batches: int) -> bool:
        """Whether it rose."""
        now = self.count()
        before, had = self._last
        self._last = (batches, now)
        self._recent.append(now)
        self._fastest = max(self._fastest, (now - had) / max(1, batches - before))
        self._looks += 1
        if self._looks % self._every == 0:
            self.points.append(self._last)
            if len(self.points) > _MOST_POINTS:
                del self.points[1::2]
                self._every *= 2
        rose = now > self._highest
        self._highest = max(self._highest, now)
        return rose

    def finding(self) -> tuple[Told, int | None] | None:
        """What there is to tell, and if it is time to leave, how many it may have. Asked when it rose."""
        batches, now = self._last
        limit = self.limit(now)
        if limit is not None and self._is_near(now, limit) and self._is_rising():
            return self._told(now, batches, limit), limit
        if now < self._asked_at + self.tells_at // 2 or now < self.first + self.tells_at:
            return None
        self._asked_at = now
        if trends.steady_slope(self.points, self.tells_at / 2) is None:
            return None
        too_many = now >= self.first + self.leaves_at
        return self._told(now, batches, limit), self.first + self.leaves_at if too_many else None

    def _is_near(self, now: int, limit: int) -> bool:
        return now >= self.first + _NEAR * (limit - self.first) or now + self._fastest >= limit

    def _is_rising(self) -> bool:
        """Weak evidence is enough near the limit: who is there will not go far."""
        counts = list(self._recent)
        middle = len(counts) // 2
        return len(counts) >= 3 and min(counts[middle:]) > min(counts[:middle]) and counts[-1] == max(counts)

    def _told(self, now: int, batches: int, limit: int | None) -> Told:
        rate = (now - self.first) / max(1, batches)
        return Told(self.kind, now, self.first, rate, batches, limit, self.mostly())


class Descriptors(Gauge):
    kind, reason = CreepKind.DESCRIPTORS, Reason.DESCRIPTORS
    tells_at, leaves_at = 32, 1024

    def __init__(self) -> None:
        # The folder's size is their number since Linux 6.2; a listing has one more, its own.
        listed = os.listdir("/proc/self/fd")
        self.has_size = os.stat("/proc/self/fd").st_size == len(listed) - 1
        self._inherited = frozenset(name for name in listed if os.path.lexists(f"/proc/self/fd/{name}"))
        super().__init__()

    def count(self) -> int:
        return os.stat("/proc/self/fd").st_size if self.has_size else len(os.listdir("/proc/self/fd")) - 1

    def limit(self, now: int) -> int | None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if soft == resource.RLIM_INFINITY else soft

    def mostly(self) -> tuple[str, ...]:
        kinds: Counter[str] = Counter()
        for name in os.listdir("/proc/self/fd"):
            if name not in self._inherited:
                with contextlib.suppress(OSError):  # the listing's own, or another thread's that is closed again
                    kinds[_kind_of(os.readlink(f"/proc/self/fd/{name}"))] += 1
        return tuple(f"{count} {kind}" for kind, count in kinds.most_common(_MOST_NAMED))


def _kind_of(target: str) -> str:
    if target.startswith("/"):
        if target.startswith("/memfd:"):
            return "memory files"
        return f"times {target}" if target.startswith("/dev/") else f"files in {os.path.dirname(target)}"
    word = target.partition(":")[0]
    return {"socket": "sockets", "pipe": "pipes"}.get(word, target)


class Threads(Gauge):
    kind, reason = CreepKind.THREADS, Reason.THREADS
    tells_at, leaves_at = 16, 64

    def __init__(self) -> None:
        # A folder has as many links as folders in it, and two more.
        self.has_links = os.stat("/proc/self/task").st_nlink - 2 == len(os.listdir("/proc/self/task"))
        self._groups = [folder.path for folder in cgroups.own_folders("pids")]
        super().__init__()

    def count(self) -> int:
        return os.stat("/proc/self/task").st_nlink - 2 if self.has_links else len(os.listdir("/proc/self/task"))

    def limit(self, now: int) -> int | None:
        """How many it could have if nobody else took any: of its groups' limits, others have used a part."""
        limits = []
        soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
        if soft != resource.RLIM_INFINITY and os.geteuid() != 0:
            limits.append(soft)
        for group in self._groups:
            most, used = cgroups.number(f"{group}/pids.max"), cgroups.number(f"{group}/pids.current")
            if most is not None and used is not None:
                limits.append(now + max(0, most - used))
        return min(limits, default=None)

    def mostly(self) -> tuple[str, ...]:
        known = Counter(_DIGITS.sub("", thread.name).strip(" -_") for thread in threading.enumerate())
        native = self.count() - known.total()
        if native > 0:
            known["(native code)"] = native
        known.pop("MainThread", None)
        return tuple(f"{count} of {name}" for name, count in known.most_common(_MOST_NAMED))


class Creep:
    """Both, for one worker."""

    def __init__(self, box: BlackBox, tell: Callable[[Told], None], gauges: Sequence[Gauge] | None = None) -> None:
        self._box = box
        self._tell = tell
        self._gauges = list(gauges or ())
        if gauges is None:
            with contextlib.suppress(OSError):  # no /proc
                self._gauges = [Descriptors(), Threads()]
        self._told: set[CreepKind] = set()
        self._batches = 0
        self._stride = self._left = 1
        room = min((limit - g.first for g in self._gauges if (limit := g.limit(g.first)) is not None), default=1 << 20)
        self._most_stride = max(1, min(_MOST_STRIDE, room // _PER_BATCH))

    def is_too_much(self) -> bool:
        """After a batch: whether it is time to leave. Why stands in the black box then."""
        self._left -= 1
        if self._left:
            return False
        self._batches += self._stride
        rose = False
        try:
            for gauge in self._gauges:
                if gauge.look(self._batches):
                    rose = True
                    if self._judge(gauge):
                        return True
        except OSError:  # no descriptor is left to look with: what comes next says so
            pass
        self._left = self._stride = 1 if rose else min(self._most_stride, 2 * self._stride)
        return False

    def _judge(self, gauge: Gauge) -> bool:
        found = gauge.finding()
        if found is None:
            return False
        told, bound = found
        if gauge.kind not in self._told:
            self._told.add(gauge.kind)
            self._tell(told)
        if bound is None:
            return False
        self._box.retire(gauge.reason, told.now, bound)
        return True
