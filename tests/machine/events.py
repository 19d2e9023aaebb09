"""Builds machines, sends them events, and picks out the actions they answer with.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

from typing import Any

from outlive import records as r
from outlive._fleet.machine import Machine
from outlive.incident import Exit, InHand, Stage
from outlive.records import Outcome, Plan
from outlive.settings import FaultPolicy


def begun(slots: int = 1, **policy: Any) -> Machine:
    """A machine whose workers have all started."""
    machine = Machine(slots, FaultPolicy(**policy))
    machine.begin()
    for slot in range(slots):
        machine.handle(r.WorkerReady(slot, 1), 0.0)
    return machine


def submit(machine: Machine, *seqs: int, slot: int = 0, size: int = 4, **more: Any) -> list[r.Action]:
    return [a for seq in seqs for a in machine.handle(r.TaskSubmitted(seq, slot, size, **more), 0.0)]


def death(
    incarnation: int = 1, stage: Stage = Stage.FETCHING, batch: int = 0, position: int = -1, slot: int = 0, **more: Any
) -> r.WorkerExited:
    return r.WorkerExited(slot, incarnation, 4000 + incarnation, Exit(signal=9), InHand(stage, batch, position), **more)


def of(kind: type, actions: list[r.Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def sent(actions: list[r.Action]) -> list[tuple[int, int, Plan]]:
    return [(a.incarnation, a.seq, a.plan) for a in of(r.SendTask, actions)]


def concluded(actions: list[r.Action]) -> list[tuple[int, Outcome]]:
    return [(a.seq, a.outcome) for a in of(r.ConcludeTask, actions)]


def handle(machine: Machine, *events: r.Event, now: float = 0.0) -> list[r.Action]:
    return [action for event in events for action in machine.handle(event, now)]


def ready(incarnation: int, slot: int = 0) -> r.WorkerReady:
    return r.WorkerReady(slot, incarnation)


def killed_twice(machine: Machine, position: int = 2, size: int = 4, **more: Any) -> list[r.Action]:
    submit(machine, 0, 1, size=size, **more)
    handle(machine, death(1, position=position), ready(2))
    return handle(machine, death(2, position=position))


def searching(**policy: Any) -> tuple[Machine, list[r.Action]]:
    machine = begun(**policy)
    submit(machine, 0, 1)
    handle(machine, death(1, Stage.COLLATING), ready(2))
    return machine, handle(machine, death(2, Stage.COLLATING), ready(3))


def asked_about_death() -> tuple[Machine, r.AskPolicy]:
    machine = begun(on_error=lambda incident: "skip")
    [question] = of(r.AskPolicy, killed_twice(machine))
    handle(machine, ready(3))
    return machine, question
