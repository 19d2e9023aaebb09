"""Decides whether it is samples that fail or their source, and who waits how long for a source that is gone.

Reads   what workers say that doubt their source, and the time it is handed.
Writes  nothing; answers with actions.
Never   a process, a file, a lock, the clock; it has no timers: the worker that probes sleeps before it does.

    closed → suspected (one worker probes at once) → open → closed    a probe succeeded: all who wait try again
                     └ closed: it answers, or        └────→ given up  the last probe within the patience failed
                       too few fail alike

One worker probes at a time, the others wait. When its probe fails, or it dies of it, it is the next one's turn. After
every third probe that fails the prober is replaced: what it holds open may be dead though the source is back.
"""

from __future__ import annotations

import enum
from collections import deque

from outlive import records as r
from outlive._fleet import incidents
from outlive._fleet.policy import pause_s
from outlive.incident import Failure, first_line
from outlive.records import Action, SourceWord
from outlive.settings import FaultPolicy

ALIKE = 4  # so many different samples that fail alike, and none that works, are no accident
_FRESH = 3  # so many probes fail, then a fresh worker has its turn
_LEAST_PAUSE_S = 0.02
_MOST_DOUBLINGS = 60
_MOST_NAMED = 10_000

_Asker = tuple[int, int]  # slot, incarnation


class State(enum.Enum):
    CLOSED = "closed"
    SUSPECTED = "suspected"
    OPEN = "open"
    GIVEN_UP = "given up"


