"""Datasets whose samples depend on the epoch that the trainer has set. Under spawn, workers import them from here.

Reads   marker files, where a worker is to die.
Writes  them.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset, get_worker_info

from loader_inputs import Kills, NoKills


class EpochAware(Dataset[tuple[int, int]]):
    """What it gives is worked out by `set_epoch`, which also draws a random number."""

    def __init__(self, size: int = 8, kills: Kills | None = None) -> None:
        self.size = size
        self.kills = kills or NoKills()
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        random.random()
        self.samples = [(epoch, index) for index in range(self.size)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, int]:
        self.kills.at((self.samples[index][0], index))
        return self.samples[index]


class NoisyEpochAware(EpochAware):
    """With a random number beside each sample."""

    def __getitem__(self, index: int) -> Any:
        return (*super().__getitem__(index), random.random())


class EpochAwareStream(IterableDataset[tuple[int, int]]):
    def __init__(self, kills: Kills | None = None) -> None:
        self.epoch = 0
        self.kills = kills or NoKills()

    def set_epoch(self, epoch: int = 0) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 8, info.num_workers):
            self.kills.at((self.epoch, index))
            yield self.epoch, index


class NestedDatasets(Dataset[Any]):
    """Holds others: in an attribute, in a list, and one that is no dataset."""

    def __init__(self) -> None:
        self.one = EpochAware()
        self.others = [EpochAware(), EpochAware()]
        self.transform = EpochAwareTransform()

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.one[index][0], self.others[1][index][0], self.transform.epoch


class EpochAwareTransform:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
