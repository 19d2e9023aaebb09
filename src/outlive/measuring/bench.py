"""`outlive.bench`: how fast a user's own loader is, by worker count and prefetch factor, within a given time.

Reads   the loader; its samples.
Writes  a progress bar, a plot where one is asked for.
Never   takes much longer than it was given: a trial ends on time, whether or not a batch has come.

    1, 2, 4, … workers and the loader's own, as configured  ─►  more while they are of use
                                                            ─►  the best of them with other prefetch factors
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from outlive._forensics import heralds
from outlive._system import cpus
from outlive.loader.dataloader import DataLoader
from outlive.measuring import plot as plotting
from outlive.measuring import trial as trials
from outlive.measuring.report import BenchReport, recommended
from outlive.measuring.trial import Trial
from outlive.pool import bars
from outlive.settings import check_number

_USUAL_PREFETCH = 2  # torch's own
_PREFETCHES = (1, 4, 8)
_MOST_WORKERS = 64
_MOST_MORE = 4
_OF_USE = 1.2  # times the speed of fewer workers: then still more are tried


class Unretried:
    """What a bar asks of a pool."""

    retries = 0


def bench(
    loader: Any,
    *,
    workers: Sequence[int] | None = None,
    prefetch: Sequence[int] | None = None,
    seconds: float = 60.0,
    batches: int | None = None,
    step: float = 0.0,
    batch_size: int | None = None,
    plot: str | os.PathLike[str] | None = None,
    progress: bool | None = None,
    name: str = "",
) -> BenchReport:
    """Try a loader with several numbers of workers and prefetch factors.

    loader      a DataLoader, ours or torch's (it is then tried as ours); or a dataset, with `batch_size`
    workers     the numbers to try; None: 1, 2, 4, … up to the CPUs that there are, the loader's own, and more
                while they are of use. 0 is tried when it is named: what kills a worker would kill this process
    prefetch    the factors to try with the best of these numbers; None: 1, 4 and 8 beside the loader's own
    seconds     for all trials together, about
    batches     a trial ends after so many, if that is sooner
    step        seconds that a training step takes: the consumer then pauses so long after each batch
    batch_size  for a dataset
    plot        a file for a plot, .svg or .png; needs matplotlib
    progress    a bar on standard error; None: where that is a terminal
    """
    check_number("seconds", seconds, least=0.1)
    check_number("step", step, least=0)
    if batches is not None:
        check_number("batches", batches, least=1, whole=True)
    if plot is not None:
        plotting.check(plot)
    if not isinstance(loader, torch.utils.data.DataLoader):
        if batch_size is None:
            raise TypeError(f"bench measures a DataLoader; for a dataset give batch_size, too; got {loader!r:.80}")
        loader = DataLoader(loader, batch_size, num_workers=1, faults="skip")
    usable = cpus.usable_cpus()
    own = int(loader.num_workers) if getattr(loader, "_sizing", None) is None else 0
    own_prefetch = (loader.prefetch_factor or _USUAL_PREFETCH) if own else _USUAL_PREFETCH
    numbers = _numbers("workers", workers, 0) or _usual(usable, own)
    factors = _numbers("prefetch", prefetch, 1) or [f for f in _PREFETCHES if f != own_prefetch]
    first_factor = own_prefetch if prefetch is None else factors.pop(0)
    label = name or type(loader).__name__
    begun = time.monotonic()
    found: list[Trial] = []

    def all_trials() -> Iterator[Trial]:
        more = _MOST_MORE if workers is None else 0
        total = len(numbers) + more + len(factors)
        for number in numbers:
            until = _until(begun, seconds, len(found), total)
            yield trials.run(loader, number, first_factor, until, step, batches)
        while more and (number := next_number(found)):  # workers that wait for a disk need no CPU
            more -= 1
            until = _until(begun, seconds, len(found), total)
            yield trials.run(loader, number, first_factor, until, step, batches)
        total -= more
        best = recommended(found, step)
        if best is not None and best.workers:
            for factor in factors:
                until = _until(begun, seconds, len(found), total)
                yield trials.run(loader, best.workers, factor, until, step, batches)

    shown = progress if progress is not None else bool(sys.stderr is not None and sys.stderr.isatty())
    bar = (
        bars.Bar("bench", len(numbers) + len(factors), Unretried(), bars.screen_of(sys.stderr))  # a tick per trial
        if shown
        else None
    )
    with heralds.hushed():  # the same bad sample in every epoch of every trial; the report counts them
        for one in bar.around(all_trials()) if bar is not None else all_trials():
            found.append(one)
            if bar is not None:
                bar.add(1, 0 if one.is_measured else 1)
                bar.tick()
    ordered = tuple(sorted(found, key=lambda one: (one.workers, one.prefetch or 0)))
    report = BenchReport(
        label, ordered, (own, own_prefetch if own else None), step, time.monotonic() - begun, usable, _advice(ordered)
    )
    if plot is not None:
        plotting.draw(report, plot)
    return report


def _until(begun: float, seconds: float, done: int, total: int) -> float:
    """When a trial is to end: what earlier ones did not use is there for it."""
    now = time.monotonic()
    return now + max(0.1, (begun + seconds - now) / (total - done))


def _usual(usable: float, own: int) -> list[int]:
    most = min(_MOST_WORKERS, max(1, math.ceil(usable)))
    doubled = [1 << power for power in range(most.bit_length()) if 1 << power <= most]
    return sorted({*doubled, most, *([own] if own else [])})


def next_number(found: Sequence[Trial]) -> int:
    """A number of workers beyond those that were tried, where the last ones were of use; 0: there is none."""
    ordered = sorted(found, key=lambda one: one.workers)
    last, before = ordered[-1], ordered[-2] if len(ordered) > 1 else None
    gained = before is None or last.batches_per_s >= _OF_USE * before.batches_per_s
    return 2 * last.workers if last.is_measured and gained and 2 * last.workers <= _MOST_WORKERS else 0


def _numbers(name: str, given: Sequence[int] | None, least: int) -> list[int]:
    if given is None:
        return []
    numbers = list(dict.fromkeys(given))
    if not numbers:
        raise ValueError(f"{name} must be one or more numbers, got none")
    for number in numbers:
        check_number(name, number, least=least, whole=True)
    return numbers


def _advice(found: Sequence[Trial]) -> str:
    """What no number of workers mends."""
    chosen = recommended(found)
    if chosen is None or not chosen.shares:
        return ""
    if chosen.shares["transport"] > 0.3:
        return "much time goes into sending: return smaller types (uint8, not float32), and convert on the device"
    if chosen.shares["collate"] > 0.4:
        return "much time goes into collating: stack tensors or arrays of one shape, or let the dataset return batches"
    return ""
