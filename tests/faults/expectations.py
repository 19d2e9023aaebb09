"""What the trainer must know of a fault: where the bad sample stands, each row's policy, the check of its incident.

Reads   a row of the table, and the incidents of a loader.
Writes  assertions.
Never   compares the text of a message where a field says the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from faults.faulty_datasets import BATCH, SIZE, WORKERS, FaultPlacement, Samples, Stream, make_loader
from faults.table import FAULTS, TORN, Fault, FaultSite, Moment, PlantedFault, call_os_exit, kill_self
from outlive import FaultPolicy, Incident, IncidentKind
from outlive._forensics.ledger import StreamIndex
from outlive.incident import Stage

# The bad sample: the second of batch 3 in a map-style dataset, the third of batch 3 in a stream. Slot 1 has both.
BAD = 13
BAD_BATCH = 3
BAD_SLOT = 1
BAD_OF_STREAM = StreamIndex(worker=1, ordinal=6)

SAMPLE_TIMEOUT_S = 0.4
# With a whole batch in hand each of its samples has this time: four times as long in all.
SHARED_TIMEOUT_S = 0.2
HANG_FLOOR_S = 0.3
# What worker_init_fn may take follows from the floor alone, and is ten times that.
INIT_FLOOR_S = 0.15

STAGES = {
    Moment.GETITEM: Stage.FETCHING,
    Moment.GETITEMS: Stage.FETCHING_MANY,
    Moment.NEXT: Stage.FETCHING,
    Moment.COLLATE: Stage.COLLATING,
    Moment.SENDING: Stage.SENDING,
    Moment.INIT: Stage.PREPARING,
}


# ---------------------------------------------------------------- rows


def rows(sites: Iterable[FaultSite], *conditions: Callable[[Fault, FaultSite], bool], turn: int | None = None) -> Any:
    """Every fault at each of these sites that meets the conditions, as parameters (fault, site).

    With a `turn` (0 to 5), five of six rows are `full`. Tests with different turns share the rows among them, and
    each test has every fault and every site in its share.
    """
    found = [
        pytest.param(
            fault,
            site,
            id=f"{name}-{site}",
            marks=[] if turn is None or (of_site + of_fault) % 6 == turn else pytest.mark.full,
        )
        for of_site, site in enumerate(sites)
        for of_fault, (name, fault) in enumerate(FAULTS.items())
        if site.moment not in fault.spares and all(condition(fault, site) for condition in conditions)
    ]
    return pytest.mark.parametrize(("fault", "site"), found)


def is_reachable(fault: Fault, site: FaultSite) -> bool:
    """Whether a plain stream gets past it: nobody can step over a sample that kills inside __next__ without skip(n)."""
    return not (fault.kills and site.moment is Moment.NEXT)


def is_cheap(fault: Fault, site: FaultSite) -> bool:
    """Whether a row costs little: each search among the samples of a batch takes deaths. Under "skip" all are done."""
    return site.in_sample or not fault.kills or fault.fire in (kill_self, call_os_exit)


def loader_with(fault: Fault, site: FaultSite, on_error: Any, *, marker: Any = None, **settings: Any) -> Any:
    """The loader of a row: one planted fault at the bad sample, or in the bad slot's worker_init_fn."""
    planted = PlantedFault(fault.name, None if marker is None else str(marker))
    placement = FaultPlacement.at(site.moment, {BAD_SLOT if site.moment is Moment.INIT else BAD: planted})
    dataset = Stream(SIZE, placement) if site.stream else None
    return make_loader(placement, policy_for(fault, site, on_error, **settings), dataset=dataset)


def policy_for(fault: Fault, site: FaultSite, on_error: Any, **settings: Any) -> FaultPolicy:
    """Limits under which a hang shows quickly and nothing healthy can be taken for one."""
    watch: dict[str, Any] = {}
    if fault.hangs:
        watch["hang_floor_s"] = INIT_FLOOR_S if site.moment is Moment.INIT else HANG_FLOOR_S
        if fault.needs_timeout and site.moment is not Moment.INIT:
            watch["sample_timeout"] = _timeout_s(site)
    return FaultPolicy(on_error=on_error, **{"backoff_s": 0.01, "max_bad": None, **watch, **settings})


