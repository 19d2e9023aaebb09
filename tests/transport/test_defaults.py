"""Batches are CPU tensors of their own dtype, whatever the trainer's defaults are when they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from loader_comparison import OURS, TORCH
from transport import batch_values
from transport.value_comparison import value_differences

pytestmark = pytest.mark.filterwarnings("ignore:.*(ComplexHalf|TypedStorage|Sparse|nested|matrix|jagged).*")


@pytest.fixture(autouse=True)
def _defaults_come_back() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(dtype)


def _samples() -> list[Any]:
    kinds = [
        lambda n: torch.arange(float(n)),
        lambda n: torch.arange(n),
        lambda n: batch_values.of_bits(torch.float8_e5m2, n),
        lambda n: torch.arange(float(3 * n + 5000))[n : 2 * n],
        lambda n: torch.arange(float(n)).reshape(4, -1).T,
        lambda n: torch.arange(n)[2:2],
        lambda n: torch.arange(float(n)).as_subclass(batch_values.Image),
        lambda n: torch.nn.Parameter(torch.arange(float(n))),
        lambda n: torch.arange(float(n)).requires_grad_(),
        lambda n: torch.arange(float(n)).reshape(-1, 4).to_sparse(),
        lambda n: torch.arange(float(n)).reshape(-1, 4).to_sparse_csr(),
        lambda n: torch.zeros(0, n),
        lambda n: torch.empty(n, device="meta"),
        lambda n: np.arange(float(n)),
        lambda n: 1.5,
    ]
    return [kind(n) for kind in kinds for n in (batch_values.SMALL, batch_values.LARGE)]


def _arrived(kind: type, samples: list[Any], device: str | None, dtype: torch.dtype, **more: Any) -> list[Any]:
    """What arrives when the defaults change between the start of the workers and the first batch.

    Set earlier, «meta» keeps torch's loader from drawing its seed: it cannot begin at all.
    """
    iterator = iter(kind(batch_values.ReadySamples(*samples), num_workers=2, **more))
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        return list(iterator)
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["meta", None])
def test_batches_are_torchs_whatever_the_defaults_are(device, dtype):
    """On the CPU, of the dtype they had."""
    samples = _samples()

    ours, theirs = (
        _arrived(kind, samples, device, dtype, batch_size=None, collate_fn=batch_values.as_is) for kind in (OURS, TORCH)
    )

    assert value_differences(ours, samples) == []
    for our, their in zip(ours, theirs, strict=True):
        # torch's loader moves sparse tensors to the default device, and loses them on «meta».
        if not (isinstance(our, torch.Tensor) and our.layout is not torch.strided):
            assert value_differences(our, their) == []


@pytest.mark.parametrize("floats", [batch_values.SMALL, batch_values.LARGE], ids=["small", "large"])
def test_collated_batches_are_torchs_whatever_the_defaults_are(floats):
    """Python floats become float64 with both, arrays keep theirs."""
    samples = [{"t": torch.arange(float(floats)), "a": np.arange(floats), "f": 0.5, "i": i} for i in range(8)]

    ours, theirs = (_arrived(kind, samples, "meta", torch.float64, batch_size=2) for kind in (OURS, TORCH))

    assert value_differences(ours, theirs) == []
    assert {part.device.type for batch in ours for part in batch.values()} == {"cpu"}


def test_a_default_dtype_set_before_the_workers_start_holds_in_them():
    """Forked workers have the trainer's defaults, as torch's have."""
    torch.set_default_dtype(torch.float64)

    ours, theirs = (
        list(kind(batch_values.ReadySamples(*[[0.5, 1.5]] * 4), batch_size=2, num_workers=1)) for kind in (OURS, TORCH)
    )

    assert value_differences(ours, theirs) == []


def test_an_epoch_begins_under_a_default_device_when_torchs_does():
    """`with torch.device("cpu")` around everything: a mode is on, and nothing changes."""
    with torch.device("cpu"):
        ours, theirs = (
            list(kind(batch_values.ReadySamples(*[torch.ones(n) for n in (3, 3, 3)]), batch_size=2, num_workers=1))
            for kind in (OURS, TORCH)
        )

    assert value_differences(ours, theirs) == []
