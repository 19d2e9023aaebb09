"""Everything that a collate function may return, small (inside the message) and large (in cells).

Reads   nothing.
Writes  nothing.
Never   pytest: spawned workers import this.
"""

from __future__ import annotations

import collections
import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

SMALL, LARGE = 12, 60_000  # elements; the larger takes more than the 56 KiB of a message with one byte each

DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
QUANTIZED = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.").startswith(("qint", "quint"))]
PLAIN = [dtype for dtype in DTYPES if dtype not in QUANTIZED]


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    name: str
    tensor: torch.Tensor
    array: np.ndarray


@dataclasses.dataclass(frozen=True)
class Frozen:
    tensor: torch.Tensor


class Image(torch.Tensor):
    """A subclass, as torchvision's are."""


class Tagged(torch.Tensor):
    """A subclass with something of its own."""

    tag: str = ""


class TensorDict(Mapping):
    """A mapping that is no dict and has a batch size."""

    def __init__(self, source: dict[str, Any], batch_size: int) -> None:
        self.source = source
        self.batch_size = batch_size

    def __getitem__(self, key: str) -> Any:
        return self.source[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.source)

    def __len__(self) -> int:
        return len(self.source)


def of_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """A tensor of any type, over bytes that do not repeat soon."""
    most = 2 if dtype is torch.bool else 251
    size = count * dtype.itemsize
    data = torch.arange(most, dtype=torch.uint8).repeat(size // most + 1)[:size].clone()
    return torch.empty(0, dtype=dtype).set_(data.untyped_storage(), 0, (count,))


def _view_of_bits(dtype: torch.dtype, count: int) -> torch.Tensor:
    """A few elements in the midst of a large storage."""
    whole = of_bits(dtype, 3 * count + 5000)
    return torch.empty(0, dtype=dtype).set_(whole.untyped_storage(), count, (count,))


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def _memmap(array: np.ndarray) -> np.ndarray:
    with tempfile.TemporaryFile() as file:
        array.tofile(file)
        return np.memmap(file, array.dtype, "r+", shape=array.shape)


def _tagged(tensor: torch.Tensor) -> Tagged:
    made = tensor.as_subclass(Tagged)
    made.tag = "north"
    return made


def _with_attribute(tensor: torch.Tensor) -> torch.Tensor:
    tensor.origin = "here"
    return tensor


def _jagged(count: int) -> torch.Tensor:
    parts = [torch.arange(3.0).reshape(1, 3), torch.arange(float(count)).reshape(-1, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.jagged)


def makers() -> dict[str, Callable[[int], Any]]:
    """How each value is made, from a number of elements that 12 divides."""

    def floats(count: int) -> torch.Tensor:
        return torch.arange(float(count)).sub_(7.5)

    def grid(count: int) -> torch.Tensor:
        return floats(count).reshape(-1, 4)

    def sparse(count: int) -> torch.Tensor:
        return torch.where(grid(count) % 3 == 0, grid(count), 0.0)

    def array(count: int) -> np.ndarray:
        return np.arange(float(count)).reshape(-1, 4) / 7

    def complex_grid(count: int) -> torch.Tensor:
        return torch.complex(grid(count), -grid(count))

    def records(count: int, order: str = "<") -> np.ndarray:
        made = np.zeros(count, [("a", f"{order}i4"), ("b", f"{order}f8"), ("c", "S3"), ("d", f"{order}u2", (2,))])
        made["a"], made["b"], made["c"], made["d"] = np.arange(count), np.arange(count) / 3, b"xyz", 7
        return made

    made: dict[str, Callable[[int], Any]] = {}
    for dtype in PLAIN:
        name = str(dtype).removeprefix("torch.")
        made[name] = lambda n, dtype=dtype: of_bits(dtype, n)
        made[f"{name}, transposed"] = lambda n, dtype=dtype: of_bits(dtype, n).as_strided((4, n // 4), (1, 4))
        made[f"{name}, empty"] = lambda n, dtype=dtype: of_bits(dtype, n)[3:3]
        made[f"{name}, scalar"] = lambda n, dtype=dtype: of_bits(dtype, 1).as_strided((), ())
        made[f"{name}, a view of a larger storage"] = lambda n, dtype=dtype: _view_of_bits(dtype, n)
    for dtype in (torch.qint8, torch.quint8, torch.qint32):
        made[str(dtype).removeprefix("torch.")] = lambda n, dtype=dtype: torch.quantize_per_tensor(
            grid(n) / n, 0.25, 3, dtype
        )
    return made | {
        "quantized per channel": lambda n: torch.quantize_per_channel(
            grid(n), torch.arange(1.0, 5.0), torch.arange(4), 1, torch.qint8
        ),
        "sparse COO": lambda n: sparse(n).to_sparse(),
        "sparse COO, hybrid": lambda n: sparse(n).reshape(-1, 2, 2).to_sparse(1),
        "sparse COO, uncoalesced": lambda n: torch.sparse_coo_tensor(
            torch.zeros(1, n, dtype=torch.int64), floats(n), (2,), check_invariants=False
        ),
        "sparse COO, nothing in it": lambda n: torch.zeros(n).to_sparse(),
        "sparse CSR": lambda n: sparse(n).to_sparse_csr(),
        "sparse CSC": lambda n: sparse(n).to_sparse_csc(),
        "sparse BSR": lambda n: sparse(n).reshape(-1, 6).to_sparse_bsr((1, 2)),
        "sparse BSC": lambda n: sparse(n).reshape(-1, 6).to_sparse_bsc((1, 2)),
        "conjugated": lambda n: complex_grid(n).conj(),
        "conjugated complex32": lambda n: complex_grid(n).to(torch.complex32).conj(),
        "negated view": lambda n: complex_grid(n).conj().imag,
        "real part": lambda n: complex_grid(n).real,
        "strided": lambda n: grid(n)[:, ::2],
        "columns of a larger tensor": lambda n: grid(4 * n + 5000)[:n, 1],
        "expanded": lambda n: floats(3).reshape(3, 1).expand(3, n),
        "expanded, of a large one": lambda n: grid(n).expand(2, n // 4, 4),
        "channels last": lambda n: floats(n).reshape(1, 3, 2, -1).to(memory_format=torch.channels_last),
        "zero-sized": lambda n: torch.zeros(0, n),
        "requires grad": lambda n: floats(n).requires_grad_(),
        "parameter": lambda n: torch.nn.Parameter(grid(n)),
        "frozen parameter": lambda n: torch.nn.Parameter(grid(n), requires_grad=False),
        "buffer": lambda n: torch.nn.Buffer(grid(n)),
        "tensor with an attribute": lambda n: _with_attribute(floats(n)),
        "float8 tensor with an attribute": lambda n: _with_attribute(of_bits(torch.float8_e5m2, n)),
        "subclass": lambda n: grid(n).as_subclass(Image),
        "subclass with an attribute": lambda n: _tagged(grid(n)),
        "nested": lambda n: torch.nested.nested_tensor([grid(n), grid(12)]),
        "jagged": _jagged,
        "meta": lambda n: torch.empty(n, device="meta"),
        "untyped storage": lambda n: floats(n).untyped_storage(),
        "empty storage": lambda n: torch.UntypedStorage(0),
        "module": lambda n: torch.nn.ParameterList([floats(n), grid(n)]),
        "size, dtype, device": lambda n: (torch.Size((n, 2)), torch.float8_e4m3fn, torch.device("cpu")),
        "array": array,
        "array, Fortran order": lambda n: np.asfortranarray(array(n)),
        "array, transposed": lambda n: array(n).T,
        "array, axes in another order": lambda n: array(n).reshape(2, -1, 3).transpose(2, 0, 1),
        "array, strided": lambda n: array(n)[:, ::2],
        "array, reversed": lambda n: array(n)[::-1],
        "array, read-only": lambda n: _frozen(array(n)),
        "array, read-only, Fortran order": lambda n: _frozen(np.asfortranarray(array(n))),
        "array, big-endian": lambda n: array(n).astype(">f8"),
        "array, structured": records,
        "array, structured, big-endian": lambda n: records(n, ">"),
        "array, structured, big-endian, read-only": lambda n: _frozen(records(n, ">")),
        "array, record": lambda n: records(n).view(np.recarray),
        "array of objects": lambda n: np.array([1, "a", None, floats(n)], dtype=object),
        "array of dates": lambda n: np.arange(n).astype("datetime64[s]"),
        "array of spans": lambda n: np.arange(n).astype("timedelta64[ms]"),
        "array of strings": lambda n: np.arange(n).astype("U6"),
        "array of byte strings": lambda n: np.arange(n).astype("S6"),
        "array of void": lambda n: np.arange(n, dtype="i8").view("V8"),
        "array of float16": lambda n: array(n).astype("f2"),
        "array of complex": lambda n: array(n) * 1j,
        "array of bools": lambda n: array(n) > 1,
        "array, 0-d": lambda n: np.array(n / 7),
        "array, empty": lambda n: np.zeros((0, n)),
        "array, masked": lambda n: np.ma.masked_less(array(n), 1.0),
        "array, memmap": lambda n: _memmap(array(n)),
        "array, matrix": lambda n: np.asmatrix(array(n)),
        "numpy scalar": lambda n: np.float32(n / 7),
        "bytes": lambda n: bytes(range(256)) * (n // 12),
        "bytearray": lambda n: bytearray(range(256)) * (n // 12),
        "text": lambda n: "grüße" * n,
        "namedtuple": lambda n: Point(floats(n), Point(array(n), "y")),
        "dataclass": lambda n: Record("r", floats(n), array(n)),
        "frozen dataclass": lambda n: Frozen(floats(n)),
        "mapping": lambda n: TensorDict({"a": floats(n), "b": {"c": grid(n)}}, n),
        "ordered dict": lambda n: collections.OrderedDict(b=floats(n), a=array(n)),
        "default dict": lambda n: collections.defaultdict(list, a=[floats(n)]),
        "deque": lambda n: collections.deque([floats(n), 1], maxlen=5),
        "sets": lambda n: ({1, n}, frozenset({"a"})),
        "much at once": lambda n: [floats(n), array(n), bytes(n), {"x": of_bits(torch.uint4, n)}, complex_grid(n)],
        "collated": lambda n: default_collate(
            [
                {"image": grid(n), "label": i, "name": str(i), "meta": {"scale": 0.5 * i, "box": (i, array(n))}}
                for i in range(3)
            ]
        ),
    }


# What torch's own loader delivers otherwise than it was sent, or not at all.
NOT_AS_SENT_BY_TORCH = {
    "qint8": "loses its quantizer",
    "quint8": "loses its quantizer",
    "qint32": "loses its quantizer",
    "quantized per channel": "loses its quantizer",
    "conjugated": "arrives unconjugated",
    "conjugated complex32": "arrives unconjugated",
    "float8 tensor with an attribute": "loses it",
    "negated view": "arrives without its sign",
    "tensor with an attribute": "loses it",
    "buffer": "is no buffer any more",
}


class ValuesByName(Dataset):
    """Values by name, made where they are asked for."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return len(makers())

    def __getitem__(self, name: str) -> Any:
        return makers()[name](self.count)


class ReadySamples(Dataset):
    """Ready samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class FilledTensors(Dataset):
    """Sample i is so many float32 of value i; sizes may differ from sample to sample."""

    def __init__(self, *counts: int) -> None:
        self.counts = counts

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.counts[index],), float(index))


def as_is(sample: Any) -> Any:
    return sample
