"""A job's side of the board and the event file.

Reads   what its meter hands it.
Writes  a folder in the runtime folder: who it is, the board, events.
Never   disturbs the job: what cannot be written is said once, in the log, and then left; no thread, no descriptor that
        stays open.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import mmap
import os
import sys
import time
import weakref
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outlive._metrics import history, layout, runtime
from outlive._system import nameless
from outlive._system.safe_files import create

log = logging.getLogger("outlive")

_numbers = itertools.count()
failure_logged = False  # that publishing failed: once is enough for a process
_RANKS = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
_RUNS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "OMPI_COMM_WORLD_JOBID")
_MOST_WAITING = 1000  # events of a job that has not been published yet


def new(kind: str, name: str, slots: int, limits: dict[str, Any], *, here: bool = False) -> Publisher | None:
    """None where nothing is to be published. `here`: there are no workers, the trainer does it all itself."""
    return Publisher(kind, name, slots, limits, here) if runtime.is_on() else None


class Publisher:
    """One loader's or pool's. The folder is made when there is something to see."""

    def __init__(self, kind: str, name: str, slots: int, limits: dict[str, Any], here: bool = False) -> None:
        self.words: Any = memoryview(array("q", bytes(layout.size_bytes(slots))))  # the board's, once there is one
        self.slots = min(slots, layout.MOST_SLOTS)
        self.here = here
        self.folder: Path | None = None
        self.holds_until = 0.0  # so long figures alone are no reason to make it; as time.monotonic() tells it
        self._who = {"kind": kind, "name": name, "slots": slots, "limits": limits, "began": time.time(), "here": here}
        self._waiting: list[dict[str, Any]] = [
            {"time": time.time(), "kind": "job-began", "pid": os.getpid(), "slots": slots}
        ]
        self._history: history.Writer | None = None
        self._owner = os.getpid()
        self.is_over = False  # it ended, or cannot be written
        self.tick_at = 0.0
        self._ended: Callable[[], object] = _nothing
        layout.begin(self.words, self.slots)
        self.words[layout.LEFT] = 1

    # ------------------------------------------------------------ making

    def make(self) -> None:
        """Once: the folder and what is in it."""
        if self.folder is not None or self.is_over or os.getpid() != self._owner:
            return
        try:
            self._make()
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _make(self) -> None:
        key = f"{os.getpid()}-{next(_numbers)}-{time.time_ns() // 1000000 & 0xFFFFFFF:x}"
        folder = runtime.make(key)
        try:
            size = len(self.words) * 8
            fd = create(folder / runtime.BOARD)
            try:
                # All of it now: a store into a page for which there is no room on the disk is a SIGBUS.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(fd, 0, size)
                else:
                    os.write(fd, bytes(size))
                mapped = nameless.map_descriptor(fd, size) if sys.platform == "linux" else mmap.mmap(fd, size)
            finally:
                os.close(fd)
            words = memoryview(mapped).cast("B").cast("q")
            words[: len(layout.HEAD)] = self.words[: len(layout.HEAD)]  # the rest follows with the first look
            _write(folder / runtime.WHO, json.dumps({**self._who, **_identity(), "key": key}).encode())
        except BaseException:
            runtime.remove(folder)
            raise
        self.folder, self.words = folder, words
        self._history = history.Writer(folder)
        self._ended = weakref.finalize(self, _end, self._owner, words, self._history)
        self._write_waiting()

    def _give_up(self, error: Exception) -> None:
        global failure_logged
        self.is_over = True
        self._waiting.clear()
        if not failure_logged:
            failure_logged = True
            log.warning(
                "cannot publish what this job does, so `outlive top` will not show it: %s "
                "(OUTLIVE_RUNTIME names another folder, OUTLIVE_BOARD=0 publishes nothing)",
                error,
            )

    # ------------------------------------------------------------ events

    def tell(self, events: Sequence[dict[str, Any]], *, now: bool = True) -> None:
        """`now`: make the folder for them, if it is not there yet."""
        if self.is_over or os.getpid() != self._owner or not events:
            return
        at = time.time()
        self._waiting += [{"time": at, **event} for event in events]
        if self._history is not None:
            self._write_waiting()
        elif now:
            self.make()
        elif len(self._waiting) > _MOST_WAITING:
            del self._waiting[1]

    def _write_waiting(self) -> None:
        assert self._history is not None
        events, self._waiting = self._waiting, []
        try:
            self._history.write(events)
        except OSError as error:
            # The board goes on: it has its room already.
            self._history = None
            over, self.is_over = self.is_over, False
            self._give_up(error)
            self.is_over = over

    @property
    def has_history(self) -> bool:
        return self._history is not None

    # ------------------------------------------------------------ the end

    def end(self) -> None:
        """The job is over; what it published can be looked at for a while."""
        self._ended()
        self.is_over = True


def _write(path: Path, body: bytes) -> None:
    fd = create(path)
    try:
        os.write(fd, body)
    finally:
        os.close(fd)


def _nothing() -> None:
    """There is nothing to end yet."""


def _end(owner: int, words: Any, writer: history.Writer) -> None:
    """At the end of the job, or of Python; not of a copy of the process."""
    if os.getpid() != owner:
        return
    with contextlib.suppress(OSError, ValueError):
        words[layout.ENDED] = time.time_ns()
        writer.write([{"kind": "job-ended"}])


def _identity() -> dict[str, Any]:
    """Who this process is."""
    pid = os.getpid()
    try:
        folder = os.getcwd()
    except OSError:  # it was removed
        folder = ""
    rank, world_size = _rank()
    return {
        "pid": pid,
        "start": runtime.start_of(pid),
        "command": " ".join(getattr(sys, "argv", None) or [sys.executable])[:500],
        "folder": folder,
        "rank": rank,
        "world_size": world_size,
        "local_rank": _number("LOCAL_RANK"),
        "run": "" if rank is None else f"{_launched_by()} {world_size}",
    }


def _rank() -> tuple[int | None, int | None]:
    """Of this process among others of its job, as torch.distributed or the launcher has it."""
    group = sys.modules.get("torch.distributed")
    with contextlib.suppress(Exception):  # a torch without it, or one that is being imported
        if group is not None and group.is_initialized():
            return group.get_rank(), group.get_world_size()
    for rank, world_size in _RANKS:
        found, among = _number(rank), _number(world_size)
        if found is not None and (rank == "RANK" or (among or 0) > 1):  # slurm numbers single processes, too
            return found, among
    return None, None


def _launched_by() -> str:
    """The same for all ranks of a run on this machine."""
    named = next((os.environ[name] for name in _RUNS if os.environ.get(name)), "")
    return f"{named[:100]} {os.getppid()}"


def _number(name: str) -> int | None:
    try:
        return int(os.environ[name])
    except (KeyError, ValueError):
        return None
