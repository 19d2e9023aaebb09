"""Whatever a collate function returns arrives as it was sent, and as torch's own loader delivers it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from loader_comparison import OURS, TORCH
from transport import batch_values
from transport.value_comparison import value_differences

SIZES = {"small": batch_values.SMALL, "large": batch_values.LARGE}
NAMES = list(batch_values.makers())
# Views of less than half of their storage travel without the rest: dense ones as they are, others closed up.
CLOSED_UP = ("columns of a larger tensor",)
# Through pickle without buffers, which torch uses, NumPy's axes come in C or Fortran order only.
OTHER_STRIDES_FROM_TORCH = (*CLOSED_UP, "array, axes in another order")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*(ComplexHalf|TypedStorage|Sparse|quantization|nested tensors|matrix subclass|jagged).*"
)


def _delivered(kind: type, size: int, names: list[str], **more: Any) -> dict[str, Any]:
    loader = kind(
        batch_values.ValuesByName(size),
        sampler=names,
        batch_size=None,
        collate_fn=batch_values.as_is,
        num_workers=2,
        **more,
    )
    return dict(zip(names, loader, strict=True))


def _as_consumers(value: Any) -> Any:
    """As torch has it, too: an array to write to, dense, in the machine's byte order but for the fields of records."""
    if type(value) is not np.ndarray or not value.size:
        return value
    dtype = value.dtype if value.dtype.names else value.dtype.newbyteorder("=")
    order: Any = "K" if value.flags.writeable and value.dtype.isnative else "F" if value.flags.fnc else "C"
    return value.astype(dtype, order=order, copy=True)


@pytest.mark.parametrize(("size", "method"), [("small", "fork"), ("large", "fork"), ("large", "spawn")])
def test_values_arrive_as_they_were_sent(size, method):
    """Type, dtype, shape, strides, layout, flags and bits, of every value."""
    arrived = _delivered(OURS, SIZES[size], NAMES, multiprocessing_context=method)

    found = {}
    for name, value in arrived.items():
        sent = _as_consumers(batch_values.makers()[name](SIZES[size]))
        found[name] = value_differences(value, sent, strides=name not in CLOSED_UP)
    assert {name: differs for name, differs in found.items() if differs} == {}


@pytest.mark.parametrize("size", SIZES)
def test_values_arrive_as_torch_delivers_them(size):
    """Where torch's own loader can carry them."""
    names = [name for name in NAMES if name not in batch_values.NOT_AS_SENT_BY_TORCH]

    ours = _delivered(OURS, SIZES[size], names)
    theirs = _delivered(TORCH, SIZES[size], names)

    found = {
        name: value_differences(ours[name], theirs[name], strides=name not in OTHER_STRIDES_FROM_TORCH)
        for name in names
    }
    assert {name: differs for name, differs in found.items() if differs} == {}


# ---------------------------------------------------------------- sharing

