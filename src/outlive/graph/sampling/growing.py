"""What a sampler collects while it goes: nodes of a kind, edges of a kind; and what it asks of one hop.

Reads   nothing.
Writes  arrays that grow as the hops need it.
Never   knows how edges are chosen: plain.py and compiled.py do, with the same results.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlive.graph.topology import Longs


class Rule(NamedTuple):
    """How edges into a node are chosen: how many (negative: all), how, and the key of their draws."""

    fanout: int
    replace: bool
    weighted: bool
    last: bool
    key: int


class Span(NamedTuple):
    """Those nodes of a kind whose neighbours are wanted, [first, end), and the latest time each of them may see."""

    first: int
    end: int
    times: Longs | None


def _empty() -> Longs:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class Found:
    """Nodes of one kind that were met, in order; for disjoint sampling with the seed that each belongs to."""

    num_nodes: int
    nodes: Longs
    owners: Longs | None
    count: int
    per_hop: list[int] = field(default_factory=list)
    slots: NDArray[np.uint64] | None = None  # C's table over them
    entered: int = 0  # how many of them the table has

    def reserve(self, more: int) -> None:
        """Make room for so many further nodes."""
        needed = self.count + more
        if needed > len(self.nodes):
            self.nodes = _grown(self.nodes, self.count, needed)
            if self.owners is not None:
                self.owners = _grown(self.owners, self.count, needed)

    def taken(self) -> Longs:
        return self.nodes[: self.count]


@dataclass(slots=True)
class Edges:
    """Edges of one kind that were taken, hop after hop."""

    rows: Longs = field(default_factory=_empty)
    cols: Longs = field(default_factory=_empty)
    ids: Longs = field(default_factory=_empty)
    count: int = 0
    per_hop: list[int] = field(default_factory=list)

    def reserve(self, more: int) -> None:
        """Make room for so many further edges."""
        needed = self.count + more
        if needed > len(self.rows):
            self.rows = _grown(self.rows, self.count, needed)
            self.cols = _grown(self.cols, self.count, needed)
            self.ids = _grown(self.ids, self.count, needed)


def _grown(array: Longs, used: int, room: int) -> Longs:
    larger = np.empty(room, np.int64)
    larger[:used] = array[:used]
    return larger
