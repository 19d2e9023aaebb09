"""Arrays, tensors and tables in shared memory: their bytes are moved, the objects around them are ordinary ones.

Reads   arrays, tensors, pandas and Arrow tables, through the buffers that pickle protocol 5 takes out of them.
Writes  reducers for multiprocessing's pickler, once: of arrays, tensors and Arrow buffers.
Never   changes how anything that was not shared is pickled; imports neither torch nor pandas nor pyarrow.

A process that multiprocessing starts gets a shared array by handle. Any other pickle of it (through a queue, by
`pickle.dumps`, a checkpoint) has the values, as of any array.
"""

from __future__ import annotations

import copyreg
import io
import pickle
import sys
from collections.abc import Callable
from multiprocessing import context
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy

from outlive._share import segments
from outlive._share.segments import Builder, Memory, Segment

_TABLES = ("pandas", "pyarrow", "scipy")
# What torch.frombuffer takes: with types that are packed or quantized it ends the process.
_FLAT = (
    *("float64", "float32", "float16", "bfloat16", "complex64", "complex128"),
    *("int64", "int32", "int16", "int8", "uint8", "bool"),
)
_PROTOCOL = 5


# ---------------------------------------------------------------- which they are


def is_array(obj: Any) -> bool:
    return type(obj) is numpy.ndarray and not obj.dtype.hasobject


def is_tensor(obj: Any) -> bool:
    """Whether this is an ordinary tensor in main memory, with nothing attached that its bytes do not say."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and type(obj) is torch.Tensor
        and obj.device.type == "cpu"
        and obj.layout is torch.strided
        and str(obj.dtype).removeprefix("torch.") in _FLAT
        and not (obj.requires_grad or obj.is_conj() or obj.is_neg() or obj._backward_hooks or obj.__dict__)
    )


def is_table(obj: Any) -> bool:
    """Whether this is of a package whose objects give their buffers to pickle."""
    return type(obj).__module__.partition(".")[0] in _TABLES and not isinstance(obj, type)


def is_shared(obj: Any) -> bool:
    """Whether the bytes of an array, a tensor or a table lie in shared memory already."""
    if is_array(obj):
        return _place_of_array(obj) is not None
    if is_tensor(obj):
        return _place_of_tensor(obj) is not None
    return is_table(obj) and _is_shared_table(obj)


def _is_shared_table(obj: Any) -> bool:
    if not segments.any_here():
        return False
    try:
        _, found = ElementPickler().dump(obj)
    except Exception:  # what cannot be pickled was never shared
        return False
    places = [numpy.frombuffer(buffer, numpy.uint8).ctypes.data for buffer in found]
    return bool(found) and all(segments.find(place, buffer.nbytes) for place, buffer in zip(places, found))


# ---------------------------------------------------------------- into a segment


class ElementPickler:
    """Pickles values that are to lie in a segment one by one, with their buffers apart."""

    def __init__(self) -> None:
        self._buffers: list[Any] = []
        self._file = io.BytesIO()
        self._pickler = pickle.Pickler(self._file, _PROTOCOL, buffer_callback=self._take)
        table: dict[type, Any] = {**copyreg.dispatch_table, Segment: _refuse}
        torch = sys.modules.get("torch")
        if torch is not None:
            table[torch.Tensor] = _take_apart
        table |= dict.fromkeys(_arrow_arrays(), lambda array: _bare(array) or array.__reduce_ex__(_PROTOCOL))
        self._pickler.dispatch_table = table

    def _take(self, buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if not raw.nbytes:
            return True
        self._buffers.append(raw)
        return False

    def dump(self, value: Any) -> tuple[bytes, list[memoryview]]:
        self._buffers = []
        self._file.seek(0)
        self._file.truncate()
        self._pickler.clear_memo()
        self._pickler.dump(value)
        return self._file.getvalue(), self._buffers


def _refuse(segment: Segment) -> Any:
    raise pickle.PicklingError("it contains something that was shared before: share the outer object alone")


def _take_apart(tensor: Any) -> Any:
    if not is_tensor(tensor):
        return tensor.__reduce_ex__(_PROTOCOL)
    name = str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel():
        return _empty_tensor, (name, tuple(tensor.shape))
    flat, stride = _dense(tensor)
    octets = flat.view(sys.modules["torch"].uint8).numpy()
    return _tensor_from, (pickle.PickleBuffer(octets), name, tuple(tensor.shape), stride)


def _dense(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """All elements in a row, in the order of the tensor's memory, and its strides there; a copy if it has gaps."""
    repeated = [step == 0 and length > 1 for length, step in zip(tensor.shape, tensor.stride())]
    for dimension, is_repeated in enumerate(repeated):
        if is_repeated:  # by expand()
            tensor = tensor.narrow(dimension, 0, 1)
    reach = 1
    for step, length in sorted((step, length) for length, step in zip(tensor.shape, tensor.stride()) if length > 1):
        if step != reach:
            tensor = tensor.clone()  # which keeps the order of the dimensions
            break
        reach *= length
    stride = tuple(0 if is_repeated else step for step, is_repeated in zip(tensor.stride(), repeated))
    return tensor.as_strided((tensor.numel(),), (1,)), stride


