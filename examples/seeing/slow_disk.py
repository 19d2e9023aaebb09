"""Samples that come slowly: run it beside `outlive dash`, and see what the trainer waits for.

For the first third of the time reads are quick; then a disk that others use, too, takes 60 ms for each. Without a
folder a pause stands in for the disk. With one, a file there is read past the page cache for so long: workers are then
seen to wait for a disk, where it is one. In both cases they compute next to nothing.

    outlive dash &
    python examples/seeing/slow_disk.py [SECONDS [FOLDER]]
"""

from __future__ import annotations

import mmap
import os
import sys
import time

import torch
from torch.utils.data import Dataset

from outlive import DataLoader

BLOCK, BLOCKS = 8 << 20, 16


class OnDisk(Dataset[torch.Tensor]):
    def __init__(self, slow_from: float, file: str = "") -> None:
        self.slow_from = slow_from  # as time.monotonic() tells it, which is the same in all processes
        self.file = file
        self.room: mmap.mmap | None = None

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if time.monotonic() < self.slow_from:
            time.sleep(0.003)
        elif self.file:
            self.read_for(0.06, index)
        else:
            time.sleep(0.06)  # the read
        return torch.full((64,), float(index))

    def read_for(self, seconds: float, index: int) -> None:
        if self.room is None:
            self.room = mmap.mmap(-1, BLOCK)  # aligned, as reads past the cache must be
        end = time.monotonic() + seconds
        fd = os.open(self.file, os.O_RDONLY | os.O_DIRECT)
        while time.monotonic() < end:
            os.preadv(fd, [self.room], (index % BLOCKS) * BLOCK)
            index += 1
        os.close(fd)


def prepare(folder: str) -> str:
    file = os.path.join(folder, "samples.bin")
    with open(file, "wb") as out:
        for _ in range(BLOCKS):
            out.write(os.urandom(BLOCK))
        out.flush()
        os.fsync(out.fileno())
    return file


def main(seconds: float, folder: str = "") -> None:
    file = prepare(folder) if folder else ""
    began = time.monotonic()
    loader = DataLoader(OnDisk(began + seconds / 3, file), batch_size=8, num_workers=2)
    for _ in loader:
        time.sleep(0.05)  # the training step
        if time.monotonic() > began + seconds:
            break
    print(f"{loader.statistics().delivered} batches; {loader.statistics().advice}")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 30.0, *sys.argv[2:3])
