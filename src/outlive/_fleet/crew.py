"""How many slots may have a worker at a time, and which: for want of memory not all, or as many as are of use.

Reads   slots, and what is told about memory and sizes.
Writes  starts and farewells, through the machine.
Never   a process, a file, a lock, the clock.

    capacity = the smaller of what is wanted (all slots, or what a sizing found best) and what memory bears

A slot's batches are its own: its random state, its worker id. So where fewer workers than slots may live, slots *take
turns*: a worker that has done what was asked of its slot leaves, and the slot that waits longest gets one in its place,
which goes on with that slot's random state. Tasks bound to no slot are taken by whoever lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from outlive import records as r
from outlive._fleet.state import Slot
from outlive.incident import Incident, IncidentKind, InHand, Stage
from outlive.quantities import in_words
from outlive.records import Action

SETTLE_S = 3.0  # after a change, before memory is judged again
HOLD_S = 20.0  # before a fleet that was made smaller grows again; doubles each time
MOST_HOLD_S = 600.0


class Crew:
    def __init__(
        self, slots: list[Slot], start: Callable[[Slot], None], do: Callable[[Action], None], *, takes_turns: bool
    ) -> None:
        self._slots = slots
        self._start = start
        self._do = do
        self._takes_turns = takes_turns
        self.wanted = len(slots)
        self._borne: int | None = None  # what memory bears; None: as many as are wanted
        self._changed = float("-inf")
        self._hold_s = HOLD_S
        self._told_helpless = False

    @property
    def capacity(self) -> int:
        return self.wanted if self._borne is None else min(self._borne, self.wanted)

    @property
    def is_short(self) -> bool:
        return self._borne is not None or self.wanted < len(self._slots)

    def _living(self) -> int:
        return sum(slot.state != "empty" for slot in self._slots)

    def _staying(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.state != "empty" and not slot.leaving]

    # ------------------------------------------------------------ who comes, who goes

    def arrange(self) -> None:
        """Start whom there is room for, and have leave who is too many or in the way."""
        room = self.capacity - self._living()
        if room > 0:
            for slot in self._missing()[:room]:
                self._start(slot)
        staying = self._staying()
        for slot in _dispensable(staying)[: max(0, len(staying) - self.capacity)]:
            self._dismiss(slot)
        if self._living() >= self.capacity:
            self._change_shifts()

    def _missing(self) -> list[Slot]:
        """Slots to be filled; first the one whose batch is wanted first."""
        missing = [slot for slot in self._slots if slot.state == "empty" and not (slot.ended and not slot.queue)]
        return sorted(missing, key=lambda slot: slot.queue[0] if slot.queue else float("inf"))

    def _change_shifts(self) -> None:
        waiting = sum(1 for slot in self._slots if slot.state == "empty" and slot.queue)
        leaving = self._living() - len(self._staying())
        idle = [slot for slot in self._staying() if slot.state == "ready" and not slot.queue]
        for slot in idle[: max(0, waiting - leaving)]:
            self._dismiss(slot)

    def _dismiss(self, slot: Slot) -> None:
        slot.leaving = True
        self._do(r.DismissWorker(slot.number, slot.incarnation))

    def want(self, count: int) -> None:
        """So many workers are best."""
        self.wanted = max(1, min(count, len(self._slots)))
        self.arrange()

    # ------------------------------------------------------------ memory

    def was_killed_for_memory(self, event: r.WorkerExited, incident: Incident, now: float) -> bool:
        """The kernel killed a worker, which is gone already: go on with one less. False: there is nobody to spare."""
        if not (self._takes_turns and event.evidence.killed_for_memory):
            return False
        left = len(self._staying())
        if left < 1:
            return False
        self._shrink(left, now)
        size = max((sample.resident_bytes for sample in event.evidence.worked.memory), default=0)
        size = max(size, event.evidence.worked.peak_resident_bytes or 0)
        had = f", which had {in_words(size)}," if size else ""
        why = f"the kernel killed worker {event.slot}{had} for want of memory"
        self._do(r.ReportIncident(replace(incident, action="not replaced, its work is done by the others")))
        self._report(why, event.slot, event.incarnation, event.pid)
        return True

    def memory_told(self, event: r.MemoryTold, now: float) -> None:
        if event.scarce:
            self._memory_is_scarce(event, now)
        elif self._borne is not None and now - self._changed >= self._hold_s:
            self._changed = now
            self._borne += 1
            if self._borne >= self.wanted:
                self._borne = None
            self._report(f"there is room for another worker ({in_words(event.left_bytes)} left)")
            self.arrange()

    def _memory_is_scarce(self, event: r.MemoryTold, now: float) -> None:
        staying = self._staying()
        unsettled = any(slot.leaving or slot.state == "starting" for slot in self._slots)
        if unsettled or now - self._changed < SETTLE_S or not staying:
            return
        large = ""
        if event.slot >= 0:
            large = f"; worker {event.slot} is the largest with {in_words(event.slot_bytes)}"
        why = f"workers use {in_words(event.used_bytes)} and {in_words(event.left_bytes)} is left of the memory"
        if len(staying) == 1 or not self._takes_turns:
            if not self._told_helpless:
                self._told_helpless = True
                rest = "no worker can be spared" if self._takes_turns else "each worker has a stream of its own"
                self._report(f"{why}{large}; {rest}", event.slot)
            return
        self._shrink(len(staying) - 1, now)
        largest = next((slot for slot in staying if slot.number == event.slot), staying[-1])
        self._dismiss(largest)
        self._report(why + large, largest.number, largest.incarnation)

    def _shrink(self, to: int, now: float) -> None:
        if self._borne is not None:
            self._hold_s = min(MOST_HOLD_S, 2 * self._hold_s)
        self._borne = to
        self._changed = now

    def _report(self, why: str, slot: int = -1, incarnation: int = 0, pid: int = -1) -> None:
        action = f"goes on with {self.capacity} of {self.wanted} workers"
        hand = InHand(Stage.AT_WORK)
        incident = Incident(IncidentKind.RESIZED, slot, incarnation, pid, -1, hand, action=action, recycled=why)
        self._do(r.ReportIncident(incident))


def _dispensable(staying: Iterable[Slot]) -> list[Slot]:
    """Who may leave, first whose work is wanted last."""
    return sorted(staying, key=lambda slot: (slot.queue[0] if slot.queue else float("inf"), slot.number), reverse=True)
