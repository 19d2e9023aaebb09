"""One thread that reads all jobs for all viewers: every second, and as soon as one has something to tell.

Reads   what jobs publish; of the journal what verdicts say of incidents that findings name.
Writes  to the queues of viewers.
Never   waits for a viewer: one whose queue is full is dropped, and may come again.

    jobs ──► reader thread ──► state (whoever comes gets it whole) ──► a bounded queue per viewer
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sqlite3
import threading
import time
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

from outlive._forensics import journal
from outlive._forensics.journal_file import NewerJournalError
from outlive._metrics import runtime, viewing
from outlive.dashboard import telling
from outlive.dashboard.story import Story

log = logging.getLogger("outlive")

EVERY_S = 1.0
_GLANCE_S = 0.25  # between two looks whether anything has happened
_AT_ONCE = 1000  # events
_MOST_TICKS, _MOST_EVENTS = 1200, 800  # of a job, that whoever comes late is told
_MOST_LOOKS = 600
SETTLED_S = 15.0  # so long after its end the journal has what there is to say of a job
_QUEUE = 16  # messages a viewer may be behind
_MOST_VIEWERS = 32
_LOOKUPS, _TRIES, _MOST_KNOWN = 8, 40, 2000  # of the journal: in one round, for one incident, in all


class Watched:
    """One job, and what is remembered of it."""

    def __init__(self, job: viewing.Job) -> None:
        self.job = job
        self.story = Story()
        self.after = 0
        self.ticks: deque[dict[str, Any]] = deque(maxlen=_MOST_TICKS)
        self.events: deque[dict[str, Any]] = deque(maxlen=_MOST_EVENTS)
        self.looks: deque[tuple[float, list[dict[str, Any]]]] = deque(maxlen=_MOST_LOOKS)  # what each worker did when
        self.snapshot: dict[str, Any] = {}
        self.findings: list[dict[str, Any]] = []
        self._alive: dict[str, Any] = {}  # the last snapshot in which there were workers
        self._over_at = 0.0  # when we first saw that it is

    def about(self) -> dict[str, Any]:
        job = self.job
        return {
            **{name: getattr(job, name) for name in ("key", "pid", "command", "folder", "rank", "world_size", "run")},
            **{name: getattr(job, name) for name in ("kind", "name", "began", "limits")},
        }

    def read(self, remedies: dict[str, list[str]]) -> list[dict[str, Any]]:
        """What is new; the rest is in the attributes."""
        fresh: list[dict[str, Any]] = []
        if self._over_at and time.monotonic() - self._over_at > SETTLED_S and not self.job.has_news():
            return fresh
        while True:
            events, self.after = self.job.events(self.after, _AT_ONCE)
            for event in events:
                try:
                    self.story.take(event)
                except (LookupError, TypeError, ValueError, AttributeError):
                    log.debug("event %r is not as this version writes it", event, exc_info=True)
                (self.ticks if event.get("kind") == "tick" else self.events).append(event)
            fresh += events
            if len(events) < _AT_ONCE:
                break
        self.snapshot = self.job.snapshot() or self.snapshot
        self._over_at = self._over_at or (0.0 if self.snapshot.get("alive", True) else time.monotonic())
        if self.snapshot:
            noun = "task" if self.job.kind == "pool" else "sample"
            shown = self.snapshot
            if not shown.get("alive"):
                shown = {**shown, **self._alive}
            else:
                slots = [slot for slot in shown["slots"] if slot["pid"]]
                self.looks.append((shown["time"], [{"slot": s["slot"], "doing": s["stage"]} for s in slots]))
            if shown.get("alive") and any(slot.get("load") for slot in shown.get("slots", ())):
                self._alive = {name: shown[name] for name in ("slots", "workers", "advice")}
            told = telling.findings(
                self.story, shown, remedies=remedies, cpus=_cpus(), noun=noun, unreadable=self.job.unreadable
            )
            self.findings = [finding.to_dict() for finding in told]
        return fresh[-_MOST_EVENTS - _MOST_TICKS :]

    def history(self) -> list[dict[str, Any]]:
        return sorted([*self.ticks, *self.events], key=lambda event: event["n"])


class Viewer:
    """One page that is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.is_dropped = False

    def put(self, message: str) -> None:
        """From any thread; drops the viewer that does not keep up."""
        if self.queue.qsize() >= _QUEUE:
            self.drop()
        else:
            self._call(self.queue.put_nowait, message)

    def drop(self) -> None:
        if not self.is_dropped:
            self.is_dropped = True
            self._call(self.queue.put_nowait, None)

    def _call(self, what: Any, *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the server ends
            self.loop.call_soon_threadsafe(what, *args)


class Hub:
    """The reader thread, and those who listen to it."""

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._watched: dict[str, Watched] = {}
        self._viewers: list[Viewer] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outlive-dash", daemon=True)
        self._known = _Remedies()
        self._complained: set[str] = set()  # keys of jobs that could not be read, and the log has said so
        self._unreadable = 0
        self.left_at = time.monotonic()  # when the last viewer went

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self.dismiss()
        if self._thread.is_alive():
            self._thread.join(5.0)

    # ------------------------------------------------------------ viewers

    def dismiss(self) -> None:
        """All of them: the server ends."""
        with self._lock:
            for viewer in self._viewers:
                viewer.drop()

    def join(self, viewer: Viewer) -> bool:
        """Whether there is room; it first gets all that is remembered."""
        with self._lock:
            self._viewers = [each for each in self._viewers if not each.is_dropped]
            if len(self._viewers) >= _MOST_VIEWERS:
                return False
            whole = [
                {**self._told(watched, watched.history()), "looks": list(watched.looks)}
                for watched in self._watched.values()
            ]
            viewer.put(_message("state", {"time": time.time(), "unreadable": self._unreadable, "jobs": whole}))
            self._viewers.append(viewer)
            return True

    def leave(self, viewer: Viewer) -> None:
        with self._lock:
            self._viewers = [each for each in self._viewers if each is not viewer]
            self.left_at = time.monotonic()

    @property
    def viewers(self) -> int:
        return len(self._viewers)

    # ------------------------------------------------------------ asking

    def jobs(self) -> list[dict[str, Any]]:
        with self._lock:
            return [self._told(watched, None) for watched in self._watched.values()]

    def seen(self) -> list[tuple[viewing.Job, dict[str, Any]]]:
        """The jobs that live, as they stood when they were last read. Waits for nobody."""
        found = [(watched.job, watched.snapshot) for watched in tuple(self._watched.values())]
        return [(job, snapshot) for job, snapshot in found if snapshot.get("alive")]

    def events(self, key: str, after: int) -> list[dict[str, Any]] | None:
        with self._lock:
            watched = self._watched.get(key)
            return None if watched is None else [event for event in watched.history() if event["n"] > after]

    def ask(self, key: str, what: str, slot: int) -> str:
        """As `Job.ask`, on a job of its own: the reader may close that of ours meanwhile. KeyError: there is none."""
        with self._lock:
            path = self._watched[key].job.path
        who = runtime.read_who(Path(path))
        if who is None:
            raise KeyError(key)
        job = viewing.Job(Path(path), who)
        try:
            return job.ask(what, slot)
        finally:
            job.close()

    @staticmethod
    def _told(watched: Watched, events: list[dict[str, Any]] | None) -> dict[str, Any]:
        told = {**watched.about(), "snapshot": watched.snapshot, "findings": watched.findings}
        return told if events is None else {**told, "events": events}

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        due = 0.0
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                if began >= due or any(watched.job.has_news() for watched in self._watched.values()):
                    due = began + EVERY_S
                    self._round()
            except Exception:
                log.warning("the dashboard could not read the jobs", exc_info=True)
            # Half of the time at most is spent here, however many jobs there are.
            self._stop.wait(max(_GLANCE_S - (time.monotonic() - began), time.monotonic() - began, 0.05))

    def _round(self) -> None:
        jobs = viewing.jobs(folder=self._folder)
        by_key = {job.key: job for job in jobs}
        with self._lock:
            gone = [key for key, watched in self._watched.items() if by_key.get(key) is not watched.job]
            for key in gone:
                del self._watched[key]
            for key, job in by_key.items():
                self._watched.setdefault(key, Watched(job))
            watched = list(self._watched.values())
        self._known.look_up([ident for each in watched for finding in each.findings for ident in finding["incidents"]])
        told = []
        with self._lock:
            for each in watched:
                before = each.snapshot.get("alive"), len(each.findings)
                try:
                    fresh = each.read(self._known.found)
                except Exception:
                    self._complain(each.job)
                    continue
                if fresh or each.snapshot.get("alive") or before != (each.snapshot.get("alive"), len(each.findings)):
                    told.append(self._told(each, fresh))
            self._unreadable = jobs.unreadable + sum(job.key in self._complained for job in jobs)
            heading = {"time": time.time(), "unreadable": self._unreadable}
            message = _message("news", {**heading, "gone": gone, "jobs": told})
            for viewer in self._viewers:
                viewer.put(message)

    def _complain(self, job: viewing.Job) -> None:
        """One job that cannot be read must not hide the others."""
        if job.key not in self._complained:
            self._complained.add(job.key)
            log.warning("the dashboard could not read job %s; others are shown", job.key, exc_info=True)


class _Remedies:
    """What the journal says should be changed, by incident; it is written a moment after the incident is told."""

    def __init__(self) -> None:
        self.found: dict[str, list[str]] = {}
        self._tries: OrderedDict[str, int] = OrderedDict()

    def look_up(self, ids: list[str]) -> None:
        wanted = [ident for ident in dict.fromkeys(ids) if ident and self._tries.get(ident, 0) < _TRIES]
        for ident in [ident for ident in wanted if ident not in self.found][:_LOOKUPS]:
            self._tries[ident] = self._tries.get(ident, 0) + 1
            try:
                entries = journal.find(id_prefix=ident, limit=1)
                verdict = entries[0].incident.verdict if entries else None
            except (sqlite3.Error, OSError, ValueError, NewerJournalError):
                continue
            if verdict is not None:
                self.found[ident] = list(verdict.remedies)
        while len(self._tries) > _MOST_KNOWN:
            self.found.pop(self._tries.popitem(last=False)[0], None)


def _message(kind: str, told: Any) -> str:
    """One server-sent event; JSON has no line breaks."""
    return f"event: {kind}\ndata: {json.dumps(told, separators=(',', ':'))}\n\n"


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
