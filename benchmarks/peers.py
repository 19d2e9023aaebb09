"""Other loaders for the same work: torchdata, Grain, SPDL. Each is imported only when it is asked for.

Each in the form its own documentation recommends for data like ours, with two workers (or threads), batches in order
and as torch collates them. Where a library offers several transports, the one that was fastest here.

    torchdata stateful   StatefulDataLoader, as torch's
    torchdata nodes      SamplerWrapper → ParallelMapper (fetch and collate) → Prefetcher
    grain                MapDataset.batch → mp_prefetch; it speaks NumPy: samples are arrays, leaves become tensors
    spdl                 PipelineBuilder.pipe (fetch and collate) on a pool of processes, or on threads
    spdl arena           two subprocesses, batches in turn, through its pool of shared-memory segments
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import util
from multiprocessing import resource_tracker
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, SequentialSampler, default_collate

from loaders import Loader, torch_options
from workloads import InMemory, Workload

# What a loader may prepare in advance, per worker: torch's default.
PREFETCH = 2
# Below this an array costs less inside a message than as a segment of shared memory.
SMALL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Peer:
    name: str
    package: str
    loader: Loader
    processes: bool = True

    @property
    def installed(self) -> bool:
        return util.find_spec(self.package) is not None


class FetchBatch:
    """Fetches and collates: what a worker does with a list of indices."""

    def __init__(self, dataset: Dataset[Any], workload: Workload) -> None:
        self.dataset = dataset
        self.collate = workload.collate or default_collate

    def __call__(self, indices: list[int]) -> Any:
        return self.collate([self.dataset[index] for index in indices])


def _index_lists(dataset: Any, workload: Workload) -> Any:
    return BatchSampler(SequentialSampler(dataset), workload.batch_size, drop_last=False)


@contextmanager
def stateful(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    from torchdata.stateful_dataloader import StatefulDataLoader

    yield iter(StatefulDataLoader(dataset, **torch_options(workload)))


@contextmanager
def nodes(method: str, dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    from torchdata import nodes

    mapper = nodes.ParallelMapper(
        nodes.SamplerWrapper(_index_lists(dataset, workload)),
        map_fn=FetchBatch(dataset, workload),
        num_workers=workload.workers,
        method=method,
        multiprocessing_context=workload.method if method == "process" else None,
    )
    yield iter(nodes.Loader(nodes.Prefetcher(mapper, prefetch_factor=PREFETCH * workload.workers)))


@contextmanager
def grain(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    from grain import MapDataset, MultiprocessingOptions, ReadOptions, experimental

    # A plain function stacks as fast as its own batching for large leaves, and twice as fast for many small ones.
    with_arrays = _has((torch.Tensor, np.ndarray), dataset)
    batch_fn = workload.collate or _stack_leaves
    batches = MapDataset.source(_as_arrays(dataset) if with_arrays else _SealedSamples(dataset)).batch(
        workload.batch_size, batch_fn=batch_fn if with_arrays else partial(_seal_batch, batch_fn)
    )
    # In memory already: no threads for reading, as its documentation says.
    stream = batches.to_iter_dataset(ReadOptions(num_threads=0, prefetch_buffer_size=0))
    stream = experimental.WithOptionsIterDataset(stream, experimental.DatasetOptions(min_shm_size=SMALL_BYTES))
    options = MultiprocessingOptions(num_workers=workload.workers, per_worker_buffer_size=PREFETCH)
    iterator = iter(stream.mp_prefetch(options, _one_thread))
    try:
        if not with_arrays:
            yield (sealed.content for sealed in iterator)
        else:
            yield map(_as_tensors, iterator) if _has(torch.Tensor, dataset) else iterator
    finally:
        iterator.close()


@contextmanager
def spdl_threads(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    from spdl.pipeline import PipelineBuilder

    pipeline: Any = (
        PipelineBuilder()
        .add_source(_index_lists(dataset, workload))
        .pipe(FetchBatch(dataset, workload), concurrency=workload.workers, output_order="input")
        .add_sink(PREFETCH * workload.workers)
        .build(num_threads=workload.workers)
    )
    with pipeline.auto_stop():
        yield iter(pipeline)


@contextmanager
def spdl_processes(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    from spdl.pipeline import PipelineBuilder

    pool = ProcessPoolExecutor(
        workload.workers,
        multiprocessing.get_context(workload.method),
        initializer=_start_worker,
        initargs=(FetchBatch(dataset, workload),),
    )
    with pool:
        pipeline: Any = (
            PipelineBuilder()
            .add_source(_index_lists(dataset, workload))
            .pipe(_work, executor=pool, concurrency=PREFETCH * workload.workers, output_order="input")
            .add_sink(PREFETCH * workload.workers)
            .build(num_threads=1)
        )
        with pipeline.auto_stop():
            yield iter(pipeline)


@contextmanager
def spdl_arena(dataset: Dataset[Any], workload: Workload) -> Iterator[Iterator[Any]]:
    from spdl.pipeline import SharedMemorySegmentPool, iterate_in_subprocess

    lists = list(_index_lists(dataset, workload))
    # Its locks are of the default start method.
    by_arena = _has((torch.Tensor, np.ndarray), dataset) and workload.method == "fork"
    size_bytes = 2 * max(_batch_bytes(dataset, workload), SMALL_BYTES)
    parts = [
        iterate_in_subprocess(
            partial(_Part, FetchBatch(dataset, workload), lists[worker :: workload.workers]),
            buffer_size=PREFETCH,
            mp_context=workload.method,
            # Without arrays it would only look at every object in vain.
            arena=SharedMemorySegmentPool(size_bytes, PREFETCH + 3) if by_arena else None,
        )
        for worker in range(workload.workers)
    ]
    streams = [iter(part) for part in parts]
    try:
        yield (next(stream) for stream in itertools.islice(itertools.cycle(streams), len(lists)))
    finally:
        # The last reference ends the subprocess and frees the segments.
        streams.clear()
        parts.clear()


class _Part:
    """One worker's batches."""

    def __init__(self, work: FetchBatch, lists: list[list[int]]) -> None:
        self.work = work
        self.lists = lists

    def __iter__(self) -> Iterator[Any]:
        torch.set_num_threads(1)
        return map(self.work, self.lists)


