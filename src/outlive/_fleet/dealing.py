"""Which tasks are sent to which worker, and when.

Reads   slots and tasks.
Writes  their queues; tasks to workers, through the machine.
Never   a process, a file, a lock, the clock.

A slot's tasks are sent in the order in which they were submitted, a few at a time. Tasks bound to no slot wait here
until a worker has time for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from outlive import records as r
from outlive._fleet.state import Slot, Task
from outlive.records import Action

MOST_SENT = 16  # tasks that wait at a worker; the rest waits here, where it costs no descriptor
DEPTH = 2  # tasks bound to no slot that a worker is given at a time


class Dealer:
    def __init__(self, slots: list[Slot], tasks: dict[int, Task], do: Callable[[Action], None]) -> None:
        self._slots = slots
        self._tasks = tasks
        self._do = do
        self._unbound: deque[int] = deque()
        self.depth = DEPTH

    def add(self, task: Task) -> None:
        """A new task, to its slot or to whoever has time."""
        if task.slot >= 0:
            self._slots[task.slot].queue.append(task.seq)
            self.send(self._slots[task.slot])
            return
        self._unbound.append(task.seq)
        there = [slot for slot in self._slots if slot.state != "empty" and not slot.leaving]
        if there:
            self.send(min(there, key=lambda slot: len(slot.queue)))

    def send(self, slot: Slot) -> None:
        """Send a slot's worker what it may have now."""
        if slot.state == "empty" or slot.leaving or (slot.sent and self._tasks[slot.queue[0]].search is not None):
            return  # nobody is there, or a search has its worker to itself
        while self._unbound and len(slot.queue) < self.depth:
            slot.queue.append(self._unbound.popleft())
        while slot.sent < min(len(slot.queue), MOST_SENT):
            task = self._tasks[slot.queue[slot.sent]]
            if task.is_asked_about:
                return
            slot.sent += 1
            self._do(r.SendTask(slot.number, slot.incarnation, task.seq, task.plan()))
            if task.search is not None:
                return

    def pass_on(self, slot: Slot) -> None:
        """Nobody comes here for a while: others do what is bound to no slot. What is searched or asked about stays."""
        tasks = [self._tasks[seq] for seq in slot.queue]
        free = [task.seq for task in tasks if task.slot < 0 and task.search is None and not task.is_asked_about]
        if free:
            slot.queue = deque(seq for seq in slot.queue if seq not in free)
            self._unbound = deque(sorted([*self._unbound, *free]))
            for other in self._slots:
                self.send(other)

    def clear(self) -> None:
        self._unbound.clear()
        for slot in self._slots:
            slot.queue.clear()
            slot.sent = 0
