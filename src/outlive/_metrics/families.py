"""How jobs stand, as families of figures: what a scrape has, whoever writes it down. Pure.

Reads   snapshots of jobs.
Writes  nothing; `exposition` answers with Prometheus' text format.
Never   needs the client library, which takes ten times as long to write the same down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from outlive._metrics import viewing

Looked = list[tuple[viewing.Job, dict[str, Any]]]
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

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
_GAUGES: dict[str, tuple[str, Callable[[dict[str, Any]], float]]] = {
    "workers": ("Workers that may live now.", lambda told: told["workers"]),
    "epoch": ("The epoch that runs.", lambda told: told["epoch"]),
    "cells_bytes": ("Shared memory that holds batches.", lambda told: told["cells"]["bytes"]),
    "cells": ("Cells in use.", lambda told: told["cells"]["count"]),
    "breaker_open": ("1: the source of samples is gone.", lambda told: float(told["breaker"] != "closed")),
}
_SLOT_GAUGES: dict[str, tuple[str, Callable[[dict[str, Any]], float | None]]] = {
    "memory_private_bytes": ("Private memory of a worker.", lambda slot: slot["memory"]["private"]),
    "memory_shared_bytes": (
        "Shared memory that a worker has touched: its cells.",
        lambda slot: slot["memory"]["shared"],
    ),
    "memory_slope_bytes_per_second": (
        "How fast its private memory grows: what a leak costs.",
        lambda slot: slot["memory"]["slope"],
    ),
    "cpu_ratio": ("Processors that a worker used, over the last seconds.", lambda slot: slot["cpu"]),
    "waiting_ratio": (
        "Share of its time that it waited with a task in hand.",
        lambda slot: (slot["load"] or {}).get("waiting"),
    ),
    "idle_ratio": ("Share of its time without a task.", lambda slot: (slot["load"] or {}).get("idle")),
    "descriptors": ("Open descriptors of a worker.", lambda slot: slot["descriptors"]),
    "threads": ("Threads of a worker.", lambda slot: slot["threads"]),
    "queued_batches": ("Batches that a worker has yet to do.", lambda slot: slot["queued"]),
    "in_hand_seconds": (
        "For how long the worker has had in hand what it has; 0: nothing.",
        lambda slot: slot["seconds"] if slot["stage"] != "idle" else 0.0,
    ),
    "incarnation": ("Which worker this slot has: 1 is the first.", lambda slot: slot["incarnation"]),
}
_ESCAPED = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})


class Buckets(NamedTuple):
    """Of a histogram: each counts what is in those before it, too."""

    counts: list[tuple[str, float]]
    sum: float


class Family(NamedTuple):
    kind: str  # counter, gauge or histogram
    name: str
    text: str
    labels: tuple[str, ...]
    values: list[tuple[list[str], Any]]  # of labels, and a number or Buckets


def families(looked: Looked) -> Iterator[Family]:
    known = [(_labels(job), snapshot) for job, snapshot in looked]
    yield from _of_jobs(known)
    yield from _of_slots(known)


def exposition(looked: Looked) -> str:
    """All of them in Prometheus' text format."""
    lines: list[str] = []
    for family in families(looked):
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        lines += (f"# HELP {name} {family.text}", f"# TYPE {name} {family.kind}")
        for labels, value in family.values:
            told = ",".join(f'{label}="{text.translate(_ESCAPED)}"' for label, text in zip(family.labels, labels))
            if isinstance(value, Buckets):
                lines += (f'{name}_bucket{{{told},le="{bound}"}} {count!r}' for bound, count in value.counts)
                lines += (f"{name}_count{{{told}}} {value.counts[-1][1]!r}", f"{name}_sum{{{told}}} {value.sum!r}")
            else:
                lines.append(f"{name}{{{told}}} {float(value)!r}")
    return "\n".join((*lines, ""))


def _of_jobs(known: list[tuple[list[str], dict[str, Any]]]) -> Iterator[Family]:
    for name, (key, text) in _COUNTERS.items():
        yield Family("counter", f"outlive_{name}", text, _LABELS, [(labels, told[key]) for labels, told in known])
    by_verdict = [
        ([*labels, verdict], number) for labels, told in known for verdict, number in told["by_verdict"].items()
    ]
    text = "Samples that were left out or replaced."
    yield Family("counter", "outlive_quarantined", text, (*_LABELS, "verdict"), by_verdict)
    for name, (text, value) in _GAUGES.items():
        yield Family("gauge", f"outlive_{name}", text, _LABELS, [(labels, value(told)) for labels, told in known])
    for name, text in _HISTOGRAMS.items():
        values = [(labels, _buckets(told["histograms"][name])) for labels, told in known]
        yield Family("histogram", f"outlive_{name}_seconds", text, _LABELS, values)


def _of_slots(known: list[tuple[list[str], dict[str, Any]]]) -> Iterator[Family]:
    slots = [(labels, slot) for labels, told in known for slot in told["slots"] if slot["pid"] is not None]
    for name, (text, value) in _SLOT_GAUGES.items():
        values = []
        for labels, slot in slots:
            found = value(slot)
            here = slot["state"] == "here"  # no worker, the trainer itself
            if found is not None and not (here and name != "in_hand_seconds"):
                values.append(([*labels, "here" if here else str(slot["slot"])], found))
        yield Family("gauge", f"outlive_worker_{name}", text, (*_LABELS, "slot"), values)


def _labels(job: viewing.Job) -> list[str]:
    return [job.kind, job.name, str(job.pid), "" if job.rank is None else str(job.rank), job.key]


def _buckets(histogram: dict[str, Any]) -> Buckets:
    total, counts = 0, []
    for bound, count in zip([*map(str, histogram["bounds"]), "+Inf"], histogram["counts"], strict=True):
        total += count
        counts.append((bound, float(total)))
    return Buckets(counts, float(histogram["sum"]))
