"""What is said when the arrays of a graph turn out to be damaged while they are sampled.

Reads   nothing.
Writes  nothing.
Never   guesses: C and NumPy find the same damage, and say it in the same words.
"""

from __future__ import annotations

import enum

_NEXT = "; the graph's file or memory is damaged: build the graph again, or open another copy of its file"


class Damage(enum.IntEnum):
    """sampler.h has the same numbers."""

    SOUND = 0
    NODE_OUTSIDE = 1
    COLUMN_DAMAGED = 2
    SOURCE_OUTSIDE = 3
    WEIGHT_BAD = 4
    TOTAL_BAD = 5
    ROOM_EXCEEDED = 6


def error(damage: Damage, place: int) -> ValueError:
    """The error to raise. `place`: an edge in the graph's order, or a node; see sampler.h."""
    if damage is Damage.NODE_OUTSIDE:
        return ValueError(f"node {place} of a frontier is not in the graph{_NEXT}")
    if damage is Damage.COLUMN_DAMAGED:
        return ValueError(f"indptr of node {place} does not ascend within the graph's edges{_NEXT}")
    if damage is Damage.SOURCE_OUTSIDE:
        return ValueError(f"edge {place} (sorted by destination) comes from a node that is not in the graph{_NEXT}")
    if damage is Damage.WEIGHT_BAD:
        return ValueError(
            f"the weight of edge {place} (sorted by destination) is negative or not finite; weights must be numbers "
            f"from 0 on: an edge of weight 0 is never drawn"
        )
    if damage is Damage.TOTAL_BAD:
        return ValueError(f"the weights of edges into node {place} sum to infinity; scale the weights down")
    return ValueError(f"the graph changed while it was sampled{_NEXT}")