class Breaker:
    """One fleet's opinion of where its samples come from."""

    def __init__(self, policy: FaultPolicy) -> None:
        self._policy = policy
        self.replaceable = True  # False: the one who probes is the trainer itself
        self.good_batch = -1  # the last batch of which every sample was good
        self.reset()

    def reset(self) -> None:
        """An epoch begins: nobody waits, and batches are numbered anew."""
        self.good_batch = -1
        self._last_outage = (0.0, "")  # until when, and the exception's type
        self._settle()

    def rest(self) -> None:
        """The workers are gone; that it was given up is remembered."""
        if self.state is not State.GIVEN_UP:
            self.reset()

    def _settle(self) -> None:
        self.state = State.CLOSED
        self._asked: r.SourceDoubted | None = None
        self._failure: Failure | None = None
        self._samples: set[str] = set()
        self._waiting: deque[_Asker] = deque()
        self._prober: _Asker | None = None
        self._since = 0.0
        self._probes = 0
        self._is_last = False  # there will be no probe after this one

    @property
    def deserted(self) -> bool:
        """It is open, and nobody is left who would find out that the source is back."""
        return self.state is State.OPEN and self._prober is None and not self._waiting

    # ------------------------------------------------------------ news

    def doubted(self, event: r.SourceDoubted, now: float) -> list[Action]:
        actions: list[Action] = []
        if event.failed_at:
            again = self._was_gone_then(event)
            return [r.AnswerDoubt(event.slot, event.incarnation, SourceWord.AGAIN if again else SourceWord.CONDEMN)]
        if self.state is State.CLOSED:
            self._settle()
            self.state, self._since, self._asked = State.SUSPECTED, now, event
        self._note(event.failure, event.samples)
        asker = (event.slot, event.incarnation)
        if self._prober == asker:  # it was interrupted: what it found is lost
            self._prober = None
        self._waiting.append(asker)
        if self.state is State.SUSPECTED and event.proven:
            actions += self._open(event, now)
        if self._prober is None:
            actions += self._next_probe(now)
        return actions

    def _was_gone_then(self, event: r.SourceDoubted) -> bool:
        """Whether a batch had begun to fail, as others did, before the source was back: that a sample after them, or a
        probe, is fetched well says nothing about those."""
        if self.state is not State.CLOSED and self._failure is not None:
            return self._failure.type_name == event.failure.type_name
        until, type_name = self._last_outage
        return type_name == event.failure.type_name and event.failed_at <= until

    def probed(self, event: r.SourceProbed, now: float) -> list[Action]:
        if self._prober != (event.slot, event.incarnation):
            return []
        self._waiting.append(self._prober)
        self._prober = None
        if event.works:
            return self.close(now, event.goods)
        if event.failure is not None:
            self._note(event.failure, event.samples)
        if self.state is State.SUSPECTED:
            assert self._asked is not None
            if event.proven or len(self._samples) >= ALIKE:
                return self._open(self._asked, now) + self._next_probe(now)
            return self._dismiss(SourceWord.CONDEMN)
        if self._is_last:
            return self._give_up(now)
        if self.replaceable and self._probes % _FRESH == 0:
            leaves = r.AnswerDoubt(*self._waiting.pop(), SourceWord.LEAVE)
            return [leaves, *(self._next_probe(now) if self._waiting else ())]
        return self._next_probe(now)

    def exited(self, slot: int, now: float) -> list[Action]:
        """A worker is gone, perhaps of its probe."""
        self._waiting = deque(asker for asker in self._waiting if asker[0] != slot)
        if self._prober is None or self._prober[0] != slot:
            return []
        self._prober = None
        if self.state is State.OPEN and self._is_last:
            return self._give_up(now)
        if self._waiting:
            return self._next_probe(now)
        if self.state is State.SUSPECTED:
            self._settle()
        return []

    def close(self, now: float, goods: tuple[object, ...] = ()) -> list[Action]:
        """The source answers: all who wait do their batches again."""
        actions: list[Action] = []
        if self.state is State.OPEN:
            assert self._asked is not None
            assert self._failure is not None
            probes = f"{self._probes} probe{'' if self._probes == 1 else 's'}"
            found = f"the source answers again, after {now - self._since:.1f} s and {probes}"
            self._last_outage = (now, self._failure.type_name)
            action = "closed the breaker, going on"
            actions.append(r.ReportIncident(incidents.of_source(self._asked, (), self._failure, found, action)))
        return actions + self._dismiss(SourceWord.AGAIN, goods)

    # ------------------------------------------------------------ decisions

    def _note(self, failure: Failure, samples: tuple[str, ...]) -> None:
        self._failure = failure
        if len(self._samples) < _MOST_NAMED:
            self._samples.update(samples)

    def _open(self, event: r.SourceDoubted, now: float) -> list[Action]:
        self.state, self._since, self._asked = State.OPEN, now, event
        action = "opened the breaker, no sample is condemned, waiting for it"
        found = f"the source is gone: {self._cause()}"
        return [r.ReportIncident(incidents.of_source(event, event.positions, event.failure, found, action))]

    def _next_probe(self, now: float) -> list[Action]:
        """It is the turn of whoever has waited longest."""
        self._prober = self._waiting.popleft()
        self._probes += 1
        pause = 0.0
        if self.state is State.OPEN:
            pause = max(_LEAST_PAUSE_S, pause_s(self._policy, min(self._probes, _MOST_DOUBLINGS), 0))
            if self._policy.breaker_patience is not None:
                left = max(0.0, self._since + self._policy.breaker_patience - now)
                self._is_last = pause >= left
                pause = min(pause, left)
        return [r.AnswerDoubt(*self._prober, SourceWord.PROBE, pause, self.good_batch)]

    def _dismiss(self, word: SourceWord, goods: tuple[object, ...] = ()) -> list[Action]:
        askers = list(self._waiting)
        self._settle()
        return [r.AnswerDoubt(*asker, word, goods=goods) for asker in askers]

    def _give_up(self, now: float) -> list[Action]:
        assert self._asked is not None
        assert self._failure is not None
        self.state = State.GIVEN_UP
        text = f"the source has not answered for {now - self._since:.1f} s: {self._cause()}"
        positions = self._asked.positions[:1]
        incident = incidents.of_source(self._asked, positions, self._failure, text, "gave up")
        return [r.ReportIncident(incident), r.GiveUp(r.LimitKind.PATIENCE, text, incident)]

    # ------------------------------------------------------------ words

    def _cause(self) -> str:
        assert self._failure is not None
        count = len(self._samples)
        raised = f"{self._failure.type_name}: {first_line(self._failure.message)}"
        return f"{count} different samples raised {raised}" if count > 1 else f"a sample raised {raised}"

    def words(self, now: float) -> str:
        """How it stands: for `statistics()`."""
        if self._failure is None or self.state in (State.CLOSED, State.SUSPECTED):
            return State.CLOSED.value
        head = "open since" if self.state is State.OPEN else "given up after"
        raised = f"{self._failure.type_name}: {first_line(self._failure.message)}"
        return f"{head} {now - self._since:.0f} s: {raised}"
