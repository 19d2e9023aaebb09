"""Map-style datasets.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from deadlines import Deadline
from loader_inputs.kills import Kills, NoKills


def draws(odd: int) -> dict[str, Any]:
    """Random numbers of all three generators; how many varies, so that left-over gaussians do too."""
    return {
        "torch": torch.randn(3),
        "torch_many": torch.rand(17 + odd % 5).sum(),
        "random": random.random(),
        "gauss": max(random.gauss(0, 1) for _ in range(1 + odd % 2)),
        "numpy": np.random.randn(1 + 2 * (odd % 3))[0],
        "numpy_whole": int(np.random.randint(0, 1 << 30)),
    }


class Noisy(Dataset):
    """Each sample depends on its index and on what was drawn before it in this worker."""

    def __init__(self, size: int = 23, kills: Kills | None = None) -> None:
        self.size = size
        self.kills = kills or NoKills()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = draws(index)
        self.kills.at(index)
        return {"index": index, **first, "after": torch.randint(0, 1000, ())}


class NoisyMany(Noisy):
    """The same through __getitems__."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]


class EchoesIndex(Dataset):
    """Answers with what it was asked: the very index, its type and its repr."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> tuple[Any, str, str]:
        return index, type(index).__name__, repr(index)


class EchoesIndices(EchoesIndex):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [(type(indices).__name__, self[i]) for i in indices]


class ReadySamples(Dataset):
    """Made of ready samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class ShowsMark(Dataset):
    """worker_init_fn writes into it; its samples show what was written."""

    def __init__(self) -> None:
        self.mark: Any = "untouched"

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        who = (-1, -1, -1) if info is None else (info.id, info.num_workers, info.seed)
        return index, self.mark, who, torch.get_num_threads() if info else 0, draws(index)


def mark_by_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.mark = (worker, random.random(), float(np.random.randn()), torch.rand(2).tolist())


class Fails(Dataset):
    """Some samples raise, after drawing random numbers."""

    def __init__(self, errors: dict[int, Any], size: int = 14, kills: Kills | None = None) -> None:
        self.errors = errors
        self.size = size
        self.kills = kills or NoKills()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = draws(index)
        self.kills.at(index)
        if index in self.errors:
            raise self.errors[index]()
        return {"index": index, **first}


class FailsMany(Fails):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]


class KillsWhenPickled:
    """Kills its worker while it is being sent."""

    def __init__(self, kills: Kills, index: int) -> None:
        self.kills = kills
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KillsWhenPickled) and self.index == other.index

    def __hash__(self) -> int:
        return self.index

    def __reduce__(self) -> Any:
        self.kills.at(("sent", self.index))
        return KillsWhenPickled, (NoKills(), self.index)


class KillsWhenSent(Noisy):
    """Each sample brings something whose pickling may kill."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), KillsWhenPickled(self.kills, index)


class Caching(Dataset):
    """Makes each sample with default_collate, once, and keeps it."""

    def __init__(self, floats: int) -> None:
        self.floats = floats
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        key = index % 4
        if key not in self.kept:
            self.kept[key] = torch.utils.data.default_collate([torch.arange(self.floats) + 1000.0 * key])
        return self.kept[key]


def with_noise(number: int) -> tuple[int, torch.Tensor, float]:
    return number, torch.randn(2), random.random()


class DeadlyNoise:
    def __init__(self, kills: Kills) -> None:
        self.kills = kills

    def __call__(self, number: int) -> tuple[int, torch.Tensor, float]:
        noise = with_noise(number)
        self.kills.at(number)
        return noise


class NoisyShowsMark(ShowsMark):
    """worker_init_fn writes into it, and it kills."""

    def __init__(self, kills: Kills) -> None:
        super().__init__()
        self.kills = kills

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = super().__getitem__(index)
        self.kills.at(index)
        return sample


def refuse_to_start(worker: int) -> None:
    raise LookupError(f"worker {worker} finds nothing to read")


class Gated(Dataset):
    """Samples from the third on wait until a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        deadline = Deadline(60)
        while index >= 2 and not self.gate.exists() and not deadline.passed:
            time.sleep(0.005)
        return index, torch.rand(2)
