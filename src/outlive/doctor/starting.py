"""What this process already runs that its workers will not have, or have too often: threads, CUDA, pools.

Reads   the threads of this process and what their stacks lead to, loaded modules, environment variables.
Writes  nothing.
Never   imports a library to ask it something.

A fork copies memory and one thread. Whatever the other threads held or had half done stays so for ever in the copy.
outlive forks once, when iteration begins, and every replacement comes from that copy; torch forks each worker. Under
spawn and forkserver none of this matters.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

from outlive import places
from outlive._system import threads as native_threads
from outlive._system import unwinding
from outlive.doctor.findings import Finding, Rank
from outlive.doctor.machine import Machine
from outlive.doctor.plan import Plan

_SYSTEM = (
    "libc.so",
    "libc-",
    "libpthread",
    "ld-linux",
    "libstdc",
    "libgcc",
    "[vdso]",
    "libpython",
    "python",
    "libm.so",
)
_OPENMP = ("libgomp", "libiomp", "libomp")
# By the beginning of a library's file name: pools that a fork breaks, seen to do so, and what to do instead.
_BREAKS = {
    "cygrpc": ("grpc", "make channels in worker_init_fn, or when the first sample is fetched"),
    "polars": ("polars", "read tables before, or in worker_init_fn"),
}
_OURS = "outlive-"  # threads that see to their locks at a fork
_NOTEBOOKS = ("IPython", "ipykernel", "debugpy", "pydevd")
_LOOKS, _LOOK_AGAIN_S = 20, 0.01
_SPAWNING = 'multiprocessing_context="forkserver"'


@dataclass(frozen=True)
class Running:
    """The threads of this process beside the one that asks."""

    python: tuple[tuple[str, str], ...] = ()  # name, and where it is
    native: tuple[tuple[str, int], ...] = ()  # the library that its stack leads to ("" unknown), and how many

    def of(self, *beginnings: str) -> int:
        return sum(count for name, count in self.native if name.startswith(beginnings))


def running() -> Running:
    """As of now; before the doctor starts anything of its own."""
    frames = sys._current_frames()
    python = [thread for thread in threading.enumerate() if thread is not threading.current_thread()]
    told = []
    for thread in python:
        frame = frames.get(thread.ident or -1)
        if thread.name.startswith(_OURS) or _is_of_notebook(frame):
            continue
        where = f"{places.file_name(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""
        told.append((thread.name, where))
    known = {thread.native_id for thread in threading.enumerate()} | {threading.get_native_id()}
    libraries: Counter[str] = Counter()
    for _ in range(_LOOKS):
        maps = native_threads.Maps(os.getpid())
        there = [thread for thread in native_threads.threads_of(os.getpid()) if thread.number not in known]
        libraries = Counter(_library(thread, maps) for thread in there)
        if all(thread.stack_pointer for thread in there):
            break
        time.sleep(_LOOK_AGAIN_S)  # one runs, so that nobody knows where: OpenMP's spin for a while after work
    return Running(tuple(told), tuple(libraries.items()))


def _is_of_notebook(frame: FrameType | None) -> bool:
    """A kernel's own threads are in every notebook; forks there have always lived with them."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _NOTEBOOKS:
            return True
        frame = frame.f_back
    return False


def _library(thread: native_threads.Thread, maps: native_threads.Maps) -> str:
    if not thread.stack_pointer:
        return ""  # it runs just now
    registers = unwinding.at_stack(thread.stack_pointer)
    found = unwinding.places(os.getpid(), thread.instruction_pointer, registers, maps, _SYSTEM)
    return found[0].partition("+")[0] if found else ""


def findings(plan: Plan, machine: Machine, seen: Running) -> Iterator[Finding]:
    if plan.forks:
        yield from _of_cuda(plan)
        yield from _of_python_threads(plan, seen)
        yield from _of_pools(plan, seen)
        yield from _of_openmp(plan, seen)
    yield from _of_oversubscription(plan, machine)


