"""Objects whose strides, flags and aliasing may get lost on the way to another process, and what to compare of them.

Reads   what it is given.
Writes  nothing.
Never   allows for a difference that is not named here.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

LARGE = 20_000  # torch uses no threads for so little: the standard library forks, and its workers would hang


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _channels_last(*shape: int) -> torch.Tensor:
    count = int(np.prod(shape))
    return torch.arange(float(count)).reshape(shape).to(memory_format=torch.channels_last)


def objects() -> dict[str, Any]:
    """Each by its name: a tensor, an array, or a list of such that may share memory."""
    grid = torch.arange(float(LARGE)).view(100, 200)
    small = torch.arange(24.0)
    table = np.arange(float(LARGE)).reshape(100, 200)
    records = np.zeros(LARGE // 10, [("a", "<i4"), ("b", ">f8"), ("c", "S3")])
    records["a"] = np.arange(LARGE // 10)
    read_only = _frozen(table.copy())
    return {
        "a tensor": grid,
        "a small tensor": small,
        "a scalar": torch.tensor(3.5),
        "an empty tensor": torch.zeros(3, 0, 2),
        "transposed": grid.t(),
        "channels_last": _channels_last(2, 3, 60, 50),
        "channels_last, one channel": _channels_last(2, 1, 90, 100),
        "channels_last, one image": _channels_last(1, 3, 60, 100),
        "channels_last, one small gray image": _channels_last(1, 1, 4, 4),
        "channels_last_3d": torch.arange(2400.0).reshape(1, 2, 3, 20, 20).to(memory_format=torch.channels_last_3d),
        "odd strides along single elements": small.as_strided((1, 24, 1), (7, 1, 99)),
        "every other column": grid[:, ::2],
        "expanded": small[:3].reshape(3, 1).expand(3, 5),
        "expanded in front": grid.expand(3, 100, 200),
        "bfloat16": grid.bfloat16(),
        "float8": small.to(torch.float8_e5m2),
        "bools": grid > 7,
        "complex": torch.complex(small, -small),
        "requires grad": grid.clone().requires_grad_(),
        "a parameter": torch.nn.Parameter(grid.clone()),
        "a tensor twice": [grid, grid],
        "a tensor and a view of most of it": [grid, grid[1:]],
        "a tensor and its transpose": [grid, grid.t()],
        "a view of most of it and the tensor": [grid[1:], grid],
        "small views that overlap": [grid[3:7], grid[5:9]],
        "small views that do not overlap": [grid[3:7], grid[80:84]],
        "a small view of a large tensor": grid[3, 10:20],
        "two types over one storage": [grid, grid.view(torch.int32)],
        "an array": table,
        "a small array": table[0, :5].copy(),
        "an empty array": np.zeros((3, 0)),
        "Fortran order": np.asfortranarray(table),
        "small Fortran order": np.asfortranarray(table[:3, :3]),
        "a strided array": table[:, ::3],
        "a transposed array": table.T,
        "a read-only array": read_only,
        "a small read-only array": _frozen(table[0, :5].copy()),
        "a read-only view": _frozen(table[:90]),
        "a read-only array in Fortran order": _frozen(np.asfortranarray(table)),
        "a read-only array twice": [read_only, read_only],
        "an array over bytes": np.frombuffer(bytes(LARGE * 8)),
        "an array twice": [table, table],
        "an array and a view of it": [table, table[1:]],
        "records": records,
        "a record array": records.view(np.recarray),
        "big-endian": table.astype(">f8"),
        "dates": np.arange(LARGE).astype("datetime64[s]"),
        "objects": np.array([1, "two", None], dtype=object),
        "bytes": bytes(LARGE * 8),
        "a bytearray": bytearray(LARGE * 8),
    }


def describe(thing: Any) -> Any:
    """What can be told of an object: type, layout, flags, values, and what of it shares memory or is the same."""
    if isinstance(thing, list):
        pairs = list(itertools.combinations(thing, 2))
        shares = [_span(one)[0] < _span(two)[1] and _span(two)[0] < _span(one)[1] for one, two in pairs]
        return [describe(each) for each in thing], [one is two for one, two in pairs], shares
    told = {"type": type(thing)}
    if isinstance(thing, torch.Tensor):
        names = ("dtype", "shape", "requires_grad", "is_leaf", "layout", "device")
        told |= {name: getattr(thing, name) for name in names}
        formats = (torch.contiguous_format, torch.channels_last)
        told["formats"] = [
            thing.is_contiguous(memory_format=form) for form in formats if thing.ndim == 4 or form is formats[0]
        ]
        told["stride"] = thing.stride() if thing.numel() else None
        told["is a view"] = thing._is_view()
        told["values"] = thing.detach().to(torch.complex128).tolist()
        thing.detach_()
    elif isinstance(thing, np.ndarray):
        told |= {
            name: getattr(thing, name) for name in ("dtype", "shape", "strides") if thing.size or name != "strides"
        }
        told |= {flag: thing.flags[flag] for flag in ("WRITEABLE", "C_CONTIGUOUS", "F_CONTIGUOUS", "ALIGNED")}
        told["values"] = thing.tolist()
    else:
        told["values"] = thing
    return told


def _span(thing: Any) -> tuple[int, int]:
    if isinstance(thing, np.ndarray):
        return np.lib.array_utils.byte_bounds(thing)
    reach = sum((length - 1) * step for length, step in zip(thing.shape, thing.stride())) + 1
    return thing.data_ptr(), thing.data_ptr() + reach * thing.element_size()


def make(name: str) -> Any:
    return objects()[name]
