"""Tensors as arguments and results: their bytes beside the pickle, as those of arrays.

Reads   tensors in main memory.
Writes  nothing.
Never   /dev/shm, as torch's own way has it.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    }
)


def reduce_tensor(tensor: torch.Tensor) -> Any:
    """How a tensor is pickled; one that is more than its numbers goes as torch has it."""
    if (
        tensor.dtype not in _PLAIN
        or tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor.requires_grad
        or tensor._backward_hooks
        or tensor.__dict__
        or not tensor.numel()
    ):
        return tensor.__reduce_ex__(5)
    return _rebuilt, (tensor.contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tuple(tensor.shape))


def _rebuilt(numbers: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(numbers).view(dtype).reshape(shape)
