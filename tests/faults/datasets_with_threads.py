"""Datasets that wait for what a thread of the trainer has: under fork their workers would wait for ever.

Reads   a lock of this module, which the trainer may hold while it forks.
Writes  nothing.
Never   hangs in a process that was not forked while the lock was held.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import queue
import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

LOCK = threading.Lock()
HELD_BY_IMPORT = threading.Lock()
DIE_ONCE = "OUTLIVE_TEST_DIE_ONCE"  # names a file that says whether it has happened
if multiprocessing.current_process().name == "outlive-zygote":  # a spawned one: a forked one imports nothing
    HELD_BY_IMPORT.acquire()
    if DIE_ONCE in os.environ and not os.path.exists(os.environ[DIE_ONCE]):
        with open(os.environ[DIE_ONCE], "x"):
            os.kill(os.getpid(), signal.SIGKILL)
SIZE = 24


@contextmanager
def held_by_a_thread() -> Iterator[None]:
    """A thread of this process holds the lock for as long as this lasts."""
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        with LOCK:
            held.set()
            enough.wait()

    thread = threading.Thread(target=hold, name="log-writer")
    thread.start()
    held.wait()
    try:
        yield
    finally:
        enough.set()
        thread.join()


class Augmented(Dataset[Any]):
    """Random samples of three generators; those from `first` on take the lock."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self.first:
            with LOCK:
                pass
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64)


class AugmentedStream(IterableDataset[Any]):
    """The same as a stream."""

    def __init__(self, first: int) -> None:
        self.samples = Augmented(first)

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = get_worker_info()
        assert worker is not None
        return (self.samples[index] for index in range(worker.id, SIZE, worker.num_workers))


class HeldByImport(Augmented):
    """Takes a lock that is held where its module was imported to fork workers."""

    def __getitem__(self, index: int) -> torch.Tensor:
        with HELD_BY_IMPORT:
            return super().__getitem__(index)


class Unloadable(Augmented):
    """Its pickle cannot be loaded anywhere."""

    def __reduce__(self) -> Any:
        return refuse, ()


def refuse() -> None:
    raise ImportError("no module named 'of_the_trainer_only'")


class Asking(Dataset[int]):
    """Each sample asks a thread that `make` starts, in the trainer."""

    def __init__(self, make: Callable[[], tuple[Any, Callable[[Any, int], int]]]) -> None:
        self.source, self.ask = make()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.ask(self.source, index)


def executor() -> tuple[Any, Callable[[Any, int], int]]:
    pool = ThreadPoolExecutor(1)
    pool.submit(abs, 1).result()
    return pool, lambda pool, index: int(pool.submit(abs, index).result())


class Prefetching:
    """A thread that puts samples into a queue."""

    def __init__(self) -> None:
        self.items: queue.Queue[int] = queue.Queue(maxsize=1)
        self.end = threading.Event()
        self.thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)
        self.thread.start()

    def _fill(self) -> None:
        self.items.put(1)
        self.end.wait()


def prefetching() -> tuple[Any, Callable[[Any, int], int]]:
    source = Prefetching()
    source.items.get()
    return source, lambda source, index: int(source.items.get())


async def _answer(index: int) -> int:
    return index


def event_loop() -> tuple[Any, Callable[[Any, int], int]]:
    from fsspec import asyn

    loop: asyncio.AbstractEventLoop = asyn.get_loop()
    asyn.sync(loop, _answer, 1)
    return loop, lambda loop, index: int(asyn.sync(loop, _answer, index))


class WaitingRightly(Dataset[int]):
    """Waits long for a pool of its own, made in the worker; the trainer's stands idle beside it."""

    def __init__(self) -> None:
        self.left_behind = ThreadPoolExecutor(1)
        self.left_behind.submit(abs, 1).result()
        self.own: ThreadPoolExecutor | None = None
        self.over = torch.multiprocessing.get_context("fork").Event()

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.own = self.own or ThreadPoolExecutor(1)
        return int(self.own.submit(self._take_long, index).result())

    def _take_long(self, index: int) -> int:
        self.over.wait()
        return index


def take_lock(number: int) -> int:
    with LOCK:
        return 10 * number
