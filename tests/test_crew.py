"""How many workers may live: what memory and sizes change, by hand.

Reads   the actions that events are answered with.
Writes  events, one by one.
Never   a process, a clock; times are numbers.
"""

from __future__ import annotations

from typing import Any

from outlive import records as r
from outlive._fleet.crew import HOLD_S, SETTLE_S
from outlive._fleet.machine import Machine
from outlive.evidence import Evidence, MemorySample, Oom, Surroundings, Worked
from outlive.incident import Exit, IncidentKind, InHand, Stage
from outlive.settings import FaultPolicy

GIB = 1 << 30
KILLED = Evidence(Worked(memory=(MemorySample(1.0, 3 * GIB, None),)), surroundings=Surroundings(oom=Oom(group_kills=1)))
SCARCE = r.MemoryTold(True, slot=1, slot_bytes=4 * GIB, used_bytes=7 * GIB, left_bytes=GIB // 4)
AMPLE = r.MemoryTold(False, left_bytes=6 * GIB)


def begun(slots: int = 3, *, takes_turns: bool = True) -> Machine:
    machine = Machine(slots, FaultPolicy(retries=0, on_error="skip"), takes_turns=takes_turns)
    machine.begin()
    for slot in range(slots):
        machine.handle(r.WorkerReady(slot, 1), 0.0)
    return machine


def of(kind: type, actions: list[r.Action]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


def resized(actions: list[r.Action]) -> list[str]:
    told = [action.incident for action in of(r.ReportIncident, actions)]
    return [str(incident) for incident in told if incident.kind is IncidentKind.RESIZED]


def left(slot: int, incarnation: int) -> r.WorkerExited:
    hand = InHand(Stage.LEAVING)
    return r.WorkerExited(slot, incarnation, 1, Exit(code=0), hand, recycled="it was asked to leave")


def killed(slot: int, incarnation: int = 1) -> r.WorkerExited:
    hand = InHand(Stage.FETCHING, slot, 0)
    return r.WorkerExited(slot, incarnation, 1, Exit(signal=9), hand, evidence=KILLED)


def test_the_fleet_goes_on_with_one_less_after_the_kernel_killed_one():
    """No worker in its place, no sample blamed, and the report says who was how large."""
    machine = begun()
    machine.handle(r.TaskSubmitted(1, 1, 4), 0.0)

    actions = machine.handle(killed(1), 1.0)

    # Slot 1 has work, slot 0 has none: its worker makes room.
    assert of(r.StartWorker, actions) == []
    assert of(r.DismissWorker, actions) == [r.DismissWorker(0, 1)]
    assert of(r.PutInQuarantine, actions) == []
    assert resized(actions) == [
        "the fleet goes on with 2 of 3 workers: the kernel killed worker 1, which had 3 GiB, for want of memory"
    ]
    assert machine.handle(left(0, 1), 1.1) == [r.StartWorker(1, 2), r.SendTask(1, 2, 1)]


def test_the_last_worker_is_replaced_and_its_sample_blamed():
    """Nobody is left to spare: then it is a death like others."""
    machine = begun(1)
    machine.handle(r.TaskSubmitted(0, 0, 4), 0.0)

    actions = machine.handle(killed(0), 1.0)

    assert of(r.StartWorker, actions) == [r.StartWorker(0, 2)]
    assert of(r.PutInQuarantine, actions)[0].positions == (0,)


def test_the_largest_leaves_when_memory_is_scarce():
    machine = begun()

    actions = machine.handle(SCARCE, 1.0)

    assert of(r.DismissWorker, actions) == [r.DismissWorker(1, 1)]
    assert resized(actions) == [
        "the fleet goes on with 2 of 3 workers: workers use 7 GiB and 256 MiB is left of the memory; "
        "worker 1 is the largest with 4 GiB"
    ]
    assert machine.handle(SCARCE, 2.0) == []  # it has not left yet
    assert machine.handle(left(1, 1), 2.0) == []
    assert machine.handle(SCARCE, 2.0 + SETTLE_S / 2) == []  # what it gave back may not show yet
    assert len(of(r.DismissWorker, machine.handle(SCARCE, 2.0 + SETTLE_S))) == 1


def test_the_last_one_stays_and_that_is_told_once():
    machine = begun(1)

    assert "no worker can be spared" in resized(machine.handle(SCARCE, 1.0))[0]
    assert machine.handle(SCARCE, 99.0) == []


def test_streams_keep_their_workers():
    """A stream is its worker's: nobody else could go on with it."""
    machine = begun(takes_turns=False)

    actions = machine.handle(SCARCE, 1.0)

    assert of(r.DismissWorker, actions) == []
    assert "each worker has a stream of its own" in resized(actions)[0]
    assert of(r.StartWorker, machine.handle(killed(1), 2.0)) == [r.StartWorker(1, 2)]


def test_it_grows_back_one_by_one_when_there_is_room_and_later_each_time():
    machine = begun()
    machine.handle(killed(2), 0.0)

    assert machine.handle(AMPLE, HOLD_S / 2) == []
    actions = machine.handle(AMPLE, HOLD_S)
    assert of(r.StartWorker, actions) == [r.StartWorker(2, 2)]
    assert resized(actions) == ["the fleet goes on with 3 of 3 workers: there is room for another worker (6 GiB left)"]
    assert machine.handle(AMPLE, 9 * HOLD_S) == []

    machine.handle(killed(1), 10 * HOLD_S)
    machine.handle(killed(0), 10 * HOLD_S)
    assert machine.handle(AMPLE, 11 * HOLD_S) == []
    assert len(of(r.StartWorker, machine.handle(AMPLE, 12 * HOLD_S))) == 1


def test_tasks_bound_to_no_slot_go_to_idle_workers():
    machine = begun(2)
    actions = [a for seq in range(5) for a in machine.handle(r.TaskSubmitted(seq, -1, 1), 0.0)]
    assert [(a.slot, a.seq) for a in of(r.SendTask, actions)] == [(0, 0), (1, 1), (0, 2), (1, 3)]

    assert of(r.SendTask, machine.handle(r.TaskFinished(1, 1, 1), 0.0)) == [r.SendTask(1, 1, 4)]


def test_what_a_smaller_fleet_has_left_over_others_do():
    """Tasks bound to no slot do not wait for theirs to be filled again."""
    machine = begun(2)
    for seq in range(4):
        machine.handle(r.TaskSubmitted(seq, -1, 1), 0.0)

    machine.handle(killed(1), 1.0)

    actions = machine.handle(r.TaskFinished(0, 1, 0), 1.0)
    assert [a.seq for a in of(r.SendTask, actions)] == [1]
    actions = machine.handle(r.TaskFinished(0, 1, 2), 1.0)
    assert [a.seq for a in of(r.SendTask, actions)] == [3]


def test_the_wanted_number_of_workers_is_kept():
    machine = begun(3)

    actions = machine.handle(r.SizeWanted(1), 0.0)
    assert [a.slot for a in of(r.DismissWorker, actions)] == [2, 1]

    for slot in (1, 2):
        machine.handle(left(slot, 1), 0.0)
    actions = machine.handle(r.SizeWanted(2), 0.0)
    assert of(r.StartWorker, actions) == [r.StartWorker(1, 2)]
