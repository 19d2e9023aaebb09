"""Loaders to be measured; the command line imports them from here.

Reads   nothing.
Writes  nothing.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

import outlive


class Slow(Dataset[Any]):
    """Each sample takes its time."""

    def __init__(self, seconds: float, size: int = 64) -> None:
        self.seconds = seconds
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        time.sleep(self.seconds)  # what is measured
        return index


class SourceGone(Slow):
    """There is nothing to be fetched from."""

    def __getitem__(self, index: int) -> int:
        raise OSError("no such bucket")


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(2000))


def slow_collate(samples: list[Any]) -> Any:
    time.sleep(0.02)  # what is measured
    return default_collate(samples)


fetching = outlive.DataLoader(Slow(0.005), 4, num_workers=1, multiprocessing_context="fork")
collating = DataLoader(Slow(0.0), 4, num_workers=2, collate_fn=slow_collate, multiprocessing_context="fork")
hanging = DataLoader(Slow(3600.0), 4, num_workers=1, multiprocessing_context="fork")
stream = DataLoader(Numbers(), 20)
batches = DataLoader(Slow(0.0), batch_sampler=[[1, 2], [3, 4], [5]] * 20)
empty = DataLoader(Slow(0.0, 0), 4)
gone = DataLoader(SourceGone(0.0), 4, num_workers=1, multiprocessing_context="fork")
tiny = DataLoader(torch.utils.data.TensorDataset(torch.arange(3)), 1)
