"""Tensors in cells: taken apart in the worker, put together as views in the trainer.

Reads   tensors.
Writes  their storages into the arena, each one once, however many tensors share it.
Never   /dev/shm, nor a descriptor per tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from outlive._transport import packing, wire
from outlive._transport.parts import WASTE, Extent, parts_of

if TYPE_CHECKING:
    from outlive._transport.cells import Arena
    from outlive._transport.wire import Place

_DTYPES = tuple(sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str))
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_CPU = torch.device("cpu")


# What torch.frombuffer takes; with types that are packed or quantized it ends the process.
_FLAT = frozenset(
    _CODES[dtype]
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
)


class Packing(Protocol):
    """What tensors are packed into: the cells that a batch travels in, or the buffers beside a task."""

    owners: dict[int, Any]  # storage → what carries it: tensors that share one go on sharing it
    places: list[Place]
    unsettled: bool  # some places were promised and are to be filled in

    def place_storage(self, storage: torch.UntypedStorage, low: int, size: int) -> int: ...
    def promise_place(self) -> int: ...


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def is_flat(dtype: torch.dtype) -> bool:
    """Whether tensors of this type can be made from plain bytes."""
    return _CODES[dtype] in _FLAT


class Stored:
    """A storage on its way; pickled by identity, so that tensors which share it go on sharing it."""

    __slots__ = ("keep", "place")

    def __init__(self, place: int, keep: torch.UntypedStorage) -> None:
        self.place = place
        self.keep = keep

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, (self.place,)


class Partly:
    """A storage that only small views were seen of so far: what of it travels is settled when all are known."""

    __slots__ = ("extents", "keep", "views")

    def __init__(self, keep: torch.UntypedStorage) -> None:
        self.keep = keep
        self.extents: list[Extent] = []
        self.views: dict[int, torch.Tensor] = {}

    def promise(self, packer: Packing, tensor: torch.Tensor) -> int:
        """A place for a view, to be filled in."""
        low = int(tensor.storage_offset()) * tensor.dtype.itemsize
        reach = sum(int(length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        place = packer.promise_place()
        self.extents.append(Extent(low, low + reach * tensor.dtype.itemsize, tensor.nbytes, place))
        self.views[place] = tensor
        return place

    def promise_all(self, packer: Packing) -> _Promised:
        place = packer.promise_place()
        size = self.keep.nbytes()
        self.extents.append(Extent(0, size, size, place))
        return _Promised(place)

    def settle(self, packer: Packing) -> None:
        """Copy what travels, and say where each view finds itself in it."""
        for part in parts_of(self.extents):
            if part.dense:
                for view in part.views:
                    clone = _compact(self.views[view.place].detach(), self.keep)
                    whole = clone.untyped_storage()
                    where = packer.place_storage(whole, 0, whole.nbytes())
                    packer.places[view.place] = (wire.DENSE, where, 0)
            else:
                where = packer.place_storage(self.keep, part.low, part.high - part.low)
                for view in part.views:
                    packer.places[view.place] = (wire.WITHIN, where, part.low)


class _Promised:
    """All of a storage that was at first seen in parts."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return _storage, (self.place,)


def settle(packer: Packing) -> None:
    """Everything was pickled: place what of large storages travels."""
    for owner in list(packer.owners.values()):
        if type(owner) is Partly:
            owner.settle(packer)


def reducers(packer: Packing) -> dict[type, Callable[[Any], Any]]:
    """How tensors and storages are pickled by a worker's packer; of exactly these types, not of subclasses."""

    def reduce_untyped(storage: torch.UntypedStorage) -> Any:
        if storage.device != _CPU:
            return storage.__reduce_ex__(5)
        return _storage_of, (_owner(packer, storage),)

    def reduce_typed(storage: torch.TypedStorage) -> Any:
        if storage._untyped_storage.device != _CPU:
            return storage.__reduce_ex__(5)
        return _typed_storage, (_owner(packer, storage._untyped_storage), storage.dtype)

    def reduce_tensor(tensor: torch.Tensor) -> Any:
        return _reduce_tensor(packer, tensor)

    return {
        torch.Tensor: reduce_tensor,
        torch.UntypedStorage: reduce_untyped,
        torch.TypedStorage: reduce_typed,
    }


