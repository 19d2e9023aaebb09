"""Tensors as arguments and results: as in batches, with their bytes beside the pickle.

Reads   tensors in main memory.
Writes  nothing.
Never   /dev/shm, as torch's own way has it; a copy, unless views look at little of a storage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outlive._transport import tensors, wire
from outlive._transport.wire import Place


class TensorBuffers:
    """The storages of one value, as buffers; a place is the number of one. Tensors that share a storage share it."""

    def __init__(self) -> None:
        self.owners: dict[int, Any] = {}
        self.places: list[Place] = []
        self.unsettled = False
        self.buffers: list[memoryview] = []

    def reducers(self) -> dict[type, Callable[[Any], Any]]:
        found = tensors.reducers(self)
        reduce = found[torch.Tensor]

        def reduce_tensor(tensor: torch.Tensor) -> Any:
            # A result with a history arrives without it. A batch with one is an error, as in torch.
            return reduce(tensor) if tensor.is_leaf else tensor.__reduce_ex__(5)

        return {**found, torch.Tensor: reduce_tensor}

    def place_storage(self, storage: torch.UntypedStorage, low: int, size: int) -> int:
        if size:
            flat = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (storage.nbytes(),), (1,))
            self.places.append((len(self.buffers), 0, size))
            self.buffers.append(flat.numpy().data[low : low + size])
        else:
            self.places.append((wire.INLINE, 0, 0))
        return len(self.places) - 1

    def promise_place(self) -> int:
        self.places.append((wire.INLINE, 0, 0))
        return len(self.places) - 1

    def clear(self) -> None:
        self.owners.clear()
        self.places.clear()
        self.buffers.clear()
        self.unsettled = False

    def settle(self, others: Sequence[memoryview]) -> tuple[list[memoryview], list[Place]]:
        """Everything was pickled: all buffers, the `others` first, and the places in them."""
        if self.unsettled:
            tensors.settle(self)
        first = len(others)
        places = [(number + first if number >= 0 else number, *rest) for number, *rest in self.places]
        return [*others, *self.buffers], places  # type: ignore[return-value]
