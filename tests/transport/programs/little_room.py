"""Loads batches of a megabyte in several ways, with the loader that is named: `stock` or `holdfast`."""

import sys

import torch

import holdfast
from transport import shelf

KINDS = {"stock": torch.utils.data.DataLoader, "holdfast": holdfast.DataLoader}

if __name__ == "__main__":
    loader_class = KINDS[sys.argv[1]]
    plain = torch.ones(65_536)
    done = 0
    for sample in (
        plain,
        plain.to(torch.float8_e4m3fn),
        plain.to(torch.uint16),
        plain.as_subclass(shelf.Image),
        torch.nn.Parameter(plain, requires_grad=False),
        {"x": plain.numpy(), "y": [plain.bfloat16(), 3]},
    ):
        for batch in loader_class(shelf.Stock(*[sample] * 8), batch_size=4, num_workers=2):
            first = batch["x"] if isinstance(batch, dict) else batch
            assert first.shape == (4, 65_536)
            assert bool((first.float() == 1).all())
            done += 1
    print(f"{done} batches")
