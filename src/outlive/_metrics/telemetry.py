"""OpenTelemetry: metrics that read the board, and a span for some of a loader's batches.

Reads   what this process publishes; a loader's batches and incidents.
Writes  through OpenTelemetry's API, to whatever the program has set up; to nothing where it has set up nothing.
Never   the SDK: it is not safe to fork, and it is the program's to choose.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from outlive._metrics import viewing
from outlive.incident import Incident

T = TypeVar("T")

_COUNTERS = {
    "batches": ("delivered", "1"),
    "samples": ("samples", "1"),
    "bytes": ("bytes", "By"),
    "wait": ("wait_seconds", "s"),
    "restarts": ("restarts", "1"),
    "retries": ("retries", "1"),
    "recycled": ("recycled", "1"),
    "quarantined": ("quarantined", "1"),
    "incidents": ("incidents", "1"),
}
_GAUGES = {"workers": "workers", "epoch": "epoch"}


def observe(meter: Any = None) -> None:
    """Have OpenTelemetry collect what loaders and pools of this process do: «outlive.batches», «outlive.wait», ….

    meter  of the API's; None: the global provider's
    """
    from opentelemetry import metrics

    meter = metrics.get_meter("outlive") if meter is None else meter

    def observations(key: str) -> Any:
        def collected(_: Any) -> list[Any]:
            return [
                metrics.Observation(snapshot[key], _attributes(job))
                for job in viewing.jobs()
                if job.pid == os.getpid() and job.alive and (snapshot := job.snapshot())
            ]

        return collected

    def memory(_: Any) -> list[Any]:
        return [
            metrics.Observation(slot["memory"]["private"], {**_attributes(job), "slot": slot["slot"]})
            for job in viewing.jobs()
            if job.pid == os.getpid() and job.alive
            for slot in job.snapshot().get("slots", ())
            if slot["memory"]["private"] is not None
        ]

    for name, (key, unit) in _COUNTERS.items():
        meter.create_observable_counter(f"outlive.{name}", [observations(key)], unit=unit)
    for name, key in _GAUGES.items():
        meter.create_observable_gauge(f"outlive.{name}", [observations(key)], unit="1")
    meter.create_observable_gauge("outlive.worker.memory", [memory], unit="By")


def traced(loader: Iterable[T], *, every: int = 100, tracer: Any = None) -> Iterator[T]:
    """The loader's batches, with a span «outlive.batch» for every so many of them, from asking for it to its arrival.

    An incident is an event of the span of the batch that was waited for; such a batch has a span in any case.
    tracer  of the API's; None: the global provider's
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a whole number of batches, at least 1, got {every!r}")
    from opentelemetry import trace

    tracer = trace.get_tracer("outlive") if tracer is None else tracer
    any_loader: Any = loader
    known = len(any_loader.incidents)
    number = 0
    batches = iter(loader)
    while True:
        begun = time.time_ns()
        try:
            batch = next(batches)
        except StopIteration:
            batch = None
            ended = True
        else:
            ended = False
        incidents = any_loader.incidents[known:] if len(any_loader.incidents) > known else ()
        known += len(incidents)
        if incidents or (not ended and number % every == 0):
            span = tracer.start_span("outlive.batch", start_time=begun, attributes={"outlive.batch": number})
            for incident in incidents:
                span.add_event("outlive.incident", _of_incident(incident), timestamp=int(incident.when * 1e9))
            span.end()
        if ended:
            return
        number += 1
        yield batch  # type: ignore[misc]


def _attributes(job: viewing.Job) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": job.kind, "name": job.name, "job": job.key}
    return found if job.rank is None else {**found, "rank": job.rank}


def _of_incident(incident: Incident) -> dict[str, Any]:
    told = {
        "id": incident.id,
        "kind": incident.kind.value,
        "sentence": str(incident),
        "verdict": incident.verdict.name.value if incident.verdict is not None else "",
        "action": incident.action,
        "worker": incident.slot,
        "pid": incident.pid,
        "samples": [str(index) for index in incident.indices[:16]],
    }
    return {f"outlive.{name}": value for name, value in told.items()}
