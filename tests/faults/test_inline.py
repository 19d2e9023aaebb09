"""num_workers=0: exceptions are dealt with in the trainer's own process, by the same words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from faults.expectations import BAD, BAD_BATCH, ScriptedDecider, rows, without_bad
from faults.faulty_datasets import (
    BATCH,
    SIZE,
    FaultPlacement,
    Stream,
    all_indices,
    all_values,
    arguments,
    make_loader,
    outcomes_of,
)
from faults.table import FAULTS, Fault, FaultSite, Moment, PlantedFault
from outlive import FaultPolicy, TooManyFaultsError

GETITEM = FaultSite(Moment.GETITEM)
EXCEPTION = FAULTS["exception"]

in_process = rows(
    [
        FaultSite(Moment.GETITEM),
        FaultSite(Moment.GETITEMS),
        FaultSite(Moment.COLLATE),
        FaultSite(Moment.NEXT, stream=True),
    ],
    # Nothing is pickled where nothing travels: any result will do. What kills a process kills the trainer here.
    lambda fault, site: not fault.kills and not fault.spares,
)


def inline(fault: Fault, site: FaultSite, on_error: Any, marker: Path | None = None, **settings: Any) -> Any:
    placement = FaultPlacement.at(site.moment, {BAD: PlantedFault(fault.name, marker and str(marker))})
    policy = FaultPolicy(on_error=on_error, backoff_s=0.01, **settings)
    return make_loader(placement, policy, num_workers=0)


@in_process
def test_everything_else_is_delivered_when_there_are_no_workers(fault: Fault, site: FaultSite) -> None:
    """num_workers=0 knows the same words for exceptions."""
    loader = inline(fault, site, "skip")

    delivered = all_indices(loader)

    assert delivered == without_bad(GETITEM)
    ((index, incident),) = loader.quarantine.items()
    assert index == ((0, BAD) if site.stream else BAD)
    assert incident.failure is not None
    assert incident.failure.type_name == fault.type_name


@in_process
def test_not_one_bit_differs_when_a_fault_passes_and_there_are_no_workers(
    fault: Fault, site: FaultSite, tmp_path: Path
) -> None:
    """Retrying in the trainer's own process rewinds its generators, too."""
    healthy = Stream(SIZE, FaultPlacement()) if site.stream else None
    theirs = seeded(torch.utils.data.DataLoader(**arguments(FaultPlacement(), healthy, num_workers=0)))

    ours = seeded(inline(fault, site, "raise", tmp_path / "fired", retry_on=(Exception,)))

    assert ours == theirs
    assert torch.utils.data.get_worker_info() is None


def seeded(loader: Any) -> Any:
    """What a loader delivers in this process, whose generators begin with a known state."""
    torch.manual_seed(1)
    random.seed(1)
    numpy.random.seed(1)
    return all_values(loader)


@in_process
def test_the_exception_itself_is_raised_when_there_are_no_workers(fault: Fault, site: FaultSite) -> None:
    """Under "raise" num_workers=0 is torch's own: the exception object itself, and then the other batches."""
    loader = inline(fault, site, "raise")

    outcomes = outcomes_of(loader)

    error = outcomes.pop(BAD_BATCH)
    assert type(error).__name__ == fault.type_name


def test_the_callable_s_word_holds_when_there_are_no_workers() -> None:
    """It is asked with the attempt's number, and its "retry" and "replace" mean the same."""
    rule = ScriptedDecider("retry", "replace")
    loader = inline(EXCEPTION, GETITEM, rule)

    delivered = all_indices(loader)

    assert [len(batch) for batch in delivered] == [BATCH] * (SIZE // BATCH)
    assert [incident.attempt for incident in rule.asked] == [1, 2]
    assert list(loader.quarantine) == [BAD]


def test_the_budget_holds_when_there_are_no_workers() -> None:
    """max_bad ends the epoch in the trainer's own process as it does with workers."""
    placement = FaultPlacement(getitem={index: PlantedFault("exception") for index in (1, 6, BAD)})
    loader = make_loader(placement, FaultPolicy(on_error="skip", max_bad=2), num_workers=0)

    with pytest.raises(TooManyFaultsError):
        all_indices(loader)
