"""What is loaded: eight workloads, each of 64 different samples.

In memory, so that fetching costs nothing, and 64 of them, so that the source of a copy is not in the cache. The JPEGs
are files, and cost what decoding costs. Spawned workers import this module: what only the trainer needs is elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

DIFFERENT = 64
MEAN = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
DEVIATION = torch.tensor([0.229, 0.224, 0.225])[:, None, None]


class InMemory(Dataset[Any]):
    """`length` samples, of which 64 are different."""

    def __init__(self, samples: list[Any], length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % DIFFERENT]


class Jpegs(Dataset[Any]):
    """Read, decode, crop at random, normalise: what image training does per sample."""

    def __init__(self, files: list[str], length: int) -> None:
        self.files = files
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        from PIL import Image  # here, so that only this workload needs Pillow

        with Image.open(self.files[index % DIFFERENT]) as image:
            pixels = np.asarray(image)
        top, left = random.randrange(32), random.randrange(32)
        crop = torch.from_numpy(pixels[top : top + 224, left : left + 224].transpose(2, 0, 1).copy())
        return crop.float().div_(255).sub_(MEAN).div_(DEVIATION), index


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    `bulk`: its bytes are what costs, so that a plain copy of them is the limit. `random`: no two batches are the same.
    `first_batch`: the time to the first batch counts, not the rate.
    """

    name: str
    batch_size: int
    batches: int
    make: Callable[[int], Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None = None
    bulk: bool = True
    workers: int = 2
    method: str = "fork"
    first_batch: bool = False
    random: bool = False


def _images(length: int) -> Dataset[Any]:
    return InMemory([(torch.rand(3, 224, 224), i) for i in range(DIFFERENT)], length)


def _rows(length: int) -> Dataset[Any]:
    return InMemory([(torch.rand(16), i) for i in range(DIFFERENT)], length)


def _dicts(length: int) -> Dataset[Any]:
    return InMemory([{f"field{k}": torch.rand(64) for k in range(20)} for _ in range(DIFFERENT)], length)


def _arrays(length: int) -> Dataset[Any]:
    rng = np.random.default_rng(0)
    return InMemory([(rng.random((3, 224, 224), dtype=np.float32), i) for i in range(DIFFERENT)], length)


def _tensors(length: int) -> Dataset[Any]:
    return InMemory([torch.rand(3, 64, 64) for _ in range(DIFFERENT)], length)


def _tokens(length: int) -> Dataset[Any]:
    draw = random.Random(0)
    return InMemory(
        [
            {"text": f"sentence number {i}", "tokens": [draw.randrange(50_000) for _ in range(100)]}
            for i in range(DIFFERENT)
        ],
        length,
    )


def jpegs_in(folder: Path, length: int) -> Dataset[Any]:
    from PIL import Image

    files = [folder / f"{i:02}.jpg" for i in range(DIFFERENT)]
    rng = np.random.default_rng(0)
    for file in files:
        if not file.exists():
            small = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
            small.resize((256, 256)).save(file, "JPEG", quality=90)
    return Jpegs([str(file) for file in files], length)


def stack_arrays(samples: list[Any]) -> dict[str, Any]:
    return {"image": np.stack([image for image, _ in samples]), "label": np.array([label for _, label in samples])}


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def workloads(folder: Path) -> tuple[Workload, ...]:
    """All rows of the table; the JPEGs are written to `folder` when they are first asked for."""
    jpegs = partial(jpegs_in, folder)
    starting: dict[str, Any] = {"workers": 4, "method": "spawn", "first_batch": True}
    return (
        Workload("images: 64 × (3×224×224 float32) + label", 64, 120, _images),
        Workload("rows: 32 × (16 float32) + label", 32, 4000, _rows),
        Workload("dicts: 20 tensors of 32×64", 32, 600, _dicts),
        Workload("arrays: 32 × (3×224×224) NumPy, custom collate", 32, 120, _arrays, stack_arrays),
        Workload("tensors: a list of 64 of 3×64×64", 64, 200, _tensors, as_list),
        Workload("tokens: strings and lists of int", 32, 3000, _tokens, as_list, bulk=False),
        Workload("jpegs: decode, crop, normalise (CPU-bound)", 32, 60, jpegs, bulk=False, random=True),
        Workload("first batch: spawn, 4 workers", 32, 1, _rows, bulk=False, **starting),
    )
