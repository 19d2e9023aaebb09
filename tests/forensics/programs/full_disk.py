"""A little training job whose samples write more than there is room for: to /dev/shm, to a disk.

Reads   nothing; the folder of a disk with 64 KiB and 50 inodes is its first argument, the start method its second.
Writes  to standard output the verdicts, as JSON.
Never   a module of the tests: it is run by its path.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

SIZE = 1 << 20


def write(folder: Path) -> None:
    with open(folder / "written", "wb") as file:
        file.write(bytes(SIZE))


def make_files(folder: Path) -> None:
    for number in range(1000):
        (folder / str(number)).touch()


def save_array(folder: Path) -> None:
    np.save(folder / "array", np.zeros(SIZE))


def save_tensor(folder: Path) -> None:
    torch.save(torch.zeros(SIZE), str(folder / "tensor"))


def take_room(folder: Path) -> None:
    with open(folder / "taken", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, SIZE)


def write_nameless(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(SIZE))


def share(_: Path) -> None:
    torch.zeros(SIZE).share_memory_()


WAYS = (write, make_files, save_array, save_tensor, take_room, write_nameless, share)


class Writing:
    """The odd samples write, each in a way of its own, and leave no room behind them until the next one is fetched."""

    def __init__(self, disk: str) -> None:
        self.disk = disk

    def __len__(self) -> int:
        return 4 * len(WAYS)

    def __getitem__(self, index: int) -> int:
        gc.collect()  # torch's writer keeps what it could not write, in a cycle
        for folder in (Path(self.disk), Path("/dev/shm")):
            for path in folder.iterdir():
                path.unlink()
        if index % 2:
            WAYS[index // 4](Path("/dev/shm" if index % 4 == 3 else self.disk))
        return index


def main(disk: str, method: str) -> None:
    import outlive

    policy = outlive.FaultPolicy("skip", max_bad=None)
    loader: Any = outlive.DataLoader(Writing(disk), 2, num_workers=1, multiprocessing_context=method, faults=policy)
    delivered = [int(index) for batch in loader for index in batch]
    told = {
        index: (incident.verdict.name.value, incident.verdict.cause, *incident.verdict.remedies)
        for index, incident in loader.quarantine.items()
    }
    print(json.dumps([delivered, told, loader.statistics().restarts]))


if __name__ == "__main__":
    main(*sys.argv[1:])
