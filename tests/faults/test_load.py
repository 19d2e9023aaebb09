"""Real workers that compute, starve, wait and idle show it in statistics(), and one line says what to change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import outlive
import warm_server
from control_groups import cpu_group
from deadlines import wait_until

DEADLINE_S = 60.0

THROTTLED = """
import json, os, sys, time
import outlive, torch

class BurnsCpu:
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        begun = time.thread_time()
        while time.thread_time() - begun < 0.01:
            pass
        return index

sys.stdin.readline()
loader = outlive.DataLoader(BurnsCpu(), num_workers=2, multiprocessing_context="fork")
give_up_at = time.monotonic() + 60
for _ in loader:
    told = loader.statistics()
    if "throttles" in told.advice or time.monotonic() > give_up_at:
        break
print(json.dumps([told.cpus, told.throttled, told.advice]))
"""


class WaitsAndComputes(Dataset[int]):
    """Sample 0 waits in a read, 1 to 3 compute on one and the same CPU, all until they are told to stop."""

    def __init__(self, folder: Path) -> None:
        self.fifo = str(folder / "fifo")
        self.stop = str(folder / "stop")
        self.cpu = min(os.sched_getaffinity(0))

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        if index == 0:
            with open(self.fifo, "rb") as file:
                file.read()
        elif index < 4:
            os.sched_setaffinity(0, {self.cpu})
            give_up_at = time.monotonic() + DEADLINE_S
            while not os.path.exists(self.stop) and time.monotonic() < give_up_at:
                sum(range(10_000))
        return index


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_each_workers_time_is_told(method, tmp_path):
    """One reads, three share a CPU, one has nothing to do: all of it at once, and their batches arrive."""
    dataset = WaitsAndComputes(tmp_path)
    os.mkfifo(dataset.fifo)
    loader: Any = outlive.DataLoader(
        dataset, None, num_workers=5, prefetch_factor=1, multiprocessing_context=method, faults="raise"
    )
    iterator = iter(loader)
    hold = os.open(dataset.fifo, os.O_RDWR)  # whoever opens it goes on to wait for data

    def shown() -> bool:
        loads = [slot.load for slot in loader.statistics().slots]
        if None in loads:
            return False
        reader, *burners, idler = loads
        return (
            reader.waiting > 0.8
            and idler.idle > 0.8
            and all(burner.starved > 0.4 and burner.starved + burner.on_cpu > 0.8 for burner in burners)
        )

    try:
        seen = wait_until(shown, DEADLINE_S)
        slots = loader.statistics().slots
    finally:
        Path(dataset.stop).touch()
        os.close(hold)  # the reader's end of file

    assert seen, [slot.load for slot in slots]
    assert sum(slot.load.on_cpu for slot in slots[1:4]) < 1.5
    assert all(slot.threads >= 1 and slot.descriptors >= 3 for slot in slots)
    assert [int(index) for index in iterator] == [0, 1, 2, 3, 4]


def test_workers_without_a_cpu_get_advice_which_stays_after_the_epoch(tmp_path):
    """That is when people ask."""
    dataset = WaitsAndComputes(tmp_path)
    loader: Any = outlive.DataLoader(dataset, None, sampler=[1, 2, 3], num_workers=3, prefetch_factor=1)
    iterator = iter(loader)
    try:
        seen = wait_until(lambda: "waited" in loader.statistics().advice, DEADLINE_S)
    finally:
        Path(dataset.stop).touch()

    assert seen, loader.statistics()
    assert [int(index) for index in iterator] == [1, 2, 3]
    after = loader.statistics()
    assert "of their time for" in after.advice
    assert 0 < after.cpus <= len(os.sched_getaffinity(0))


def test_a_containers_cpu_limit_that_throttles_is_named():
    """Half a CPU for two workers that want two."""
    with cpu_group(0.5) as group:
        job = warm_server.Popen(
            [sys.executable, "-c", THROTTLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with job:
            try:
                (group / "cgroup.procs").write_text(str(job.pid))
                out, _ = job.communicate("go\n", timeout=100)
            except BaseException:
                job.kill()
                raise
    usable, throttled, advice = json.loads(out)

    assert usable == 0.5
    assert throttled > 0.1
    assert advice.startswith("the container's CPU limit of 0.5 throttles workers in ")
    assert advice.endswith("% of periods: num_workers=1, or raise the limit")
