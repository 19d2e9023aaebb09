"""Makes incidents of what the machine was told.

Reads   events, slots, tasks.
Writes  nothing.
Never   a process, a file, a lock, the clock; indices and times are added by whoever knows them.
"""

from __future__ import annotations

from outlive import records as r
from outlive._fleet.state import Slot, Task
from outlive.incident import Decision, Failure, Incident, IncidentKind, InHand, Stage

WHOLE_BATCH_STAGES = (Stage.FETCHING_MANY, Stage.COLLATING, Stage.SENDING, Stage.AT_WORK)


def of_failure(slot: Slot, task: Task, failure: Failure, action: str, allowed: int) -> Incident:
    positions = failure.culprits or ((failure.position,) if failure.position >= 0 else ())
    if not positions and failure.stage in WHOLE_BATCH_STAGES:
        positions = task.live()
    return Incident(
        kind=IncidentKind.EXCEPTION,
        slot=slot.number,
        incarnation=slot.incarnation,
        pid=-1,
        batch=task.seq,
        in_hand=InHand(failure.stage, task.seq, failure.position),
        positions=positions,
        failure=failure,
        action=action,
        attempt=failure.attempts,
        attempts_allowed=allowed,
    )


def of_death(event: r.WorkerExited, allowed: int) -> Incident:
    return Incident(
        kind=IncidentKind.HANG if event.hung else IncidentKind.CRASH,
        slot=event.slot,
        incarnation=event.incarnation,
        pid=event.pid,
        batch=event.in_hand.batch,
        in_hand=event.in_hand,
        exit=event.exit,
        failure=event.unsent,
        hung=event.hung,
        stack=event.stack,
        evidence=event.evidence,
        action="replaced" if event.unsent is None else "replaced, its batch is made again",
        attempts_allowed=allowed,
    )


def of_lost(slot: Slot, task: Task, positions: tuple[int, ...]) -> Incident:
    """A sample that raised and was replaced by its worker, which then died of the replacement and told nobody."""
    what = "it raised; its worker put another sample in its place, and died of that one with the traceback in hand"
    failure = Failure("Exception", what, "", None, Stage.FETCHING, positions[0], Decision.REPLACE)
    return of_failure(slot, task, failure, "replaced by another sample", 1)


def of_recycling(event: r.WorkerExited) -> Incident:
    return Incident(
        kind=IncidentKind.RECYCLED,
        slot=event.slot,
        incarnation=event.incarnation,
        pid=event.pid,
        batch=-1,
        in_hand=event.in_hand,
        exit=event.exit,
        recycled=event.recycled,
        evidence=event.evidence,
        action="recycled",
    )


def of_growth(event: r.WorkerGrew) -> Incident:
    return Incident(
        kind=IncidentKind.GROWTH,
        slot=event.slot,
        incarnation=event.incarnation,
        pid=event.pid,
        batch=-1,
        in_hand=InHand(Stage.AT_WORK),
        evidence=event.evidence,
        action="watched",
    )


def of_source(
    event: r.SourceDoubted | r.SourceProbed, positions: tuple[int, ...], failure: Failure, found: str, action: str
) -> Incident:
    return Incident(
        kind=IncidentKind.BREAKER,
        slot=event.slot,
        incarnation=event.incarnation,
        pid=event.pid,
        batch=event.seq,
        in_hand=InHand(Stage.PROBING, event.seq),
        positions=positions,
        failure=failure,
        source=found,
        action=action,
    )


def of_search(slot: Slot, task: Task, allowed: int) -> Incident:
    """A culprit that was found because others survived without it."""
    return Incident(
        kind=IncidentKind.CRASH,
        slot=slot.number,
        incarnation=slot.incarnation,
        pid=-1,
        batch=task.seq,
        in_hand=InHand(Stage.COLLATING, task.seq),
        attempts_allowed=allowed,
    )


def of_preparation(event: r.PreparationFailed) -> Incident:
    return Incident(
        kind=IncidentKind.START,
        slot=event.slot,
        incarnation=event.incarnation,
        pid=event.pid,
        batch=-1,
        in_hand=InHand(Stage.STARTING if event.failure.stage is Stage.STARTING else Stage.PREPARING),
        failure=event.failure,
        action="started again",
    )


def of_suspicion(event: r.WorkerSuspected) -> Incident:
    position = event.in_hand.position
    return Incident(
        kind=IncidentKind.SUSPECTED_HANG,
        slot=event.slot,
        incarnation=event.incarnation,
        pid=event.pid,
        batch=event.in_hand.batch,
        in_hand=event.in_hand,
        positions=(position,) if position >= 0 else (),
        stack=event.stack,
        evidence=event.evidence,
        action="watched",
    )
