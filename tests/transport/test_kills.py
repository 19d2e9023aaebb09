"""A worker killed at any moment corrupts nothing: what arrives is whole, and what it held is given back."""

from __future__ import annotations

import os
import random
import signal
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import loader_inputs as inputs
from loader_comparison import OURS
from outlive import FaultPolicy
from transport import batch_values
from transport.process_inspection import NOTHING, mapped_cells

PATIENT = FaultPolicy(retries=1000, max_restarts=10_000, max_bad=None)


class Checked(Dataset):
    """Large samples, each with its own check sum: a batch takes about a millisecond to write."""

    def __init__(self, size: int, floats: int) -> None:
        self.size = size
        self.floats = floats

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        data = np.full(self.floats, index, np.float32)
        data[:: 7 + index] = -index
        return {
            "index": index,
            "tensor": torch.from_numpy(data),
            "array": data[: self.floats // 2].copy(),
            "sum": zlib.crc32(data),
            "half": zlib.crc32(data[: self.floats // 2]),
        }


def whole(sample: dict[str, Any]) -> bool:
    return zlib.crc32(sample["tensor"].numpy()) == sample["sum"] and zlib.crc32(sample["array"]) == sample["half"]


def kill(pid: int | None) -> bool:
    """Whether there was anybody to kill: between two lives there is not."""
    try:
        os.kill(pid or 1 << 30, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("seed", range(4))
def test_every_batch_is_whole_when_workers_are_killed_at_random_moments(seed):
    """In order, each once; at the end nothing is mapped and no descriptor is left."""
    chance = random.Random(seed)
    descriptors = open_descriptors()
    loader = OURS(
        Checked(60, 400_000),
        batch_size=None,
        collate_fn=batch_values.as_is,
        num_workers=2,
        faults=PATIENT,
        prefetch_factor=3,
    )
    kept: list[dict[str, Any]] = []
    indices = []
    kills = 0
    for sample in loader:
        indices.append(sample["index"])
        assert whole(sample)
        kept = [*kept, sample][-3:]
        if chance.random() < 0.4:
            # Not at the moment of a delivery: somewhere in what the worker does next.
            until = time.perf_counter() + chance.uniform(0, 0.004)
            while time.perf_counter() < until:
                pass
            pid = chance.choice(loader.statistics().slots).pid
            kills += kill(pid)
        assert all(whole(earlier) for earlier in kept)

    assert indices == list(range(60))
    assert kills >= 10
    assert all(whole(earlier) for earlier in kept)
    kept.clear()
    del sample
    assert mapped_cells() == NOTHING
    assert open_descriptors() == descriptors


def test_a_batch_is_made_again_when_its_worker_dies_with_half_of_it_written(tmp_path: Path):
    """Its tensors lie in a cell, the pickle is unfinished, nothing was sent: nobody sees any of it."""
    moments = {("sent", i): {1} for i in (2, 3, 7)}
    kills = inputs.Kills(tmp_path, moments)
    descriptors = open_descriptors()
    samples = [
        [torch.full((100_000,), float(i)), inputs.KillsWhenPickled(kills, i), torch.full((9,), i)] for i in range(12)
    ]
    loader = OURS(
        batch_values.ReadySamples(*samples),
        batch_size=None,
        collate_fn=batch_values.as_is,
        num_workers=2,
        faults=FaultPolicy(retries=3),
    )

    arrived = [(float(large.min()), float(large.max()), int(small[0])) for large, _, small in loader]

    assert arrived == [(i, i, i) for i in range(12)]
    assert loader.statistics().restarts == 3
    assert mapped_cells() == NOTHING
    assert open_descriptors() == descriptors


def test_what_is_in_hand_stays_when_its_worker_is_killed():
    """The maps are the trainer's."""
    loader = OURS(Checked(30, 100_000), batch_size=None, collate_fn=batch_values.as_is, num_workers=1, faults=PATIENT)
    kept = []
    for sample in loader:
        kept.append(sample)
        if sample["index"] % 5 == 4:
            kill(loader.statistics().slots[0].pid)

    assert [sample["index"] for sample in kept] == list(range(30))
    assert all(whole(sample) for sample in kept)
