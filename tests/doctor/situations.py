"""Loaders and datasets with something the matter with them, one function each: what to examine, and how.

Reads   nothing.
Writes  threads, channels and files that it holds until the program ends.
Never   more than some megabytes.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import random
import socket
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset, SubsetRandomSampler

import outlive
from outlive._system.cpus import usable_cpus

Situation = tuple[Any, dict[str, Any]]
CPUS = usable_cpus()
NO_SAMPLES = {"samples": 0}
_kept: list[Any] = []


class Plain(Dataset[Any]):
    """A dataset that is what it should be; others are like it, but for one thing."""

    def __init__(self, shape: tuple[int, ...] = (4, 4), count: int = 64) -> None:
        self.shape, self.count = shape, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.full(self.shape, float(index)), index


class FunctionDataset(Plain):
    """Its samples are what a function of this module says."""

    def __init__(self, fetch: Callable[[Any, int], Any], **held: Any) -> None:
        super().__init__()
        self.fetch = fetch
        vars(self).update(held)

    def __getitem__(self, index: int) -> Any:
        return self.fetch(self, index)


def ours(dataset: Any, **options: Any) -> Any:
    return outlive.DataLoader(
        dataset, **{"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"} | options
    )


def stock(dataset: Any, **options: Any) -> Any:
    more = {"batch_size": 4, "num_workers": 2, "multiprocessing_context": "fork"} | options
    return torch.utils.data.DataLoader(dataset, **more)


# ---------------------------------------------------------------- nothing the matter


class DataFrameDataset(Dataset[Any]):
    """Of a DataFrame and an Arrow table, as people have them."""

    def __init__(self) -> None:
        import pandas
        import pyarrow
        from pyarrow import parquet

        numbers = numpy.arange(20_000)
        self.frame = pandas.DataFrame({"number": numbers, "name": [f"row {number}" for number in numbers]})
        with tempfile.TemporaryDirectory() as folder:
            parquet.write_table(pyarrow.Table.from_pandas(self.frame), f"{folder}/table.parquet")
            self.table = parquet.read_table(f"{folder}/table.parquet")  # its threads are here from now on
        self.frame.groupby("name").sum()
        self.scale = torch.randn(500, 500) @ torch.randn(500, 500)  # and OpenMP's
        self.shift = numpy.linalg.inv(numpy.eye(300) + 0.1)  # and OpenBLAS's

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, index: int) -> Any:
        row = self.frame.iloc[index]
        augmented = torch.rand(3) + random.random() + numpy.random.rand()  # of seeded generators
        return {"number": int(row["number"]), "name": row["name"], "x": self.scale[index % 500] * augmented[0]}


def clean_stock() -> Situation:
    return stock(DataFrameDataset(), num_workers=max(1, math.floor(CPUS))), {"samples": 8}


def clean_ours() -> Situation:
    return ours(DataFrameDataset(), num_workers=max(1, math.floor(CPUS))), {"samples": 8}


def clean_spawned() -> Situation:
    return ours(DataFrameDataset(), multiprocessing_context="spawn", num_workers=1), {"samples": 4, "time_limit": 120.0}


def clean_stream() -> Situation:
    return stock(Stream(), num_workers=1), {"samples": 8}


def clean_alone() -> Situation:
    return [numpy.full(8, number) for number in range(100)], {"samples": 8}


# ---------------------------------------------------------------- starting


def threads_run() -> Situation:
    thread = threading.Thread(target=threading.Event().wait, name="feeder", daemon=True)
    thread.start()
    return stock(Plain()), NO_SAMPLES


def threads_run_but_spawned() -> Situation:
    return ours(Plain(), multiprocessing_context="forkserver"), NO_SAMPLES  # after threads_run


def openmp_worked() -> Situation:
    torch.set_num_threads(2)
    torch.randn(800, 800) @ torch.randn(800, 800)
    return ours(Plain(), worker_threads=2), NO_SAMPLES


def openmp_worked_but_one_thread() -> Situation:
    return ours(Plain()), NO_SAMPLES  # after openmp_worked


def grpc_worked() -> Situation:
    import grpc

    channel = grpc.insecure_channel("localhost:1")
    _kept.append(channel)
    try:
        grpc.channel_ready_future(channel).result(0.1)
    except grpc.FutureTimeoutError:
        pass  # nobody is there: its threads are
    return ours(FunctionDataset(nothing, channel=channel)), NO_SAMPLES


def polars_worked() -> Situation:
    import polars

    polars.DataFrame({"number": range(1000)}).group_by("number").agg(polars.len())
    return ours(Plain()), NO_SAMPLES


def opencv_takes_all() -> Situation:
    import cv2

    cv2.setNumThreads(math.ceil(CPUS) * 2)
    return stock(Plain()), NO_SAMPLES


def many_threads() -> Situation:
    return ours(Plain(), worker_threads=math.ceil(CPUS) * 2, multiprocessing_context="forkserver"), NO_SAMPLES


def many_workers() -> Situation:
    return stock(FunctionDataset(compute), num_workers=math.ceil(CPUS) * 3), {"samples": 4}


def many_workers_that_wait() -> Situation:
    return stock(FunctionDataset(wait), num_workers=math.ceil(CPUS) * 3), {"samples": 4}


def cuda_is_on() -> Situation:
    torch.zeros(1, device="cuda")
    return ours(Plain()), NO_SAMPLES


def cuda_held() -> Situation:
    dataset = Plain()
    dataset.weights = torch.zeros(1000, device="cuda")  # type: ignore[attr-defined]
    return ours(dataset), NO_SAMPLES


# ---------------------------------------------------------------- arithmetic


def large_batches() -> Situation:
    """8 MiB a sample, 64 MiB a batch, 9 of them under way."""
    return stock(Plain((2 << 20,)), batch_size=8, num_workers=4), {"samples": 2}


def large_batches_of_ours() -> Situation:
    return ours(Plain((2 << 20,)), batch_size=8, num_workers=4), {"samples": 2}


def many_tensors() -> Situation:
    return stock(FunctionDataset(leaves), batch_size=4), {"samples": 2}


# ---------------------------------------------------------------- datasets


class Compose:
    def __init__(self, *transforms: Any) -> None:
        self.transforms = list(transforms)


class Transform:
    def __init__(self, fn: Any) -> None:
        self.fn = fn


def lambda_inside() -> Situation:
    dataset = FunctionDataset(nothing, transform=Compose(abs, Transform(abs), Transform(lambda x: x)))
    return ours(dataset, multiprocessing_context="spawn"), NO_SAMPLES


def lambda_collates() -> Situation:
    return stock(Plain(), collate_fn=lambda samples: samples, multiprocessing_context="spawn"), NO_SAMPLES


def own_keys() -> Situation:
    """Indices that only the sampler knows."""
    return stock(KeyedByName(), batch_size=1, batch_sampler=[["a", "b"], ["c"]]), {"samples": 3}


class KeyedByName(Dataset[Any]):
    def __getitem__(self, index: str) -> Any:
        return {"a": 1, "b": 2, "c": 3}[index]


def killing_the_trainer() -> Situation:
    return ours(FunctionDataset(misbehave, hangs=False), num_workers=0, multiprocessing_context=None), {"samples": 4}


def lambda_inside_but_forked() -> Situation:
    return ours(FunctionDataset(nothing, transform=Compose(Transform(lambda x: x)))), NO_SAMPLES


def large_to_pickle() -> Situation:
    dataset = FunctionDataset(nothing, images=numpy.zeros(300 << 20, numpy.uint8), more=torch.zeros(1000))
    return stock(dataset, multiprocessing_context="spawn"), NO_SAMPLES


def python_objects() -> Situation:
    dataset = FunctionDataset(nothing, paths=[f"/data/images/{number:09d}.jpg" for number in range(300_000)])
    dataset.names = numpy.array([f"name {number}" for number in range(300_000)], dtype=object)  # type: ignore[attr-defined]
    return stock(dataset), NO_SAMPLES


def python_objects_shared() -> Situation:
    paths = outlive.share([f"/data/images/{number:09d}.jpg" for number in range(300_000)])
    return ours(FunctionDataset(nothing, paths=paths, numbers=numpy.zeros(10 << 20))), NO_SAMPLES


def things_held() -> Situation:
    return ours(_holding()), NO_SAMPLES


def things_held_but_closed() -> Situation:
    dataset = _holding()
    dataset.file.close()
    dataset.sockets["upstream"].close()
    del dataset.reader, dataset.lock
    return ours(dataset), NO_SAMPLES


def lock_and_threads() -> Situation:
    threads_run()
    return ours(FunctionDataset(nothing, guard=Transform(threading.Lock()))), NO_SAMPLES


def lock_at_rest() -> Situation:
    return ours(FunctionDataset(nothing, guard=Transform(threading.Lock()))), NO_SAMPLES


def _holding() -> Any:
    lock = threading.Lock()
    lock.acquire()
    connection = sqlite3.connect(":memory:")
    return FunctionDataset(
        nothing,
        file=open(os.devnull, "rb"),
        sockets={"upstream": socket.socket()},
        reader=functools.partial(nothing, connection),
        lock=lock,
    )


# ---------------------------------------------------------------- samples


def nothing(dataset: Any, index: int) -> Any:
    return index


def compute(dataset: Any, index: int) -> Any:
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    return index


def wait(dataset: Any, index: int) -> Any:
    time.sleep(0.02)  # as a slow disk does; no test waits for it
    return index


def leaves(dataset: Any, index: int) -> Any:
    return {str(name): torch.zeros(1) for name in range(100)}


def misbehave(dataset: Any, index: int) -> Any:
    if index == 21:
        ctypes.string_at(0)
    if index == 42 and dataset.hangs:
        threading.Event().wait()
    if index == 63:
        raise ValueError("image file is truncated")
    return torch.full((8,), float(index))


def count(dataset: Any, index: int) -> Any:
    dataset.calls = getattr(dataset, "calls", 0) + 1
    return index, dataset.calls


def draw_from_own(dataset: Any, index: int) -> Any:
    return dataset.rng.random(4)


def draw_unseeded(dataset: Any, index: int) -> Any:
    return numpy.random.default_rng().random(4)


def tell_process(dataset: Any, index: int) -> Any:
    return index, os.getpid()


def race(dataset: Any, index: int) -> Any:
    dataset.current = index
    for _ in range(2000):
        pass
    return dataset.current


def die_in_company(dataset: Any, index: int) -> Any:
    if threading.active_count() > 2:
        ctypes.string_at(0)
    return index


def linger(dataset: Any, index: int) -> Any:
    time.sleep(1.2 if index == 0 and not hasattr(dataset, "warm") else 0.001)  # a straggler; no test waits for it
    dataset.warm = True
    return index


class Stream(IterableDataset[Any]):
    def __init__(self, kills: bool = False, length: int = 100) -> None:
        self.kills = kills
        self.length = length

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.length):
            if self.kills and number == 3:
                os.kill(os.getpid(), 9)
            yield torch.full((4,), float(number)) * torch.rand(1)


class EmptySampler(SubsetRandomSampler):
    """Not one of torch's own, which the doctor knows."""


