"""What has happened in one job so far, folded from its events. Pure.

Reads   the events that a job publishes (`_metrics/fold.py` lists them).
Writes  nothing.
Never   the clock, a file; grows with the number of events: of each thing a bounded number is kept.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

_WINDOW_S = 5.0  # over which the share of waiting is looked at
_WINDOW_TICKS = 64
_BEHIND, _CAUGHT_UP = 0.2, 0.1  # the share of waiting at which a trainer begins, and stops, to be kept waiting
_MOST_SAMPLES = 200
_MOST_IDS = 20
_MOST_TROUBLES = 64
_LEAST_TICKS, _MUCH, _STILL_S = 5, 32 << 20, 8.0  # of a worker whose memory rises
DEADLY = ("crash", "hang")


@dataclass
class Trouble:
    """What has one verdict in common."""

    verdict: str
    kind: str  # of the last incident: «crash», «hang», «exception», …
    since: float
    last: float = 0.0
    incidents: int = 0
    workers_lost: int = 0
    seconds: float = 0.0  # until somebody was at work again, and what hung until then
    sentence: str = ""
    cause: str = ""
    action: str = ""
    ids: list[str] = field(default_factory=list)
    slots: Counter[int] = field(default_factory=Counter)
    samples: dict[Any, str] = field(default_factory=dict)  # → the user's words for it
    condemned: dict[Any, bool] = field(default_factory=dict)  # sample → whether another took its place
    at: str = ""  # which batch it began with

    def names(self, samples: list[Any], described: list[str]) -> None:
        for place, sample in enumerate(samples):
            if len(self.samples) < _MOST_SAMPLES or sample in self.samples:
                words = described[place] if place < len(described) else ""
                self.samples[sample] = words or self.samples.get(sample, "")


@dataclass
class Memory:
    """Of one slot's workers: recycled for it, and how fast it rises."""

    recycled: int = 0
    since: float = 0.0
    why: str = ""
    seconds: float = 0.0  # between a worker's leaving and its follower's being ready
    incarnation: int = -1
    first: tuple[float, int] = (0.0, 0)
    last: tuple[float, int] = (0.0, 0)
    rate: float = 0.0  # bytes a second, of the last worker that was seen for long enough
    began: float = 0.0  # when the first of them was seen
    changed: float = 0.0
    ticks: int = 0  # of this life, those with another figure than the one before
    rises: int = 0  # of these, how many showed more than the one before

    def saw(self, incarnation: int, time: float, private: int) -> None:
        if incarnation != self.incarnation:
            self.incarnation, self.first, self.ticks, self.rises = incarnation, (time, private), 0, 0
            self.began = self.began or time
        if private != self.last[1]:  # it is not measured anew for each tick
            self.ticks += 1
            self.rises += private > self.last[1]
            self.changed = time
            if time - self.first[0] >= 2:
                self.rate = (private - self.first[1]) / (time - self.first[0])
        self.last = (time, private)

    @property
    def is_rising(self) -> bool:
        """Nearly always, and by much: not the warm-up of a healthy worker."""
        nearly_always = self.ticks >= _LEAST_TICKS and self.rises >= 0.8 * self.ticks
        still = self.last[0] - self.changed <= _STILL_S
        return nearly_always and still and self.last[1] - self.first[1] >= _MUCH


