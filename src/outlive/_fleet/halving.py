"""Finds the one sample among many that kills a worker, by trying halves.

Reads   whether a try survived, and how a worker died.
Writes  nothing; says what to try next.
Never   a process; no clock.

    suspects {0…7} died → try {0…3}: survived → try {4,5}: died → try {4}: survived → {5}? died: it is 5

What was found by elimination is tried alone once more: when it survives that, no single
sample is to blame, and the batch as a whole is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outlive.incident import Incident


def may_be_anothers(incident: Incident, live: Sequence[int]) -> bool:
    """Whether a death while fetching one of these samples may be another's work, say of a thread that it started.

    It is not where the main thread itself hung, or ran into the fault.
    """
    crash = incident.crash
    own_fault = crash is not None and crash.thread == crash.pid and crash.sender_pid is None
    return len(live) > 1 and not incident.hung and not own_fault


@dataclass(frozen=True)
class Alone:
    """The sample that was in hand at a death is tried by itself: it dies again, or another one is to blame."""

    probe: tuple[int, ...]
    else_blamed: tuple[int, ...] = ()


class Halving:
    def __init__(self, suspects: Sequence[int], else_blamed: tuple[int, ...] = ()) -> None:
        self.else_blamed = else_blamed  # where no single one is to blame; then each try waits for what comes later
        self._whole = tuple(suspects)
        self._suspects = tuple(suspects)
        self.culprits: tuple[int, ...] | None = None
        if len(self._suspects) <= 1:
            self.culprits = self._whole

    @property
    def probe(self) -> tuple[int, ...]:
        """What to try now."""
        if len(self._suspects) == 1:
            return self._suspects
        return self._suspects[: len(self._suspects) // 2]

    @property
    def would_end(self) -> bool:
        """Whether a death now would end the search."""
        return len(self.probe) == 1

    def learn(self, survived: bool) -> None:
        """What the try of `probe` showed."""
        tried = self.probe
        if len(self._suspects) == 1:
            self.culprits = self._whole if survived else tried
        elif survived:
            self._suspects = self._suspects[len(tried) :]
        else:
            self._suspects = tried
            if len(tried) == 1:
                self.culprits = tried
