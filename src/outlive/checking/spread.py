"""How values are spread: p50, p99 and the largest of any number of them, in a few hundred counts.

Reads   values, or the counts of other workers.
Writes  nothing.
Never   keeps the values: a billion samples are no more than a thousand. Percentiles are right to 5 %, the least and
        the largest value exactly.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_PER_DOUBLING = 16
MOST_LISTED = 1000  # outliers that are kept with their names


class Outlier(NamedTuple):
    value: int
    index: Any  # an index, or the worker and place of a sample in a stream


class Counts(NamedTuple):
    """What a worker tells of the values of one batch."""

    buckets: tuple[tuple[int, int], ...]
    least: int
    largest: Outlier
    outliers: tuple[Outlier, ...]  # from some value on


def count(values: NDArray[np.int64], indices: Any, floor: int) -> Counts:
    """The values of samples with these indices; those from `floor` on are named."""
    numbers = np.bincount((np.log2(values + 1.0) * _PER_DOUBLING).astype(np.int64))
    buckets = tuple((int(bucket), int(numbers[bucket])) for bucket in np.flatnonzero(numbers))
    at = int(values.argmax())
    largest = Outlier(int(values[at]), indices[at])
    if largest.value < floor:
        return Counts(buckets, int(values.min()), largest, ())
    far = np.flatnonzero(values >= floor)
    if len(far) > MOST_LISTED:
        far = far[np.argpartition(values[far], -MOST_LISTED)[-MOST_LISTED:]]
    named = tuple(Outlier(int(values[at]), indices[at]) for at in far.tolist())
    return Counts(buckets, int(values.min()), largest, named)


class Spread:
    """Of all samples so far."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self.number = 0
        self.least = 0
        self.largest = Outlier(0, None)
        self.outliers: list[Outlier] = []

    def add(self, counts: Counts) -> None:
        for bucket, number in counts.buckets:
            self._buckets[bucket] += number
            self.number += number
        first = self.largest.index is None
        self.least = counts.least if first else min(self.least, counts.least)
        if first or counts.largest.value > self.largest.value:
            self.largest = counts.largest
        if counts.outliers:
            self.outliers.extend(counts.outliers)
            if len(self.outliers) > 2 * MOST_LISTED:
                self.outliers = sorted(self.outliers, key=lambda o: -o.value)[:MOST_LISTED]

    def quantile(self, share: float) -> int:
        """The value that this share of samples does not exceed."""
        before = 0
        for bucket in sorted(self._buckets):
            before += self._buckets[bucket]
            if before >= share * self.number:
                middle = round(2 ** ((bucket + 0.5) / _PER_DOUBLING) - 1)
                return min(max(middle, self.least), self.largest.value)
        return self.largest.value

    def threshold(self, floor: int) -> int:
        """From where on a value is far from the others: ten times the usual one, ten times further up than the middle
        half of them is wide, and no less than `floor`.
        """
        low, middle, high = (self.quantile(share) for share in (0.25, 0.5, 0.75))
        return max(floor, 10 * middle, high + 10 * (high - low))

    def beyond(self, threshold: int) -> list[Outlier]:
        """The largest first."""
        return sorted((o for o in self.outliers if o.value >= threshold), key=lambda o: (-o.value, str(o.index)))

    def number_beyond(self, threshold: int) -> int:
        """How many there are: of a few exactly, else by the counts."""
        named = len(self.beyond(threshold))
        if named < MOST_LISTED:
            return named
        first = math.floor(math.log2(threshold + 1.0) * _PER_DOUBLING)
        return max(named, sum(number for bucket, number in self._buckets.items() if bucket > first))

    def to_dict(self) -> dict[str, Any]:
        return {
            "buckets": sorted(self._buckets.items()),
            "least": self.least,
            "largest": self.largest,
            "outliers": self.outliers,
        }

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Spread:
        spread = cls()
        spread._buckets = Counter({int(bucket): int(number) for bucket, number in told["buckets"]})
        spread.number = sum(spread._buckets.values())
        spread.least = int(told["least"])
        spread.largest = _outlier(told["largest"])
        spread.outliers = [_outlier(each) for each in told["outliers"]]
        return spread


def _outlier(told: Any) -> Outlier:
    value, index = told
    return Outlier(int(value), tuple(index) if isinstance(index, list) else index)
