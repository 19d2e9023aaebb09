"""What the runner asks about a loader's tasks: their bytes, their samples' names, the user's decision.

Reads   the tasks that were drawn.
Writes  the ledger.
Never   knows the iterator: that must be free to go when its last user lets go of it.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch.utils.data import RandomSampler, SequentialSampler

from outlive import errors
from outlive import records as r
from outlive._forensics import autopsy, guard, unpicklable
from outlive._forensics.ledger import Ledger, StreamIndex, key_of
from outlive._transport import wire
from outlive._worker import failures
from outlive.evidence import RECENT_SAMPLES, Evidence
from outlive.incident import Decision, Failure, Incident, IncidentKind, InHand, Stage
from outlive.loader import tasks
from outlive.loader.history import History
from outlive.loader.raising import add_note, rebuilt
from outlive.orders import Plan
from outlive.settings import FaultPolicy, decision_of

_CANDIDATES = 32
_MOST_DESCRIBED = 8
_REMEMBERED_DRAWS = 4096
_PROBED = 3


class Sight(Protocol):
    """What the door wants to know of an engine."""

    def look(self, slot: int) -> tuple[int | None, InHand | None]: ...
    def place_of(self, slot: int) -> bytes | None: ...


class Door:
    """The front door that a loader's runner works for."""

    def __init__(
        self,
        ledger: Ledger,
        policy: FaultPolicy,
        engine: Sight,
        *,
        stream: bool,
        batched: bool,
        describe: Callable[[Any], str] | None = None,
    ) -> None:
        self.ledger = ledger
        self.policy = policy
        self.engine = engine
        self.stream = stream
        self.batched = batched
        self.describe = describe
        self.history = History(self._listed)
        self.drawn: dict[int, Any] = {}  # seq → index as the sampler gave it
        self.pool: Any = None  # where replacements are drawn from
        self.seed = 0
        self.imports_main = False  # workers import the main module
        rules = (policy.on_error, policy.crash_rule)
        self._may_replace = "replace" in rules or any(callable(rule) for rule in rules)
        self._last: tuple[Incident, Incident] | None = None
        self._looks = 0
        self._candidates: dict[int, tuple[Any, ...]] = {}
        self._substituted: dict[int, dict[int, Any]] = {}  # seq → position → what was sent in its place

    def draw(self, seq: int, index: Any) -> None:
        """Note what the sampler drew for a batch."""
        if self.batched and not hasattr(index, "__len__") and hasattr(index, "__iter__"):
            index = list(index)
        self.drawn[seq] = index
        if type(self.pool) is list and len(self.pool) < _REMEMBERED_DRAWS:
            self.pool.extend(self._listed(index))
        if self._may_replace and self.pool:
            self._candidates[seq] = self._draw_candidates(seq, index)

    def size_of(self, seq: int) -> int:
        index = self.drawn[seq]
        return len(index) if self.batched and hasattr(index, "__len__") else 1

    def known_bad(self, seq: int) -> tuple[tuple[int, ...], ...]:
        """Positions of samples that are known to be bad, as `TaskSubmitted` has them: by an earlier epoch, in which
        they killed workers; by a quarantine file, left out; likewise, replaced.
        """
        quarantine = self.ledger.quarantine
        if self.stream or not quarantine.has_deadly:
            return ()
        deadly = {p: i for p, i in enumerate(self._listed(self.drawn[seq])) if quarantine.is_deadly(i)}
        foreseen = {p: quarantine[i].kind for p, i in deadly.items() if quarantine.is_foreseen(i)}
        exchanged = tuple(p for p, kind in foreseen.items() if self._candidates.get(seq) and self._replaces(kind))
        spared = tuple(p for p in foreseen if p not in exchanged)
        return tuple(p for p in deadly if p not in foreseen), spared, exchanged

    def _replaces(self, kind: IncidentKind) -> bool:
        return (self.policy.on_error if kind is IncidentKind.EXCEPTION else self.policy.crash_rule) == "replace"

    def encode(self, seq: int, plan: Plan) -> bytes:
        index = self.drawn[seq]
        if self.stream:
            return tasks.encode_stream(self.size_of(seq) if self.batched else -1, plan)
        candidates = self._candidates.get(seq, ())
        if plan.substitutes and candidates:
            chosen = {p: tasks.candidate(candidates, p, nth) for p, nth in plan.substitutes.items()}
            self._substituted[seq] = chosen
            return tasks.encode_map(index, self.batched, plan, candidates, chosen)
        return tasks.encode_map(index, self.batched, plan, candidates, {})

    def begin_epoch(self, pool: Any) -> None:
        self.drawn.clear()
        self._candidates.clear()
        self._substituted.clear()
        self.history.clear()
        self.pool = pool

    def forget(self, seq: int) -> None:
        """The batch is over."""
        if seq in self.drawn:
            self.history.keep(seq, self.drawn.pop(seq))
        if self._candidates:
            self._candidates.pop(seq, None)
            self._substituted.pop(seq, None)

    def _draw_candidates(self, seq: int, index: Any) -> tuple[Any, ...]:
        """Other samples that may take a bad one's place: the same ones in every run with the same seed."""
        pool = self.pool
        own = {key_of(i) for i in self._listed(index)}
        draw = random.Random(f"{self.seed}/{self.ledger.epoch}/{seq}")
        quarantine = self.ledger.quarantine
        found: dict[Any, Any] = {}  # each once: a small dataset would offer the same bad ones again and again
        for _ in range(4 * _CANDIDATES):
            candidate = pool[draw.randrange(len(pool))]
            key = key_of(candidate)
            if not quarantine.is_deadly(candidate) and (key not in own or len(own) == len(pool)):
                found.setdefault(key, candidate)
            if len(found) == _CANDIDATES:
                break
        return tuple(found.values())

    def explain(self, incident: Incident) -> Incident:
        """Add what the machine does not know: indices, epoch, pid, time."""
        if self._last is not None and self._last[0] is incident:
            return self._last[1]
        if self.imports_main and incident.kind is IncidentKind.START and incident.exit is None:
            # Whoever waits for the first batch is still on the stack, at the line that asked for it.
            evidence = replace(incident.evidence, unguarded=guard.unguarded_line())
            incident, asked = replace(incident, evidence=evidence), incident
        else:
            asked = incident
        indices = self._indices(incident)
        pid = incident.pid
        if pid < 0:
            pid = self.engine.look(incident.slot)[0] or -1
        explained = autopsy.perform(
            replace(
                incident,
                indices=indices,
                described=self._described(indices),
                evidence=self._with_recent(incident, indices),
                index=indices[0] if len(indices) == 1 else None,
                epoch=self.ledger.epoch,
                pid=pid,
                when=time.time(),
                number=len(self.ledger.incidents),
                id=secrets.token_hex(4),
            )
        )
        self._last = (asked, explained)
        return explained

    def _described(self, indices: tuple[Any, ...]) -> tuple[str, ...]:
        if self.describe is None:
            return ()
        try:
            return tuple(str(self.describe(index)) for index in indices[:_MOST_DESCRIBED])
        except Exception as error:  # words are no reason to lose the incident
            return (f"describe raised {type(error).__name__}: {failures.text_of(error)}",)

    def _with_recent(self, incident: Incident, indices: tuple[Any, ...]) -> Evidence:
        """The evidence, with the samples that its worker took up last."""
        evidence = incident.evidence
        batches = evidence.worked.recent_batches
        if not batches:
            return evidence
        if self.stream:
            upto = indices[-1].ordinal + 1 if indices else 0
            first = max(0, upto - RECENT_SAMPLES)
            recent: tuple[Any, ...] = tuple(StreamIndex(incident.slot, ordinal) for ordinal in range(first, upto))
        else:
            recent = self.history.recent(batches, incident.in_hand, self.drawn)
        return replace(evidence, worked=replace(evidence.worked, recent_indices=recent))

    def _indices(self, incident: Incident) -> tuple[Any, ...]:
        if self.stream:
            begun = incident.failure.ordinal if incident.failure is not None else -1
            if begun < 0:  # a death: the batch after the last one that arrived
                place = self.engine.place_of(incident.slot)
                begun = 0 if place is None else wire.load(place)[0]
            return tuple(StreamIndex(incident.slot, begun + p) for p in incident.positions)
        index = self.drawn.get(incident.batch)
        if index is None:
            return ()
        if len(incident.positions) == 1:
            stand_in = incident.in_hand.stand_in if incident.failure is None else incident.failure.stand_in
            if stand_in is not None:
                return (stand_in,)
        drawn = dict(enumerate(self._listed(index))) | self._substituted.get(incident.batch, {})
        return tuple(drawn[p] for p in incident.positions if p in drawn)

    def _listed(self, index: Any) -> list[Any]:
        return list(index) if self.batched and hasattr(index, "__iter__") else [index]

    def incident_happened(self, incident: Incident) -> None:
        self.ledger.add(incident)

    def incident_goes_on(self, incident: Incident) -> None:
        self.ledger.tell_again(incident)

    def quarantine(self, seq: int, positions: tuple[int, ...], incident: Incident) -> None:
        for index in incident.indices:
            self.ledger.quarantine.put(index, incident)

    def decide(self, incident: Incident) -> Decision:
        rule = self.policy.on_error if incident.kind is IncidentKind.EXCEPTION else self.policy.crash_rule
        assert callable(rule)
        return decision_of(rule(incident))

    def probes(self, good_batch: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What a worker that doubts its source may try: samples that were good before, and others by chance."""
        goods = self._ends_of(good_batch) or self.ledger.goods
        self._looks += 1
        draw = random.Random(f"{self.seed}/{self._looks}")
        pool = self.pool or [i for index in self.drawn.values() for i in self._listed(index)]
        others = [pool[draw.randrange(len(pool))] for _ in range(_PROBED)] if len(pool) else []
        return self._not_deadly(goods), self._not_deadly(others)

    def remember(self, good_batch: int) -> None:
        """An epoch ends: what was good in it is worth a probe in the next."""
        self.ledger.goods = self._ends_of(good_batch) or self.ledger.goods

    def _ends_of(self, batch: int) -> tuple[Any, ...]:
        index = self.drawn.get(batch, self.history.of(batch))
        listed = [] if index is None else self._listed(index)
        return tuple(listed[:1] + listed[1:][-1:])

    def _not_deadly(self, indices: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(i for i in indices if not self.ledger.quarantine.is_deadly(i))

    def unreadable(self, seq: int, slot: int, error: Exception) -> Incident:
        """Report a batch that arrived and cannot be unpickled here."""
        failure = failures.capture(error, Stage.SENDING)
        keep = self.policy.on_error not in ("skip", "replace")
        raw = Incident(
            IncidentKind.EXCEPTION,
            slot,
            0,
            -1,
            seq,
            InHand(failure.stage, seq),
            positions=tuple(range(self.size_of(seq))),
            failure=failure,
            action="raised" if keep else "left out, because it cannot be unpickled here",
        )
        incident = self.explain(raw)
        self.incident_happened(incident)
        if not keep:
            self.quarantine(seq, incident.positions, incident)
        return incident

    def unsendable(self, error: Exception, job: Any) -> None:
        """A job that cannot be pickled: add to the error which part of it, and what to do."""
        failure = failures.capture(error, Stage.STARTING)
        evidence = Evidence(unpicklable=unpicklable.find(job))
        if not evidence.unpicklable:
            return
        hand = InHand(Stage.STARTING)
        raw = Incident(IncidentKind.START, 0, 0, -1, -1, hand, failure=failure, evidence=evidence, action="raised")
        incident = self.explain(raw)
        self.incident_happened(incident)
        add_note(error, errors.verdict_note(incident))
        with contextlib.suppress(Exception):  # a class may refuse new attributes
            error.incident = incident  # type: ignore[attr-defined]

    def decide_failure(self, seq: int, failure: Failure) -> Decision:
        """The user's word on an exception in this very process."""
        positions = (failure.position,) if failure.position >= 0 else ()
        hand = InHand(failure.stage, seq, failure.position)
        raw = Incident(
            IncidentKind.EXCEPTION,
            0,
            1,
            -1,
            seq,
            hand,
            positions=positions,
            failure=failure,
            attempt=failure.attempts,
            attempts_allowed=self.policy.retries + 1,
        )
        return self.decide(self.explain(raw))


def replacement_pool(loader: Any) -> Any:
    """What bad samples may be replaced by: never one that this sampler could not have drawn.

    The whole dataset under torch's own samplers; else what has been drawn so far in this epoch.
    """
    plain = type(loader.batch_sampler) in (type(None), torch.utils.data.BatchSampler)
    if plain and isinstance(loader.sampler, (SequentialSampler, RandomSampler)):
        size = len(loader.sampler.data_source)
        if size:
            return range(size)
    return []


def give_up_error(given_up: r.GiveUp, ledger: Ledger, policy: FaultPolicy) -> BaseException:
    """The one error that ends an epoch when a limit is exceeded."""
    incident = given_up.incident
    if given_up.limit is r.LimitKind.STARTS:
        assert incident is not None
        if incident.failure is not None and incident.failure.traceback:
            error = rebuilt(incident)
            add_note(error, errors.verdict_note(incident))
            return error
        return errors.start_error(incident, incident.attempt)
    if given_up.limit is r.LimitKind.RENEWAL:
        assert incident is not None
        return errors.renewal_error(incident, given_up.text, delivered=ledger.delivered)
    if given_up.limit is r.LimitKind.PATIENCE:
        assert incident is not None
        told = [i for i in ledger.incidents if i.kind is IncidentKind.BREAKER]
        return errors.source_error(
            given_up.text, incident, told[-2:], delivered=ledger.delivered, patience_s=policy.breaker_patience or 0.0
        )
    if given_up.limit is r.LimitKind.UNSENT:
        assert incident is not None
        verdict = incident.verdict
        remedy = verdict.remedies[0] if verdict is not None and verdict.remedies else "smaller batches"
        seen = [i for i in ledger.incidents if i.failure is not None and i.kind is IncidentKind.CRASH]
    elif given_up.limit is r.LimitKind.RESTARTS:
        remedy = "FaultPolicy(max_restarts=…, restart_window_s=…)   if so many deaths are to be expected"
        seen = [i for i in ledger.incidents if i.kind is not IncidentKind.EXCEPTION]
    else:
        remedy = "FaultPolicy(max_bad=…)   if so many bad samples are to be expected"
        seen = list(ledger.quarantine.values())
    seen = [i for i in seen if i.epoch == ledger.epoch]
    return errors.TooManyFaultsError(errors.limit_message(given_up.text, seen, remedy), seen)
