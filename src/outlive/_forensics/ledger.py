"""What a loader remembers: incidents, quarantine, counts. Outlives epochs and iterators.

Reads   nothing.
Writes  the log, one line per incident, and the journal.
Never   values of samples; only indices.
"""

from __future__ import annotations

import logging
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from outlive import tables
from outlive._forensics import journal
from outlive._forensics.heralds import Herald
from outlive._system.cpus import Throttled
from outlive.evidence import NO_EVIDENCE
from outlive.incident import Incident, IncidentKind
from outlive.statistics import Load, StuckWorker

log = logging.getLogger("outlive")

_MOST_NAMED = 8
_FLUSH_S = 1.0  # that the end of an epoch with incidents may wait for the journal
COUNTS = ("restarts", "retries", "replaced", "recycled", "spared", "healed")  # of a machine, and of a ledger
KEPT_WHOLE = 100  # incidents that keep their evidence in memory; the journal has that of all


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
    """The samples that were left out or replaced, by index, each with its incident. Read-only.

    An index that a state could only carry as text is that text here, its `repr`, and is found by the index as well.
    """

    def __init__(self) -> None:
        self._incidents: dict[Any, Incident] = {}
        self._deadly: set[Any] = set()
        self._foreseen: set[Any] = set()
        self._texts: set[str] = set()  # keys that are the `repr` of an index

    def put(self, index: Any, incident: Incident) -> None:
        key = self._key(index)
        self._incidents[key] = incident
        if incident.kind is not IncidentKind.EXCEPTION:
            self._deadly.add(key)

    def put_text(self, text: str, incident: Incident) -> None:
        """Put a sample in whose index is only known by its `repr`."""
        self._texts.add(text)
        self.put(text, incident)

    def _key(self, index: Any) -> Any:
        key = key_of(index)
        if not self._texts or type(key) in (int, str) or key in self._incidents:
            return key
        text = repr(key)
        return text if text in self._texts else key

    def foresee(self, index: Any, incident: Incident) -> None:
        """Put a sample in that was found to be bad before this loader was made: it is not tried at all."""
        key = self._key(index)
        self._incidents[key] = incident
        self._deadly.add(key)
        self._foreseen.add(key)

    def exchange(self, old: Incident, new: Incident) -> None:
        for key in map(self._key, old.indices):
            if self._incidents.get(key) is old:
                self._incidents[key] = new

    def is_deadly(self, index: Any) -> bool:
        return self._key(index) in self._deadly

    def is_foreseen(self, index: Any) -> bool:
        return self._key(index) in self._foreseen

    def foreseen_in_streams(self) -> frozenset[tuple[int, int]]:
        return frozenset(key for key in self._foreseen if isinstance(key, StreamIndex))

    @property
    def has_foreseen(self) -> bool:
        return bool(self._foreseen)

    @property
    def has_deadly(self) -> bool:
        return bool(self._deadly)

    def __getitem__(self, index: Any) -> Incident:
        return self._incidents[self._key(index)]

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
    def __init__(self, listeners: Sequence[Callable[[Incident], object]] = ()) -> None:
        self._herald = Herald(listeners)
        self.incidents: list[Incident] = []
        self.quarantine = Quarantine()
        self.epoch = -1
        self.delivered = 0
        self.errored = 0
        self.emptied = 0
        self.restarts = 0
        self.retries = 0
        self.replaced = 0
        self.recycled = 0
        self.spared = 0
        self.healed = 0
        self.loads: tuple[Load, ...] = ()  # what workers did with the last seconds of the last epoch
        self.throttling: tuple[Throttled, ...] | None = None  # counts when the first workers were started
        self.stuck: tuple[StuckWorker, ...] = ()  # of iterators that are gone
        self.goods: tuple[Any, ...] = ()  # indices of samples that were fetched well in an earlier epoch
        self.breaker: Any = None  # of the epoch that runs
        self.earlier = 0  # incidents before a position was taken up, of which there is only the number
        self._summed_up = 0  # incidents that a summary has told of
        self._lost = journal.lost()  # incidents of this process that were not in the journal at that time
        self.watcher: Callable[[Incident], None] | None = None  # publishes them

    def add(self, incident: Incident) -> None:
        self.incidents.append(incident)
        if len(self.incidents) > KEPT_WHOLE:
            self._slim(len(self.incidents) - KEPT_WHOLE - 1)
        if self.watcher is not None:
            self.watcher(incident)
        self._herald.tell(incident)

    def tell_again(self, incident: Incident) -> None:
        """Of one that is known: it goes on."""
        self._herald.tell_log(incident)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "watcher": None}  # of this process

    def _slim(self, place: int) -> None:
        """An incident of long ago goes on without its evidence: a job may have a million of them."""
        whole = self.incidents[place]
        if whole.evidence is NO_EVIDENCE:
            return
        slim = self.incidents[place] = replace(whole, evidence=NO_EVIDENCE)
        self.quarantine.exchange(whole, slim)

    def begin_epoch(self) -> None:
        self.end_epoch()  # which the user may have left early
        self.epoch += 1

    def end_epoch(self) -> None:
        """Sum up an epoch that had incidents, in the log."""
        seen = [i for i in self.incidents[self._summed_up :] if i.kind is not IncidentKind.RECYCLED]
        self._summed_up = len(self.incidents)
        if seen:
            log.warning("%s%s", summary(self.epoch, seen, self.quarantine), self._where(seen))

    def _where(self, seen: Sequence[Incident]) -> str:
        """Where all of them can be read."""
        if not journal.is_on():
            return ""
        is_there = journal.has_all(min(incident.when for incident in seen), self._lost, _FLUSH_S)
        self._lost = journal.lost()
        if is_there:
            return f"; «outlive incidents» has them all, from {journal.path()}"
        return f"; not all of them are in the journal in {journal.home()}, loader.incidents has them"


def summary(epoch: int, incidents: Sequence[Incident], quarantine: Quarantine) -> str:
    """One paragraph on an epoch: how many of what, which samples are out."""
    counts = Counter(i.verdict.name.value if i.verdict is not None else i.kind.value for i in incidents)
    told = ", ".join(f"{count} × {name}" for name, count in counts.most_common())
    out = [index for index, incident in quarantine.items() if incident.epoch == epoch]
    named = ", ".join(map(str, out[:_MOST_NAMED])) + (", …" if len(out) > _MOST_NAMED else "")
    plural = "s" if len(incidents) > 1 else ""
    left_out = f"; {len(out)} sample{'s' if len(out) > 1 else ''} left out or replaced: {named}" if out else ""
    return f"epoch {epoch} ended with {len(incidents)} incident{plural}: {told}{left_out}"
