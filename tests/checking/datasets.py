"""Datasets to be checked. Under spawn, workers import them from here; the command line does, too.

Reads   nothing.
Writes  nothing; some of their samples ruin the process that fetches them.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from faults.table import PlantedFault

MIB = 1 << 20
KINDS = {  # what is planted, and how it is judged
    "exception": {"exception"},
    "lock-as-result": {"unpicklable-result"},
    "sigsegv": {"null-pointer"},
    "sigkill": {"killed", "oom-killer"},
    "sigill": {"deliberate-trap", "illegal-instruction"},
    "sigbus": {"truncated-file"},
    "abort": {"aborted"},
    "stack-overflow": {"stack-overflow"},
    "sleep": {"sleeping"},
    "memory": {"memory-limit"},
}


class BadSamples(Dataset[Any]):
    """Numbers, of which some are bad: index → kind."""

    def __init__(self, size: int, planted: dict[int, str]) -> None:
        self.size = size
        self.planted = planted

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        kind = self.planted.get(index)
        if kind is None:
            return index
        if kind == "memory":
            np.zeros(400 * MIB, np.uint8)[::4096] = 1
        return PlantedFault(kind)() or index


class Files(Dataset[Any]):
    """As datasets of files are: a list of names, a root, a transform."""

    def __init__(self, names: list[str], root: str = "/data", bad: tuple[str, ...] = ()) -> None:
        self.names = names
        self.root = root
        self.bad = bad
        self.labels = torch.arange(len(names))
        self.tried: list[int] = []

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> str:
        if self.names[index] in self.bad:
            raise OSError(f"{self.names[index]} is torn")
        return self.names[index]


class NamedFiles(Files):
    """The same, whose samples have names of their own."""

    def sample_id(self, index: int) -> str:
        return self.names[index]


class UnevenCosts(Dataset[Any]):
    """A few are slow, a few are huge."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        if index == 123:
            time.sleep(0.4)  # what is to be found
        return {"image": torch.zeros(3 * MIB if index == 77 else 100, dtype=torch.uint8), "label": index}


class Stream(IterableDataset[int]):
    """Numbers, shared among workers; some of them raise, some kill."""

    def __init__(self, size: int, bad: tuple[int, ...] = (), deadly: tuple[int, ...] = (), skips: bool = True) -> None:
        self.size = size
        self.bad = bad
        self.deadly = deadly
        self.skips = skips

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        number, numbers = (info.id, info.num_workers) if info is not None else (0, 1)
        return (Skipping if self.skips else Numbers)(self, number, numbers)


class Numbers:
    def __init__(self, stream: Stream, at: int, step: int) -> None:
        self.stream, self.at, self.step = stream, at, step

    def __iter__(self) -> Numbers:
        return self

    def __next__(self) -> int:
        here, self.at = self.at, self.at + self.step
        if here >= self.stream.size:
            raise StopIteration
        if here in self.stream.bad:
            raise ValueError(f"{here} is bad")
        if here in self.stream.deadly:
            PlantedFault("sigkill")()
        return here


class Skipping(Numbers):
    def skip(self, count: int) -> None:
        self.at += count * self.step


planted = BadSamples(2000, {7: "exception", 500: "os-exit", 1999: "lock-as-result"})
good = BadSamples(300, {})
empty = BadSamples(0, {})
loader = torch.utils.data.DataLoader(planted, batch_size=10, num_workers=2)
gone = Files([f"{number}.png" for number in range(100)], bad=tuple(f"{number}.png" for number in range(100)))
