"""default_collate, writing straight into the memory that the batch travels in.

Reads   the samples of a batch.
Writes  their stack into the worker's arena.
Never   in the trainer's process: the entry is changed in workers only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils import collate as torch_collate

from outlive._transport import tensors
from outlive._transport.cells import Arena

_plain = torch_collate.collate_tensor_fn


def install(arena: Arena) -> None:
    """In a worker: have default_collate, and custom functions that call it, stack into `arena`."""

    def collate_tensor(batch: Any, *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if first.device.type != "cpu" or first.layout is not torch.strided or first.is_nested:
            return _plain(batch, collate_fn_map=collate_fn_map)
        shape = (len(batch), *first.shape)
        if type(first) is torch.Tensor and tensors.is_flat(first.dtype):
            return torch.stack(batch, 0, out=tensors.room_for(arena, shape, first.dtype))
        # As torch has it, subclasses included, but not in /dev/shm, where torch would put it.
        storage = tensors.storage_for(arena, sum(item.numel() for item in batch), first.dtype)
        return torch.stack(batch, 0, out=first.new(storage).resize_(shape))

    if torch_collate.default_collate_fn_map.get(torch.Tensor) is _plain:
        torch_collate.default_collate_fn_map[torch.Tensor] = collate_tensor
