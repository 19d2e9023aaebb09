"""The loaders that every run compares: stock torch, outlive and, on request, outlive without supervision.

A loader is a function `(dataset, workload) → context manager → iterator over batches`; leaving the context ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch.utils.data import Dataset

import outlive
from outlive._capture.blackbox import BlackBox
from outlive._worker.randomness import Randomness
from workloads import Workload

Loader: TypeAlias = Callable[[Dataset[Any], Workload], AbstractContextManager[Iterator[Any]]]


def torch_options(workload: Workload) -> dict[str, Any]:
    """A workload in the arguments of torch's DataLoader."""
    return {
        "batch_size": workload.batch_size,
        "num_workers": workload.workers,
        "collate_fn": workload.collate,
        "multiprocessing_context": workload.method,
    }


@contextmanager
def stock(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    yield iter(torch.utils.data.DataLoader(dataset, **torch_options(workload)))


@contextmanager
def supervised(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    yield iter(outlive.DataLoader(dataset, **torch_options(workload)))


@contextmanager
def bare(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    """No notes in the black box, no random state kept, nobody watching: the rest is what supervision costs."""
    policy = outlive.FaultPolicy(sample_timeout=None)
    yield iter(outlive.DataLoader(dataset, **torch_options(workload), worker_init_fn=_strip, faults=policy))


def _strip(_: int) -> None:
    """In a worker: do the work and nothing else."""
    for name in ("enter", "fetch", "finished", "was_healthy", "count_done"):
        setattr(BlackBox, name, lambda *_, **__: None)
    BlackBox.keep_random_state = lambda *_: None  # type: ignore[method-assign]
    Randomness.read = lambda self: b""  # type: ignore[method-assign]
