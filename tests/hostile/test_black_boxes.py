"""A black box that a worker has written over: what the trainer knows by itself decides, and one sample pays."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset

from outlive import DataLoader, IncidentKind
from outlive._capture.blackbox import BlackBox
from outlive.incident import Stage

WORDS = 128


def own_box() -> BlackBox:
    """A worker's record, as a wild write might hit it."""
    return next(thing for thing in gc.get_objects() if isinstance(thing, BlackBox))


def fill(word: int) -> None:
    box = own_box()
    for at in range(WORDS):
        box.words[at] = word


DAMAGE: dict[str, Callable[[], None]] = {
    "zeros": lambda: fill(0),
    "ones": lambda: fill(-1),
    "numbers": lambda: fill(0x4141414141414141),
    "another batch": lambda: own_box().enter(Stage.FETCHING, 77, 1),
    "a start": lambda: own_box().enter(Stage.PREPARING),
}


class WritesOver(Dataset[Any]):
    """Sample 6 damages its worker's record, and kills it."""

    def __init__(self, damage: str) -> None:
        self.damage = damage

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 6:
            DAMAGE[self.damage]()
            os._exit(1)
        return index


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_worker_that_writes_over_its_record_and_dies_costs_one_sample(damage):
    """It was ready, so it did not die while starting; and what it had in hand the trainer knows."""
    loader = DataLoader(WritesOver(damage), batch_size=4, num_workers=1, multiprocessing_context="fork", faults="skip")

    assert [int(number) for batch in loader for number in batch] == [n for n in range(12) if n != 6]
    assert set(loader.quarantine) == {6}
    assert {incident.kind for incident in loader.incidents} == {IncidentKind.CRASH}