class FailsToUnpickle(Plain):
    def __setstate__(self, state: Any) -> None:
        raise KeyError("a field of an older version")


def bad_samples() -> Situation:
    return stock(FunctionDataset(misbehave, hangs=True)), {"samples": 7, "time_limit": 15.0}


def bad_samples_left_out() -> Situation:
    return ours(FunctionDataset(misbehave, hangs=False), faults="skip"), {"samples": 4}


def counting() -> Situation:
    return ours(FunctionDataset(count)), {"samples": 4}


def own_generator() -> Situation:
    return ours(FunctionDataset(draw_from_own, rng=numpy.random.default_rng(0))), {"samples": 4}


def unseeded() -> Situation:
    return ours(FunctionDataset(draw_unseeded)), {"samples": 4}


def by_process() -> Situation:
    return ours(FunctionDataset(tell_process)), {"samples": 4}


def racing() -> Situation:
    return ours(FunctionDataset(race)), {"samples": 8}


def dying_in_company() -> Situation:
    return ours(FunctionDataset(die_in_company)), {"samples": 2}


def unstartable() -> Situation:
    return ours(FailsToUnpickle(), multiprocessing_context="spawn"), {"samples": 2}


def empty() -> Situation:
    return ours([]), {"samples": 4}


def empty_stream() -> Situation:
    return stock(Stream(length=0), num_workers=1), {"samples": 4}


