"""Collate functions.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from loader_inputs.kills import Kills, NoKills
from loader_inputs.values import Point


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def as_is(sample: Any) -> Any:
    return sample


def as_point(samples: list[Any]) -> Point:
    return Point(torch.utils.data.default_collate(samples), len(samples))


class RandomCollate:
    """Draws random numbers after the samples have; may kill its worker at a batch that holds a given index."""

    def __init__(self, kills: Kills | None = None) -> None:
        self.kills = kills or NoKills()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        noise = torch.rand(len(samples)), random.random(), float(np.random.randn())
        for sample in samples:
            self.kills.at(("collate", sample["index"]))
        return {"batch": torch.utils.data.default_collate(samples), "noise": noise}


class KeepsLast:
    """Returns each batch together with the one before it, which it has kept."""

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        last, self.last = self.last, batch
        return batch, last


class FailingCollate:
    """Raises for some batches, after drawing."""

    def __init__(self, *indices: int, kind: type[Exception] = ValueError) -> None:
        self.indices = indices
        self.kind = kind

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        noise = torch.rand(3)
        if any(int(sample["index"]) in self.indices for sample in samples):
            raise self.kind(f"cannot collate {[int(s['index']) for s in samples]}")
        return noise, torch.utils.data.default_collate(samples)
