"""Batches of 1,000 tensors each, several kept, in a process that may open 64 files."""

import resource

import torch

import outlive
from transport import batch_values

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    for floats in (10, 100, 1000):
        samples = [[torch.full((floats,), float(i)) for i in range(1000)] for _ in range(4)]
        loader = outlive.DataLoader(
            batch_values.ReadySamples(*samples), batch_size=None, collate_fn=batch_values.as_is, num_workers=2
        )
        kept = list(loader)
        assert all(bool((batch[i] == i).all()) for batch in kept for i in range(1000))
    print(f"{len(kept)} batches")
