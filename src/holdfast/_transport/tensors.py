"""Tensors in cells: taken apart in the worker, put together as views in the trainer.

Reads   tensors.
Writes  their storages into the arena, each one once, however many tensors share it.
Never   /dev/shm, nor a descriptor per tensor.
"""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from holdfast._transport.cells import Arena
    from holdfast._transport.packing import Placer

# A view of a storage this many times its size travels without the rest of the storage.
_WASTE = 2


class Stored:
    """A storage on its way; pickled by identity, so that tensors which share it go on sharing it."""

    __slots__ = ("buffer", "keep")

    def __init__(self, buffer: pickle.PickleBuffer, keep: Any) -> None:
        self.buffer = buffer
        self.keep = keep

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, (self.buffer,)


def reduce(placer: Placer, obj: Any) -> Any:
    """Called for every object that pickle has no shortcut for; NotImplemented leaves it to pickle."""
    kind = type(obj)
    if kind is torch.Tensor:
        return _reduce_tensor(placer, obj)
    if kind is torch.UntypedStorage and obj.device.type == "cpu":
        return _storage, (_stored(placer, obj).buffer,)
    if kind is torch.TypedStorage and obj._untyped_storage.device.type == "cpu":
        return _typed_storage, (_stored(placer, obj._untyped_storage), obj.dtype)
    return NotImplemented


def _reduce_tensor(placer: Placer, tensor: torch.Tensor) -> Any:
    if (
        tensor.device.type != "cpu"
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
    ):
        return NotImplemented
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor "
            "before serializing (e.g., putting it on the queue)."
        )
    storage = tensor.untyped_storage()
    if tensor.nbytes * _WASTE < storage.nbytes() and tensor.nbytes + 4096 < storage.nbytes():
        requires_grad = tensor.requires_grad
        tensor = tensor.detach().clone(memory_format=torch.preserve_format)
        storage = tensor.untyped_storage()
    else:
        requires_grad = tensor.requires_grad
    stored = _stored(placer, storage)
    return _tensor, (stored, tensor.dtype, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), requires_grad)


def _stored(placer: Placer, storage: torch.UntypedStorage) -> Stored:
    key = storage._cdata
    stored: Stored | None = placer.storages.get(key)
    if stored is None:
        buffer = placer.place_memory(storage.data_ptr(), storage.nbytes())
        stored = placer.storages[key] = Stored(buffer, storage)
    return stored


def _storage(buffer: Any) -> torch.UntypedStorage:
    if len(buffer) == 0:
        return torch.UntypedStorage(0)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _typed_storage(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def _tensor(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=dtype).set_(storage, offset, shape, stride)
    if requires_grad:
        tensor.requires_grad_(True)
    return tensor


def room_for(arena: Arena, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor inside the arena, to be written by `out=`."""
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    _, _, _, array = arena.allocate(count * dtype.itemsize)
    return torch.frombuffer(array, dtype=dtype).view(shape)
