"""Rows by number: the features of the nodes that a sampler found, copied to where they are wanted.

Reads   an array, and numbers of its rows.
Writes  those rows, in that order, into an array that is given: one that lies in a cell, for example.
Never   makes a copy in between.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from outlive.graph.sampling import choice, compiled


def gather_rows(source: NDArray[Any], index: NDArray[Any], out: NDArray[Any]) -> NDArray[Any]:
    """`out[i] = source[index[i]]` for all rows; answers with `out`. Any type whose items are plain bytes."""
    if index.ndim != 1 or index.dtype.kind not in "iu":
        raise ValueError(f"index must be a list of whole numbers, got {index.dtype} of shape {index.shape}")
    shape = (len(index), *source.shape[1:])
    if source.ndim < 1 or out.dtype != source.dtype or out.shape != shape:
        raise ValueError(f"out must be {source.dtype} of shape {shape}, got {out.dtype} of shape {out.shape}")
    if not out.flags.writeable:
        raise ValueError("out is read-only; give an array that may be written")
    flat = source.flags.c_contiguous and out.flags.c_contiguous and not source.dtype.hasobject
    if flat and choice.use_c() and not np.may_share_memory(source, out):
        compiled.gather(source, np.ascontiguousarray(index, np.int64), out)
        return out
    outside = (index < 0) | (index >= len(source))
    if outside.any():
        raise IndexError(f"row {int(index[np.argmax(outside)])} was asked for, of {len(source)}")
    if len(index):
        np.take(source, index, axis=0, out=out, mode="clip")  # "raise" would copy through a buffer
    return out
