"""A fault that passes: the batch is made again, and not one bit of the epoch differs."""

from __future__ import annotations

from pathlib import Path

from faults.expectations import assert_explains, kind_of, loader_with, real_incidents, rows
from faults.faulty_datasets import all_values, undisturbed
from faults.table import INIT_SITES, SITES, Fault, FaultSite


@rows(SITES + INIT_SITES, turn=3)
def test_not_one_bit_differs_when_a_fault_passes(fault: Fault, site: FaultSite, tmp_path: Path) -> None:
    """What fires once costs a retry: same batches, same order, same random numbers; nothing is quarantined."""
    loader = loader_with(fault, site, "raise", marker=tmp_path / "fired", retry_on=(Exception,))

    delivered = all_values(loader)

    assert delivered == undisturbed(kind_of(site))
    assert dict(loader.quarantine) == {}
    (incident,) = real_incidents(loader)
    assert_explains(incident, fault, site)
