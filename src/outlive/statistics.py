"""What a loader has done and is doing: an immutable snapshot.

Reads   nothing.
Writes  nothing.
Never   a live object: what is in here does not change.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Load:
    """What a worker did with its time, over the last seconds: shares of it, which add up to 1 or nearly so."""

    on_cpu: float  # all threads together: more than 1 where several of them computed
    starved: float  # it wanted a CPU and had none
    waiting: float  # with a task in hand, for something else: reads, answers, locks
    idle: float  # without a task
    disk: float = 0.0  # of the looks at it: how often it waited for a disk
    seconds: float = 0.0  # how long that was


@dataclass(frozen=True)
class SlotStatistics:
    slot: int
    state: str
    pid: int | None
    incarnation: int
    doing: str
    batch: int
    seconds: float
    queued: int
    cell_bytes: int = 0  # shared memory that its worker's batches travel in
    load: Load | None = None  # what its worker did with the last seconds; None: nobody has looked yet
    descriptors: int | None = None  # that its worker had open, and threads, when last looked at
    threads: int | None = None
    limit_s: float | None = None  # after how many seconds what is in hand is taken for hung; None: never


@dataclass(frozen=True)
class StuckWorker:
    """A worker that SIGKILL has not ended: it waits in the kernel, for a drive that does not answer. Another has taken
    its place."""

    slot: int
    pid: int
    place: str = ""  # what it waits for: «nas:/export»; empty: nobody knows
    born: int | None = None  # in ticks after boot: with its pid this names the process


def in_kernel_words(stuck: Sequence[StuckWorker]) -> str:
    """«1 worker is still stuck in the kernel on nas:/export»; empty for none."""
    if not stuck:
        return ""
    places = " and ".join(dict.fromkeys(worker.place for worker in stuck if worker.place))
    who = "1 worker is" if len(stuck) == 1 else f"{len(stuck)} workers are"
    return f"{who} still stuck in the kernel{f' on {places}' if places else ''}"


@dataclass(frozen=True)
class Statistics:
    """A snapshot of a loader: counts since it was made, and its slots as they are now."""

    epoch: int = 0
    delivered: int = 0
    errored: int = 0
    emptied: int = 0
    restarts: int = 0
    retries: int = 0
    replaced: int = 0
    recycled: int = 0
    quarantined: int = 0
    incidents: int = 0
    cell_bytes: int = 0  # shared memory of all batches, those too that you still hold after their worker is gone
    slots: tuple[SlotStatistics, ...] = ()
    cpus: float = 0.0  # that this process may use: affinity mask, limits of containers
    throttled: float | None = None  # of the limit's periods since the loader began, those in which it made us stop
    advice: str = ""  # one line on what to change, where the figures say so
    workers: int = 0  # that may live now: num_workers, or fewer where memory is scarce, or what "auto" found
    breaker: str = "closed"  # or «open since 12 s: ConnectionRefusedError: …», or «given up after 300 s: …»
    spared: int = 0  # samples that were left out or replaced without a try, because the file `quarantine=` names them
    healed: int = 0  # times that all workers were replaced by such as are no forks of a process with threads
    samples: int = 0  # that were delivered; these six are 0 or empty under OUTLIVE_BOARD=0
    bytes: int = 0  # of batches, from the sizes of some of them
    wait_seconds: float = 0.0  # that you waited for batches
    trainer_seconds: float = 0.0  # in epochs, that you did not wait
    by_verdict: Mapping[str, int] = field(default_factory=dict)  # samples that were left out or replaced
    histograms: Mapping[str, Any] = field(default_factory=dict)  # "fetch", "collate", "send": bounds, counts, sum
    stuck: tuple[StuckWorker, ...] = ()  # workers that SIGKILL has not ended: they wait in the kernel

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)