_work_of_this_process: Callable[[list[int]], Any]


def _start_worker(work: FetchBatch) -> None:
    global _work_of_this_process
    torch.set_num_threads(1)
    _work_of_this_process = work


def _work(indices: list[int]) -> Any:
    return _work_of_this_process(indices)


def _one_thread(_worker: int, _workers: int) -> None:
    """As torch does in its workers: else they fight for the cores, each with as many threads as there are."""
    torch.set_num_threads(1)


class _Sealed:
    """Something as one leaf: Grain would walk down to every int, at every step, and be ten times slower."""

    def __init__(self, content: Any) -> None:
        self.content = content


class _SealedSamples:
    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> _Sealed:
        return _Sealed(self.dataset[index])


def _seal_batch(batch_fn: Callable[[Any], Any], samples: Any) -> _Sealed:
    return _Sealed(batch_fn([sample.content for sample in samples]))


def _as_arrays(dataset: Any) -> Any:
    """The same samples with arrays for tensors: what somebody who uses Grain would have in memory."""
    if isinstance(dataset, InMemory):
        return InMemory([_leaves(_to_array, sample) for sample in dataset.samples], dataset.length)
    return _Arrays(dataset)


class _Arrays:
    """A dataset whose samples are made when they are asked for."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return _leaves(_to_array, self.dataset[index])


def _leaves(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _leaves(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_leaves(function, item) for item in value)
    return function(value)


def _to_array(leaf: Any) -> Any:
    return leaf.numpy() if isinstance(leaf, torch.Tensor) else leaf


def _stack_leaves(samples: Any) -> Any:
    """As default_collate, of arrays."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in first}
    return [np.stack(column) for column in zip(*samples, strict=True)]


def _as_tensors(batch: Any) -> Any:
    return _leaves(lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, batch)


def _has(kinds: Any, dataset: Any) -> bool:
    """Whether samples contain something of these kinds."""
    found: list[bool] = []
    _leaves(lambda leaf: found.append(isinstance(leaf, kinds)), dataset[0])
    return any(found)


def _batch_bytes(dataset: Any, workload: Workload) -> int:
    """About what a batch takes; 8 for a number."""
    sizes: list[int] = []
    _leaves(lambda leaf: sizes.append(getattr(leaf, "nbytes", 8)), dataset[0])
    return sum(sizes) * workload.batch_size


def silence_resource_tracker() -> None:
    """Starts the tracker of this process tree with nowhere to complain: SPDL's arena unregisters each segment twice."""
    kept = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        resource_tracker.ensure_running()
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


PEERS = (
    Peer("torchdata stateful", "torchdata", stateful),
    Peer("torchdata nodes, processes", "torchdata", partial(nodes, "process")),
    Peer("torchdata nodes, threads", "torchdata", partial(nodes, "thread"), processes=False),
    Peer("grain", "grain", grain),
    Peer("spdl processes", "spdl", spdl_processes),
    Peer("spdl arena", "spdl", spdl_arena),
    Peer("spdl threads", "spdl", spdl_threads, processes=False),
)
