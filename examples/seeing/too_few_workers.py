"""One worker that computes all the time, and a trainer that waits for it: run it beside `outlive dash`.

outlive dash &
python examples/seeing/too_few_workers.py [SECONDS]
"""

from __future__ import annotations

import sys
import time

import torch
from torch.utils.data import Dataset

from outlive import DataLoader


class Augmented(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        until = time.thread_time() + 0.012  # of CPU time: decoding, cropping, turning
        total = 0
        while time.thread_time() < until:
            total += index
        return torch.full((64,), float(index))


def main(seconds: float) -> None:
    loader = DataLoader(Augmented(), batch_size=8, num_workers=1)
    end = time.monotonic() + seconds
    for _ in loader:
        time.sleep(0.04)  # the training step
        if time.monotonic() > end:
            break
    print(f"{loader.statistics().delivered} batches; {loader.statistics().advice}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
