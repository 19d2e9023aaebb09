"""What the machine knows of slots, tasks and open questions.

Reads   nothing.
Writes  nothing; the machine changes these and nobody else does.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from outlive import records as r
from outlive._fleet.halving import Halving
from outlive.incident import Incident, Stage

# No user code runs, or (probing) such that nobody asked for: no sample is to blame.
OWN_STAGES = (Stage.IDLE, Stage.LEAVING, Stage.WAITING, Stage.DELIVERING, Stage.PROBING)
START_STAGES = (Stage.STARTING, Stage.PREPARING, Stage.FORWARDING)
_CHANCE = 5


@dataclass
class Slot:
    number: int
    incarnation: int = 0
    state: str = "empty"
    queue: deque[int] = field(default_factory=deque)
    sent: int = 0  # how many of the queue this incarnation has been sent
    failed_starts: int = 0
    ended: bool = False
    can_skip: bool = False  # its stream can step over a sample that kills
    leaving: bool = False  # its worker was asked to go, and is sent nothing more


@dataclass
class Task:
    seq: int
    slot: int  # -1: whichever takes it
    size: int
    skippable: bool
    deaths: dict[int, int] = field(default_factory=dict)
    whole_deaths: int = 0
    excluded: set[int] = field(default_factory=set)
    substitutes: dict[int, int] = field(default_factory=dict)
    search: Halving | None = None
    is_asked_about: bool = False  # the user's callable has yet to say what becomes of it
    undelivered: int = 0  # how many workers died while they handed it over

    def leave_out(self, event: r.TaskSubmitted, rule: object) -> None:
        """Leave out, or replace, what is known to be bad; `rule`: for what has killed workers in an earlier epoch."""
        if rule == "skip":
            self.excluded.update(event.known_bad)
        elif rule == "replace":
            self.substitutes.update(dict.fromkeys(event.known_bad, 1))
        self.excluded.update(event.spared)
        self.substitutes.update(dict.fromkeys(event.exchanged, 1))

    def keeps_being_undelivered(self) -> bool:
        """One more has died so. That is nobody's fault, until it is no chance any more."""
        self.undelivered += 1
        return self.undelivered > _CHANCE

    def live(self) -> tuple[int, ...]:
        if self.skippable:
            return tuple(p for p in range(self.size) if p not in self.excluded)
        # A stream: what takes a bad sample's place comes after the others, and its own place stays empty.
        return tuple(p for p in range(self._end()) if p not in self.excluded and p not in self.substitutes)

    def has(self, position: int) -> bool:
        return 0 <= position and (position < self.size or not self.skippable)

    def suspects(self) -> tuple[int, ...]:
        """Where a killer may be: in a stream also behind, where the worker put more for samples that raised."""
        if self.skippable:
            return self.live()
        return self.live() + tuple(range(self._end(), self._end() + self.size))

    def _end(self) -> int:
        return self.size + sum(self.substitutes.values())

    def plan(self) -> r.Plan:
        if self.search is not None:
            return r.Plan(frozenset(self.excluded), dict(self.substitutes), self.search.probe)
        if not self.excluded and not self.substitutes:
            return r.WHOLE
        return r.Plan(frozenset(self.excluded), dict(self.substitutes))


@dataclass
class Question:
    """A decision that only the user's callable can make."""

    incident: Incident
    slot: int
    incarnation: int
    task: Task | None  # None: a living worker waits for the answer
    positions: tuple[int, ...] = ()
