"""A dataset that never forgets: run it for half a minute beside `outlive dash`, and see whose memory grows.

Each sample is kept in a list, as a cache without a bound does it. Workers near their limit of 160 MiB are recycled:
they finish their batch and leave, a fresh one goes on, and the epoch does not notice.

    outlive dash &
    python examples/seeing/leak.py [SECONDS]
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import Dataset

from outlive import DataLoader


class Hoarding(Dataset[torch.Tensor]):
    def __init__(self, size: int) -> None:
        self.size = size
        self.seen: list[bytes] = []

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen.append(b"x" * 40_000)  # the leak
        time.sleep(0.002)
        return torch.full((64,), float(index))


def main(seconds: float) -> None:
    loader = DataLoader(Hoarding(100_000), batch_size=8, num_workers=2, memory_limit="160MiB")
    end = time.monotonic() + seconds
    for _ in loader:
        time.sleep(0.015)  # the training step
        if time.monotonic() > end:
            break
    print(f"{loader.statistics().delivered} batches, {loader.statistics().recycled} workers recycled")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
