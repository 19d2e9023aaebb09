"""Does what the machine decides: the one loop that waits, feeds the machine and carries its actions out.

Reads   events from an engine.
Writes  tasks and starts to the engine, outcomes and incidents to the front door.
Never   decides anything; never runs in a thread of its own: it works while the front door waits in it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from outlive import records as r
from outlive._fleet.machine import Machine
from outlive.incident import Decision, Incident
from outlive.records import Action, Event, Outcome


class Engine(Protocol):
    """Where workers run."""

    def start_worker(self, slot: int, incarnation: int) -> None: ...
    def renew_workers(self) -> r.WorkersRenewed | r.RenewalFailed: ...
    def dismiss_worker(self, slot: int, incarnation: int) -> None: ...
    def send_task(self, slot: int, incarnation: int, seq: int, body: Any, probe: bool) -> None: ...
    def answer(self, slot: int, incarnation: int, decision: Decision) -> None: ...
    def answer_doubt(self, answer: r.AnswerDoubt) -> None: ...
    def step_over(self, slot: int, count: int, killers: frozenset[int]) -> None: ...
    def wait_ready(self, timeout_s: float | None) -> Any: ...
    def take_events(self, ready: Any) -> Sequence[tuple[Event, Any]]: ...


class FrontDoor(Protocol):
    """What the runner asks of the loader or pool that it works for."""

    def encode(self, seq: int, plan: r.Plan) -> Any:
        """A task as bytes, or as a list of parts."""
        ...

    def explain(self, incident: Incident) -> Incident: ...
    def incident_happened(self, incident: Incident) -> None: ...
    def incident_goes_on(self, incident: Incident) -> None: ...
    def quarantine(self, seq: int, positions: tuple[int, ...], incident: Incident) -> None: ...
    def decide(self, incident: Incident) -> Decision: ...
    def probes(self, good_batch: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]: ...


class Concluded(NamedTuple):
    outcome: Outcome
    payload: Any
    incident: Incident | None


def _is_no_start(action: Action) -> bool:
    return type(action) is not r.StartWorker


class Runner:
    def __init__(self, engine: Engine, machine: Machine, door: FrontDoor) -> None:
        self._engine = engine
        self._machine = machine
        self._door = door
        self._payloads: dict[int, Any] = {}
        self.concluded: dict[int, Concluded] = {}
        self.arrived: deque[int] | None = None  # the order in which tasks were concluded, for who wants it
        self.given_up: r.GiveUp | None = None
        # Set while news are acted on. When an interrupt leaves it set, something may have been read and lost.
        self.torn = False
        self.problem: BaseException | None = None  # what the user's callable raised
        self.listener: Callable[[Event | Action], None] | None = None  # is told of what is not of every task

    @property
    def machine(self) -> Machine:
        return self._machine

    def begin(self) -> None:
        self._carry_out(self._machine.begin())

    def tell(self, event: Event) -> None:
        self.torn = True
        self._handle(event)
        self.torn = False

    def wait(self, timeout_s: float | None) -> None:
        """Wait for news, `timeout_s` at most, and act on it."""
        ready = self._engine.wait_ready(timeout_s)
        self.torn = True
        for event, payload in self._engine.take_events(ready):
            if payload is not None:
                self._payloads[event.seq] = payload  # type: ignore[union-attr]
            elif self.listener is not None:
                self.listener(event)
            self._handle(event)
        self.torn = False

    def _handle(self, event: Event) -> None:
        actions = self._machine.handle(event, time.monotonic())
        if actions:
            if type(event) is r.WorkerExited:
                # The newcomer first: it starts while the incident is looked into.
                actions.sort(key=_is_no_start)
            self._carry_out(actions)

    def _carry_out(self, actions: list[Action]) -> None:
        for action in actions:  # which grows when an answer leads to more
            if isinstance(action, r.ConcludeTask):
                seq, outcome, incident = action
                if incident is not None:
                    incident = self._door.explain(incident)
                self.concluded[seq] = Concluded(outcome, self._payloads.pop(seq, None), incident)
                if self.arrived is not None:
                    self.arrived.append(seq)
            elif isinstance(action, r.SendTask):
                slot, incarnation, seq, plan = action
                body = self._door.encode(seq, plan)
                self._engine.send_task(slot, incarnation, seq, body, plan.probe is not None)
            else:
                actions.extend(self._carry_out_rare(action))
                if self.listener is not None:
                    self.listener(action)

    def _carry_out_rare(self, action: Action) -> list[Action]:
        if isinstance(action, r.StartWorker):
            self._engine.start_worker(action.slot, action.incarnation)
        elif isinstance(action, r.RenewWorkers):
            return self._machine.handle(self._engine.renew_workers(), time.monotonic())
        elif isinstance(action, r.DismissWorker):
            self._engine.dismiss_worker(action.slot, action.incarnation)
        elif isinstance(action, r.ReportIncident):
            tell = self._door.incident_goes_on if action.again else self._door.incident_happened
            tell(self._door.explain(action.incident))
        elif isinstance(action, r.PutInQuarantine):
            self._door.quarantine(action.seq, action.positions, self._door.explain(action.incident))
        elif isinstance(action, r.AnswerWorker):
            self._engine.answer(action.slot, action.incarnation, action.decision)
        elif isinstance(action, r.AnswerDoubt):
            if action.word is r.SourceWord.PROBE:
                goods, others = self._door.probes(action.good_batch)
                action = replace(action, goods=goods, others=others)
            self._engine.answer_doubt(action)
        elif isinstance(action, r.StepOver):
            self._engine.step_over(action.slot, action.count, action.killers)
        elif isinstance(action, r.AskPolicy):
            return self._machine.handle(r.DecisionMade(action.ticket, self._ask(action.incident)), time.monotonic())
        elif isinstance(action, r.GiveUp):
            incident = action.incident and self._door.explain(action.incident)
            self.given_up = r.GiveUp(action.limit, action.text, incident)
        return []

    def _ask(self, incident: Incident) -> Decision:
        try:
            return self._door.decide(self._door.explain(incident))
        except Exception as error:
            # Raised at the next next(), where the user can see it; the sample is raised, never silently skipped.
            self.problem = error
            return Decision.RAISE
