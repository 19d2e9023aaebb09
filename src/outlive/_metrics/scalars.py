"""A loader's figures as plain numbers, for loggers such as TensorBoard's and Weights & Biases'.

Reads   the loader's statistics.
Writes  through the callable that it is given.
Never   more often than asked for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

T = TypeVar("T")

_COUNTS = (
    *("epoch", "delivered", "samples", "bytes", "errored", "emptied", "restarts", "retries", "replaced", "recycled"),
    *("quarantined", "incidents", "workers", "cell_bytes", "wait_seconds", "trainer_seconds"),
)


def scalars(loader: Any) -> dict[str, float]:
    """Its figures by name, «outlive/…»: numbers only, as every logger takes them."""
    told = loader.statistics()
    found = {f"outlive/{name}": float(getattr(told, name)) for name in _COUNTS}
    spent = told.wait_seconds + told.trainer_seconds
    found["outlive/wait_share"] = told.wait_seconds / spent if spent else 0.0
    found["outlive/breaker_open"] = float(told.breaker != "closed")
    for verdict, count in told.by_verdict.items():
        found[f"outlive/quarantined/{verdict}"] = float(count)
    for name, histogram in told.histograms.items():
        count = sum(histogram["counts"])
        found[f"outlive/{name}_seconds"] = histogram["sum"] / count if count else 0.0
    loads = [slot.load for slot in told.slots if slot.load is not None]
    for name in ("on_cpu", "starved", "waiting", "idle"):
        if loads:
            found[f"outlive/workers_{name}"] = sum(getattr(load, name) for load in loads) / len(loads)
    return found


def logged(
    loader: Iterable[T], log: Callable[[dict[str, float], int], object], *, every_s: float = 10.0
) -> Iterator[T]:
    """The loader's batches; `log(scalars, step)` is called every so many seconds, and after the last batch.

    step  batches that this loader has delivered since it was made
    """
    if not callable(log):
        raise TypeError(f"log must be a callable that takes a dictionary of numbers and a step, got {log!r}")
    if not isinstance(every_s, (int, float)) or every_s < 0:
        raise ValueError(f"every_s must be a number of seconds, got {every_s!r}")
    due = time.monotonic() + every_s
    any_loader: Any = loader
    try:
        for batch in loader:
            yield batch
            if time.monotonic() >= due:
                log(scalars(loader), any_loader.statistics().delivered)
                due = time.monotonic() + every_s
    finally:
        log(scalars(loader), any_loader.statistics().delivered)
