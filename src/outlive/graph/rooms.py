"""Where the arrays of a batch are made: in plain memory, or in the cell that the batch travels in.

Reads   nothing.
Writes  nothing; hands out room to be written.
Never   makes an array twice: what is gathered into a cell is sent from there.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Room(Protocol):
    """Hands out arrays to be filled."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], Any]:
        """An array to write to, and what the batch is to hold: itself, or a tensor over the same memory."""
        ...

    def wrap(self, array: NDArray[Any]) -> Any:
        """What the batch is to hold of an array that is there already."""
        ...


class Plain:
    """NumPy arrays."""

    def take(self, shape: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], Any]:
        array = np.empty(shape, dtype)
        return array, array

    def wrap(self, array: NDArray[Any]) -> Any:
        return array


class Tensors:
    """torch's tensors; in the cell of a worker's batch, where an arena is given."""

    def __init__(self, arena: Any = None) -> None:
        import torch

        self._torch = torch
        self._arena = arena

    def take(self, shape: tuple[int, ...], dtype: Any) -> tuple[NDArray[Any], Any]:
        tensor: Any = self._torch.from_numpy(np.empty(0, dtype))
        kind = tensor.dtype
        if self._arena is not None and 0 not in shape:
            from outlive._transport import tensors

            if tensors.is_flat(kind):
                tensor = tensors.room_for(self._arena, shape, kind)
                return tensor.numpy(), tensor
        tensor = self._torch.empty(shape, dtype=kind, device="cpu")
        return tensor.numpy(), tensor

    def wrap(self, array: NDArray[Any]) -> Any:
        if not array.flags.writeable:
            array = array.copy()
        return self._torch.from_numpy(array)
