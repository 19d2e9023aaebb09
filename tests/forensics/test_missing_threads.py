"""What a forked worker waits for that only threads left behind could give: told where it is so, and never otherwise.

Reads   threads, stacks and objects as they are here.
Writes  nothing.
Never   a process: what was seen of one goes in, words come out.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from outlive._forensics.kin import Kin
from outlive._forensics.missing_threads import awaited
from outlive.evidence import ThreadSeen

WAITING = ThreadSeen(1, "outlive-w0", "S", "futex", for_ever=True)
POLLING = ThreadSeen(1, "outlive-w0", "S", "futex")
GRPC = ThreadSeen(2, "event_engine", "S", "futex")
NATIVE = Kin(lambda: None, left_native=("3 × python",))


def dump(*lines: str) -> str:
    frames = [f'  File "{path}", line 7 in {function}' for path, function in (line.split() for line in lines)]
    return "\n".join(["Current thread 0x00007f (most recent call first):", *frames])


held_here: Any
USER = "/home/me/dataset.py __getitem__"
RESULT = dump("/usr/lib/python3.11/threading.py wait", "/usr/lib/python3.11/concurrent/futures/_base.py result", USER)
GET = dump("/usr/lib/python3.11/threading.py wait", "/usr/lib/python3.11/queue.py get", USER)
SYNC = dump("/usr/lib/python3.11/threading.py wait", "/x/site-packages/fsspec/asyn.py sync", USER)
OWN = dump("/home/me/dataset.py result", USER)


@pytest.mark.parametrize(
    ("threads", "places", "kin", "words"),
    [
        ((WAITING,), ("libgomp.so.1+0x1e073", "libtorch_cpu.so+0x1"), NATIVE, "threads of OpenMP (libgomp.so.1)"),
        ((WAITING,), ("_polars_runtime.abi3.so+0x7",), NATIVE, "threads of polars (_polars_runtime.abi3.so)"),
        ((WAITING, GRPC), ("libgomp-a34b.so.1+0x1",), NATIVE, "threads of OpenMP (libgomp-a34b.so.1)"),
        # It may be woken: by threads of its own pool, of any name, or by itself.
        ((WAITING, ThreadSeen(2, "outlive-w0", "S", "futex")), ("libgomp.so.1+0x1e073",), NATIVE, ""),
        ((WAITING, ThreadSeen(2, "tokio-runtime-w", "S", "epoll_wait")), ("_polars_runtime.abi3.so+0x7",), NATIVE, ""),
        ((WAITING, ThreadSeen(2, "event_engine", "R", busy=True)), ("libgomp.so.1+0x1e073",), NATIVE, ""),
        ((POLLING,), ("libgomp.so.1+0x1e073",), NATIVE, ""),
        # Something else waits, which OpenMP called; or the library has no threads; or no thread was left behind.
        ((WAITING,), ("libdecoder.so+0x1", "libgomp.so.1+0x1e073"), NATIVE, ""),
        ((WAITING,), ("libdecoder.so+0x1",), NATIVE, ""),
        ((WAITING,), ("libgomp.so.1+0x1e073",), Kin(lambda: None), ""),
    ],
)
def test_threads_of_a_library_are_named_where_nothing_else_can_end_the_wait(
    threads: tuple[ThreadSeen, ...], places: tuple[str, ...], kin: Kin, words: str
) -> None:
    """A worker that waits for threads of its own is never taken for one of these."""
    assert awaited(threads, (), places, dump(USER), kin) == words


@pytest.mark.parametrize(
    ("threads", "lock", "words"),
    [
        ((WAITING,), "dataset.lock (a threading.Lock)", "dataset.lock (a threading.Lock), which was held"),
        ((WAITING, GRPC), "dataset.lock (a threading.Lock)", "dataset.lock (a threading.Lock), which was held"),
        ((WAITING, ThreadSeen(2, "other", "S")), "dataset.lock (a threading.Lock)", ""),
        ((WAITING, ThreadSeen(2, "other", "S")), "a native mutex that thread 7 holds", "a native mutex that thread 7"),
    ],
)
def test_a_lock_that_another_thread_of_the_worker_may_let_go_of_is_not_out_of_reach(
    threads: tuple[ThreadSeen, ...], lock: str, words: str
) -> None:
    """Any thread may release a lock of Python's, the holder alone a native mutex."""
    found = awaited(threads, (lock,), (), dump(USER), NATIVE)

    assert found.startswith(words)
    assert bool(found) == bool(words)


@pytest.fixture
def dataset() -> Iterator[Any]:
    """With a pool and a thread, both alive, as they were when the fork was made."""
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="prefetch")
    thread.start()
    with ThreadPoolExecutor(1, thread_name_prefix="decode") as pool:
        pool.submit(abs, 1).result()
        yield SimpleNamespace(pool=pool, thread=thread)
    end.set()
    thread.join()


@pytest.mark.parametrize(
    ("main", "stack", "left", "words"),
    [
        (WAITING, RESULT, ("decode_0",), "a thread of dataset.pool (a ThreadPoolExecutor)"),
        (WAITING, GET, ("prefetch",), "dataset.thread (the thread prefetch)"),
        (POLLING, SYNC, ("fsspecIO",), "fsspec's thread fsspecIO"),
        (WAITING, RESULT, ("prefetch",), ""),  # a future needs a pool
        (WAITING, RESULT, ("MainThread",), ""),  # the pool's threads were made in the worker, or have ended
        (POLLING, GET, ("prefetch",), ""),  # it gives up by itself
        (POLLING, SYNC, ("prefetch",), ""),
        (WAITING, OWN, ("decode_0", "prefetch"), ""),  # a function of the user's that has such a name
    ],
)
def test_what_holds_the_thread_that_was_left_behind_is_named(
    dataset: Any, main: ThreadSeen, stack: str, left: tuple[str, ...], words: str
) -> None:
    """Python's own code for such waits is on the stack, and the dataset has a thread that no fork has."""
    job = SimpleNamespace(settings=SimpleNamespace(dataset=dataset))

    assert awaited((main,), (), (), stack, Kin(lambda: job, left_behind=left)) == words


def test_threads_of_other_modules_are_no_reason_for_a_queue_to_be_empty(dataset: Any) -> None:
    """Every trainer has some: they have nothing to do with what a sample waits for."""
    global held_here
    held_here = dataset.thread
    try:
        assert awaited((WAITING,), (), (), GET, Kin(lambda: None, left_behind=("prefetch",))) == ""
    finally:
        del held_here
