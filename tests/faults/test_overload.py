"""A disk or a /dev/shm that is full, and a consumer that is slower than the workers: told clearly, and bounded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import outlive
from deadlines import wait_until
from outlive._capture.vitals import own_bytes
from transport.process_inspection import mapped_cells

PROGRAM = Path(__file__).parents[1] / "forensics" / "programs" / "full_disk.py"
SMALL = "size=64k,nr_inodes=50"
# In a mount namespace of its own: the rest of the machine keeps its /dev/shm.
MOUNTED = f'mount -t tmpfs -o {SMALL} tmpfs /dev/shm && mount -t tmpfs -o {SMALL} tmpfs "$0" && exec "$@"'
WAYS = ("write", "make_files", "save_array", "save_tensor", "take_room", "write_nameless", "share")
MIB = 1 << 20


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_full_disk_is_named(method, tmp_path):
    """Which one, how large it is, what to do; whoever it is that says so, and however he says it."""
    command = ["unshare", "-m", "sh", "-c", MOUNTED, str(tmp_path)]
    tried = subprocess.run([*command, "true"], capture_output=True, text=True)
    if tried.returncode != 0:
        pytest.skip(f"a disk of 64 KiB needs the right to mount: {tried.stderr.strip()}")
    done = subprocess.run(
        [*command, sys.executable, str(PROGRAM), str(tmp_path), method], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-2000:]
    delivered, told, restarts = json.loads(done.stdout)

    assert delivered == list(range(0, 4 * len(WAYS), 2))
    assert restarts == 0
    for number, way in enumerate(WAYS):
        for index, mount in ((4 * number + 1, str(tmp_path)), (4 * number + 3, "/dev/shm")):
            name, cause, *remedies = told[str(index)]
            in_shm = way == "share" or mount == "/dev/shm"
            assert name == ("shared-memory-full" if in_shm else "disk-full"), (way, told[str(index)])
            assert cause.startswith("/dev/shm " if in_shm else f"{tmp_path} "), (way, cause)
            if way == "make_files":
                assert "no room for another file: all of its inodes are in use" in cause
                assert "df -i" in remedies[0]
            elif way in ("take_room", "share", "write_nameless"):  # which leave the room that there was
                assert "KiB left of 64 KiB" in cause
            else:
                assert "is full: 0 KiB left of 64 KiB" in cause
            if way == "write":
                assert "at full_disk.py:" in cause
                assert ("--shm-size" if in_shm else f"df -h {tmp_path}") in remedies[0]


# ---------------------------------------------------------------- a slow consumer


class Quick(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((MIB // 4,), float(index))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_consumer_that_is_slower_than_the_workers_costs_no_memory(method):
    """Workers wait for it with every batch ready, 200 times: cells and private memory of both sides stay level."""
    loader: Any = outlive.DataLoader(
        Quick(), None, num_workers=2, prefetch_factor=2, multiprocessing_context=method, worker_threads=1
    )
    cells, mapped, owned = [], [], []
    pids: list[int] = []

    def all_idle() -> bool:
        return all(slot.doing == "idle" for slot in loader.statistics().slots)

    for number, batch in enumerate(loader):
        assert float(batch[-1]) == number
        # Slower than any worker: not before both have nothing left to do.
        assert number > 190 or wait_until(all_idle, 60)
        if number % 20 == 19 and number < 190:
            statistics = loader.statistics()
            pids = [slot.pid for slot in statistics.slots]
            cells.append(statistics.cell_bytes)
            mapped.append(mapped_cells().size_bytes)
            owned.append([own_bytes(pid) for pid in (os.getpid(), *pids)])

    # Prefetched, in hand, held; and for each worker one that it writes and one on its way.
    batches = 2 * 2 + 1 + 1 + 2 * 2
    assert len(cells) == 9
    assert max(cells) <= batches * (MIB + 65536)
    assert max(mapped) <= batches * (MIB + 65536)
    assert max(cells[1:]) <= cells[0] + 2 * MIB
    for before, after in zip(owned[1], owned[-1], strict=True):
        assert after - before < 8 * MIB  # 140 batches of 1 MiB went by