def drawing_none() -> Situation:
    return ours(Plain(), sampler=EmptySampler(())), {"samples": 4}


def straggling() -> Situation:
    return ours(FunctionDataset(linger)), {"samples": 5, "time_limit": 60.0}


def stream_that_kills() -> Situation:
    return stock(Stream(kills=True), num_workers=1), {"samples": 8}


def too_slow_for_all() -> Situation:
    return ours(FunctionDataset(linger)), {"samples": 5, "time_limit": 1.0}


# ---------------------------------------------------------------- odd ones


class RaisesOnAccess:
    """Whatever is asked of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("do not touch")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("do not compare")

    def __hash__(self) -> int:
        raise RuntimeError("do not hash")

    def __bool__(self) -> bool:
        raise RuntimeError("do not ask")

    def __len__(self) -> int:
        raise RuntimeError("do not count")

    def __repr__(self) -> str:
        raise RuntimeError("do not print")

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("do not ask who I am")

    @property
    def nbytes(self) -> int:
        raise RuntimeError("do not weigh")


class OddAttributes(Dataset[Any]):
    @property
    def broken(self) -> Any:
        raise RuntimeError("a property that raises")

    def __init__(self) -> None:
        self.trap = RaisesOnAccess()
        self.cycle: list[Any] = [self]
        self.cycle.append(self.cycle)
        deep: list[Any] = []
        self.deep = deep
        for _ in range(5000):
            deep.append([])
            deep = deep[0]
        self.many = [[number] for number in range(300_000)]
        self.keyed = {Transform(None): RaisesOnAccess(), (1, 2): RaisesOnAccess()}

    def __len__(self) -> int:
        return 10**15

    def __getitem__(self, index: int) -> Any:
        return {"trap": RaisesOnAccess(), "index": index, "cycle": self.cycle}


class LengthRaises(OddAttributes):
    def __len__(self) -> int:
        raise TypeError("nobody knows")

    def __reduce__(self) -> Any:
        raise RuntimeError("do not pickle")


class LengthCrashes(Plain):
    def __len__(self) -> int:
        ctypes.string_at(0)
        raise AssertionError


def odd() -> Situation:
    return OddAttributes(), {"samples": 3, "start_method": "fork"}


def unmeasurable() -> Situation:
    return stock(LengthRaises(), multiprocessing_context="spawn", sampler=[1, 2, 3]), {"samples": 3}


def deadly_length() -> Situation:
    return LengthCrashes(), {"start_method": "fork"}
