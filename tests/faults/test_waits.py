"""Which waits are ended soon, because nothing living can end them, and which are not."""

from __future__ import annotations

from pathlib import Path

import pytest

import outlive
from faults.waits import RIGHT, WRONG, Waiting, World, die_with_lock
from outlive import FaultPolicy, Incident, IncidentKind

FLOOR_S = 0.3


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than processors: they wait
def test_a_wait_is_ended_soon_only_if_nothing_living_can_end_it(tmp_path: Path) -> None:
    """Each in a worker of its own: right ones are told of, and delivered; wrong ones are ended at the floor."""
    waits = (*RIGHT, *WRONG, die_with_lock)
    right, wrong = {wait.__name__ for wait in RIGHT}, {wait.__name__ for wait in WRONG}
    world = World(tmp_path)
    watched: set[str] = set()
    ended: dict[str, float | None] = {}

    def note(incident: Incident) -> None:
        name = waits[incident.index].__name__ if incident.index is not None else ""
        if incident.kind is IncidentKind.SUSPECTED_HANG:
            watched.add(name)
        elif incident.kind is IncidentKind.HANG:
            assert incident.evidence.seen is not None
            ended[name] = incident.evidence.seen.limit_s
        if watched | ended.keys() >= right and ended.keys() >= wrong and not world.over.exists():
            world.let_go(ended.keys() & right)

    policy = FaultPolicy(
        on_error="skip", retries=0, max_bad=None, hang_floor_s=FLOOR_S, hang_wait_s=100.0, hang_busy_s=100.0
    )
    loader = outlive.DataLoader(
        Waiting(world, waits),
        batch_size=None,
        num_workers=len(waits),
        multiprocessing_context="fork",
        faults=policy,
        on_incident=note,
    )
    try:
        delivered = [waits[index].__name__ for index in loader]
    finally:
        world.close()

    assert ended == dict.fromkeys(wrong, FLOOR_S)
    assert delivered == [wait.__name__ for wait in RIGHT]
    assert loader.statistics().restarts == len(WRONG) + 1
