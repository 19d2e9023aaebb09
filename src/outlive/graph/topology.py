"""The edges of one kind, as samplers read them.

Reads   nothing; arrays are handed over.
Writes  nothing.
Never   copies an array, and never knows where it lies (in a segment, in a file, or in plain memory).
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Longs: TypeAlias = NDArray[np.int64]
Indices: TypeAlias = "NDArray[np.int32] | NDArray[np.int64]"
EdgeType: TypeAlias = tuple[str, str, str]  # (kind of source, name of relation, kind of destination)


class Topology(NamedTuple):
    """Edges sorted by destination (CSC): those into node `v` lie at `indptr[v] : indptr[v + 1]`, sources ascending."""

    indptr: Longs
    indices: Indices  # the source of each edge; 32 bits where all nodes fit
    edge_ids: Indices | None  # where each stood in the user's edge list; None: in this order
    weights: NDArray[Any] | None = None  # float32 or float64, not negative
    times: Longs | None = None