def _reduce_tensor(packer: Packing, tensor: torch.Tensor) -> Any:
    if (
        tensor.device != _CPU
        or tensor.layout is not torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.is_conj()
        or tensor.is_neg()
        or tensor._backward_hooks
        or tensor.__dict__
    ):
        return _mended(tensor.__reduce_ex__(5))
    requires_grad = tensor.requires_grad
    if requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not support "
            "crossing process boundaries.  If you just want to transfer the data, call detach() on the tensor "
            "before serializing (e.g., putting it on the queue)."
        )
    storage = tensor.untyped_storage()
    size, whole = tensor.nbytes, storage.nbytes()
    code = _CODES[tensor.dtype]
    owner = packer.owners.get(storage._cdata)
    if owner is None and size * WASTE < whole and size + 4096 < whole and size:
        owner = packer.owners[storage._cdata] = Partly(storage)
        packer.unsettled = True
    if type(owner) is Partly and size:
        place = owner.promise(packer, tensor)
        return _part, (place, code, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), requires_grad)
    if owner is None or size == 0:
        if size == 0:
            return _empty, (code, tuple(tensor.shape), tensor.stride(), requires_grad)
        if size == whole and code in _FLAT and tensor.is_contiguous() and _has_plain_strides(tensor):
            # By far the most: a tensor that is all of its storage.
            packer.owners[storage._cdata] = tensor
            return _tensor, (packer.place_storage(storage, 0, size), code, tuple(tensor.shape), requires_grad)
        owner = _owner(packer, storage)
    return _view, (owner, code, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), requires_grad)


def _has_plain_strides(tensor: torch.Tensor) -> bool:
    """Whether the strides of a contiguous tensor are those that its shape would be given: along a single element, as
    the channel of a gray image in channels_last, they may be any.
    """
    if 1 not in tensor.shape:
        return True
    expected = 1
    for length, step in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if step != expected:
            return False
        expected *= length
    return True


def _mended(reduced: Any) -> Any:
    """torch's own way to take a tensor apart, with our way to put it together where its own serves torch.load only."""
    function, arguments, *rest = reduced
    if function is torch._tensor._rebuild_from_type_v2 and arguments[0] in _INSTEAD:
        return function, (_INSTEAD[arguments[0]], *arguments[1:]), *rest
    return _INSTEAD.get(function, function), arguments, *rest