class Story:
    """One job's."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.time = 0.0  # of the last event
        self.troubles: dict[str, Trouble] = {}
        self.memory: dict[int, Memory] = {}
        self.asked = 0  # workers that somebody had recycled
        self.breaker: list[dict[str, Any]] = []  # the source went, and came back
        self.given_up: dict[str, Any] | None = None
        self.resized: dict[str, Any] | None = None
        self.behind_since = 0.0  # the trainer has been kept waiting since then; 0: it is not
        self.behind_from: tuple[float, float] = (0.0, 0.0)  # its waiting and its own time until then
        self.share = 0.0  # of waiting, over the last seconds
        self.rate = 0.0  # batches a second, likewise
        self.sample_rate = 0.0  # samples
        self.good_rate = 0.0  # batches a second when the trainer was last not kept waiting
        self._ticks: deque[dict[str, Any]] = deque(maxlen=_WINDOW_TICKS)
        self._away: dict[int, tuple[float, str]] = {}  # slot → since when nobody is there, and why: a verdict, or ""
        self._died: dict[int, float] = {}

    def take(self, event: dict[str, Any]) -> None:
        self.time = max(self.time, event.get("time", 0.0))
        self.began = self.began or self.time
        take = getattr(self, "_" + str(event.get("kind", "")).replace("-", "_"), None)
        if take is not None:
            take(event)

    # ------------------------------------------------------------ workers

    def _worker_died(self, event: dict[str, Any]) -> None:
        self._died[event["slot"]] = event["time"]

    def _worker_recycled(self, event: dict[str, Any]) -> None:
        slot, why = event["slot"], str(event.get("why", ""))
        if "memory" not in why:
            self.asked += 1
            return
        memory = self.memory.setdefault(slot, Memory())
        memory.since = memory.since or event["time"]
        memory.recycled += 1
        memory.why = why
        self._away[slot] = (event["time"], "")

    def _worker_ready(self, event: dict[str, Any]) -> None:
        slot, now = event["slot"], event["time"]
        self._died.pop(slot, None)
        since, verdict = self._away.pop(slot, (now, ""))
        passed = max(0.0, now - since)
        if verdict in self.troubles:
            self.troubles[verdict].seconds += passed
        elif slot in self.memory and not verdict:
            self.memory[slot].seconds += passed

    # ------------------------------------------------------------ incidents

    def _trouble(self, verdict: str, kind: str, time: float) -> Trouble | None:
        found = self.troubles.get(verdict)
        if found is None and len(self.troubles) < _MOST_TROUBLES:
            found = self.troubles[verdict] = Trouble(verdict, kind, time)
        return found

    def _incident(self, event: dict[str, Any]) -> None:
        kind = event.get("incident", "")
        if kind in ("recycled", "resized", "breaker"):
            return
        trouble = self._trouble(event.get("verdict") or kind, kind, event["time"])
        if trouble is None:
            return
        slot = event.get("slot", -1)
        if not trouble.incidents and event.get("batch", -1) >= 0:
            trouble.at = f"batch {event['batch']} of epoch {event.get('epoch', 0)}"
        trouble.kind, trouble.last = kind, event["time"]
        trouble.incidents += 1
        trouble.sentence, trouble.cause, trouble.action = event["sentence"], event["cause"], event["action"]
        trouble.slots[slot] += 1
        trouble.names(event.get("samples", []), event.get("described", []))
        if len(trouble.ids) < _MOST_IDS:
            trouble.ids.append(event["id"])
        else:
            trouble.ids[-1] = event["id"]
        if kind in DEADLY:
            trouble.workers_lost += 1
            if kind == "hang":
                trouble.seconds += event.get("seconds", 0.0)
            self._away[slot] = (self._died.get(slot, event["time"]), trouble.verdict)

    def _quarantine(self, event: dict[str, Any]) -> None:
        trouble = self._trouble(event["verdict"], event["verdict"], event["time"])
        if trouble is None:
            return
        trouble.names(event.get("samples", []), [])
        for sample in event.get("samples", []):
            if len(trouble.condemned) < _MOST_SAMPLES:
                trouble.condemned[sample] = bool(event.get("replaced"))
        if event["id"] not in trouble.ids and len(trouble.ids) < _MOST_IDS:
            trouble.ids.append(event["id"])

    def _breaker(self, event: dict[str, Any]) -> None:
        if event.get("open") or not self.breaker:
            self.breaker = [*self.breaker[-9:], {**event, "closed": None}]
        else:
            self.breaker[-1]["closed"] = event["time"]

    def _given_up(self, event: dict[str, Any]) -> None:
        self.given_up = event

    def _resized(self, event: dict[str, Any]) -> None:
        self.resized = event

    def _job_ended(self, event: dict[str, Any]) -> None:
        self.ended = event["time"]

    # ------------------------------------------------------------ time

    def _epoch_began(self, event: dict[str, Any]) -> None:
        self._ticks.clear()  # between epochs nobody waits: no stretch reaches over it

    def _tick(self, event: dict[str, Any]) -> None:
        for slot in event.get("slots", ()):
            if "private" in slot:
                memory = self.memory.setdefault(slot["slot"], Memory())
                memory.saw(slot["incarnation"], event["time"], slot["private"])
        self._ticks.append(event)
        while len(self._ticks) > 2 and event["time"] - self._ticks[1]["time"] >= _WINDOW_S:
            self._ticks.popleft()
        first = self._ticks[0]
        passed = event["time"] - first["time"]
        if passed < _WINDOW_S * 0.6:
            return
        self.share = _share(first, event)
        self.rate = (event["delivered"] - first["delivered"]) / passed
        self.sample_rate = (event.get("samples", 0) - first.get("samples", 0)) / passed
        if self.share >= _BEHIND and not self.behind_since:
            ticks = list(self._ticks)
            begun = next((a for a, b in itertools.pairwise(ticks) if _share(a, b) >= _BEHIND), first)
            self.behind_since = begun["time"]
            self.behind_from = (begun["wait_seconds"], begun["trainer_seconds"])
        elif self.share < _CAUGHT_UP:
            self.behind_since = 0.0
            self.good_rate = self.rate


def _share(before: dict[str, Any], after: dict[str, Any]) -> float:
    """Of waiting, between two ticks."""
    wait = after["wait_seconds"] - before["wait_seconds"]
    own = after["trainer_seconds"] - before["trainer_seconds"]
    return wait / (wait + own) if wait + own > 0 else 0.0
