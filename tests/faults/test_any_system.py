"""Faults that every system layer survives: `OUTLIVE_SYSTEM=portable` runs the same tests without fork and memfd.

Few loaders with many faults each: a spawned worker takes seconds to import what it needs.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from deadlines import Deadline
from outlive import DataLoader, FaultPolicy
from outlive._system import choice

SIZE = 24
LARGE = 40_000  # floats in a sample, so that batches travel in cells


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def segfault() -> None:
    ctypes.string_at(0)


def leave() -> None:
    os._exit(3)


def fail() -> None:
    raise ValueError("a bad sample")


def hang() -> None:
    threading.Event().wait()


Faults = dict[int, Callable[[], None]]


class Samples(Dataset[Any]):
    """Each sample is its index, drawn numbers of all three generators, and a large piece."""

    def __init__(self, faults: Faults, mark: Path | None = None) -> None:
        self.faults = faults
        self.mark = mark  # with it, each fault strikes once

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        drawn = torch.tensor([torch.rand(()).item(), random.random(), numpy.random.random()])
        self.strike(index)
        return index, drawn, torch.full((LARGE,), float(index))

    def strike(self, index: int) -> None:
        if index not in self.faults:
            return
        if self.mark is not None:
            path = self.mark / str(index)
            if path.exists():
                return
            path.touch()
        self.faults[index]()


class SampleIterator:
    def __init__(self, samples: Samples, indices: range) -> None:
        self.samples = samples
        self.indices = iter(indices)

    def __next__(self) -> Any:
        return self.samples[next(self.indices)]


class Stream(IterableDataset[Any]):
    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __iter__(self) -> Any:
        info = get_worker_info()
        return SampleIterator(self.samples, range(info.id, SIZE, info.num_workers))


def collate_badly(samples: list[Any]) -> Any:
    if any(index == 6 for index, _, _ in samples):
        kill()
    return torch.utils.data.default_collate(samples)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def add_unpicklable(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return [*batch, Unpicklable()] if any(index == 6 for index, _, _ in samples) else [*batch, None]


def epoch(loader: Any) -> list[list[Any]]:
    """All batches, as plain values; the large pieces by one number each."""
    batches = []
    for indices, drawn, large, *_ in loader:
        assert bool((large == large[:, :1]).all())
        batches.append([indices.tolist(), drawn.tolist(), large[:, 0].tolist()])
    return batches


def indices_of(batches: list[list[Any]]) -> list[int]:
    return [index for indices, _, _ in batches for index in indices]


def make(dataset: Any, **more: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="spawn", **more)


@pytest.fixture
def undisturbed() -> Callable[[Any], list[list[Any]]]:
    """What torch's own loader delivers."""

    def run(dataset: Any) -> list[list[Any]]:
        torch.manual_seed(5)
        return epoch(TorchLoader(dataset, batch_size=4, num_workers=2, multiprocessing_context="fork"))

    return run


def test_the_layer_is_the_one_that_was_asked_for():
    """Else these tests would test the same one twice."""
    assert choice.PORTABLE is (os.environ.get("OUTLIVE_SYSTEM") == "portable")


def test_each_healthy_sample_comes_once_when_others_kill_exit_and_raise():
    """Each bad one is named, with how the worker ended."""
    loader = make(Samples({1: fail, 5: kill, 14: leave, 22: segfault}), faults="skip")

    delivered = indices_of(epoch(loader))

    assert delivered == [index for index in range(SIZE) if index not in (1, 5, 14, 22)]
    ends = {index: incident.exit for index, incident in loader.quarantine.items()}
    assert (ends[5].signal, ends[14].code, ends[22].signal) == (signal.SIGKILL, 3, signal.SIGSEGV)
    assert "string_at" in loader.quarantine[22].stack


def test_each_healthy_sample_comes_once_when_others_hang():
    """In a wait that never ends, and stopped."""
    loader = make(Samples({3: hang, 17: stop}), faults=FaultPolicy("skip", retries=0, sample_timeout=1.0))

    assert indices_of(epoch(loader)) == [index for index in range(SIZE) if index not in (3, 17)]
    assert set(loader.quarantine) == {3, 17}
    assert all(incident.hung for incident in loader.quarantine.values())
    assert "in hang" in loader.quarantine[3].stack


@pytest.mark.parametrize("collate", [collate_badly, add_unpicklable])
def test_the_culprit_is_found_when_a_batch_cannot_be_made(collate):
    """By halving, where collating kills; by trying, where pickling raises."""
    loader = make(Samples({}), collate_fn=collate, faults=FaultPolicy("skip", retries=0))

    assert indices_of(epoch(loader)) == [index for index in range(SIZE) if index != 6]
    assert set(loader.quarantine) == {6}


@pytest.mark.parametrize("kind", ["map", "stream"])
def test_not_one_bit_differs_from_torch_when_workers_die_once(tmp_path, undisturbed, kind):
    """Random numbers of all three generators included."""

    def dataset(faults: Faults) -> Any:
        samples = Samples(faults, tmp_path)
        return samples if kind == "map" else Stream(samples)

    loader = make(dataset({2: kill, 9: segfault, 20: leave}))

    assert epoch(loader) == undisturbed(dataset({}))
    assert loader.statistics().restarts == 3
    assert len(loader.quarantine) == 0


def test_nothing_is_left_when_the_loop_is_left(tmp_path):
    """Not even the names of shared memory; what is held stays readable."""
    iterator = iter(make(Samples({})))
    _, _, held = next(iterator)
    del iterator

    assert held[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]
    deadline = Deadline(10)
    while left := [name for name in os.listdir("/dev/shm") if name.startswith(f"outlive-{os.getpid()}-")]:
        assert not deadline.passed, left
        time.sleep(0.01)  # between two looks, with a deadline
