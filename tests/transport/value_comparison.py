"""Say where two values differ, in more respects than `loader_comparison`: strides, conjugation, quantizers, attributes.

Reads   two values.
Writes  nothing.
Never   allows for a difference that is not named here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from loader_comparison import differences

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def value_differences(ours: Any, theirs: Any, *, strides: bool = True, at: str = "") -> list[str]:
    """Where they differ, in words; [] when they are the same, bit for bit."""
    if type(ours) is not type(theirs):
        return [f"{at}: {_kind(ours)}, not {_kind(theirs)}"]
    if isinstance(ours, torch.Tensor):
        return _tensor_differences(ours, theirs, strides, at)
    if isinstance(ours, np.ma.MaskedArray):
        pairs = [(getattr(ours, name), getattr(theirs, name)) for name in ("data", "mask", "fill_value")]
        return [found for pair in pairs for found in value_differences(*pair, strides=strides, at=at)]
    if isinstance(ours, np.ndarray) and ours.dtype.hasobject:
        return value_differences(ours.tolist(), theirs.tolist(), strides=strides, at=at)
    if isinstance(ours, np.ndarray) and not ours.size:
        return differences((ours.shape, ours.dtype), (theirs.shape, theirs.dtype), at)
    if isinstance(ours, torch.UntypedStorage):
        return differences(*(torch.empty(0, dtype=torch.uint8).set_(storage) for storage in (ours, theirs)), at)
    if isinstance(ours, np.ndarray) and not strides:
        return differences(np.ascontiguousarray(ours), np.ascontiguousarray(theirs), at)
    if isinstance(ours, torch.nn.Module):
        return value_differences(ours.state_dict(), theirs.state_dict(), strides=strides, at=at)
    if isinstance(ours, Mapping):
        found = differences(list(ours), list(theirs), f"{at} keys") + attribute_differences(ours, theirs, at)
        return found or [
            d for key in ours for d in value_differences(ours[key], theirs[key], strides=strides, at=f"{at}[{key!r}]")
        ]
    if dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        return value_differences(vars(ours), vars(theirs), strides=strides, at=at)
    if isinstance(ours, Sequence) and not isinstance(ours, (str, bytes, bytearray)):
        if len(ours) != len(theirs):
            return [f"{at}: {len(ours)} items, not {len(theirs)}"]
        return [
            d
            for i, pair in enumerate(zip(ours, theirs))
            for d in value_differences(*pair, strides=strides, at=f"{at}[{i}]")
        ]
    return differences(ours, theirs, at)


def _kind(value: Any) -> str:
    # Some tensors cannot be printed.
    return str(type(value)) if isinstance(value, torch.Tensor) else f"{type(value)} ({value!r:.300})"


def attribute_differences(ours: Any, theirs: Any, at: str) -> list[str]:
    names = ("batch_size", "default_factory", "maxlen")
    return [f"{at}.{name}" for name in names if getattr(ours, name, None) != getattr(theirs, name, None)]


_FLAGS = ("dtype", "layout", "device", "requires_grad", "is_leaf", "is_quantized", "is_nested", "__dict__")


def _tensor_differences(ours: torch.Tensor, theirs: torch.Tensor, strides: bool, at: str) -> list[str]:
    def flag(name: str) -> list[str]:
        one, other = getattr(ours, name), getattr(theirs, name)
        return [] if one == other else [f"{at}.{name}: {one}, not {other}"]

    def part(name: str) -> list[str]:
        one, other = getattr(ours, name)(), getattr(theirs, name)()
        return value_differences(one, other, strides=strides, at=f"{at}.{name}()")

    jagged = ours.layout is torch.jagged
    if found := [found for name in _FLAGS if not (jagged and name == "__dict__") for found in flag(name)]:
        return found
    if jagged:
        return part("values") + part("offsets")
    if ours.is_nested:
        return part("unbind")
    if found := flag("shape"):
        return found
    if ours.device.type == "meta":
        return []
    if ours.layout is torch.sparse_coo:
        return part("is_coalesced") + part("_indices") + part("_values")
    if ours.layout in (torch.sparse_csr, torch.sparse_bsr):
        return part("crow_indices") + part("col_indices") + part("values")
    if ours.layout in (torch.sparse_csc, torch.sparse_bsc):
        return part("ccol_indices") + part("row_indices") + part("values")
    if strides and (found := part("is_conj") + part("is_neg")):
        return found
    if strides and _steps(ours) != _steps(theirs):
        return [f"{at}: strides {ours.stride()}, not {theirs.stride()}"]
    if ours.is_quantized:
        if ours.qscheme() is not theirs.qscheme():
            return [f"{at}.qscheme()"]
        kinds = ["q_scale", "q_zero_point"]
        if ours.qscheme() is torch.per_channel_affine:
            kinds = ["q_per_channel_scales", "q_per_channel_zero_points", "q_per_channel_axis"]
        return [found for name in [*kinds, "int_repr"] for found in part(name)]
    return [] if _bits(ours) == _bits(theirs) else [f"{at}: other bits: {ours.shape} {ours.dtype}"]


def _steps(tensor: torch.Tensor) -> list[int]:
    """Its strides where they mean something: not of nothing, and not along a single element."""
    return [step for step, length in zip(tensor.stride(), tensor.shape) if length > 1 and tensor.numel()]


def _bits(tensor: torch.Tensor) -> bytes:
    """What a tensor looks at, its type aside: some types can neither be copied nor printed."""
    if tensor.numel() == 0:
        return b""
    tensor = tensor.detach().as_subclass(torch.Tensor)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    plain = torch.empty(0, dtype=_INTEGERS[tensor.dtype.itemsize])
    plain.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
    return plain.contiguous().numpy().tobytes()
