"""The whole table under spawn and forkserver: starts are dear there, so many faults share one loader.

Each planted fault has a batch of its own, the second sample of two. Where a row of the table fails under fork alone, it
stands in the other files; here it shows what fails because of the way in which workers are started.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from faults.expectations import INIT_FLOOR_S, assert_cause, real_incidents, stage_of
from faults.faulty_datasets import (
    FaultPlacement,
    ManySamples,
    Samples,
    SkippingStream,
    Unloadable,
    all_indices,
    all_values,
    arguments,
    make_loader,
    outcomes_of,
)
from faults.table import FAULTS, Fault, FaultSite, Moment, PlantedFault
from outlive import FaultPolicy, IncidentKind, WorkerStartError
from outlive._forensics.ledger import StreamIndex

pytestmark = [
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes"),
]

# Hangs cost waiting, not work: with four workers on two cores they are waited for together.
BATCH = 2
WORKERS = 4
AHEAD = 4
TIMEOUT_S = 0.3
SHAPE: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "prefetch_factor": AHEAD}

BY_SAMPLE = (FaultSite(Moment.GETITEM), FaultSite(Moment.COLLATE), FaultSite(Moment.SENDING))
BY_BATCH = (FaultSite(Moment.GETITEMS),)
AS_STREAM = (FaultSite(Moment.NEXT, True), FaultSite(Moment.COLLATE, True), FaultSite(Moment.SENDING, True))

started_by = pytest.mark.parametrize("method", ["spawn", "forkserver"])
carried_by = pytest.mark.parametrize(
    ("kind", "sites"),
    [
        pytest.param(Samples, BY_SAMPLE, id="by-sample"),
        pytest.param(ManySamples, BY_BATCH, id="by-batch"),
        pytest.param(SkippingStream, AS_STREAM, id="stream"),
    ],
)


class FaultGrid:
    """Every fault at every one of these sites, each in a batch of its own, and healthy samples around them."""

    def __init__(
        self, sites: Iterable[FaultSite], marks: Path | None, faults: Iterable[Fault] = FAULTS.values()
    ) -> None:
        self.rows: dict[int, tuple[Fault, FaultSite]] = {}  # index of the bad sample → what is planted there
        kinds: dict[str, dict[int, PlantedFault]] = {}
        for site in sites:
            for fault in faults:
                index = self._second_of(len(self.rows), site.stream)
                marker = None if marks is None else str(marks / f"{fault.name}-{site}")
                self.rows[index] = (fault, site)
                kinds.setdefault(site.moment.name.lower(), {})[index] = PlantedFault(fault.name, marker)
        self.size = (len(self.rows) // WORKERS + 1) * WORKERS * BATCH
        self.placement = FaultPlacement(**kinds)

    def _second_of(self, batch: int, stream: bool) -> int:
        if not stream:
            return batch * BATCH + 1
        slot, nth = batch % WORKERS, batch // WORKERS
        return slot + WORKERS * (nth * BATCH + 1)

    def batches(self, stream: bool, without: Iterable[int] = ()) -> list[list[int]]:
        step = WORKERS if stream else 1
        shards = [list(range(slot, self.size, step)) for slot in range(step)]
        rounds = range(0, len(shards[0]), BATCH)
        return [[i for i in shard[at : at + BATCH] if i not in without] for at in rounds for shard in shards]

    def batch_of(self, index: int) -> int:
        return list(self.rows).index(index)


def name_of(index: int, site: FaultSite) -> Any:
    return StreamIndex(index % WORKERS, index // WORKERS) if site.stream else index


def make(kind: type, field: FaultGrid, method: str, on_error: Any, **settings: Any) -> Any:
    policy = FaultPolicy(
        **{
            "on_error": on_error,
            "backoff_s": 0.01,
            "sample_timeout": TIMEOUT_S,
            "hang_floor_s": INIT_FLOOR_S,
            "max_restarts": 10_000,
            "max_bad": None,
            **settings,
        }
    )
    dataset = kind(field.size, field.placement)
    return make_loader(field.placement, policy, dataset=dataset, multiprocessing_context=method, **SHAPE)


def assert_happened(loader: Any, field: FaultGrid) -> None:
    """That each planted fault has an incident which names it."""
    for index, (fault, site) in field.rows.items():
        of_batch = [i for i in real_incidents(loader) if i.batch == field.batch_of(index)]
        assert of_batch, f"nothing is known of {fault.name} at {site}"
        incident = of_batch[0]
        assert incident.in_hand.stage is stage_of(fault, site), f"{fault.name} at {site}"
        assert incident.slot == field.batch_of(index) % WORKERS
        assert name_of(index, site) in incident.indices, f"{fault.name} at {site}"
        assert_cause(incident, fault, site, least_s=TIMEOUT_S)


@started_by
@carried_by
def test_not_one_bit_differs_when_every_fault_passes(
    kind: type, sites: tuple[FaultSite, ...], method: str, tmp_path: Path
) -> None:
    """All faults at all moments, each once, in one epoch: same batches, same order, same random numbers."""
    field = FaultGrid(sites, tmp_path)
    healthy = arguments(FaultPlacement(), kind(field.size, FaultPlacement()), **SHAPE)
    loader = make(kind, field, method, "raise", retry_on=(Exception,))

    delivered = all_values(loader)

    assert delivered == all_values(torch.utils.data.DataLoader(**healthy))
    assert dict(loader.quarantine) == {}
    assert_happened(loader, field)


@started_by
@carried_by
def test_everything_else_is_delivered_when_every_fault_is_poison(
    kind: type, sites: tuple[FaultSite, ...], method: str
) -> None:
    """All faults at all moments, for ever, in one epoch: each bad sample is left out and named, no other one."""
    field = FaultGrid(sites, None)
    loader = make(kind, field, method, "skip")

    delivered = all_indices(loader)

    assert delivered == field.batches(sites[0].stream, without=field.rows)
    assert set(loader.quarantine) == {name_of(index, site) for index, (_, site) in field.rows.items()}
    for index, (fault, site) in field.rows.items():
        assert_cause(loader.quarantine[name_of(index, site)], fault, site, least_s=TIMEOUT_S)
    assert_happened(loader, field)


@started_by
def test_each_error_comes_in_its_place_when_every_fault_is_raised(method: str) -> None:
    """Types and texts survive the journey from a process that shares no memory with ours."""
    field = FaultGrid(BY_SAMPLE[:1], None)
    loader = make(Samples, field, method, "raise")

    outcomes = outcomes_of(loader)

    expected = field.batches(stream=False)
    assert len(outcomes) == len(expected)
    for index, (fault, site) in field.rows.items():
        error = outcomes[field.batch_of(index)]
        assert isinstance(error, fault.raises), f"{fault.name} at {site}"
        assert index in error.incident.indices  # type: ignore[attr-defined]
        assert_cause(error.incident, fault, site, least_s=TIMEOUT_S)  # type: ignore[attr-defined]
    assert outcomes[len(field.rows) :] == expected[len(field.rows) :]


@started_by
def test_not_one_bit_differs_when_every_fault_passes_in_worker_init_fn(method: str, tmp_path: Path) -> None:
    """A slot is started again until its worker_init_fn is through; then the epoch is as it should be."""
    faults = [fault for fault in FAULTS.values() if not fault.spares]
    planted_faults = [PlantedFault(fault.name, str(tmp_path / fault.name)) for fault in faults]
    placement = FaultPlacement(init={1: planted_faults})
    healthy = arguments(FaultPlacement(), size=16)
    policy = FaultPolicy(retries=len(faults), hang_floor_s=INIT_FLOOR_S)
    loader = make_loader(placement, policy, size=16, multiprocessing_context=method)

    delivered = all_values(loader)

    assert delivered == all_values(torch.utils.data.DataLoader(**healthy))
    assert [incident.slot for incident in real_incidents(loader)] == [1] * len(faults)
    for incident, fault in zip(real_incidents(loader), faults, strict=True):
        assert_cause(incident, fault, FaultSite(Moment.INIT))


@started_by
def test_one_error_comes_when_worker_init_fn_always_fails(method: str) -> None:
    """The error of a start names its cause under every start method."""
    loader = make_loader(FaultPlacement(init={1: [PlantedFault("sigsegv")]}), "skip", multiprocessing_context=method)

    with pytest.raises(WorkerStartError) as caught:
        all_indices(loader)

    assert caught.value.incident is not None
    assert_cause(caught.value.incident, FAULTS["sigsegv"], FaultSite(Moment.INIT))


@started_by
@pytest.mark.parametrize("name", ["exception", "sigsegv"])
def test_one_error_comes_when_the_dataset_cannot_be_loaded(method: str, name: str) -> None:
    """What fails while a dataset is unpickled ends with one error, promptly; there is nobody who could try again."""
    fault = FAULTS[name]
    loader = make_loader(
        FaultPlacement(), "skip", dataset=Unloadable(PlantedFault(name)), multiprocessing_context=method
    )

    with pytest.raises(WorkerStartError if fault.kills else fault.raises) as caught:
        all_indices(loader)

    assert caught.value.incident.kind is IncidentKind.START
