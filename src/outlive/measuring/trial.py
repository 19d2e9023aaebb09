"""One trial: a loader with so many workers and such a prefetch factor, run for a while and looked at.

Reads   the loader that it is a twin of; black boxes, through the engine; /proc.
Writes  nothing; answers with a Trial.
Never   changes the user's loader, nor what its workers do: where they are is read from their black boxes, a few hundred
        times a second.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from outlive._forensics.ledger import Ledger
from outlive.incident import IncidentKind, Stage
from outlive.loader.dataloader import DataLoader
from outlive.loader.iterator import SupervisedIterator
from outlive.loader.resuming import Bookmark

PARTS = ("fetch", "collate", "transport", "idle")
_PART_OF = {
    Stage.FETCHING: "fetch",
    Stage.FETCHING_MANY: "fetch",
    Stage.PROBING: "fetch",
    Stage.WAITING: "fetch",
    Stage.COLLATING: "collate",
    Stage.SENDING: "transport",
    Stage.DELIVERING: "transport",
    Stage.IDLE: "idle",
}
_LOOK_S = 0.05
IN_VAIN = "no batch came in time"
NO_BATCHES = "it gives no batches; has its dataset samples?"
_SURE = 3
_SAMPLE_S = 0.003
_MEMORY_S = 1.0  # between two looks at PSS: they stop the process that is looked at


class OutOfTime(Exception):
    """No batch came before the trial was to end."""


@dataclass(frozen=True)
class Trial:
    """What was seen with so many workers."""

    workers: int
    prefetch: int | None  # None: without workers there is none
    batches: int = 0  # in the time that was measured
    batches_per_s: float = 0.0
    first_batch_s: float | None = None  # from nothing; None: none came in time
    shares: dict[str, float] = field(default_factory=dict)  # of workers' time, by PARTS
    waiting: float = 0.0  # of the consumer's time: for batches
    own: float = 0.0  # of the consumer's time: drawing indices and opening batches
    memory_bytes: int | None = None  # PSS of the consumer and all workers; None: nobody can say here
    worker_bytes: int | None = None  # likewise, of one worker on average
    incidents: int = 0
    seconds: float = 0.0  # that were measured
    problem: str = ""  # why there are no figures

    @property
    def is_measured(self) -> bool:
        return self.batches > 0

    @property
    def is_sure(self) -> bool:
        """Whether each worker has made some of its batches while it was measured."""
        return self.batches >= _SURE * max(1, self.workers)


def run(
    loader: Any, workers: int, prefetch: int | None, until: float, step_s: float = 0.0, most: int | None = None
) -> Trial:
    """Go through the loader until that time, as often as it takes, or until so many batches were measured."""
    twin = twin_of(loader, workers, prefetch)
    trial = _Running(twin, until, step_s, most)
    try:
        trial.run()
    except OutOfTime:
        trial.problem = trial.problem or ("" if trial.batches else _late(twin))
    except Exception as error:  # of the user's code: this trial has no figures, others may
        trial.problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    return trial.told(workers, prefetch)


def _late(twin: DataLoader[Any]) -> str:
    """That nothing came in time, and what is known of why."""
    told = [incident for incident in twin.incidents if incident.kind is not IncidentKind.RECYCLED]
    return f"{IN_VAIN}; {told[-1]}" if told else IN_VAIN


def twin_of(loader: Any, workers: int, prefetch: int | None) -> DataLoader[Any]:
    """The same loader with another number of workers; one of torch's becomes one of ours."""
    if not isinstance(loader, DataLoader):
        loader = _adopted(loader)
    twin: DataLoader[Any] = copy.copy(loader)
    changed: dict[str, Any] = {
        "num_workers": workers,
        "prefetch_factor": prefetch if workers else None,
        "persistent_workers": False,
        "_sizing": None,
        "_ledger": Ledger(),
        "_latest": None,
        "_iterator": None,
    }
    vars(twin).update(changed)  # not by setattr: torch forbids some of these once a loader is made
    vars(twin)["_bookmark"] = Bookmark(twin)
    return twin


def _adopted(loader: Any) -> DataLoader[Any]:
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "pin_memory": loader.pin_memory,
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        "faults": "skip",
        "num_workers": 1,
        "multiprocessing_context": loader.multiprocessing_context if loader.num_workers else None,
    }
    if isinstance(loader.dataset, torch.utils.data.IterableDataset):
        options.update(batch_size=loader.batch_size, drop_last=loader.drop_last)
    elif loader.batch_size is None and loader.batch_sampler is not None:
        options["batch_sampler"] = loader.batch_sampler
    else:
        options.update(batch_size=loader.batch_size, sampler=loader.sampler, drop_last=loader.drop_last)
    return DataLoader(loader.dataset, **options)


class Timed(SupervisedIterator):
    """Knows how long its consumer has waited, and when to stop."""

    def __init__(self, loader: Any, until: float) -> None:
        self.waited_s = 0.0
        self._until = until
        super().__init__(loader)

    def _wait(self) -> None:
        begun = time.monotonic()
        self._runner.wait(max(0.0, min(_LOOK_S, self._until - begun)))
        now = time.monotonic()
        self.waited_s += now - begun
        if now >= self._until:
            raise OutOfTime

    def stages(self) -> Iterator[Stage]:
        for slot in range(self._num_workers):
            with contextlib.suppress(Exception):  # it is being closed, on another thread
                hand = self._engine.look(slot)[1]
                if hand is not None:
                    yield hand.stage


