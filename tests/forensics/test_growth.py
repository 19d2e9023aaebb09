"""Memory that grows in real workers is told once, with what grows, how fast, and how long it lasts."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset

import outlive
from deadlines import Deadline
from outlive import Incident, IncidentKind
from outlive._capture import vitals
from outlive.verdicts import Name

METHODS = ("fork", pytest.param("spawn", marks=pytest.mark.full))  # half a minute each: looks are a second apart
MIB = 1 << 20
BATCH_S = 0.05
DEADLINE_S = 300

_kept: list[Any] = []


@pytest.fixture(autouse=True)
def frequent_looks(monkeypatch):
    """Ten looks a second under fork, whose zygotes inherit this, instead of one every second or two."""
    monkeypatch.setattr(vitals, "INTERVAL_S", 0.1)
    monkeypatch.setattr(vitals, "REST_PER_DEAR_LOOK", 10)


class Growing(Dataset[int]):
    """A quarter of a MiB per sample stays; or nothing does."""

    def __init__(self, leaks: bool) -> None:
        self.leaks = leaks

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        if self.leaks:
            block = np.zeros(MIB // 4, np.uint8)
            block[::4096] = 1
            _kept.append(block)
        time.sleep(BATCH_S / 4)  # as if it read something: growth is told per batch, whatever batches take
        return index


class Reading(Dataset[int]):
    """Reads Python objects that it inherited, and so copies them."""

    def __init__(self) -> None:
        self.texts = [f"{number:060}" for number in range(1_000_000)]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> int:
        at = index * 200 % 1_000_000
        read = sum(len(text) for text in self.texts[at : at + 200])
        time.sleep(BATCH_S / 4)  # as above
        return read


def first_growth(dataset: Dataset[int], method: str, **more: Any) -> Incident | None:
    """The first incident of this kind, as soon as it comes; None within the deadline."""
    heard: list[Incident] = []
    loader = outlive.DataLoader(
        dataset, 4, num_workers=1, multiprocessing_context=method, on_incident=heard.append, **more
    )
    deadline = Deadline(DEADLINE_S)
    for _ in loader:
        if heard or deadline.passed:
            break
    return heard[0] if heard else None


@pytest.mark.parametrize("method", METHODS)
def test_a_leak_is_told_with_its_slope_and_what_is_left(method):
    """One MiB per batch, against a limit."""
    incident = first_growth(Growing(True), method, memory_limit="4GiB")

    assert incident is not None
    assert incident.kind is IncidentKind.GROWTH
    assert incident.verdict is not None
    assert incident.verdict.name is Name.LEAK
    growth = incident.evidence.growth
    assert growth is not None
    assert growth.bytes_per_batch == pytest.approx(MIB, rel=0.3)
    assert growth.batches_left == pytest.approx((4096 * MIB - growth.now_bytes) / growth.bytes_per_batch)
    assert "batches are left until memory_limit" in incident.verdict.cause
    assert incident.evidence.worked.memory


def test_copies_of_what_was_inherited_are_told_from_a_leak():
    """Under fork only: under spawn nothing is inherited."""
    incident = first_growth(Reading(), "fork")

    assert incident is not None
    assert incident.verdict is not None
    assert incident.verdict.name is Name.COPY_ON_READ
    assert "share_dataset=True" in incident.verdict.remedies[0]
