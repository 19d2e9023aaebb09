"""How large a sample is on its way to the trainer, and whether it can travel at all.

Reads   a sample.
Writes  nothing.
Never   copies what it weighs: tensors, arrays and texts are asked for their size; only other objects are pickled, into
        nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_NUMBER = 8
# What is no larger for one value than for another.
FIXED: dict[type, int] = {int: _NUMBER, float: _NUMBER, bool: 1, complex: 2 * _NUMBER, type(None): 0}
_LONG_TEXT = 1 << 16


class Unsendable(Exception):
    """A sample that was fetched and cannot be pickled."""

    def __init__(self, error: Exception, sample: Any) -> None:
        super().__init__(error, sample)
        self.error = error
        self.sample = sample


def weigh(sample: Any) -> int:
    """Its size in bytes; Unsendable where it cannot be sent to another process."""
    try:
        return _weigh(sample)
    except Exception as error:
        raise Unsendable(error, sample) from None


def _weigh(sample: Any) -> int:
    kind = type(sample)
    fixed = FIXED.get(kind)
    if fixed is not None:
        return fixed
    known = _SCALES.get(kind)
    if known is not None:
        return known(sample)
    if isinstance(sample, (torch.Tensor, np.generic)):
        return int(sample.nbytes)
    if isinstance(sample, np.ndarray) and not sample.dtype.hasobject:
        return int(sample.nbytes)
    if isinstance(sample, tuple) and hasattr(sample, "_fields"):
        return sum(map(_weigh, sample))
    scale = _Scale()
    scale.dump(sample)
    return scale.bytes


def _of_text(text: str) -> int:
    return len(text) if text.isascii() or len(text) > _LONG_TEXT else len(text.encode("utf-8", "surrogatepass"))


def _of_array(array: Any) -> int:
    if not array.dtype.hasobject:
        return int(array.nbytes)
    scale = _Scale()
    scale.dump(array.tolist())
    return scale.bytes


_SCALES: dict[type, Callable[[Any], int]] = {
    torch.Tensor: lambda tensor: int(tensor.nbytes),
    np.ndarray: _of_array,
    str: _of_text,
    bytes: len,
    bytearray: len,
    tuple: lambda sample: sum(map(_weigh, sample)),
    list: lambda sample: sum(map(_weigh, sample)),
    dict: lambda sample: sum(map(_weigh, sample.keys())) + sum(map(_weigh, sample.values())),
}


class _Scale(pickle.Pickler):
    """Pickles into nothing, and counts; tensors and arrays are counted as they are."""

    def __init__(self) -> None:
        self.bytes = 0
        super().__init__(self, 5, buffer_callback=self._buffer)

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.bytes += size
        return size

    def _buffer(self, buffer: pickle.PickleBuffer) -> None:
        self.bytes += buffer.raw().nbytes

    def reducer_override(self, thing: Any) -> Any:
        if isinstance(thing, torch.Tensor) or (isinstance(thing, np.ndarray) and not thing.dtype.hasobject):
            self.bytes += int(thing.nbytes)
            return int, ()
        return NotImplemented
