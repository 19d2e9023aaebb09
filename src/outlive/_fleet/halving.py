"""Finds the one sample among many that kills a worker, by trying halves.

Reads   whether a try survived.
Writes  nothing; says what to try next.
Never   a process; no clock.

    suspects {0…7} died → try {0…3}: survived → try {4,5}: died → try {4}: survived → {5}? died: it is 5

What was found by elimination is tried alone once more: when it survives that, no single
sample is to blame, and the batch as a whole is.
"""

from __future__ import annotations

from collections.abc import Sequence


class Halving:
    def __init__(self, suspects: Sequence[int]) -> None:
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
