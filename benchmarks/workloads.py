"""The workloads: 64 different samples in memory, so that fetching costs nothing, and one that is CPU-bound."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

DIFFERENT = 64


class InMemory(Dataset):
    """`length` samples, of which 64 are different."""

    def __init__(self, samples: list[Any], length: int) -> None:
        self.samples = samples
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.samples[index % DIFFERENT]


class Jpegs(Dataset):
    """Decode, random crop, normalise: what image training does per sample."""

    def __init__(self, length: int) -> None:
        from PIL import Image

        rng = np.random.default_rng(0)
        self.length = length
        self.files = []
        for _ in range(DIFFERENT):
            small = Image.fromarray(rng.integers(0, 255, (16, 16, 3), dtype=np.uint8))
            file = io.BytesIO()
            small.resize((256, 256)).save(file, "JPEG")
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        image = np.asarray(Image.open(io.BytesIO(self.files[index % DIFFERENT])))
        top, left = random.randrange(32), random.randrange(32)
        crop = image[top : top + 224, left : left + 224]
        return (torch.from_numpy(crop.astype(np.float32)) - 127.5) / 63.0, index


@dataclass(frozen=True)
class Workload:
    name: str
    batch_size: int
    batches: int
    make: Callable[[int], Dataset[Any]]
    collate: Callable[[list[Any]], Any] | None = None


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


def stack_arrays(samples: list[Any]) -> dict[str, Any]:
    return {"image": np.stack([image for image, _ in samples]), "label": np.array([label for _, label in samples])}


def as_list(samples: list[Any]) -> list[Any]:
    return samples


WORKLOADS = (
    Workload("images: 64 × (3×224×224 float32) + label", 64, 120, _images),
    Workload("rows: 32 × (16 float32) + label", 32, 4000, _rows),
    Workload("dicts: 20 tensors of 32×64", 32, 600, _dicts),
    Workload("arrays: 32 × (3×224×224) NumPy, custom collate", 32, 120, _arrays, stack_arrays),
    Workload("tensors: a list of 64 of 3×64×64", 64, 200, _tensors, as_list),
    Workload("tokens: strings and lists of int", 32, 1500, _tokens, as_list),
    Workload("jpegs: decode, crop, normalise (CPU-bound)", 32, 60, Jpegs),
)

collate_default = default_collate
