"""Loaders and datasets as libraries have them. Under spawn, workers import them from here.

Reads   nothing.
Writes  nothing.
Never   outlive: they know nothing of it.
"""

from __future__ import annotations

import os
import signal
import threading
from multiprocessing.context import SpawnContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

SIZE = 24
DEADLY, BAD = 5, 9


class Faulty(Dataset[torch.Tensor]):
    """One sample kills its worker, one raises."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == DEADLY and get_worker_info() is not None:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == BAD:
            raise ValueError(f"sample {index} is bad")
        return torch.tensor([float(index)])


class Healthy(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class WrapsIterator(DataLoader[Any]):
    """As PyG's NodeLoader: takes torch's iterator and does something with what it gives."""

    def _get_iterator(self) -> Any:
        return (batch for batch in super()._get_iterator())


class _IteratorWrapper:
    """Hands everything on, as PyG's DataLoaderIterator does."""

    def __init__(self, iterator: Any) -> None:
        self.iterator = iterator

    def __iter__(self) -> Any:
        return self

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        self.iterator._reset(loader, first_iter)

    def _shutdown_workers(self) -> None:
        self.iterator._shutdown_workers()

    def __next__(self) -> Any:
        return next(self.iterator)


class KeepsIterator(DataLoader[Any]):
    """As PyG's NodeLoader with workers that persist."""

    def _get_iterator(self) -> Any:
        return _IteratorWrapper(super()._get_iterator())


class Endless(DataLoader[Any]):
    """As timm's MultiEpochsDataLoader: one iterator, made at the beginning, for all epochs."""

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.iterator = super().__iter__()

    def __iter__(self) -> Any:
        yield from self.iterator


class OwnIterator(_MultiProcessingDataLoaderIter):
    pass


class OwnIteratorLoader(DataLoader[Any]):
    """Has an iterator of its own that builds on torch's."""

    def _get_iterator(self) -> Any:
        return OwnIterator(self)


class ThreadContext(SpawnContext):
    """As MONAI's ThreadDataLoader has: workers are threads."""

    Process = threading.Thread


class ForeignLoader(DataLoader[Any]):
    """As torchdata's StatefulDataLoader: nothing of torch's is asked."""

    def __iter__(self) -> Any:
        return self._get_iterator()

    def _get_iterator(self) -> Any:
        return iter([self.collate_fn([self.dataset[i] for i in batch]) for batch in self.batch_sampler])


def indices(loader: Any) -> list[int]:
    return [int(value) for batch in loader for value in batch.flatten().tolist()]
