"""What a loader remembers: incidents, quarantine, counts. Outlives epochs and iterators.

Reads   nothing.
Writes  the log, one line per incident, and the journal.
Never   values of samples; only indices.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast import tables
from holdfast._forensics import journal
from holdfast.incident import Incident, IncidentKind

log = logging.getLogger("holdfast")


class StreamIndex(NamedTuple):
    """Names a sample of an iterable dataset: the nth that a worker took."""

    worker: int
    ordinal: int

    def __str__(self) -> str:
        return f"{self.ordinal} of worker {self.worker}'s stream"


class Incidents(tuple[Incident, ...]):
    """Incidents in order; a notebook shows them as a table."""

    __slots__ = ()

    def _repr_html_(self) -> str:
        return tables.of_incidents(self)


class Quarantine(Mapping[Any, Incident]):
    """The samples that were left out or replaced, by index, each with its incident. Read-only."""

    def __init__(self) -> None:
        self._incidents: dict[Any, Incident] = {}
        self._deadly: set[Any] = set()

    def put(self, index: Any, incident: Incident) -> None:
        key = key_of(index)
        self._incidents[key] = incident
        if incident.kind is not IncidentKind.EXCEPTION:
            self._deadly.add(key)

    def is_deadly(self, index: Any) -> bool:
        return key_of(index) in self._deadly

    @property
    def has_deadly(self) -> bool:
        return bool(self._deadly)

    def __getitem__(self, index: Any) -> Incident:
        return self._incidents[key_of(index)]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._incidents)

    def __len__(self) -> int:
        return len(self._incidents)

    def _repr_html_(self) -> str:
        return tables.of_incidents(tuple(self._incidents.values()))

    def __repr__(self) -> str:
        return f"Quarantine({{{', '.join(f'{k!r}: {str(v)!r}' for k, v in self._incidents.items())}}})"


def key_of(index: Any) -> Any:
    """An index as a dictionary key: whole numbers of any kind as int, what has no hash as its repr."""
    if type(index) is int:
        return index
    try:
        return operator.index(index)
    except TypeError:
        pass
    try:
        hash(index)
    except TypeError:
        return repr(index)
    return index


class Ledger:
    def __init__(self) -> None:
        self.incidents: list[Incident] = []
        self.quarantine = Quarantine()
        self.epoch = -1
        self.delivered = 0
        self.errored = 0
        self.emptied = 0
        self.restarts = 0
        self.retries = 0
        self.replaced = 0

    def add(self, incident: Incident) -> None:
        self.incidents.append(incident)
        level = logging.INFO if incident.action == "raised" else logging.WARNING
        log.log(level, "%s", incident)
        journal.add(incident)
