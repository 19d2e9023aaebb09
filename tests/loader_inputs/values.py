"""Values of every type that a collate function may return.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from loader_inputs.errors import OddError

Point = namedtuple("Point", "x y")


@dataclass
class Record:
    name: str
    numbers: list[int]
    tensor: torch.Tensor


class Labelled(torch.Tensor):
    """A subclass of Tensor."""


def values() -> dict[str, Any]:
    """One of everything that a collate function may return. Left out: what torch's own loader gets wrong.

    (A conjugated tensor arrives unconjugated from torch, a quantized one without its quantizer.)
    """
    chance = np.random.default_rng(5)
    floats = torch.from_numpy(chance.standard_normal((3, 4)))
    array = chance.standard_normal((3, 4))
    frozen = array.copy()
    frozen.flags.writeable = False
    return {
        "a python int": 7,
        "a huge int": 1 << 100,
        "a float": -0.0,
        "not a number": float("nan"),
        "a complex": 1 - 2j,
        "a bool": True,
        "None": None,
        "a string": "grüße",
        "bytes": b"\0\xff",
        "many bytes": bytes(range(256)) * 300,
        "a bytearray": bytearray(b"abc"),
        "a range": range(3, 9, 2),
        "an empty list": [],
        "nested containers": {"a": [1, (2.5, "x", {"b": None})], 3: ({4}, frozenset({5}))},
        "a namedtuple": Point(floats[0], Point(1, "y")),
        "a dataclass": Record("r", [1, 2], floats[1]),
        "a class": Record,
        "tensors of different sizes": [torch.full((n, 3), float(n)) for n in range(4)],
        "a scalar tensor": torch.tensor(3.5),
        "an empty tensor": torch.zeros(0, 4),
        "an empty tensor with a storage": torch.zeros(8)[3:3],
        "a bool tensor": torch.tensor([True, False, True]),
        "a bfloat16 tensor": floats.bfloat16(),
        "a float16 tensor": floats.half(),
        "a float8 tensor": floats.to(torch.float8_e4m3fn),
        "a uint16 tensor": torch.tensor([1, 65535], dtype=torch.uint16),
        "a complex tensor": torch.complex(floats, floats),
        "a tensor of nans": torch.tensor([float("nan"), -0.0, float("inf")]),
        "a sparse tensor": torch.eye(3).to_sparse(),
        "an uncoalesced sparse tensor": torch.sparse_coo_tensor(
            [[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True
        ),
        "a transposed tensor": floats.T,
        "a strided tensor": floats[:, ::2],
        "an expanded tensor": torch.tensor([2.0]).expand(50, 2),
        "a small view of a large tensor": torch.arange(50_000.0)[700:705],
        "a channels-last tensor": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "a tensor that requires grad": torch.ones(2, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.ones(2)),
        "a tensor of a subclass": torch.ones(2).as_subclass(Labelled),
        "a tensor over 64 KiB": torch.arange(20_000.0),
        "a tensor over 1 MiB": torch.arange(300_000.0),
        "tensors large and small": [torch.arange(40_000.0), torch.tensor(1), torch.arange(70_000)],
        "a storage": torch.arange(5.0).untyped_storage(),
        "an array": array,
        "an array over 1 MiB": np.arange(200_000),
        "a scalar array": np.array(2.5),
        "a numpy scalar": np.float32(1.5),
        "an empty array": np.zeros((0, 3)),
        "a Fortran array": np.asfortranarray(array),
        "a strided array": array[:, ::2],
        "a reversed array": array[::-1],
        "a read-only array": frozen,
        "an array over bytes": np.frombuffer(b"12345678", np.uint8),
        "a big-endian array": np.arange(3, dtype=">i4"),
        "an array of objects": np.array([1, "a", None], dtype=object),
        "a structured array": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        "an array of dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "an array of strings": np.array(["a", "bb"]),
        "a broadcast array": np.broadcast_to(np.arange(3), (4, 3)),
    }


STACKABLE = (
    "a python int",
    "a float",
    "a bool",
    "a string",
    "bytes",
    "a namedtuple",
    "a scalar tensor",
    "an empty tensor",
    "a bool tensor",
    "a bfloat16 tensor",
    "a float8 tensor",
    "a complex tensor",
    "a tensor of nans",
    "a transposed tensor",
    "a strided tensor",
    "an expanded tensor",
    "a channels-last tensor",
    "a tensor of a subclass",
    "a tensor over 64 KiB",
    "a tensor over 1 MiB",
    "tensors large and small",
    "an array",
    "an array over 1 MiB",
    "a scalar array",
    "a numpy scalar",
    "an empty array",
    "a read-only array",
    # These raise, and must do so in the same words.
    "None",
    "a dataclass",
    "a sparse tensor",
    "a tensor that requires grad",
    "tensors of different sizes",
    "an array of objects",
    "an array of strings",
)


class AllValues(Dataset):
    """All of `values()`, by name."""

    def __init__(self) -> None:
        self.values = values()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


class AllValuesWithErrors(AllValues):
    """Values of every kind by number, and an error after each."""

    def __len__(self) -> int:
        return 2 * len(self.values)

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            raise OddError(index, "the shelf")
        return list(self.values.values())[index // 2]
