"""What happens beside a run at its time: workers that are killed from outside, burdens, sources that fail; and a bar.

Reads   the run's notes, as they are written.
Writes  notes of what it did; processes, signals, marks that the program looks at.
Never   outlives the block: threads and burdens are gone when it is left, or when this process is killed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from outlive.pool import bars
from outlive.testing import surroundings
from outlive.testing.around import FAILING, Surrounding, Timeline
from outlive.testing.injecting import Notes
from outlive.testing.marks import Marks
from outlive.testing.modifiers import Outage
from outlive.testing.survival import KILLS

_LOOK_S = 0.02
_DRAW_S = 0.2


@contextlib.contextmanager
def killing(every_s: float | None, notes: Path, seed: int) -> Iterator[None]:
    """Kill a worker every so many seconds, one that the seed chooses among those that have begun to fetch."""
    if every_s is None:
        yield
        return
    rng = random.Random(seed)
    writer = Notes(str(notes))

    def kill(over: threading.Event) -> None:
        while not over.wait(every_s):
            begun = {(n["loader"], n["worker"]): n["pid"] for n in read(notes) if n["what"] == "went on"}
            alive = [(name, pid) for name, pid in sorted(begun.items()) if _is_alive(pid)]
            if not alive:
                continue
            (loader, worker), pid = rng.choice(alive)
            writer.add("fired", fault=KILLS, key="", moment="fetch", pid=pid, loader=loader, worker=worker)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    with _threads([kill], "kills"):
        yield


def _is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.Error:
        return False


def marks_of(folder: Path, place: int) -> Path:
    """Where the program sees whether the surrounding of this place in the plan is on."""
    return folder / f"around-{place}"


@contextlib.contextmanager
def happening(timeline: Timeline, folder: Path, notes: Path) -> Iterator[list[str]]:
    """Have all of it happen at its time, which counts from the moment in which the first loader begins. Gives a list
    in which stands, at the end, what could not be done.
    """
    problems: list[str] = []
    writer = Notes(str(notes))

    def one(place: int, planned: Surrounding, from_s: float, for_s: float | None) -> Any:
        def happen(over: threading.Event) -> None:
            if not _has_begun(notes, over) or over.wait(from_s):
                return
            try:
                with _made(planned, folder, place):
                    writer.add("began", kind=planned.kind, place=place, fails=planned.fails, error=planned.raises)
                    over.wait(for_s)
                    writer.add("over", place=place)
            except (OSError, ValueError) as error:
                problems.append(f"{planned.kind}: {error}")

        return happen

    timed = [one(place, *each) for place, each in enumerate(timeline) if each[0].kind != "disk"]
    for place, (planned, _, _) in enumerate(timeline):
        if planned.kind in FAILING:
            marks_of(folder, place).touch()
        elif planned.kind == "disk":  # it is there before the program is
            writer.add("began", kind="disk", place=place, fails=False, error="")
    with _threads(timed, "surroundings"):
        yield problems


def _made(planned: Surrounding, folder: Path, place: int) -> contextlib.AbstractContextManager[Any]:
    if planned.kind == "memory":
        return surroundings.memory_pressure(planned.size)
    if planned.kind == "cpus":
        return surroundings.busy_cpus(planned.count)
    return Outage(marks=Marks(path=str(marks_of(folder, place))))


def _has_begun(notes: Path, over: threading.Event) -> bool:
    """Wait until a loader begins; False: the run was over before."""
    tail = Tail(notes)
    while not over.wait(_LOOK_S):
        if any(b'"what":"begun"' in line for line in tail.lines()):
            return True
    return False


class Unretried:
    """What a bar asks of a pool."""

    retries = 0


@dataclass(frozen=True)
class Shown:
    """A bar on standard error, of samples that were received."""

    label: str
    total: int | None = None


def wait(process: subprocess.Popen[bytes], limit_s: float | None, notes: Path, shown: Shown | None) -> int | None:
    """The status of a run; None: it had not ended by then."""
    until = math.inf if limit_s is None else time.monotonic() + limit_s
    bar = bars.Bar(shown.label, shown.total, Unretried(), bars.screen_of(sys.stderr)) if shown is not None else None
    turns = _turns(process, until, Tail(notes), bar)
    for _ in bar.around(turns) if bar is not None else turns:
        pass
    return process.returncode


def _turns(process: subprocess.Popen[bytes], until: float, tail: Tail, bar: bars.Bar | None) -> Iterator[None]:
    """One for each look, until the process has ended or the time is up."""
    while (left := until - time.monotonic()) > 0:
        try:
            process.wait(min(left, _DRAW_S if bar is not None else threading.TIMEOUT_MAX))
        except subprocess.TimeoutExpired:
            pass
        if bar is not None:
            bar.add(sum(map(_samples, tail.lines())), 0)
            bar.tick()
        if process.returncode is not None:
            return
        yield


_KEYS = re.compile(rb'"what":"got".*"keys":\[(.*)\]')


def _samples(line: bytes) -> int:
    """How many are in the batch that this note says was received."""
    found = _KEYS.search(line)
    keys = found[1] if found else b""
    return keys.count(b"[") or keys.count(b",") + bool(keys)  # of a stream: pairs


class Tail:
    """Lines of a file, as they come."""

    def __init__(self, path: Path) -> None:
        self._path, self._at, self._rest = path, 0, b""

    def lines(self) -> list[bytes]:
        with open(self._path, "rb") as file:
            file.seek(self._at)
            new = file.read()
        self._at += len(new)
        *whole, self._rest = (self._rest + new).split(b"\n")
        return whole


@contextlib.contextmanager
def _threads(targets: Sequence[Any], name: str) -> Iterator[None]:
    over = threading.Event()
    threads = [threading.Thread(target=target, args=(over,), name=f"outlive-chaos-{name}") for target in targets]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def read(notes: Path) -> list[dict[str, Any]]:
    """The notes of a run, in order."""
    found = []
    for line in notes.read_bytes().splitlines():
        with contextlib.suppress(ValueError):  # the last line of somebody who was killed while he wrote
            found.append(json.loads(line))
    return found
