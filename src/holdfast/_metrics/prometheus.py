"""Jobs as Prometheus metrics: a collector for a registry of the client library's.

Reads   what jobs publish, at each scrape.
Writes  nothing.
Never   asks the trainer: a scrape reads the board, from any process of the same user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from holdfast._metrics import viewing

_LABELS = ("kind", "name", "pid", "rank", "job")
_COUNTERS = {
    "batches": ("delivered", "Batches that were delivered (a pool: tasks)."),
    "samples": ("samples", "Samples that were delivered."),
    "bytes": ("bytes", "Bytes of batches, from the sizes of some of them."),
    "wait_seconds": ("wait_seconds", "Time that the trainer waited for a batch."),
    "trainer_seconds": ("trainer_seconds", "Time in epochs that the trainer did not wait."),
    "restarts": ("restarts", "Workers that were replaced after their death."),
    "retries": ("retries", "Samples and batches that were tried again."),
    "recycled": ("recycled", "Workers that left on time and were replaced."),
    "replaced_samples": ("replaced", "Samples in whose place another was put."),
    "incidents": ("incidents", "Everything that went wrong."),
}
_HISTOGRAMS = {
    "fetch": "Time to fetch the samples of a batch.",
    "collate": "Time to collate a batch.",
    "send": "Time to hand a batch over.",
}
_SLOT_GAUGES = {
    "memory_private_bytes": "Private memory of a worker.",
    "memory_shared_bytes": "Shared memory that a worker has touched: its cells.",
    "memory_slope_bytes_per_second": "How fast its private memory grows: what a leak costs.",
    "cpu_ratio": "Processors that a worker used, over the last seconds.",
    "waiting_ratio": "Share of its time that it waited with a task in hand.",
    "idle_ratio": "Share of its time without a task.",
    "descriptors": "Open descriptors of a worker.",
    "threads": "Threads of a worker.",
    "queued_batches": "Batches that a worker has yet to do.",
    "in_hand_seconds": "For how long the worker has had in hand what it has; 0: nothing.",
    "incarnation": "Which worker this slot has: 1 is the first.",
}


class PrometheusCollector:
    """A collector: `REGISTRY.register(holdfast.PrometheusCollector())`.

    pid  "own": jobs of this process only (one exporter per rank); None: all of this user's on this machine, for an
         exporter in a process of its own; a number: those of that process
    """

    def __init__(self, pid: int | Literal["own"] | None = None) -> None:
        if pid not in ("own", None) and (not isinstance(pid, int) or isinstance(pid, bool)):
            raise TypeError(f'pid must be "own", None or the number of a process, got {pid!r}')
        import prometheus_client.core  # said now where it is missing, not at the first scrape

        self._core = prometheus_client.core
        self._pid = pid

    def describe(self) -> Iterable[Any]:
        """Nothing, so that a registry does not collect when this is registered."""
        return ()

    def look(self) -> list[tuple[viewing.Job, dict[str, Any]]]:
        """The jobs that live, and how they stand."""
        pid = os.getpid() if self._pid == "own" else self._pid
        found = [job for job in viewing.jobs() if job.alive and pid in (None, job.pid)]
        return [(job, snapshot) for job in found if (snapshot := job.snapshot())]

    def collect(self) -> Iterator[Any]:
        looked = [(_labels(job), snapshot) for job, snapshot in self.look()]
        yield from self._of_jobs(looked)
        yield from self._of_slots(looked)

    def _of_jobs(self, looked: list[tuple[list[str], dict[str, Any]]]) -> Iterator[Any]:
        core = self._core
        for name, (key, text) in _COUNTERS.items():
            counter = core.CounterMetricFamily(f"holdfast_{name}", text, labels=_LABELS)
            for labels, snapshot in looked:
                counter.add_metric(labels, snapshot[key])
            yield counter
        bad = core.CounterMetricFamily(
            "holdfast_quarantined", "Samples that were left out or replaced.", labels=(*_LABELS, "verdict")
        )
        workers = core.GaugeMetricFamily("holdfast_workers", "Workers that may live now.", labels=_LABELS)
        epoch = core.GaugeMetricFamily("holdfast_epoch", "The epoch that runs.", labels=_LABELS)
        cells = core.GaugeMetricFamily("holdfast_cells_bytes", "Shared memory that holds batches.", labels=_LABELS)
        count = core.GaugeMetricFamily("holdfast_cells", "Cells in use.", labels=_LABELS)
        breaker = core.GaugeMetricFamily("holdfast_breaker_open", "1: the source of samples is gone.", labels=_LABELS)
        for labels, snapshot in looked:
            for verdict, number in snapshot["by_verdict"].items():
                bad.add_metric([*labels, verdict], number)
            workers.add_metric(labels, snapshot["workers"])
            epoch.add_metric(labels, snapshot["epoch"])
            cells.add_metric(labels, snapshot["cells"]["bytes"])
            count.add_metric(labels, snapshot["cells"]["count"])
            breaker.add_metric(labels, float(snapshot["breaker"] != "closed"))
        yield from (bad, workers, epoch, cells, count, breaker)
        for name, text in _HISTOGRAMS.items():
            histogram = core.HistogramMetricFamily(f"holdfast_{name}_seconds", text, labels=_LABELS)
            for labels, snapshot in looked:
                histogram.add_metric(labels, *_buckets(snapshot["histograms"][name]))
            yield histogram

    def _of_slots(self, looked: list[tuple[list[str], dict[str, Any]]]) -> Iterator[Any]:
        for name, text in _SLOT_GAUGES.items():
            gauge = self._core.GaugeMetricFamily(f"holdfast_worker_{name}", text, labels=(*_LABELS, "slot"))
            for labels, snapshot in looked:
                for slot in snapshot["slots"]:
                    value = _slot_value(slot, name)
                    here = slot["state"] == "here"  # no worker, the trainer itself
                    if value is not None and slot["pid"] is not None and not (here and name != "in_hand_seconds"):
                        gauge.add_metric([*labels, "here" if here else str(slot["slot"])], value)
            yield gauge


def _labels(job: viewing.Job) -> list[str]:
    return [job.kind, job.name, str(job.pid), "" if job.rank is None else str(job.rank), job.key]


def _buckets(histogram: dict[str, Any]) -> tuple[list[tuple[str, float]], float]:
    """As the client library has them: each counts what is in those before it, too."""
    total, buckets = 0, []
    for bound, count in zip([*map(str, histogram["bounds"]), "+Inf"], histogram["counts"], strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram["sum"]


def _slot_value(slot: dict[str, Any], name: str) -> float | None:
    memory, load = slot["memory"], slot["load"] or {}
    value = {
        "memory_private_bytes": memory["private"],
        "memory_shared_bytes": memory["shared"],
        "memory_slope_bytes_per_second": memory["slope"],
        "cpu_ratio": slot["cpu"],
        "waiting_ratio": load.get("waiting"),
        "idle_ratio": load.get("idle"),
        "descriptors": slot["descriptors"],
        "threads": slot["threads"],
        "queued_batches": slot["queued"],
        "in_hand_seconds": slot["seconds"] if slot["stage"] != "idle" else 0.0,
        "incarnation": slot["incarnation"],
    }[name]
    return None if value is None else float(value)
