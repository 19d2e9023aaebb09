"""Finds the samples that make a step over many samples raise: __getitems__, collate, pickling.

Reads   whether the step works for a choice of samples.
Writes  nothing.
Never   gives up a healthy sample where a smaller choice explains the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Works = Callable[[Sequence[int]], bool]


def by_halving(positions: Sequence[int], works: Works) -> tuple[int, ...]:
    """For a step in which each sample fails on its own account. `positions` is known to fail."""
    if len(positions) == 1:
        return tuple(positions)
    middle = len(positions) // 2
    found: list[int] = []
    for half in (positions[:middle], positions[middle:]):
        if not works(half):
            found.extend(by_halving(half, works))
    return tuple(found) or tuple(positions)


def by_company(positions: Sequence[int], works: Works) -> tuple[int, ...]:
    """For a step in which samples may also fail to fit each other. `positions` is known to fail."""
    alone = tuple(p for p in positions if not works([p]))
    if alone:
        rest = [p for p in positions if p not in alone]
        return alone if not rest or works(rest) else alone + by_company(rest, works)
    for position in positions:
        if works([p for p in positions if p != position]):
            return (position,)
    best: list[int] = []
    for first in positions[:3]:
        group = [first]
        for position in positions:
            if position != first and works([*group, position]):
                group.append(position)
        if len(group) > len(best):
            best = group
    return tuple(p for p in positions if p not in best)