def _of_cuda(plan: Plan) -> Iterator[Finding]:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        yield Finding(
            "cuda-before-fork",
            Rank.MAY_KILL,
            "CUDA is initialised in this process, and workers are forked from it",
            ("a worker that touches it raises «Cannot re-initialize CUDA in forked subprocess»",),
            (_SPAWNING, "leave CUDA to the trainer: samples on the CPU, batch.cuda(non_blocking=True) in the loop"),
        )


def _of_python_threads(plan: Plan, seen: Running) -> Iterator[Finding]:
    if not seen.python:
        return
    count = len(seen.python)
    told = [f"{name!r} at {where}" if where else repr(name) for name, where in seen.python[:5]]
    more = f", and {count - 5} more" if count > 5 else ""
    forks = "outlive forks once, when iteration begins" if plan.is_ours else f"torch forks {plan.workers} times"
    yield Finding(
        "threads-before-fork",
        Rank.MAY_KILL,
        f"{count} thread{'' if count == 1 else 's'} run{'s' if count == 1 else ''} while workers are forked:"
        f" {', '.join(told)}{more}",
        (f"a lock that one of them holds at that moment stays locked in the workers for ever; {forks}",),
        (_SPAWNING, "start threads after iter(loader)"),
    )


def _of_pools(plan: Plan, seen: Running) -> Iterator[Finding]:
    for beginning, (name, instead) in _BREAKS.items():
        count = seen.of(beginning, f"lib{beginning}", f"_{beginning}")
        if count:
            yield _broken_by_fork(name, count, (_SPAWNING, instead))


def _broken_by_fork(name: str, count: int, remedies: tuple[str, ...]) -> Finding:
    return Finding(
        f"{name.partition(' ')[0].lower()}-before-fork",
        Rank.MAY_KILL,
        f"{name} runs {count} thread{'' if count == 1 else 's'} here that forked workers will not have",
        (f"a worker that uses {name.partition(' ')[0]} aborts, or waits for them for ever",),
        remedies,
    )


def _of_openmp(plan: Plan, seen: Running) -> Iterator[Finding]:
    """With one thread, in ours and in torch's, no pool is needed and nothing happens."""
    count = seen.of(*_OPENMP)
    if not count or not plan.is_ours or plan.threads == 1:
        return
    yield Finding(
        "openmp-before-fork",
        Rank.MAY_KILL,
        f"OpenMP has {count} threads here that forked workers will not have, and worker_threads={plan.threads}",
        ("a worker that computes in parallel waits for them for ever; with one thread it has no need of them",),
        ("worker_threads=1", _SPAWNING),
    )


def _of_oversubscription(plan: Plan, machine: Machine) -> Iterator[Finding]:
    if plan.workers < 2:
        return
    threads, whose = plan.threads or _threads_by_themselves(machine), f"worker_threads={plan.threads}"
    remedy = f"worker_threads={max(1, math.floor(machine.cpus / plan.workers))}"
    if not plan.is_ours:
        opencv = sys.modules.get("cv2")
        if opencv is None or not hasattr(opencv, "getNumThreads"):
            return
        threads, whose = int(opencv.getNumThreads()), "OpenCV"
        remedy = "cv2.setNumThreads(0) in worker_init_fn"
    if threads > 1 and plan.workers * threads > 2 * machine.cpus:
        yield Finding(
            "too-many-threads",
            Rank.SLOWS_DOWN,
            f"{plan.workers} workers × {threads} threads ({whose}) share {machine.cpus:.3g}"
            f" CPU{'' if machine.cpus == 1 else 's'}",
            ("they take turns, and wait for each other at the end of every parallel loop",),
            (remedy, "from outlive import DataLoader (one thread in each worker)") if not plan.is_ours else (remedy,),
        )


def _threads_by_themselves(machine: Machine) -> int:
    """How many a library starts that nobody tells."""
    told = os.environ.get("OMP_NUM_THREADS", "")
    return int(told) if told.isdigit() and int(told) else machine.all_cpus
