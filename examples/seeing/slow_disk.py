"""Samples that come slowly: run it beside `holdfast dash`, and see what the trainer waits for.

For the first third of the time reads are quick; then a disk that others use, too, takes 60 ms for each. A pause stands
in for the disk: workers wait, and compute nothing.

    holdfast dash &
    python examples/seeing/slow_disk.py [SECONDS]
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import Dataset

from holdfast import DataLoader


class OnDisk(Dataset[torch.Tensor]):
    def __init__(self, slow_from: float) -> None:
        self.slow_from = slow_from  # as time.monotonic() tells it, which is the same in all processes

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.06 if time.monotonic() > self.slow_from else 0.003)  # the read
        return torch.full((64,), float(index))


def main(seconds: float) -> None:
    began = time.monotonic()
    loader = DataLoader(OnDisk(began + seconds / 3), batch_size=8, num_workers=2)
    for _ in loader:
        time.sleep(0.05)  # the training step
        if time.monotonic() > began + seconds:
            break
    print(f"{loader.statistics().delivered} batches; {loader.statistics().advice}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
