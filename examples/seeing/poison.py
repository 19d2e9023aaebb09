"""A sample that kills its worker, and two that raise: run it beside `outlive dash`, and see which ones.

Picture 421 makes a decoder read address zero; 133 and 902 are truncated. Each costs itself, and nothing else.

    outlive dash &
    python examples/seeing/poison.py [SECONDS]
"""

from __future__ import annotations

import ctypes
import sys
import time

import torch
from torch.utils.data import Dataset

from outlive import DataLoader

POISON, TRUNCATED = 421, (133, 902)


class Pictures(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1600

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == POISON:
            ctypes.string_at(0)  # what a bug in a decoder does
        if index in TRUNCATED:
            raise OSError(f"picture-{index:04}.png: image file is truncated")
        time.sleep(0.004)
        return torch.full((64,), float(index))


def main(seconds: float) -> None:
    loader = DataLoader(
        Pictures(), batch_size=8, num_workers=2, faults="skip", describe=lambda index: f"picture-{index:04}.png"
    )
    step_s = seconds / len(loader)
    for _ in loader:
        time.sleep(step_s)  # the training step
    print(f"left out: {sorted(loader.quarantine)}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0)