class _Running:
    def __init__(self, loader: DataLoader[Any], until: float, step_s: float, most: int | None) -> None:
        self._loader, self._until, self._step_s = loader, until, step_s
        self._most = float("inf") if most is None else most
        self._empty = 0  # passes that had nothing to measure
        self._seen: Counter[str] = Counter()
        self.batches = 0
        self.problem = ""
        self._first_s: float | None = None
        self._seconds = self._waited_s = self._next_s = 0.0
        self._memory: tuple[int, int] | None = None

    def run(self) -> None:
        begun = time.monotonic()
        while True:
            given = self.batches
            with self._opened() as (batches, sampler):
                self._pass(batches, sampler, begun)
            if self.problem == NO_BATCHES or self._is_over():
                return
            if self.batches == given and self._passes_are_short():
                self.problem = self.problem or "it gave no batch, or only the first ones of each worker"
                return

    def _is_over(self) -> bool:
        return time.monotonic() >= self._until or self.batches >= self._most

    def _passes_are_short(self) -> bool:
        self._empty += 1
        return self._empty >= 3  # an epoch as short as that is begun again, and then taken whole

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[Any, _Sampler | None]]:
        if not self._loader.num_workers:
            yield iter(self._loader), None
            return
        batches = Timed(self._loader, self._until)
        try:
            with _Sampler(batches, self._seen) as sampler:
                yield batches, sampler
        finally:
            batches._shutdown_workers()

    def _pass(self, batches: Any, sampler: _Sampler | None, begun: float) -> None:
        warm_up = 0 if self._empty else max(1, self._loader.num_workers)
        count = 0
        since: float | None = None
        waited_before = 0.0
        try:
            while not self._is_over():
                asked = time.monotonic()
                try:
                    batch = next(batches)
                except StopIteration:
                    if self._first_s is None:
                        self.problem = NO_BATCHES
                    break
                now = time.monotonic()
                if self._first_s is None:
                    self._first_s = now - begun
                count += 1
                if since is None and count > warm_up:
                    since, waited_before = asked, getattr(batches, "waited_s", 0.0)
                    if sampler is not None:
                        sampler.begin()
                if since is not None:
                    self.batches += 1
                    self._next_s += now - asked
                if self._step_s:
                    time.sleep(self._step_s)  # in the place of a training step
                del batch
        finally:
            if since is not None:
                self._seconds += time.monotonic() - since
                self._waited_s += getattr(batches, "waited_s", 0.0) - waited_before
            if sampler is not None:
                sampler.end()
                self._note(sampler.memory)
            else:
                self._note(memory_of(batches))

    def _note(self, memory: tuple[int, int] | None) -> None:
        if memory is not None:
            self._memory = max(memory, self._memory or memory)

    def told(self, workers: int, prefetch: int | None) -> Trial:
        looks = sum(self._seen.values())
        seconds = self._seconds
        memory = self._memory
        return Trial(
            workers,
            prefetch if workers else None,
            self.batches,
            self.batches / seconds if seconds else 0.0,
            self._first_s,
            {part: self._seen[part] / looks for part in PARTS} if looks else {},
            (self._waited_s if workers else self._next_s) / seconds if seconds else 0.0,
            max(0.0, self._next_s - self._waited_s) / seconds if seconds and workers else 0.0,
            memory[0] if memory else None,
            memory[1] if memory and workers else None,
            len(self._loader.incidents),
            seconds,
            self.problem,
        )


class _Sampler:
    """Looks at what workers do, on a thread of its own."""

    def __init__(self, batches: Timed, seen: Counter[str]) -> None:
        self._batches, self._seen = batches, seen
        self._measured = False
        self.memory: tuple[int, int] | None = None  # the most that was seen
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, name="outlive-bench", daemon=True)

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def begin(self) -> None:
        self._measured = True

    def end(self) -> None:
        self._measured = False

    def _look(self) -> None:
        due = 0.0
        while not self._stop.wait(_SAMPLE_S):
            if self._measured and time.monotonic() >= due:
                with contextlib.suppress(Exception):  # it is being closed, on another thread
                    found = memory_of(self._batches)
                    if found is not None:
                        self.memory = max(found, self.memory or found)
                due = time.monotonic() + _MEMORY_S
            if self._measured:
                self._seen.update(_PART_OF[stage] for stage in self._batches.stages() if stage in _PART_OF)


def memory_of(batches: Any) -> tuple[int, int] | None:
    """PSS of this process and all that it has started, and of one worker of an iterator on average."""
    own = _pss_bytes(os.getpid())
    if own is None:
        return None
    engine: Any = getattr(batches, "_engine", None)
    slots = range(batches._num_workers) if engine is not None else range(0)
    pids = {engine.look(slot)[0] for slot in slots}
    sizes = {child.pid: _pss_bytes(child.pid) or 0 for child in psutil.Process().children(recursive=True)}
    workers = [size for pid, size in sizes.items() if pid in pids and size]
    return own + sum(sizes.values()), sum(workers) // max(1, len(workers))


def _pss_bytes(pid: int) -> int | None:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:  # no Linux, or it has just ended
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), None)
