"""Samplers.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Sampler


class Reversed(Sampler):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class FreshGenerator:
    """An iterable that is no Sampler and has no length; each epoch a new generator, which draws in the trainer."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield random.randrange(self.size)


class Batches:
    """A batch sampler that is a plain iterable of ready batches."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def generator(seed: int = 3) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


class FailingSampler:
    """Raises after so many indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)
        raise OSError("the list of files has ended early")


class StumblingSampler:
    """An iterator that raises instead of some indices, and can go on."""

    def __init__(self, size: int, without: set[int]) -> None:
        self.size, self.without, self.at = size, without, -1

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.at += 1
        if self.at >= self.size:
            raise StopIteration
        if self.at in self.without:
            raise OSError(f"nothing at {self.at}")
        return self.at