def _timeout_s(site: FaultSite) -> float:
    return SHARED_TIMEOUT_S if site.moment in (Moment.GETITEMS, Moment.COLLATE) else SAMPLE_TIMEOUT_S


def name_of_bad(site: FaultSite) -> Any:
    """How loader.quarantine names the bad sample."""
    return BAD_OF_STREAM if site.stream else BAD


def kind_of(site: FaultSite) -> type:
    return Stream if site.stream else Samples


def all_batches(site: FaultSite, size: int = SIZE) -> list[list[int]]:
    """The batches, by index, of an undisturbed run."""
    if not site.stream:
        return [list(range(at, at + BATCH)) for at in range(0, size, BATCH)]
    shards = [list(range(slot, size, WORKERS)) for slot in range(WORKERS)]
    return [shard[at : at + BATCH] for at in range(0, len(shards[0]), BATCH) for shard in shards]


def without_bad(site: FaultSite) -> list[list[int]]:
    """The batches, by index, that are delivered when the bad sample is left out."""
    return [[index for index in batch if index != BAD] for batch in all_batches(site)]


# ---------------------------------------------------------------- callables


class ScriptedDecider:
    """A fault callable that gives its answers in turn, the last one for ever, and keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[Incident] = []
        self.pid = os.getpid()

    def __call__(self, incident: Incident) -> str:
        assert os.getpid() == self.pid, "a fault callable belongs to the trainer"
        self.asked.append(incident)
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


# ---------------------------------------------------------------- incidents


def real_incidents(loader: Any) -> list[Incident]:
    """The loader's incidents, less mere suspicions: on a loaded machine a healthy worker may be suspected."""
    return [incident for incident in loader.incidents if incident.kind is not IncidentKind.SUSPECTED_HANG]


def assert_explains(incident: Incident, fault: Fault, site: FaultSite) -> None:
    """That the incident says what happened, to whom, when and where."""
    assert incident.slot == BAD_SLOT
    assert incident.pid > 0
    assert incident.in_hand.stage is stage_of(fault, site)
    if site.moment is not Moment.INIT:
        assert incident.batch == BAD_BATCH
        assert name_of_bad(site) in incident.indices
    assert_cause(incident, fault, site)


def stage_of(fault: Fault, site: FaultSite) -> Stage:
    """A result that cannot be pickled shows when it is sent, wherever it was made."""
    return Stage.SENDING if Moment.INIT in fault.spares else STAGES[site.moment]


def assert_cause(incident: Incident, fault: Fault, site: FaultSite, least_s: float | None = None) -> None:
    """That the incident has the signal, code, exception, stack and time of this fault."""
    start = site.moment is Moment.INIT
    if not fault.kills:
        assert incident.kind is (IncidentKind.START if start else IncidentKind.EXCEPTION)
        assert incident.failure is not None
        if fault.type_name is not None:
            assert incident.failure.type_name == fault.type_name
            assert fault.fire.__name__ in incident.failure.traceback
        if fault.says_torn:
            assert TORN in incident.failure.message
        return
    assert incident.exit is not None
    assert incident.hung is fault.hangs
    if fault.hangs:
        assert incident.kind is (IncidentKind.START if start else IncidentKind.HANG)
        assert incident.seconds_in_hand >= (least_seconds(fault, site) if least_s is None else least_s)
    else:
        assert incident.kind is (IncidentKind.START if start else IncidentKind.CRASH)
        assert (incident.exit.signal, incident.exit.code) == (fault.signal, fault.code)
    if fault.leaves_stack:
        assert fault.fire.__name__ in incident.stack


def least_seconds(fault: Fault, site: FaultSite) -> float:
    """How long a hang lasts at least before anything is done about it."""
    if site.moment is Moment.INIT:
        return INIT_FLOOR_S * (10 if fault.needs_timeout else 1)
    return _timeout_s(site) if fault.needs_timeout else HANG_FLOOR_S / 2  # at the second try
