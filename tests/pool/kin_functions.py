"""Tasks that start processes of their own, in every way that Python and torch offer.

Imported by workers under spawn: no test in here.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import outlive
from pool.task_functions import note, square, stay

NUMBERS = [0, 1, 4]


def _answer(sender: Any) -> None:
    sender.send([square(number) for number in range(3)])


def in_pool(method: str) -> Any:
    with outlive.Pool(2, method) as pool:
        return list(pool.map(square, range(3)))


def in_executor(method: str) -> Any:
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as pool:
        return list(pool.map(square, range(3)))


def in_multiprocessing_pool(method: str) -> Any:
    with multiprocessing.get_context(method).Pool(2) as pool:
        return pool.map(square, range(3))


def in_process(method: str) -> Any:
    context: Any = multiprocessing.get_context(method)
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sender,))
    process.start()
    try:
        return receiver.recv()
    finally:
        process.join()


class Squares:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return square(index)


def in_loader(method: str) -> Any:
    return [int(x) for x in outlive.DataLoader(Squares(), num_workers=2, multiprocessing_context=method)]  # type: ignore[arg-type]


def in_stock_loader(method: str) -> Any:
    from torch.utils.data import DataLoader

    return [int(x) for x in DataLoader(Squares(), num_workers=2, multiprocessing_context=method)]  # type: ignore[arg-type]


WAYS = {
    "Pool": in_pool,
    "ProcessPoolExecutor": in_executor,
    "multiprocessing.Pool": in_multiprocessing_pool,
    "Process": in_process,
    "DataLoader": in_loader,
    "stock DataLoader": in_stock_loader,
}


def run(way: str, method: str) -> Any:
    return WAYS[way](method)


class Nested:
    """A dataset whose samples are made by processes of its own."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __len__(self) -> int:
        return len(WAYS)

    def __getitem__(self, index: int) -> int:
        return int(list(WAYS.values())[index](self.method) == NUMBERS)


def describe(_: int = 0) -> dict[str, Any]:
    """Who this worker is, as multiprocessing has it."""
    me, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    assert parent is not None
    return {
        "pid": os.getpid(),
        "name": me.name,
        "identity": me._identity,  # type: ignore[attr-defined]
        "daemon": me.daemon,
        "parent": (parent.name, parent.pid, parent.is_alive()),
    }


def describe_together(folder: str, number: int, count: int) -> dict[str, Any]:
    """The same, once as many workers are at it."""
    (Path(folder) / str(number)).touch()
    give_up_at = time.monotonic() + 60
    while len(os.listdir(folder)) < count and time.monotonic() < give_up_at:
        time.sleep(0.005)  # between two looks, with a deadline
    return describe()


def die_together(folder: str, number: int, count: int) -> None:
    """Killed, once as many workers are."""
    dying = Path(folder) / "dying"
    dying.mkdir(exist_ok=True)
    describe_together(str(dying), number, count)
    os._exit(3)


class Described:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return describe()


def leave_a_process(folder: str) -> int:
    """Return, and leave a process that goes on: multiprocessing would wait for it at the end."""
    multiprocessing.Process(target=stay, args=(folder, os.getpid())).start()
    return os.getpid()


def stay_in_all(folder: str) -> None:
    """Leave a process of each kind that goes on, and go on."""
    pool, executor = outlive.Pool(1), ProcessPoolExecutor(1)
    pool.submit(stay, folder, 1)
    executor.submit(stay, folder, 2)
    multiprocessing.Process(target=stay, args=(folder, 3)).start()
    stay(folder, 4)


_kept: list[outlive.Pool] = []


def submit_and_return(folder: str) -> None:
    """Without a wait: the pool is alive when this process ends."""
    pool = outlive.Pool(1, retries=0)
    _kept.append(pool)
    for number in range(6):
        pool.submit(note_slowly, folder, number)


def note_slowly(folder: str, number: int) -> None:
    note(folder, number)
    time.sleep(0.05)  # this is the work
