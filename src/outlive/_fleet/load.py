"""What to change, from what workers do with their time: one line of advice, or none. Pure.

Reads   figures.
Writes  nothing.
Never   the clock, a process.

The first that holds is told: what is wrong with the CPUs comes before what is wrong with the number of workers, because
more of them would only make it worse.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from outlive.statistics import Load

_LEAST_SECONDS = 2.0  # before that it warms up
_THROTTLED = 0.1
_STARVED = 0.3
_WAITING = 0.5
_ON_DISK = 0.5  # of the waiting
_IDLE = 0.5
_KEPT_UP = 0.1  # a consumer who waits less than that needs no more workers
_COMPUTING = 0.85
_BUSY = 0.8  # how busy workers should be, where there could be fewer


@dataclass(frozen=True)
class Figures:
    workers: int
    loads: Sequence[Load]  # of those workers that were looked at
    cpus: float
    cpu_limit: float | None = None  # of the container; None: there is none
    throttled: float | None = None  # of its periods
    waits: float | None = None  # how much of its time the consumer waits for workers; None: nobody knows


def advice(figures: Figures) -> str:
    """At most one line; empty: nothing stands out, or it is too early to say."""
    loads = [load for load in figures.loads if load.seconds >= _LEAST_SECONDS]
    if len(loads) < figures.workers / 2 or not loads:
        return ""
    mean = Load(
        *(
            statistics.fmean(getattr(load, name) for load in loads)
            for name in ("on_cpu", "starved", "waiting", "idle", "disk")
        )
    )
    if mean.idle < _IDLE:
        more = figures.waits is None or figures.waits >= _KEPT_UP
        return _of_cpus(figures, mean) or (more and (_of_waiting(figures, mean) or _of_computing(figures, mean))) or ""
    fewer = max(1, math.ceil(figures.workers * (1 - mean.idle) / _BUSY))
    if fewer >= figures.workers:
        return ""
    return f"workers are idle {mean.idle:.0%} of their time, for the loader waits for you: num_workers={fewer} would do"


def _of_cpus(figures: Figures, mean: Load) -> str:
    workers, cpus = figures.workers, figures.cpus
    fit = max(1, math.floor(cpus))
    if figures.cpu_limit is not None and (figures.throttled or 0.0) >= _THROTTLED:
        fewer = f"num_workers={fit}" if fit < workers else "fewer threads in each worker (worker_threads=1)"
        return (
            f"the container's CPU limit of {figures.cpu_limit:.3g} throttles workers in {figures.throttled:.0%} of "
            f"periods: {fewer}, or raise the limit"
        )
    if mean.starved < _STARVED:
        return ""
    if workers > cpus:
        return (
            f"{_counted(workers, 'worker')} share {cpus:.3g} CPU{'' if cpus == 1 else 's'} and waited "
            f"{mean.starved:.0%} of their time for one: num_workers={fit} would do as much, or give the job more CPUs"
        )
    return (
        f"workers waited {mean.starved:.0%} of their time for a CPU, although there are {cpus:.3g} for "
        f"{_counted(workers, 'worker')}: other processes, or threads of the trainer, take them"
    )


def _of_waiting(figures: Figures, mean: Load) -> str:
    if mean.waiting < _WAITING:
        return ""
    on_disk = mean.disk >= _ON_DISK * mean.waiting
    what = "disks" if on_disk else "reads, answers or locks"
    instead = "faster storage" if on_disk else "a faster source"
    return (
        f"workers wait {mean.waiting:.0%} of their time for {what}: more workers (now {figures.workers}), or {instead}"
    )


def _of_computing(figures: Figures, mean: Load) -> str:
    workers, cpus = figures.workers, math.floor(figures.cpus)
    if mean.on_cpu < _COMPUTING or cpus <= workers + 1:  # one is the trainer's
        return ""
    return (
        f"workers compute {min(1.0, mean.on_cpu):.0%} of their time, and there are {cpus} CPUs: more workers "
        f"(now {workers}) would use them"
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
