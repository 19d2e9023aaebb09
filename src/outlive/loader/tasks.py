"""What the trainer sends to a worker for one batch, and how it is packed.

Reads   indices as the sampler drew them.
Writes  bytes: packed integers in the common case, a pickle for everything else.
Never   changes the type of an index: a dataset gets what its sampler gave.
"""

from __future__ import annotations

import pickle
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlive.orders import WHOLE, Plan

_INTEGERS = b"i"
_OBJECTS = b"o"
_PLANNED = b"p"


@dataclass(frozen=True)
class MapTask:
    """Which samples make up a batch: by position, after what was left out or replaced."""

    live: dict[int, Any]  # position in the batch → index
    candidates: tuple[Any, ...] = ()
    whole: Any = None  # the index list as drawn, when nothing was changed
    tried: Mapping[int, int] = field(default_factory=dict)  # position → how many candidates were bad there

    def candidate(self, position: int, nth: int) -> Any:
        """What the nth replacement in a place is: the same whoever asks, and whatever else went wrong."""
        return candidate(self.candidates, position, nth)


@dataclass(frozen=True)
class StreamTask:
    count: int  # samples to take; -1: one, without collating
    excluded: frozenset[int] = frozenset()
    extended: int = 0  # take so many more, in place of excluded ones
    probe: tuple[int, ...] | None = None


def candidate(candidates: Sequence[Any], position: int, nth: int) -> Any:
    return candidates[(3 * position + nth) % len(candidates)]


def encode_map(
    index: Any, batched: bool, plan: Plan, candidates: Sequence[Any], substituted: Mapping[int, Any]
) -> bytes:
    if plan is WHOLE and not candidates:
        if batched and type(index) is list and set(map(type, index)) == {int}:
            try:
                return _INTEGERS + array("q", index).tobytes()
            except OverflowError:
                pass
        return _OBJECTS + pickle.dumps((index, batched), 5)
    indices = list(index) if batched else [index]
    live = {p: i for p, i in enumerate(indices) if p not in plan.excluded}
    live.update({p: i for p, i in substituted.items() if p in live})
    if plan.probe is not None:
        live = {p: i for p, i in live.items() if p in plan.probe}
    whole = index if plan is WHOLE else None
    return _PLANNED + pickle.dumps((live, tuple(candidates), whole, dict(plan.substitutes)), 5)


def is_plain(body: memoryview) -> bool:
    """Whether a task is a batch of whole numbers, as it was drawn."""
    return body[0] == _INTEGERS[0]


def decode_plain(body: memoryview) -> list[int]:
    numbers = array("q")
    numbers.frombytes(body[1:])
    return numbers.tolist()


def decode_map(body: memoryview) -> MapTask:
    kind, rest = bytes(body[:1]), body[1:]
    if kind == _INTEGERS:
        indices = decode_plain(body)
        return MapTask(dict(enumerate(indices)), (), indices)
    if kind == _OBJECTS:
        index, batched = pickle.loads(rest)
        return MapTask(dict(enumerate(index)) if batched else {0: index}, (), index)
    return MapTask(*pickle.loads(rest))


def encode_stream(count: int, plan: Plan) -> bytes:
    excluded = plan.excluded | frozenset(plan.substitutes)
    return pickle.dumps(StreamTask(count, excluded, sum(plan.substitutes.values()), plan.probe), 5)


def decode_stream(body: memoryview) -> StreamTask:
    task: StreamTask = pickle.loads(body)
    return task
