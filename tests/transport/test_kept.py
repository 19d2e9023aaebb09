"""What a consumer keeps of its batches, or of a pool's results, costs what it weighs, and stays as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from loader_comparison import OURS
from outlive import Pool
from transport.process_inspection import NOTHING, mapped_cells, resident_cells

KIB = 1 << 10
BATCHES = 40
SIZES = {"image": 256 * KIB, "mask": 32 * KIB, "label": 4}  # of a sample; four to a batch


def _of_sample(index: int, part: str) -> torch.Tensor:
    return torch.full((SIZES[part],), index % 251, dtype=torch.uint8)


def _of_batch(number: int, part: str) -> torch.Tensor:
    return torch.stack([_of_sample(4 * number + n, part) for n in range(4)])


class Samples(Dataset):
    def __len__(self) -> int:
        return 4 * BATCHES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {part: _of_sample(index, part) for part in SIZES}


class Caching:
    """Collates, and keeps what it made; every third batch is one that it made before."""

    def __init__(self) -> None:
        self.made: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        if len(self.made) % 3 == 2:
            self.made.append(self.made[0])
        else:
            self.made.append(torch.utils.data.default_collate(samples))
        return self.made[-1]


def _arrays(samples: list[Any]) -> dict[str, np.ndarray]:
    return {part: np.stack([sample[part].numpy() for sample in samples]) for part in SIZES}


@pytest.mark.parametrize("part", ["label", "mask"])
@pytest.mark.parametrize("kind", ["tensors", "arrays"])
def test_keeping_one_part_of_each_batch_keeps_nothing_else(kind, part):
    """`labels.append(y)` over a whole epoch: no image stays."""
    collate_fn = _arrays if kind == "arrays" else None
    loader = OURS(Samples(), batch_size=4, num_workers=2, collate_fn=collate_fn)
    kept, most = [], 0
    for number, batch in enumerate(loader):
        assert np.asarray(batch["image"])[:, ::4000].tolist() == _of_batch(number, "image")[:, ::4000].tolist()
        kept.append(batch[part])
        if number % 8 == 7:
            most = max(most, resident_cells())
    del batch

    weight = BATCHES * 4 * SIZES[part] if SIZES[part] > KIB else 0
    assert most <= weight * 5 // 4 + 2 * 14 * 4 * sum(SIZES.values())
    assert resident_cells() <= weight * 5 // 4 + 3 * 4 * sum(SIZES.values())
    assert all(np.array_equal(one, _of_batch(number, part)) for number, one in enumerate(kept))
    del kept
    assert mapped_cells() == NOTHING


def test_a_batch_that_its_worker_keeps_stays_whole_where_the_trainer_keeps_a_part():
    """The collate function gives it out again later."""
    loader = OURS(Samples(), batch_size=4, num_workers=1, collate_fn=Caching())
    masks = []
    for number, batch in enumerate(loader):
        expected = 0 if number % 3 == 2 else number
        for part in SIZES:
            assert torch.equal(batch[part], _of_batch(expected, part)), (number, part)
        masks.append((expected, batch["mask"]))

    assert all(torch.equal(mask, _of_batch(expected, "mask")) for expected, mask in masks)


def _result(number: int) -> dict[str, Any]:
    return {"image": np.full(4 * SIZES["image"], number % 251, np.uint8), "label": np.full(4, number % 251, np.uint8)}


@pytest.mark.parametrize("chunksize", [1, 10])
def test_keeping_one_part_of_each_result_of_a_pool_keeps_nothing_else(chunksize):
    """Nor the other results that came with it."""
    kept = []
    with Pool(2) as pool:
        for number, result in enumerate(pool.map(_result, range(BATCHES), chunksize=chunksize)):
            assert set(result["image"][::4000].tolist()) == {number % 251}
            kept.append(result["image" if number % 10 == 3 else "label"])
    del result
    assert resident_cells() <= BATCHES // 10 * 5 * SIZES["image"] + 2 * 4 * SIZES["image"]
    assert all(set(one.tolist()) == {number % 251} for number, one in enumerate(kept))
    del kept
    assert mapped_cells() == NOTHING
