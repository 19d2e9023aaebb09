"""The jobs of this user on this machine, as whoever watches them sees them: `jobs()`.

Reads   what jobs publish; black boxes of their workers, through /proc of the process that holds them.
Writes  nothing but what `ask` is for: a wish into a worker's black box.
Never   waits for a job, or has it do anything in order to be looked at.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import subprocess
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from outlive._capture import blackbox, stacks
from outlive._capture.blackbox import SLATE_WORDS, BlackBox, Slate
from outlive._metrics import history, layout, metering, runtime
from outlive._system import nameless
from outlive.incident import Stage

_NICE = 10
READ_TIMEOUT_S = 0.5  # with a writer that has no processor in the middle of writing
_LONGEST_S = 10.0  # that py-spy may take
_START_STAGES = (Stage.STARTING, Stage.PREPARING, Stage.FORWARDING)
_OWN_WORK = "the trainer's own work"
_LOAD = ("on_cpu", "starved", "waiting", "idle", "disk", "seconds")

_known: dict[str, Job] = {}


class Jobs(list["Job"]):
    """Jobs, and how many more there are of which nothing can be read."""

    unreadable = 0


def jobs(*, folder: str | os.PathLike[str] | None = None) -> Jobs:
    """Loaders and pools of this user on this machine, the oldest run first, ranks of a run together and in their order:
    those that live, and those that ended not long ago. Jobs that are long gone are swept. `folder`: where to look,
    instead of the user's runtime folder.
    """
    home, found, unreadable = runtime.folder() if folder is None else Path(folder), [], 0
    for path, who in runtime.found(home, {key: job.who for key, job in _known.items()}):
        if who is None:
            unreadable += 1
            continue
        job = _known.get(str(path))
        if job is None:
            job = _known[str(path)] = Job(path, who)
        found.append(job)
    alive = {str(job.path) for job in found}
    for key in [key for key in _known if os.path.dirname(key) == str(home) and key not in alive]:
        _known.pop(key).close()
    begun: dict[str, float] = {}
    for job in found:
        begun[job.run] = min(job.began, begun.get(job.run, job.began))
    told = Jobs(sorted(found, key=lambda job: (begun[job.run], job.run, job.rank or 0, job.began, job.key)))
    told.unreadable = unreadable
    return told


class Job:
    """One loader or pool."""

    def __init__(self, path: Path, who: dict[str, Any]) -> None:
        self.path = path
        self.key = path.name
        self.pid = int(who["pid"])
        self.command = str(who.get("command", ""))
        self.folder = str(who.get("folder", ""))
        self.rank: int | None = who.get("rank")
        self.world_size: int | None = who.get("world_size")
        self.run = str(who.get("run") or f"pid {self.pid}")  # ranks of one have it in common
        self.kind = str(who.get("kind", "loader"))
        self.here = bool(who.get("here"))  # no workers: the trainer makes its batches itself
        self.name = str(who.get("name", ""))
        self.began = float(who.get("began", 0.0))
        self.limits: dict[str, Any] = who.get("limits") or {}
        self.who = who
        self._reader = history.Reader(path)
        self._map: mmap.mmap | None = None
        self._boxes: dict[int, tuple[tuple[int, ...], BlackBox]] = {}  # slot → whose, and the box

    def __repr__(self) -> str:
        return f"<Job {self.key}: {self.kind} {self.name!r} of process {self.pid}>"

    @property
    def alive(self) -> bool:
        """Its process lives and it has not said that it is over."""
        if self._open() is not None and self._word(layout.ENDED):
            return False
        return runtime.is_alive(self.who)

    def close(self) -> None:
        for slot in list(self._boxes):
            self._forget_box(slot)
        if self._map is not None:
            self._map.close()
            self._map = None

    # ------------------------------------------------------------ the board

    def read_words(self) -> array[int] | None:
        """A copy of the board, taken while nobody wrote; None: there is none."""
        board = self._open()
        if board is None:
            return None
        words: array[int] = array("q")
        give_up_at = time.monotonic() + READ_TIMEOUT_S
        while True:
            before = self._word(layout.SEQUENCE)
            words = array("q", board[: len(board) // 8 * 8])
            if before % 2 == 0 and self._word(layout.SEQUENCE) == before:
                break
            if time.monotonic() > give_up_at or not runtime.is_alive(self.who):
                break  # killed or stopped in the middle of writing: what is there is as good as it gets
            time.sleep(0.0001)
        return words if layout.is_board(words) else None

    def _open(self) -> mmap.mmap | None:
        if self._map is None:
            try:
                fd = os.open(self.path / runtime.BOARD, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    self._map = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
                finally:
                    os.close(fd)
            except (OSError, ValueError):
                return None
        return self._map

    def _word(self, place: int) -> int:
        assert self._map is not None
        return int.from_bytes(self._map[8 * place : 8 * place + 8], sys.byteorder, signed=True)

    def snapshot(self) -> dict[str, Any]:
        """How it stands now: plain values only. Slots are as their workers' black boxes say at this moment, where they
        can be opened; else as the trainer saw them last."""
        words = self.read_words()
        if words is None:
            return {}
        picture = layout.read(words)
        head, alive = picture.head, self.alive
        clock = time.monotonic_ns() if alive else head["clock_ns"]
        slate = Slate(memoryview(picture.slate)) if self.here and len(picture.slate) == SLATE_WORDS else None
        waits_since = head["waiting_since_ns"] if slate is None else slate.asked_ns if alive else 0
        waiting = max(0, clock - max(waits_since, head["clock_ns"])) if waits_since else 0
        wait = (head["wait_ns"] + waiting) / 1e9
        in_epochs = head["epochs_ns"] + (max(0, clock - head["epoch_since_ns"]) if head["epoch_since_ns"] else 0)
        by_verdict = _counts(picture.texts["by_verdict"])
        counts = {
            name: head[name]
            for name in (
                *("epoch", "samples", "bytes", "errored", "emptied", "restarts", "retries", "replaced", "recycled"),
                *("quarantined", "incidents", "workers"),
            )
        }
        return {
            "time": time.time() if alive else head["time_ns"] / 1e9,
            "alive": alive,
            "written": head["time_ns"] / 1e9,
            "delivered": picture.delivered,
            **counts,
            "wait_seconds": wait,
            "trainer_seconds": max(0.0, in_epochs / 1e9 - wait),
            "waiting": bool(waits_since),
            "here": self.here,
            "breaker": picture.texts["breaker"] or "closed",
            "advice": picture.texts["advice"],
            "stuck": picture.texts["stuck"],
            "cells": {"bytes": head["cell_bytes"], "count": head["cells"]},
            "memory_limit": head["memory_limit"] or None,
            "histograms": layout.histograms(picture.times),
            "by_verdict": by_verdict,
            "slots": [self._slot(n, row, head["memory_limit"], alive, slate) for n, row in enumerate(picture.rows)],
        }

    def _slot(
        self, number: int, row: layout.Row, limit: int, alive: bool, slate: Slate | None = None
    ) -> dict[str, Any]:
        values = dict(row.values)
        if alive:
            values.update(self._live(number, values) if slate is None else _as_row(slate))
        state = layout.STATES[values["state"]] if 0 <= values["state"] < len(layout.STATES) else "empty"
        if slate is not None and alive:
            state = "here"  # from the first batch on, before anything else is on the board
            if values["stage"] == Stage.IDLE:
                values["batch"] = -1
        here = alive and state in ("starting", "ready", "here") and values["pid"] > 0
        if here and not _lives(values["pid"]):
            here, state = False, "dead"  # which the trainer has not heard yet, in a long step of its own
        stage = Stage(values["stage"]) if 0 <= values["stage"] <= max(Stage) else Stage.AT_WORK
        if here and state == "starting" and stage not in _START_STAGES:
            state = "ready"  # which the trainer has not read yet
        sample = self._sample(values, row) if here else None
        load = dict(zip(_LOAD, (values[name] / 1e6 for name in (*_LOAD[:-1], "load_ns"))))
        seconds = max(0, time.monotonic_ns() - values["since_ns"]) / 1e9 if here and values["since_ns"] else 0.0
        memory = {
            "private": values["private"] or None,
            "shared": values["shared"] if values["private"] else None,
            "limit": limit or None,
            "slope": values["slope"] if values["private"] else None,
        }
        return {
            "slot": number,
            "pid": values["pid"] if here else None,
            "incarnation": values["incarnation"],
            "state": state if alive else "closed",
            "doing": (_OWN_WORK if state == "here" and stage is Stage.IDLE else stage.words) if here else "",
            "stage": stage.name.lower() if here else "",
            "batch": values["batch"] if here else -1,
            "sample": sample,
            "seconds": seconds,
            "limit": values["limit_ms"] / 1000 or None if here else None,
            "queued": values["queued"] if here else 0,
            "restarts": max(0, values["incarnation"] - 1),
            "memory": memory if here else dict.fromkeys(memory),
            "cpu": load["on_cpu"] if here and load["seconds"] else None,
            "descriptors": (values["descriptors"] or None) if here else None,
            "threads": (values["threads"] or None) if here else None,
            "cells": values["cell_bytes"] if here else 0,
            "load": load if here and load["seconds"] else None,
        }

    @staticmethod
    def _sample(values: dict[str, int], row: layout.Row) -> int | None:
        if values["stage"] != Stage.FETCHING:
            return None
        if values["stand_in"] >= 0:
            return values["stand_in"]
        listed = row.listed.get(values["batch"], ())
        return listed[values["position"]] if 0 <= values["position"] < len(listed) else None

    # ------------------------------------------------------------ black boxes

    def _live(self, number: int, values: dict[str, int]) -> dict[str, int]:
        """What the slot's black box says now; nothing where it cannot be opened."""
        box = self._box(number, values)
        if box is None:
            return {}
        return _as_row(box)

    def _box(self, number: int, values: dict[str, int]) -> BlackBox | None:
        whose = (values["holder"], values["box_fd"], values["incarnation"])
        known = self._boxes.get(number)
        if known is not None and known[0] == whose:
            return known[1]
        self._forget_box(number)
        box = _find_box(number, values, writable=False)
        if box is not None:
            self._boxes[number] = (whose, box)
        return box

    def _forget_box(self, number: int) -> None:
        known = self._boxes.pop(number, None)
        if known is not None:
            known[1].release()

    # ------------------------------------------------------------ events, wishes

    def events(self, after: int = 0, limit: int = 1000) -> tuple[list[dict[str, Any]], int]:
        """What has happened after the event of that number, `limit` at most, and the number to go on from."""
        return self._reader.events(after, limit)

    @property
    def unreadable(self) -> int:
        """How many events were passed over: damaged, or not as this version writes them."""
        return self._reader.unreadable

    def has_news(self) -> bool:
        """Whether there are events beyond those that were read."""
        return self._reader.has_news()

    def ask(self, what: str, slot: int) -> str:
        """ "stacks": what its worker runs just now; "recycle": a fresh worker after its batch. Answers in words."""
        if what not in ("stacks", "recycle"):
            raise ValueError(f'a slot can be asked for "stacks" or to "recycle", got {what!r}')
        words = self.read_words()
        rows = layout.read(words).rows if words is not None else ()
        if not 0 <= slot < len(rows):
            raise ValueError(f"there is no slot {slot}, this {self.kind} has {len(rows)}")
        values = dict(rows[slot].values)
        if self.here:
            return self._of_trainer(what)
        if self.alive:
            values.update(self._live(slot, values))
        if not self.alive or not _lives(values["pid"]):
            return f"slot {slot} has no worker now"
        return self._stacks(slot, values) if what == "stacks" else self._recycle(slot, values)

    def _of_trainer(self, what: str) -> str:
        if not self.alive:
            return "the job is over"
        if what == "recycle":
            return "there is no worker to recycle: with num_workers=0 the trainer makes its batches itself"
        told = _py_spy(self.pid)
        return told or f"only py-spy can see what the trainer (pid {self.pid}) runs: it is not installed, or may not"

    def _stacks(self, slot: int, values: dict[str, int]) -> str:
        told = _py_spy(values["pid"])
        if told:
            return told
        if values["holder"] > 0 and stacks.is_listened_for(values["pid"]):
            with contextlib.suppress(OSError):
                fd = os.open(f"/proc/{values['holder']}/fd/{values['stack_fd']}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    told = stacks.take(values["pid"], fd)
                finally:
                    os.close(fd)
        return told or f"worker {slot} (pid {values['pid']}) does not answer; py-spy would see it from outside"

    def _recycle(self, slot: int, values: dict[str, int]) -> str:
        box = _find_box(slot, values, writable=True)
        if box is None:
            return f"worker {slot} cannot be asked: its black box cannot be opened from here"
        box.ask_to_leave()
        box.release()
        return f"worker {slot} (pid {values['pid']}) leaves after its next batch, and a fresh one takes its place"


def stand_back() -> None:
    """Where processors are scarce, this process takes what the jobs that it looks at leave."""
    with contextlib.suppress(OSError, AttributeError):
        os.nice(_NICE)


def _counts(text: str) -> dict[str, int]:
    """Of JSON; a text that was cut short, or is no such thing, has none."""
    try:
        told = runtime.parse(text.encode() or b"{}")
    except ValueError:
        return {}
    return {name: count for name, count in told.items() if type(count) is int} if isinstance(told, dict) else {}


def _as_row(box: BlackBox) -> dict[str, int]:
    """What a black box has of a slot's row."""
    row, _ = metering.row_of(box)
    first = layout.ROW.index("stage")
    told = dict(zip(layout.ROW[first:-1], row[first:-1]))
    if box.pid > 0:
        told["pid"] = box.pid
    return told


def _lives(pid: int) -> bool:
    return pid > 0 and (os.path.exists(f"/proc/{pid}") or not os.path.exists("/proc/self"))


def _find_box(slot: int, values: dict[str, int], *, writable: bool) -> BlackBox | None:
    """A slot's black box: the descriptor that the board names, or, where the trainer has not heard of it yet, the one
    of all that the zygote has which says that it is this slot's."""
    holder, named = values["holder"], values["box_fd"]
    if holder <= 0:
        return None
    numbers = [named]
    if named < 0:
        with contextlib.suppress(OSError):
            numbers = [int(name) for name in os.listdir(f"/proc/{holder}/fd")]
    for number in numbers:
        box = _open_box(holder, number, writable=writable)
        if box is not None:
            if box.assigned == (slot, values["incarnation"]):
                return box
            box.release()
    return None


def _open_box(holder: int, number: int, *, writable: bool) -> BlackBox | None:
    path = f"/proc/{holder}/fd/{number}"
    try:
        if "outlive-box" not in os.readlink(path):  # the descriptor is another's by now
            return None
        fd = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(fd).st_size < blackbox.SIZE:
            return None  # to look past its end would be our death
        return BlackBox(nameless.map_descriptor(fd, blackbox.SIZE, writable=writable))
    except OSError:
        return None
    finally:
        os.close(fd)


def _py_spy(pid: int) -> str:
    search = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])
    tool = shutil.which("py-spy", path=search)
    if tool is None:
        return ""
    try:
        done = subprocess.run(
            [tool, "dump", "--pid", str(pid)],
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
