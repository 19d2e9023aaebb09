"""Finds the samples that make a step over many samples raise (__getitems__, collate, pickling), and where in a batch.

Reads   whether the step works for a choice of samples.
Writes  nothing.
Never   gives up a healthy sample where a smaller choice explains the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

Works = Callable[[Sequence[int]], bool]
Search = Callable[[Sequence[int], Works], tuple[int, ...]]
_MOST_TRIES = 256
_DEEPEST = 12
_WHOLE = (str, bytes, int, float, bool, type(None), type)  # nothing to be found inside


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


def place_in(batch: Any, packs: Callable[[Any], bool]) -> str:
    """The way from a batch that cannot be pickled to what in it cannot: «['meta'][3].lock». Empty: the batch itself."""
    tries = 0
    way = ""
    for _ in range(_DEEPEST):
        for step, part in _parts(batch):
            tries += 1
            if tries > _MOST_TRIES:
                return way
            if not packs(part):
                way += step
                batch = part
                break
        else:
            break
    return way


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = [(f".{name}", part) for name, part in zip(value._fields, value)]
    elif isinstance(value, (list, tuple)):
        parts = [(f"[{number}]", part) for number, part in enumerate(value)]
    elif callable(value) or not hasattr(value, "__dict__"):
        return
    else:
        parts = [(f".{name}", part) for name, part in vars(value).items()]
    yield from ((step, part) for step, part in parts if not isinstance(part, _WHOLE))
