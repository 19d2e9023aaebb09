"""Verdicts on what grows and grows, memory, descriptors or threads: in what, how fast, how long it lasts.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from collections.abc import Callable

from outlive.evidence import CreepKind, Growth, GrowthKind
from outlive.incident import Incident, IncidentKind
from outlive.quantities import in_words
from outlive.verdicts import Confidence, Name, Verdict

_NAMES = {
    GrowthKind.LEAK: Name.LEAK,
    GrowthKind.COPY_ON_READ: Name.COPY_ON_READ,
    GrowthKind.CELLS: Name.CELLS_GROW,
}
_IN = {
    GrowthKind.LEAK: "new memory that is never given back",
    GrowthKind.COPY_ON_READ: "memory that it shared with the process it was forked from, and now has copies of",
    GrowthKind.CELLS: "shared memory for batches",
}


def grows(incident: Incident) -> Verdict | None:
    growth = incident.evidence.growth
    if incident.kind is not IncidentKind.GROWTH or growth is None:
        return None
    left = growth.batches_left
    lasts = "" if left is None else f"; {left:.0f} batches are left until memory_limit"
    return Verdict(
        _NAMES[growth.kind],
        f"its memory grows by {in_words(growth.bytes_per_batch)} per batch: {_IN[growth.kind]}{lasts}",
        facts=(
            f"the lower edge of its memory rose in every stretch of {growth.batches} batches",
            f"it has {in_words(growth.now_bytes)} now",
        ),
        remedies=_remedies(growth),
        confidence=Confidence.LIKELY,
    )


def _remedies(growth: Growth) -> tuple[str, ...]:
    if growth.kind is GrowthKind.COPY_ON_READ:
        return (
            "DataLoader(share_dataset=True), or outlive.share(…) in the dataset: large lists and dicts, once for all",
            "NumPy arrays or tensors instead of lists of Python objects: reading them copies nothing",
        )
    if growth.kind is GrowthKind.CELLS:
        return (
            "let go of batches you no longer need: a kept slice of a batch keeps all of its memory",
            "keep copies instead: batch[0].clone()",
        )
    size = in_words(max(growth.now_bytes * 2, 1 << 30)).replace(" ", "")
    return (
        f'memory_limit="{size}"   recycles the worker in time; the epoch does not notice',
        "look for caches without a bound, lists that are only appended to, files that stay open",
    )


def creeps(incident: Incident) -> Verdict | None:
    creep = incident.evidence.creep
    if incident.kind is not IncidentKind.GROWTH or creep is None:
        return None
    files = creep.kind is CreepKind.DESCRIPTORS
    mostly = f", mostly {creep.mostly[0]}" if creep.mostly else ""
    lasts = "" if creep.left is None else f"; {creep.left} are left until the limit of {creep.limit}"
    what = "open descriptors" if files else "threads"
    return Verdict(
        Name.DESCRIPTOR_LEAK if files else Name.THREAD_LEAK,
        f"it has {creep.per_batch:.3g} more {what} with each batch{mostly}{lasts}",
        facts=(
            f"it began with {creep.first} and has {creep.now} after {creep.batches} batches",
            *((f"what is new: {', '.join(creep.mostly)}",) if creep.mostly else ()),
        ),
        remedies=_OF_DESCRIPTORS if files else _OF_THREADS,
        confidence=Confidence.LIKELY,
    )


_OF_DESCRIPTORS = (
    "close what a sample opens: with open(…) as file, and no file, mapping or connection kept per sample",
    "one handle per worker, opened in worker_init_fn, instead of one per sample",
    "until then: the worker is recycled before its limit; ulimit -n 65536 makes that rare",
)
_OF_THREADS = (
    "end what a sample starts: with ThreadPoolExecutor(…) as pool, thread.join(), or one pool per worker",
    "until then: the worker is recycled before the system refuses it another thread",
)


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (grows, creeps)
