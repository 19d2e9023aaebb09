"""How many workers are best, found while they work: `num_workers="auto"`.

Reads   how fast batches were delivered, how long the consumer waited for them, how many workers were idle.
Writes  nothing; answers with a number.
Never   a process, a file, a lock, the clock.

    the consumer waits for batches     → more workers, twice as many at first, then half-way to what was too many
    it does not, and some are idle     → one less; back if the consumer then waits
    it does not, and nobody is idle    → as it is

What was tried in vain is not tried again for a while, and for twice as long each time.
"""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 0.4  # a judgement rests on at least so much time,
WINDOW_BATCHES = 4  # and so many batches per worker
WAITS = 0.05  # of the time: then the consumer is not fed
GAIN = 1.06  # another worker must bring so much
WARM_BATCHES = 2  # per worker, after a change
MOST_VAIN = 2  # trials of more in a row
LOOKS = 2  # so often is a trial looked at before it was in vain: others may have been busy
HOLD_S = 15.0  # before what was in vain is tried again


@dataclass
class Bound:
    """A size that was tried in vain; forgotten after a while."""

    size: int
    until: float
    hold_s: float


class Sizing:
    def __init__(self, most: int, at_first: int) -> None:
        self.most = most
        self.size = max(1, min(at_first, most))
        self._from: tuple[int, float] | None = None  # the size before this one and what it delivered: this is a trial
        self._too_many: Bound | None = None
        self._too_few: Bound | None = None
        self._doubling = True
        self._doubts = 0  # looks at this trial that were disappointing
        self._vain = 0  # trials of more, one after the other, that were
        self._warming = 0  # batches that were under way, or are a newcomer's first
        self._begin(None)

    def _begin(self, now: float | None) -> None:
        self._since = now
        self._batches = 0
        self._idle = 0.0
        self._waited_s = 0.0

    def delivered(self, now: float, waited_s: float, idle: int, there: int) -> int | None:
        """A batch was delivered, after the consumer had waited so long. A number: as many workers are wanted now.

        `idle`: workers that had nothing to do; `there`: workers that have begun to work.
        """
        if self._since is None or there != self.size:  # the first batch, or somebody is still on the way
            self._begin(now)
            return None
        if self._warming:
            self._warming -= 1
            self._begin(now)
            return None
        self._batches += 1
        self._idle += idle
        self._waited_s += waited_s
        span_s = now - self._since
        if span_s < WINDOW_S or self._batches < WINDOW_BATCHES * self.size:
            return None
        rate, waits = self._batches / span_s, self._waited_s / span_s
        if self._disappoints(rate, waits) and self._doubts + 1 < LOOKS:
            self._doubts += 1
            self._begin(now)
            return None
        size = self._judge(now, rate, waits, self._idle / self._batches)
        self._doubts = 0
        self._begin(now)
        if size == self.size:
            return None
        self.size = size
        self._warming = WARM_BATCHES * size
        return size

    def settle_for(self, size: int) -> None:
        """There cannot be more for the time being."""
        self.size = size
        self._from = None
        self._doubts = 0
        self._begin(None)

    def begin_epoch(self) -> None:
        self._begin(None)

    def _disappoints(self, rate: float, waits: float) -> bool:
        """Whether this is a trial, and it was better before."""
        if self._from is None or waits <= WAITS:
            return False
        size, before = self._from
        return rate < before * GAIN if size < self.size else rate * GAIN < before

    def _judge(self, now: float, rate: float, waits: float, idle: float) -> int:
        disappointing = self._disappoints(rate, waits)
        before, self._from = self._from, None
        if before is not None and disappointing:
            if before[0] < self.size:
                # Once more half-way, for the best may lie there; then this is the best for a while.
                self._vain += 1
                self._too_many = _again(self._too_many, self.size if self._vain < MOST_VAIN else before[0] + 1, now)
                self._doubling = False
            else:
                self._too_few = _again(self._too_few, self.size, now)
            return before[0]
        if before is not None:
            self._vain = 0
        if before is not None and _brought_little(before, self.size, rate) and waits > WAITS:
            # More were better, but half as many more may be as good, or better still.
            self._too_many = _again(self._too_many, self.size, now)
            self._doubling = False
            size = (before[0] + self.size) // 2
        else:
            size = self._more(now) if waits > WAITS else self._less(now, idle)
        if size != self.size:
            self._from = (self.size, rate)
        return size

    def _more(self, now: float) -> int:
        ceiling = self.most
        if self._too_many is not None and now < self._too_many.until:
            ceiling = min(ceiling, self._too_many.size - 1)
        if self._doubling:
            return max(self.size, min(2 * self.size, ceiling))
        return self.size + (ceiling - self.size + 1) // 2 if ceiling > self.size else self.size

    def _less(self, now: float, idle: float) -> int:
        floor = 1
        if self._too_few is not None and now < self._too_few.until:
            floor = self._too_few.size + 1
        return max(floor, self.size - max(1, int(idle) // 2)) if idle >= 1 and self.size > floor else self.size


def _brought_little(before: tuple[int, float], size: int, rate: float) -> bool:
    """Whether several workers more brought clearly less than their share."""
    return size - before[0] >= 2 and rate / before[1] < 0.8 * size / before[0]


def _again(bound: Bound | None, size: int, now: float) -> Bound:
    hold_s = HOLD_S if bound is None else 2 * bound.hold_s
    return Bound(size, now + hold_s, hold_s)
