"""Values as plain data and back, with their types: what a state, a position file and the state of a check are made of.

Reads:   values, or the plain data that was made of them.
Writes:  nothing.
Never:   runs what plain data names: no pickle, no import, no class but those below.

    None, bool, int, float, str, list    as they are
    dict with texts as keys              a dict, unless one of its keys begins with "!"
    other dicts                          {"!dict": [[key, value], ...]}
    tuple, set, frozenset, bytes         {"!tuple": [...]}, {"!set": [...]}, {"!frozenset": [...]}, {"!bytes": base64}
    arrays and numbers of NumPy          {"!array": [dtype, shape, base64]}, {"!number": [dtype, base64]}
    tensors                              {"!tensor": [dtype, shape, base64]}

JSON carries it, and `torch.load(weights_only=True)` reads it.
"""

from __future__ import annotations

import base64
import inspect
import math
import re
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

_ATOMS = frozenset((type(None), bool, int, float, str))
_ARRAY = re.compile(r"[<>|](b1|[iu][1248]|f[248]|c8|c16|[SU]\d{1,9}|[mM]8(\[\w+\])?)")
_TENSOR = frozenset(
    (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
)
_TENSOR_NAMED = {str(dtype).removeprefix("torch."): dtype for dtype in _TENSOR}


def is_replaceable(owner: Any, name: str) -> bool:
    """Whether plain data may set this attribute of an object: never what its class defines, unless that is plain."""
    if not name.isidentifier() or name.startswith("__"):
        return False
    if name in getattr(owner, "__dict__", {}):
        return True
    of_class = type(inspect.getattr_static(type(owner), name, None))
    return of_class is types.MemberDescriptorType or (hasattr(owner, "__dict__") and of_class in _ATOMS)


class NotPlainError(TypeError):
    """A value that plain data cannot carry."""


def to_text(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def to_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def to_plain(value: Any, name: str = "it") -> Any:
    """Return a value as plain data. Raise `NotPlainError`, with the path from `name`, where that cannot carry it."""
    try:
        return _to_plain(value, name)
    except RecursionError:
        raise NotPlainError(f"{name} is nested too deeply, or contains itself") from None


def _to_plain(value: Any, path: str) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if kind is list:
        return _listed(value, path)
    if kind is dict:
        if all(type(key) is str and key[:1] != "!" for key in value):
            return {k: v if type(v) in _ATOMS else _to_plain(v, f"{path}[{k!r}]") for k, v in value.items()}
        return {"!dict": [[_to_plain(k, f"a key of {path}"), _to_plain(v, f"{path}[{k!r}]")] for k, v in value.items()]}
    if kind is tuple:
        return {"!tuple": _listed(value, path)}
    if kind in (set, frozenset):
        return {f"!{kind.__name__}": _listed(value, path)}
    if kind is bytes:
        return {"!bytes": to_text(value)}
    if kind is torch.Tensor and value.layout is torch.strided and value.dtype in _TENSOR:
        flat = value.detach().cpu().contiguous().reshape(-1)
        octets = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        return {"!tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), to_text(octets)]}
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and _ARRAY.fullmatch(value.dtype.str):
        return {"!array": [value.dtype.str, list(value.shape), to_text(value.tobytes())]}
    if numpy is not None and isinstance(value, numpy.generic) and _ARRAY.fullmatch(value.dtype.str):
        return {"!number": [value.dtype.str, to_text(value.tobytes())]}
    raise NotPlainError(f"{path} is of type {kind.__module__}.{kind.__qualname__}, which is not plain data")


def _listed(values: Any, path: str) -> list[Any]:
    return [each if type(each) in _ATOMS else _to_plain(each, f"{path}[{at}]") for at, each in enumerate(values)]


def from_plain(told: Any) -> Any:
    """Return the value that `to_plain` made this of. Raise `ValueError` where that made nothing like it."""
    try:
        return _from_plain(told)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (TypeError, AttributeError, KeyError, OverflowError, MemoryError) as error:
        raise ValueError(f"it is damaged: {error}") from None


def _from_plain(told: Any) -> Any:
    kind = type(told)
    if kind in _ATOMS:
        return told
    if kind in (list, tuple):  # a tuple: a checkpoint that went through something that makes these of lists
        return [each if type(each) in _ATOMS else _from_plain(each) for each in told]
    if not isinstance(told, dict):
        raise ValueError(f"it contains a {kind.__name__}")
    mark = next(iter(told), "")
    if type(mark) is not str or mark[:1] != "!":
        if not all(type(key) is str and key[:1] != "!" for key in told):
            raise ValueError("it has a key that is no text")
        return {key: each if type(each) in _ATOMS else _from_plain(each) for key, each in told.items()}
    if len(told) != 1 or mark not in _READERS:
        raise ValueError(f"it contains the unknown type {mark!r}")
    return _READERS[mark](told[mark])


def _array(told: Any) -> Any:
    import numpy

    dtype, shape, octets = told
    if not (isinstance(dtype, str) and _ARRAY.fullmatch(dtype)):
        raise ValueError(f"there is no array of {dtype!r}")
    return numpy.frombuffer(bytearray(to_bytes(octets)), numpy.dtype(dtype)).reshape(_shape(shape))


def _number(told: Any) -> Any:
    dtype, octets = told
    return _array([dtype, [], octets])[()]


def _tensor(told: Any) -> Any:
    name, shape, octets = told
    dtype, data = _TENSOR_NAMED[name], bytearray(to_bytes(octets))
    shape = _shape(shape)
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"a tensor has {len(data)} bytes")
    return torch.frombuffer(data, dtype=dtype).reshape(shape) if data else torch.empty(shape, dtype=dtype)


def _shape(told: Any) -> tuple[int, ...]:
    if not all(type(size) is int and 0 <= size < 1 << 48 for size in told):
        raise ValueError(f"there is no shape {told!r}")
    return tuple(told)


_READERS: dict[str, Callable[[Any], Any]] = {
    "!tuple": lambda told: tuple(map(_from_plain, told)),
    "!set": lambda told: set(map(_from_plain, told)),
    "!frozenset": lambda told: frozenset(map(_from_plain, told)),
    "!bytes": to_bytes,
    "!dict": lambda told: {_from_plain(key): _from_plain(value) for key, value in told},
    "!array": _array,
    "!number": _number,
    "!tensor": _tensor,
}
