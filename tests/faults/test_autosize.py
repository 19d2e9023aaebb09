"""`num_workers="auto"`: batches that depend on nothing but themselves, and a fleet that finds its size."""

from __future__ import annotations

import os
import random
import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import outlive
from deadlines import Deadline
from outlive import FaultPolicy
from outlive._fleet.sizing import Sizing
from outlive.loader import pacing

METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 60.0
SIZE = 60


class Augmented(Dataset[Any]):
    """Every kind of random number; some samples kill their worker once in a while, or raise the first time."""

    def __init__(self, folder: str = "") -> None:
        self.folder = folder

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if self.folder and index % 13 == 5 and self._is_first(index):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.folder and index % 17 == 3 and self._is_first(index):
            torch.rand(3)
            raise OSError("not now")
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)

    def _is_first(self, index: int) -> bool:
        try:
            os.close(os.open(f"{self.folder}/{index}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


def two_epochs(monkeypatch: Any, workers: int, method: str = "fork", folder: str = "", **more: Any) -> Any:
    monkeypatch.setattr(pacing, "new_sizing", lambda: Sizing(workers, workers))
    torch.manual_seed(11)
    policy = FaultPolicy(retry_on=OSError, backoff_s=0)
    loader: Any = outlive.DataLoader(
        Augmented(folder),  # type: ignore[arg-type]
        batch_size=4,
        shuffle=True,
        num_workers="auto",
        faults=policy,
        multiprocessing_context=method,
        **more,
    )
    return [torch.stack(list(loader)) for _ in range(2)], loader


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_do_not_depend_on_how_many_make_them(method, persistent, monkeypatch, tmp_path):
    """One worker, three, or five of whom some die: the same batches, and others in the next epoch."""
    alone, _ = two_epochs(monkeypatch, 1, persistent_workers=persistent)
    three, _ = two_epochs(monkeypatch, 3, method, persistent_workers=persistent)
    dying, loader = two_epochs(monkeypatch, 5, method, str(tmp_path), persistent_workers=persistent)

    for epoch in range(2):
        assert torch.equal(alone[epoch], three[epoch])
        assert torch.equal(alone[epoch], dying[epoch])
    assert not torch.equal(alone[0].flatten().sort()[0], alone[1].flatten().sort()[0])  # other random numbers
    assert loader.statistics().restarts == len([i for i in range(SIZE) if i % 13 == 5])
    assert alone[0][..., 0].flatten().sort()[0].tolist() == list(range(SIZE))


class Slow(Dataset[Any]):
    """Waits, as for a disk."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.02)  # what the workers are to be many for
        return index


@pytest.mark.parametrize("method", METHODS)
def test_it_becomes_larger_while_the_consumer_waits_and_keeps_what_it_learned(method):
    """Workers that wait for a disk are of use in numbers; the next epoch begins with as many as this one found."""
    loader: Any = outlive.DataLoader(Slow(), num_workers="auto", multiprocessing_context=method, timeout=DEADLINE_S)
    deadline = Deadline(DEADLINE_S)
    seen = []
    for count, batch in enumerate(loader):
        assert int(batch) == count
        assert not deadline.passed, seen
        workers = loader.statistics().workers
        if not seen or seen[-1] != workers:
            seen.append(workers)
        if workers >= 4:
            break

    assert seen[0] <= 2
    assert loader.num_workers >= 16
    iterator = iter(loader)
    next(iterator)
    assert loader.statistics().workers >= 4


class Endless(Augmented):
    def __len__(self) -> int:
        return 1_000_000


def test_it_becomes_smaller_when_the_trainer_does_not_wait(monkeypatch):
    """A consumer that takes its time needs no more than one worker."""
    monkeypatch.setattr(pacing, "new_sizing", lambda: Sizing(6, 6))
    loader: Any = outlive.DataLoader(Endless(), num_workers="auto")
    deadline = Deadline(DEADLINE_S)
    for _ in loader:
        time.sleep(0.02)  # a consumer that takes its time
        workers = loader.statistics().workers
        assert not deadline.passed, workers
        if workers <= 2:
            break

    assert workers <= 2


def test_a_loader_made_from_its_attributes_is_auto_again():
    """As trainers do it that put a sampler of their own into a loader."""
    loader: Any = outlive.DataLoader(Augmented(), num_workers="auto")
    other: Any = outlive.DataLoader(loader.dataset, num_workers=loader.num_workers)

    assert loader.num_workers == other.num_workers >= 16
    next(iter(other))
    assert pacing.is_auto(other.num_workers)
    assert other.statistics().workers <= 2


def test_an_unusable_number_of_workers_is_refused():
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

    with pytest.raises(ValueError, match="map-style dataset"):
        outlive.DataLoader(Stream(), num_workers="auto")
    with pytest.raises(TypeError):  # in torch's words
        outlive.DataLoader(Augmented(), num_workers="many")  # type: ignore[arg-type]
