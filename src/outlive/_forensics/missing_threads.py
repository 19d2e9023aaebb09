"""Finds what a forked worker waits for, where only threads that no fork has could end the wait.

Reads   its threads, its Python stack, native code on its stack; this process's own objects, for a short time.
Writes  nothing.
Never   user code; never takes a wait for one of these where another thread of the worker could end it.

A fork has the thread that called it and no other. What the others were to do (run a task of a pool, let go of a lock,
put an item into a queue) is never done there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent import futures
from typing import Any

from outlive._forensics import frames, locks
from outlive._forensics.kin import Kin
from outlive.evidence import ThreadSeen

# Libraries with threads of their own: what a file's name begins with, and what users call it.
POOLS = {
    "libgomp": "OpenMP",
    "libiomp": "OpenMP",
    "libomp": "OpenMP",
    "libopenblas": "OpenBLAS",
    "libscipy_openblas": "OpenBLAS",
    "libmkl": "MKL",
    "libtbb": "TBB",
    "_polars_runtime": "polars",
    "polars": "polars",
    "tokenizers": "tokenizers",
    "libarrow": "Arrow",
    "cygrpc": "gRPC",
}
# Functions of Python code that wait for another thread: their file and name → for whose.
_WAITS = {
    **{("_base.py", name): "executor" for name in ("result", "exception", "result_iterator", "wait", "as_completed")},
    **{("queue.py", name): "thread" for name in ("get", "put", "join")},
    **{("threading.py", name): "thread" for name in ("join", "_wait_for_tstate_lock", "wait", "wait_for")},
    ("asyn.py", "sync"): "fsspec",
}
_FSSPEC = "fsspecIO"
# Threads that gRPC starts in every fork: they end nobody's wait but its own.
_HARMLESS = ("event_engine", "lifeguard", "grpc_", "timer_manager")


def library_of(place: str) -> str:
    """«OpenMP (libgomp.so.1)» for a place in a library that has threads of its own; "" for any other."""
    name = next((name for start, name in POOLS.items() if place.startswith(start)), "")
    return f"{name} ({place.partition('+')[0]})" if name else ""


def awaited(threads: Sequence[ThreadSeen], lock: tuple[str, ...], places: Sequence[str], dump: str, kin: Kin) -> str:
    """What the main thread waits for, in words; "" where that is not known to be out of reach. `lock`: held by a thread
    that is not there."""
    main = threads[0]
    alone = all(thread.name.startswith(_HARMLESS) and not thread.busy for thread in threads[1:])
    if lock and (alone or "(a threading." not in lock[0]):  # any thread may let go of a lock of Python's
        return f"{lock[0]}, which was held when the worker was forked"
    if not alone or not kin.has_left_any:
        return ""
    pool = library_of(places[0]) if places and main.for_ever else ""
    return f"threads of {pool}" if pool else _in_python(main, dump, kin)


def _in_python(main: ThreadSeen, dump: str, kin: Kin) -> str:
    kind = ""
    for frame in frames.of_stack(dump):
        kind = _WAITS.get((frame.file, frame.function), kind)
        if frame.is_users or frame.is_own:
            break
    if kind == "fsspec":  # which looks about once a second, without end
        return f"fsspec's thread {_FSSPEC}" if _FSSPEC in kin.left_behind else ""
    if not kind or not main.for_ever:
        return ""
    return _holder(kin, executors_only=kind == "executor")


def _holder(kin: Kin, *, executors_only: bool) -> str:
    """What holds a thread that was left behind: a pool of the job's or of the user's modules; or the job has the thread
    itself. Those of other modules are no reason for a queue to be empty."""
    for path, found in locks.walk(kin.job(), modules=executors_only, libraries=False):
        kinds = type(found).__mro__
        if futures.Executor in kinds:
            held = found.__dict__
            its = [*(held.get("_threads") or ()), held.get("_executor_manager_thread")]  # of threads, or of processes
            if any(_name_of(thread) in kin.left_behind for thread in its):
                return f"a thread of {locks.tidy(path)} (a {type(found).__name__})"
        elif threading.Thread in kinds and not executors_only and _name_of(found) in kin.left_behind:
            return f"{locks.tidy(path)} (the thread {_name_of(found)})"
    return ""


def _name_of(thread: Any) -> str:
    return str(vars(thread).get("_name", "")) if threading.Thread in type(thread).__mro__ else ""
