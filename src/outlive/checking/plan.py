"""Which samples are checked, in what portions, and which of them are done.

Reads   lengths and counts; how long portions took.
Writes  nothing.
Never   the dataset.
"""

from __future__ import annotations

import bisect
import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_AT_FIRST = 16
_MOST = 1 << 14
_TARGET_S = 0.1  # that a portion takes: so much is done again after a death, and so often a state is written
_SHARD = re.compile(r"\s*(\d+)\s*/\s*(\d+)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Choice:
    """What part of a dataset: one of so many shards, a sample of it."""

    shard: int = 0
    shards: int = 1
    share: float | None = None  # of the samples
    number: int | None = None  # or so many
    seed: int = 0

    @property
    def words(self) -> str:
        part = f"shard {self.shard + 1} of {self.shards}" if self.shards > 1 else ""
        drawn = f"{self.share:.3%}".rstrip("0%").rstrip(".") + " %" if self.share is not None else ""
        drawn = f"{self.number:,} samples" if self.number is not None else drawn
        return ", ".join(filter(None, (drawn, part)))

    def indices(self, length: int) -> Sequence[int]:
        """Of a shard all, or some by chance, evenly spread and in order."""
        whole = range(length * self.shard // self.shards, length * (self.shard + 1) // self.shards)
        wanted = self.number if self.share is None else max(1, round(len(whole) * self.share)) if whole else 0
        if wanted is None or wanted >= len(whole):
            return whole
        draw = random.Random(self.seed)
        ends = [whole.start + len(whole) * at // wanted for at in range(wanted + 1)]
        return [draw.randrange(a, b) for a, b in itertools.pairwise(ends)]


def choice_of(sample: Any, shard: Any, seed: int = 0) -> Choice:
    """What `sample="5%"` and `shard="2/8"` mean."""
    number, numbers = 1, 1
    if shard is not None:
        found = _SHARD.fullmatch(shard) if isinstance(shard, str) else None
        given = (int(found[1]), int(found[2])) if found is not None else shard
        if not (isinstance(given, tuple) and len(given) == 2 and all(type(each) is int for each in given)):
            raise TypeError(f'shard must be such as "1/8", the first of eight parts, got {shard!r}')
        number, numbers = given
        if not 1 <= number <= numbers:
            raise ValueError(f'shard goes from "1/{numbers}" to "{numbers}/{numbers}", got {shard!r}')
    if sample is None:
        return Choice(number - 1, numbers, seed=seed)
    if isinstance(sample, str) and sample.strip().isdigit():
        sample = int(sample)
    if type(sample) is int:
        if sample < 1:
            raise ValueError(f"sample must be at least 1 sample, got {sample}")
        return Choice(number - 1, numbers, number=sample, seed=seed)
    found = _SHARE.fullmatch(sample) if isinstance(sample, str) else None
    share = float(found[1]) / 100 if found is not None else sample
    if type(share) is not float:
        raise TypeError(f'sample must be a share such as "5%" or 0.05, or a number of samples, got {sample!r}')
    if not 0 < share <= 1:
        raise ValueError(f'sample is a share of more than "0%" and at most "100%", got {sample!r}')
    return Choice(number - 1, numbers, share=share, seed=seed)


class Done:
    """Which places of a plan are done: intervals, merged."""

    def __init__(self, intervals: Sequence[Sequence[int]] = ()) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in intervals:
            self.add(int(begin), int(end))

    def add(self, begin: int, end: int) -> None:
        first = bisect.bisect_left(self._ends, begin)
        last = bisect.bisect_right(self._begins, end)
        if first < last:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[last - 1])
        self._begins[first:last] = [begin]
        self._ends[first:last] = [end]

    @property
    def number(self) -> int:
        return sum(self._ends) - sum(self._begins)

    @property
    def intervals(self) -> list[tuple[int, int]]:
        return list(zip(self._begins, self._ends, strict=True))

    def gaps(self, length: int) -> list[tuple[int, int]]:
        edges = [0, *(edge for pair in self.intervals for edge in pair), length]
        return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


class Pace:
    """How many samples a portion has: as many as take a tenth of a second."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._size = _AT_FIRST

    def size(self, left: int | None) -> int:
        if left is None:
            return self._size
        return max(1, min(self._size, -(-left // (2 * self._workers))))  # at the end all have something to do

    def took(self, number: int, seconds: float) -> None:
        fitting = int(number * _TARGET_S / seconds) if seconds > 0 else _MOST
        self._size = max(1, min(fitting, 2 * max(self._size, number), _MOST))


class Portions:
    """What a loader draws from: parts of a plan that are not done yet."""

    def __init__(self, indices: Sequence[int], done: Done, pace: Pace) -> None:
        self._indices = indices
        self._gaps = done.gaps(len(indices))
        self._left = sum(end - begin for begin, end in self._gaps)
        self._pace = pace
        self._begins: list[int] = []  # of portions that were drawn, in order
        self._ends: list[int] = []

    def __iter__(self) -> Iterator[Sequence[int]]:
        for begin, end in self._gaps:
            while begin < end:
                upto = min(end, begin + self._pace.size(self._left))
                self._left -= upto - begin
                self._begins.append(begin)
                self._ends.append(upto)
                yield self._indices[begin:upto]
                begin = upto

    def around(self, index: int) -> tuple[int, int]:
        """The portion that a sample was in, as places in the plan."""
        at = bisect.bisect_right(self._begins, self.place(index)) - 1
        return self._begins[at], self._ends[at]

    def place(self, index: int) -> int:
        if isinstance(self._indices, range):
            return self._indices.index(index)
        return bisect.bisect_left(self._indices, index)


class Endless:
    """What a loader draws from for a stream: how many samples to take next."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def __iter__(self) -> Iterator[Sequence[int]]:
        while True:
            yield range(self._pace.size(None))


Source = Portions | Endless
