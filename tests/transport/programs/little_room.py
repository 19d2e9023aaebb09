"""Loads batches of a megabyte in several ways, with the loader that is named: `stock` or `outlive`; or `pool`."""

import sys

import numpy as np
import torch

import outlive
from transport import batch_values

KINDS = {"stock": torch.utils.data.DataLoader, "outlive": outlive.DataLoader}


def megabyte(number: int) -> np.ndarray:
    return np.full(262_144, number, np.float32)


def use_pool() -> None:
    """Results that are all kept, and an argument that all share."""
    common = outlive.share(megabyte(1))
    for method in ("fork", "spawn"):
        with outlive.Pool(2, method) as pool:
            kept = list(pool.map(megabyte, range(12)))
            sums = list(pool.map(np.sum, [common, megabyte(2)]))
        assert [int(each[0]) for each in kept] == list(range(12))
        assert sums == [262_144, 524_288]
        print(f"{len(kept)} results")


if __name__ == "__main__" and sys.argv[1] == "pool":
    use_pool()
elif __name__ == "__main__":
    loader_class = KINDS[sys.argv[1]]
    plain = torch.ones(65_536)
    done = 0
    for sample in (
        plain,
        plain.to(torch.float8_e4m3fn),
        plain.to(torch.uint16),
        plain.as_subclass(batch_values.Image),
        torch.nn.Parameter(plain, requires_grad=False),
        {"x": plain.numpy(), "y": [plain.bfloat16(), 3]},
    ):
        for batch in loader_class(batch_values.ReadySamples(*[sample] * 8), batch_size=4, num_workers=2):
            first = batch["x"] if isinstance(batch, dict) else batch
            assert first.shape == (4, 65_536)
            assert bool((first.float() == 1).all())
            done += 1
    print(f"{done} batches")
