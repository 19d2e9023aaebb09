"""A fault that passes: the batch is made again, and not one bit of the epoch differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from faults.carriers import all_values, undisturbed
from faults.evidence import assert_explains, happened, kind_of, loader_with, rows
from faults.table import INIT_SPOTS, SPOTS, Fault, Spot

pytestmark = pytest.mark.faults


@rows(SPOTS + INIT_SPOTS)
def test_not_one_bit_differs_when_a_fault_passes(fault: Fault, spot: Spot, tmp_path: Path) -> None:
    """What fires once costs a retry: same batches, same order, same random numbers; nothing is quarantined."""
    loader = loader_with(fault, spot, "raise", marker=tmp_path / "fired", retry_on=(Exception,))

    delivered = all_values(loader)

    assert delivered == undisturbed(kind_of(spot))
    assert dict(loader.quarantine) == {}
    (incident,) = happened(loader)
    assert_explains(incident, fault, spot)