SHARED = {
    "whole, part": lambda x: [x, x[3:9]],
    "whole, little": lambda x: [x, x[:1]],
    "half, other half": lambda x: [x[: len(x) * 3 // 4], x[len(x) // 4 :]],
    "one as another type": lambda x: [x, x.view(torch.int32)],
    "transposed": lambda x: [x.view(4, -1), x.view(4, -1).T],
    "expanded": lambda x: [x, x[:1].expand(5)],
    "parameter and tensor": lambda x: [x, torch.nn.Parameter(x, requires_grad=False)],
    "subclass and tensor": lambda x: [x, x.as_subclass(batch_values.Image)],
    "storage and tensor": lambda x: [x, x.untyped_storage()],
    "detached": lambda x: [x, x.detach()],
}


def _first_element(thing: Any) -> torch.Tensor:
    if isinstance(thing, torch.UntypedStorage):
        thing = torch.empty(0).set_(thing)
    return thing.reshape(-1)[:1]


@pytest.mark.parametrize("kind", [OURS, TORCH], ids=["outlive", "torch"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", SHARED)
def test_tensors_that_share_memory_go_on_sharing_it(how, size, kind):
    """What is written through one is seen through the other, as with torch's loader."""
    x = torch.arange(float(SIZES[size]))
    loader = kind(
        batch_values.ReadySamples(SHARED[how](x)), batch_size=None, collate_fn=batch_values.as_is, num_workers=1
    )

    (first, second), *_ = loader
    first.fill_(-7) if first.dtype is torch.float32 else None

    seen = _first_element(second)
    seen = seen.view(torch.float32) if seen.dtype is torch.int32 else seen
    assert float(seen) == -7
    assert float(x.min()) == 0


def test_the_same_object_twice_arrives_as_one():
    """Identity within a batch, as pickle has it."""
    tensor, array = torch.zeros(30_000), np.zeros(30_000)
    loader = OURS(
        batch_values.ReadySamples([tensor, array, tensor, array]),
        batch_size=None,
        collate_fn=batch_values.as_is,
        num_workers=1,
    )

    one, two, three, four = next(iter(loader))

    assert one is three
    assert two is four


# ---------------------------------------------------------------- default_collate


def _outcomes(kind: type, *columns: list[Any], collate: Any = torch.utils.data.default_collate) -> list[Any]:
    """What a worker makes of each column of samples, errors included: one loader serves them all."""
    loader = kind(batch_values.ReadySamples(*columns), batch_size=None, num_workers=1, collate_fn=Attempt(collate))
    return list(loader)


class Attempt:
    """Collates; what that raises travels in its place."""

    def __init__(self, collate: Any) -> None:
        self.collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        try:
            return self.collate(samples)
        except Exception as error:
            return type(error), str(error)


@pytest.mark.parametrize("size", SIZES)
def test_default_collate_of_every_dtype_is_torchs(size):
    """The same stack, or the same error; some that torch's loader refuses can be stacked, and are."""
    columns = [[batch_values.of_bits(dtype, SIZES[size] // 3)] * 3 for dtype in batch_values.PLAIN]

    ours, theirs = _outcomes(OURS, *columns), _outcomes(TORCH, *columns)

    found = {
        str(dtype): value_differences(our, their)
        for dtype, our, their in zip(batch_values.PLAIN, ours, theirs, strict=True)
        if isinstance(their, torch.Tensor) or not isinstance(our, torch.Tensor)
    }
    assert {name: differs for name, differs in found.items() if differs} == {}
    assert len(found) >= 20


ODD_ROWS = {
    "subclass": lambda n: torch.arange(float(n)).as_subclass(batch_values.Image),
    "parameter": lambda n: torch.nn.Parameter(torch.arange(float(n)), requires_grad=False),
    "requires grad": lambda n: torch.arange(float(n)).requires_grad_(),
    "expanded": lambda n: torch.ones(1).expand(n),
    "transposed": lambda n: torch.arange(float(n)).reshape(4, -1).T,
    "channels last": lambda n: torch.arange(float(n)).reshape(1, 3, 2, -1).to(memory_format=torch.channels_last),
    "empty": lambda n: torch.zeros(0, 3),
    "empty float8": lambda n: torch.zeros(0, 3).to(torch.float8_e4m3fn),
    "scalar": lambda n: torch.tensor(1.5),
    "sparse": lambda n: torch.eye(3).to_sparse(),
    "sparse CSR": lambda n: torch.eye(3).to_sparse_csr(),
    "nested": lambda n: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    "mixed": lambda n: {
        "a": [np.arange(n), (np.float32(1), "x", 2, 2.5)],
        "b": batch_values.Point(torch.ones(n), b"y"),
    },
}


MIXED_ROWS = {
    "float32, float64": [torch.ones(3), torch.ones(3, dtype=torch.float64)],
    "int64, float32": [torch.ones(3, dtype=torch.int64), torch.ones(3)],
    "two shapes": [torch.ones(3), torch.ones(4)],
    "tensor, subclass": [torch.ones(3), torch.ones(3).as_subclass(batch_values.Image)],
    "subclass, tensor": [torch.ones(3).as_subclass(batch_values.Image), torch.ones(3)],
    "float8 of two shapes": [torch.ones(3).to(torch.float8_e4m3fn), torch.ones(4).to(torch.float8_e4m3fn)],
}


@pytest.mark.parametrize("size", SIZES)
def test_default_collate_of_odd_tensors_is_torchs(size):
    """Type for type; or the same error."""
    rows = {name: [make(SIZES[size])] * 2 for name, make in ODD_ROWS.items()} | MIXED_ROWS

    ours, theirs = _outcomes(OURS, *rows.values()), _outcomes(TORCH, *rows.values())

    found = {name: value_differences(*pair) for name, *pair in zip(rows, ours, theirs, strict=True)}
    assert {name: differs for name, differs in found.items() if differs} == {}


def collate_and_change(samples: list[Any]) -> Any:
    """What code that knows torch's default_collate may do with its result."""
    batch = torch.utils.data.default_collate(samples)
    return batch.detach_().unsqueeze_(0).transpose_(0, 1).requires_grad_()


@pytest.mark.parametrize("size", SIZES)
def test_a_collate_fn_may_change_in_place_what_default_collate_made(size):
    """It is no view that refuses."""
    samples = [torch.arange(float(SIZES[size])).reshape(4, -1) for _ in range(3)]

    (ours,), (theirs,) = (_outcomes(kind, samples, collate=collate_and_change) for kind in (OURS, TORCH))

    assert isinstance(ours, torch.Tensor)
    assert value_differences(ours, theirs) == []


# ---------------------------------------------------------------- other people's types


def _carried(*values: Any) -> list[Any]:
    return list(OURS(batch_values.ReadySamples(*values), batch_size=None, collate_fn=batch_values.as_is, num_workers=1))


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "F", "1", "RGBA"])
def test_a_pillow_image_arrives_as_it_was_sent(mode):
    """Mode, size, palette and pixels; small and large."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    pixels = np.arange(300 * 200 * 3, dtype=np.uint8).reshape(200, 300, 3)
    sent = [image.fromarray(pixels[:h, :w]).convert(mode) for h, w in ((3, 5), (200, 300))]

    arrived = _carried(*sent)

    for one, other in zip(arrived, sent, strict=True):
        assert (one.mode, one.size, one.getpalette()) == (other.mode, other.size, other.getpalette())
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("rows", [3, 50_000])
def test_pandas_objects_arrive_as_they_were_sent(rows):
    """Frames of several types, series, indices; and they can be written to."""
    pd = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pd.DataFrame(
        {
            "i": np.arange(rows),
            "f": np.arange(rows) / 7,
            "b": np.arange(rows) % 2 == 0,
            "s": [f"row {i}" for i in range(rows)],
            "c": pd.Categorical(np.arange(rows) % 3),
            "t": pd.date_range("2020-01-01", periods=rows, freq="min", tz="Europe/Berlin"),
            "n": pd.array([None, *range(rows - 1)], dtype="Int64"),
        }
    )

    arrived, series, index = _carried(frame, frame["f"], frame.set_index(["i", "b"]).index)

    pd.testing.assert_frame_equal(arrived, frame)
    pd.testing.assert_series_equal(series, frame["f"])
    pd.testing.assert_index_equal(index, frame.set_index(["i", "b"]).index)
    arrived.loc[0, "f"] = -1.0
    assert arrived["f"].iloc[0] == -1
    assert frame["f"].iloc[0] == 0


@pytest.mark.parametrize("rows", [3, 50_000])
def test_arrow_objects_arrive_as_they_were_sent(rows):
    """Tables, batches, arrays, slices and buffers."""
    pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pa.table(
        {
            "i": list(range(rows)),
            "s": [None if i % 5 == 0 else f"row {i}" for i in range(rows)],
            "l": [[i, i + 1] for i in range(rows)],
        }
    )
    sent = [table, table.to_batches()[0], table["s"], table.slice(1, 2), pa.array([1.5, None] * rows)]

    *arrived, buffer = _carried(*sent, pa.py_buffer(bytes(20 * rows)))

    assert all(type(one) is type(other) and one.equals(other) for one, other in zip(arrived, sent, strict=True))
    assert buffer.to_pybytes() == bytes(20 * rows)