def _compact(tensor: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """What a tensor looks at, without the rest of its storage; of integers in place of a type that cannot be copied."""
    if _CODES[tensor.dtype] not in _FLAT:
        bits = torch.empty(0, dtype=_BITS[tensor.dtype.itemsize], device=_CPU)
        tensor = bits.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor.clone(memory_format=torch.preserve_format)


def _owner(packer: Packing, storage: torch.UntypedStorage) -> Any:
    """What carries a storage: the tensor that was packed with it first, or the storage alone."""
    owner = packer.owners.get(storage._cdata)
    if type(owner) is Partly:
        return owner.promise_all(packer)
    if owner is None:
        owner = Stored(packer.place_storage(storage, 0, storage.nbytes()), storage)
        packer.owners[storage._cdata] = owner
    return owner


# ---------------------------------------------------------------- in the trainer


def _tensor(place: int, code: int, shape: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    opening = packing.now.opening
    where = opening.places[place]
    memory, offset = opening.piece(where)
    dtype = _DTYPES[code]
    # In place and not a view of a flat tensor: a view is refused by some in-place operations.
    tensor = torch.frombuffer(memory, dtype=dtype, count=where[2] // dtype.itemsize, offset=offset)
    if len(shape) != 1:
        tensor.resize_(shape)
    if requires_grad:
        tensor.requires_grad_(True)
    return tensor


def _view(
    owner: torch.Tensor | torch.UntypedStorage,
    code: int,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
) -> torch.Tensor:
    tensor = torch.empty(0, dtype=_DTYPES[code], device=_CPU).set_(_storage_of(owner), offset, shape, stride)
    if requires_grad:
        tensor.requires_grad_(True)
    return tensor


def _part(
    place: int, code: int, offset: int, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> torch.Tensor:
    kind, where, start = packing.now.opening.places[place]
    if kind == wire.DENSE:
        offset, start = 0, 0
        stride = torch.empty_strided(shape, stride, device="meta").clone(memory_format=torch.preserve_format).stride()
    return _view(_storage(where), code, offset - start // _DTYPES[code].itemsize, shape, stride, requires_grad)


def _empty(code: int, shape: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=_DTYPES[code], device=_CPU, requires_grad=requires_grad)


def _storage(place: int) -> torch.UntypedStorage:
    opening = packing.now.opening
    cell, offset, size = opening.places[place]
    if cell == wire.WITHIN:
        return _storage(offset)
    if size == 0:
        return torch.UntypedStorage(0)
    storage = opening.storages.get(place)
    if storage is None:
        memory, offset = opening.piece((cell, offset, size))
        flat = torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=offset)
        storage = opening.storages[place] = flat.untyped_storage()
    return storage


def _storage_of(owner: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    return owner.untyped_storage() if isinstance(owner, torch.Tensor) else owner


def _typed_storage(owner: torch.Tensor | torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    return torch.TypedStorage(wrap_storage=_storage_of(owner), dtype=dtype, _internal=True)


def _newer_dtype(storage: torch.UntypedStorage, *arguments: Any) -> torch.Tensor:
    """torch's looks for a typed storage."""
    rebuilt: torch.Tensor = torch._utils._rebuild_tensor_v3(_typed_storage(storage, torch.uint8), *arguments)
    return rebuilt


def _sparse(layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """torch's puts each one into a list, to be checked at the end of torch.load; here it would stay for ever."""
    if layout is torch.sparse_coo:
        indices, values, size, coalesced = parts
        return torch.sparse_coo_tensor(
            indices, values, size, device=values.device, is_coalesced=coalesced, check_invariants=False
        )
    compressed, plain, values, size = parts
    return torch.sparse_compressed_tensor(
        compressed, plain, values, size, layout=layout, device=values.device, check_invariants=False
    )


_INSTEAD: dict[Any, Callable[..., torch.Tensor]] = {
    torch._utils._rebuild_tensor_v3: _newer_dtype,
    torch._utils._rebuild_sparse_tensor: _sparse,
}


# ---------------------------------------------------------------- in the worker, while collating


def room_for(arena: Arena, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor inside the arena, to be written by `out=`."""
    count = 1
    for length in shape:
        count *= length
    if count == 0:
        return torch.empty(shape, dtype=dtype, device=_CPU)
    _, offset, _, root = arena.allocate(count * dtype.itemsize)
    room = torch.frombuffer(root, dtype=dtype, count=count, offset=offset)
    # In place, as in `_tensor`: a view could not be detached in place by a collate function.
    return room if len(shape) == 1 else room.resize_(shape)


def storage_for(arena: Arena, count: int, dtype: torch.dtype) -> torch.TypedStorage:
    """The same for types that `torch.frombuffer` does not take."""
    size = count * dtype.itemsize
    if size == 0:
        return _typed_storage(torch.UntypedStorage(0, device=_CPU), dtype)
    _, offset, _, root = arena.allocate(size)
    return _typed_storage(torch.frombuffer(root, dtype=torch.uint8, count=size, offset=offset), dtype)
