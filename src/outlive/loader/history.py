"""The samples that a worker took up last: batches that are over are remembered for a while.

Reads   index lists that were drawn.
Writes  nothing.
Never   copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outlive.evidence import RECENT_SAMPLES
from outlive.incident import InHand, Stage

_MOST_BATCHES = 4096


class History:
    def __init__(self, listed: Callable[[Any], list[Any]]) -> None:
        self._listed = listed
        self._past: dict[int, Any] = {}  # batch → its indices as drawn, oldest first
        self._most = 1

    def expect(self, slots: int, batch_size: int) -> None:
        """How much is to be remembered: for each slot as many samples as an incident tells."""
        per_slot = -(-RECENT_SAMPLES // max(1, batch_size)) + 1
        self._most = min(_MOST_BATCHES, slots * per_slot)

    def keep(self, batch: int, index: Any) -> None:
        past = self._past
        past[batch] = index
        if len(past) > self._most:
            del past[next(iter(past))]

    def of(self, batch: int) -> Any:
        """The indices of a batch, None where they are forgotten."""
        return self._past.get(batch)

    def clear(self) -> None:
        self._past.clear()

    def recent(self, batches: tuple[int, ...], in_hand: InHand, drawn: dict[int, Any]) -> tuple[Any, ...]:
        """The last samples of these batches, up to the one in hand."""
        found: list[Any] = []
        for batch in batches:
            index = drawn.get(batch, self._past.get(batch))
            if index is None:
                continue
            listed = self._listed(index)
            if batch == in_hand.batch and in_hand.stage is Stage.FETCHING:
                listed = listed[: in_hand.position + 1]
            found.extend(listed)
        return tuple(found[-RECENT_SAMPLES:])
