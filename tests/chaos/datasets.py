"""Datasets without faults, for faults to be planted in.

Reads   nothing.
Writes  nothing.
Never   anything that a spawned worker could not import by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


class Numbers(Dataset[torch.Tensor]):
    """Sample i is [i]."""

    flavour = "plain"

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


class NumbersAtOnce(Numbers):
    """A batch at a time."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


class Stream(IterableDataset[torch.Tensor]):
    """Worker w of n gives w, w+n, w+2n, …; its iterator can skip."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        return Reader(range(info.id, self.size, info.num_workers) if info is not None else range(self.size))


class Reader:
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers
        self.place = 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> torch.Tensor:
        if self.place >= len(self.numbers):
            raise StopIteration
        self.place += 1
        return torch.tensor([self.numbers[self.place - 1]])

    def skip(self, count: int) -> None:
        self.place += count


def received(loader: Any) -> list[int]:
    return [int(number) for batch in loader for number in batch.flatten()]
