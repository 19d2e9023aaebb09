"""Keeps 10,000 batches, 3,000 of them in cells, in a process that may open 256 files."""

import resource

import torch

import outlive
from transport import batch_values

resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
counts = [14_848 if i % 10 < 3 else 16 for i in range(10_000)]  # 58 KiB, or 64 bytes

if __name__ == "__main__":
    loader = outlive.DataLoader(
        batch_values.FilledTensors(*counts), batch_size=None, collate_fn=batch_values.as_is, num_workers=2
    )
    kept = list(loader)
    right = all(
        len(batch) == count and bool((batch == i).all())
        for i, (batch, count) in enumerate(zip(kept, counts, strict=True))
    )
    assert torch.is_tensor(kept[0])
    print(f"{len(kept)} batches, {'all' if right else 'not all'} as they were made")
