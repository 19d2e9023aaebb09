"""Decides that workers are of a kind that cannot work, and has all of them come from a clean process instead.

Reads   how workers ended.
Writes  what is to be done about it, through the machine.
Never   a process, a file, a lock, the clock.

Workers that were forked from a trainer with threads may wait for one of those, which they have not got. It is no
sample's doing, and the next such worker would wait as well. So no sample is blamed, and none is tried again in a worker
of that kind: all of them are ended together, and their batches done again by workers from a clean process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from outlive import records as r
from outlive._fleet.state import Slot
from outlive.incident import Incident
from outlive.records import Action

_CLEAN = (
    "all workers now come from a clean process, and no sample is blamed; "
    'multiprocessing_context="spawn", or making the pool lazily in the worker, avoids this'
)
_ALONE = (
    "each worker now has an interpreter of its own, and no sample is blamed; "
    "starting threads and taking locks lazily, not while modules are imported, avoids this"
)
MOST = 2  # a fork of a clean process, then each worker in an interpreter of its own: there is nothing cleaner


class Renewal:
    def __init__(self, slots: Sequence[Slot], do: Callable[[Action], None]) -> None:
        self._slots = slots
        self._do = do
        self._cause: Incident | None = None
        self._going: set[tuple[int, int]] = set()  # slots and incarnations that go with their kind
        self.times = 0

    def is_due(self, event: r.WorkerExited) -> bool:
        seen = event.evidence.seen
        return event.hung and seen is not None and bool(seen.out_of_reach) and self.times < MOST

    def begin(self, incident: Incident) -> None:
        self._cause = incident
        self._do(r.RenewWorkers())

    def done(self, alone: bool) -> None:
        """It is about to happen: who lives now will end, and that is no fault of anybody's."""
        assert self._cause is not None
        self.times += 1
        self._going = {(slot.number, slot.incarnation) for slot in self._slots if slot.state != "empty"}
        self._do(r.ReportIncident(replace(self._cause, action=_ALONE if alone else _CLEAN)))

    def failed(self, event: r.RenewalFailed) -> list[Action]:
        """Nothing else would help."""
        assert self._cause is not None
        evidence = replace(self._cause.evidence, unpicklable=event.unpicklable)
        incident = replace(self._cause, evidence=evidence, action="gave up")
        return [r.ReportIncident(incident), r.GiveUp(r.LimitKind.RENEWAL, event.text, incident)]

    def took(self, event: r.WorkerExited) -> bool:
        """Whether this worker ended with its kind."""
        going = (event.slot, event.incarnation)
        if going not in self._going:
            return False
        self._going.remove(going)
        return True