def _tensor_from(buffer: Any, name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    octets = numpy.frombuffer(buffer, numpy.uint8)
    found = segments.find(octets.ctypes.data, octets.nbytes)
    assert found is not None
    segment, mapped = found
    return _tensor(mapped, octets.ctypes.data - segment.address, name, shape, stride)


def _arrow_arrays() -> list[type]:
    """pandas' arrays of Arrow memory, which copy it when they are pickled, also where it is shared."""
    pandas = sys.modules.get("pandas")
    arrays = getattr(getattr(pandas, "core", None), "arrays", None)
    names = ("ArrowExtensionArray", "ArrowStringArray")
    return [getattr(arrays, name) for name in names if hasattr(arrays, name)]


def _bare(array: Any) -> Any:
    """A shared array with the very memory that it has."""
    held = [buffer for chunk in array._pa_array.chunks for buffer in chunk.buffers() if buffer is not None]
    if not any(buffer.size and segments.find(buffer.address, buffer.size) for buffer in held):
        return None
    return _bare_again, (type(array), {name: value for name, value in vars(array).items() if name != "_cache"})


def _bare_again(kind: Any, state: dict[str, Any]) -> Any:
    array = object.__new__(kind)
    array.__setstate__(state)
    return array


def _empty_tensor(name: str, shape: tuple[int, ...]) -> Any:
    import torch

    return torch.empty(shape, dtype=getattr(torch, name), device="cpu")


Opener = Callable[[Memory], Any]


def pack(obj: Any, builder: Builder) -> Opener | None:
    """Add the bytes of an array, a tensor or a table; how to open it in the segment. None: it has none to share."""
    if is_array(obj):
        order: Any = "F" if obj.flags.f_contiguous and not obj.flags.c_contiguous else "C"
        at = builder.add(numpy.ravel(obj, order=order).view(numpy.uint8) if obj.size else b"")
        return lambda mapped: _array(mapped, at, obj.dtype, obj.shape, order)
    pickled, buffers = ElementPickler().dump(obj)
    if not buffers:
        return None
    extents = [(builder.add(buffer), buffer.nbytes) for buffer in buffers]

    def open_(mapped: Memory) -> Any:
        register()
        view = segments.reading(mapped)
        return pickle.loads(pickled, buffers=[view[at : at + size] for at, size in extents])

    return open_


def _array(mapped: Memory, at: int, dtype: Any, shape: tuple[int, ...], how: Any) -> Any:
    """An array over these bytes, read-only; `how` is its order or its strides."""
    register()
    order: Any
    order, strides = (how, None) if isinstance(how, str) else ("C", how)
    array: Any = numpy.ndarray(shape, dtype, mapped, at, strides, order)
    array.flags.writeable = False
    return array


def _tensor(mapped: Memory, at: int, name: str, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """A tensor over these bytes. torch has none that are read-only: what is written is seen by all."""
    import torch

    register()
    dtype = getattr(torch, name)
    count = 1 + sum((length - 1) * step for length, step in zip(shape, stride))
    flat = torch.frombuffer(mapped, dtype=dtype, count=count, offset=at)
    # Not a view of `flat`: a view is refused by some in-place operations.
    return torch.empty(0, dtype=dtype, device="cpu").set_(flat.untyped_storage(), 0, shape, stride)


# ---------------------------------------------------------------- to a process that is started


def register() -> None:
    """Have multiprocessing hand on by handle what lies in shared memory; of types that are imported by now."""
    known = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    for kind, place in places().items():
        if not isinstance(known.get(kind), _ByHandle):
            ForkingPickler.register(kind, _ByHandle(place, known.get(kind)))


def places() -> dict[type, Callable[[Any], Any]]:
    """For types whose bytes may lie in shared memory, what reduces one to where it lies; None: it does not."""
    kinds: dict[type, Callable[[Any], Any]] = {numpy.ndarray: _place_of_array}
    if "torch" in sys.modules:
        kinds[sys.modules["torch"].Tensor] = _place_of_tensor
    if "pyarrow" in sys.modules:
        kinds[sys.modules["pyarrow"].Buffer] = _place_of_buffer
    return kinds | dict.fromkeys(_arrow_arrays(), _bare)


class _ByHandle:
    """Reduces what lies in shared memory to where it lies, for a process that is being started; else as before.

    Not for what a worker sends: the receiver's batch would be the dataset, for everybody, and to be written to.
    """

    def __init__(self, place: Callable[[Any], Any], before: Callable[[Any], Any] | None) -> None:
        self._place = place
        self._before = before

    def __call__(self, obj: Any) -> Any:
        placed = self._place(obj) if context.get_spawning_popen() is not None else None
        if placed is not None:
            return placed
        return self._before(obj) if self._before is not None else obj.__reduce_ex__(pickle.DEFAULT_PROTOCOL)


def _place_of_array(array: Any) -> Any:
    if array.dtype.hasobject or not array.size:
        return None
    low = high = array.ctypes.data
    for length, step in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, (length - 1) * step), high + max(0, (length - 1) * step)
    found = segments.find(low, high - low + array.itemsize)
    if found is None:
        return None
    segment = found[0]
    return _array, (segment, array.ctypes.data - segment.address, array.dtype, array.shape, array.strides)


def _place_of_tensor(tensor: Any) -> Any:
    if not is_tensor(tensor) or not tensor.numel():
        return None
    reach = 1 + sum((length - 1) * step for length, step in zip(tensor.shape, tensor.stride(), strict=True))
    found = segments.find(tensor.data_ptr(), reach * tensor.element_size())
    if found is None:
        return None
    segment = found[0]
    name = str(tensor.dtype).removeprefix("torch.")
    return _tensor, (segment, tensor.data_ptr() - segment.address, name, tuple(tensor.shape), tensor.stride())


def _place_of_buffer(buffer: Any) -> Any:
    found = segments.find(buffer.address, buffer.size) if buffer.size and buffer.is_cpu else None
    if found is None:
        return None
    return _arrow_buffer, (found[0], buffer.address - found[0].address, buffer.size)


def _arrow_buffer(mapped: Memory, at: int, size: int) -> Any:
    import pyarrow  # type: ignore[import-untyped]

    register()
    return pyarrow.py_buffer(segments.reading(mapped)[at : at + size])
