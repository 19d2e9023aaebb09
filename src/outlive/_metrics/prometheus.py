"""Jobs as Prometheus metrics: a collector for a registry of the client library's.

Reads   what jobs publish, at each scrape.
Writes  nothing.
Never   asks the trainer: a scrape reads the board, from any process of the same user.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from outlive._metrics import families, viewing


class PrometheusCollector:
    """A collector: `REGISTRY.register(outlive.PrometheusCollector())`.

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

    def _look(self) -> families.Looked:
        """The jobs that live, and how they stand."""
        pid = os.getpid() if self._pid == "own" else self._pid
        found = [job for job in viewing.jobs() if job.alive and pid in (None, job.pid)]
        return [(job, snapshot) for job in found if (snapshot := job.snapshot())]

    def collect(self) -> Iterator[Any]:
        core = self._core
        kinds = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        for family in families.families(self._look()):
            made = kinds[family.kind](family.name, family.text, labels=family.labels)
            for labels, value in family.values:
                made.add_metric(labels, *(value if isinstance(value, families.Buckets) else (value,)))
            yield made
