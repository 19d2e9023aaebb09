"""Values of every type arrive as torch's loader delivers them, and indices reach the dataset as drawn.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  nothing.
Never   a tolerance.
"""

from __future__ import annotations

import functools
import gc
import signal

import numpy as np
import pytest
import torch

import loader_inputs as inputs
from equality.assertions import Arguments, assert_same
from loader_comparison import OURS, TORCH, differences, run

SHELVES: dict[str, Arguments] = {
    "as it is": lambda: {"sampler": list(inputs.values()), "batch_size": None, "collate_fn": inputs.as_is},
    "in a list": lambda: {"sampler": list(inputs.values()), "batch_size": 1, "collate_fn": inputs.as_list},
    "by default_convert": lambda: {"sampler": list(inputs.values()), "batch_size": None},
    "by default_collate": lambda: {"batch_sampler": [[name, name] for name in inputs.STACKABLE]},
}


@functools.cache
def _differences_in_values(way: str) -> list[list[str]]:
    """One run of each loader serves all values; none of them is kept, lest it look like a leak."""
    ours = run(OURS, SHELVES[way], dataset=inputs.AllValues(), num_workers=2).epochs[0]
    theirs = run(TORCH, SHELVES[way], dataset=inputs.AllValues(), num_workers=2).epochs[0]
    assert len(ours) == len(theirs)
    return [differences(our, their) for our, their in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize(
    ("way", "at", "name"),
    [(way, at, name) for way in list(SHELVES)[:3] for at, name in enumerate(inputs.values())]
    + [("by default_collate", at, name) for at, name in enumerate(inputs.STACKABLE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_arrives_as_torch_delivers_it(way, at, name):
    """Type, dtype, layout, bits, whether it can be written to; or the same error."""
    found = _differences_in_values(way)

    assert found[at] == []


def test_arrived_batches_can_be_written_to_and_kept_when_their_loader_is_gone():
    """A batch is the consumer's own: for ever, and to do with as it likes."""
    samples = [torch.arange(n, dtype=torch.float32) for n in (5, 30_000, 400_000)] * 4
    loader = OURS(inputs.ReadySamples(*samples), batch_size=None, num_workers=2)

    kept = list(loader)
    for tensor in kept:
        tensor += 1
    del loader
    gc.collect()

    assert differences(kept, [tensor + 1 for tensor in samples]) == []


INDICES = {
    "numpy integers": inputs.Batches([np.int64(1), np.int32(2)], [np.uint8(3)]),
    "numpy arrays": inputs.Batches(np.arange(3), np.array([2.5])),
    "tensors": inputs.Batches([torch.tensor(1), torch.tensor([2, 3])], torch.arange(3)),
    "strings": inputs.Batches(["a", "b"], ["c"]),
    "tuples": inputs.Batches([(1, 2), (3,)], ((), (None,))),
    "bools, floats, None": inputs.Batches([True, False], [1.5], [None]),
    "huge integers": inputs.Batches([1 << 70, 1], [-(1 << 63)]),
    "ranges and tuples of integers": inputs.Batches(range(3), (4, 5)),
    "subclasses of int": inputs.Batches([signal.SIGKILL, True, 3]),
}


@pytest.mark.parametrize("dataset", [inputs.EchoesIndex, inputs.EchoesIndices], ids=["__getitem__", "__getitems__"])
@pytest.mark.parametrize("batches", INDICES.values(), ids=INDICES)
def test_a_dataset_gets_the_very_indices_that_the_sampler_drew(dataset, batches):
    """An index keeps its type on the way to the worker; so does the batch of them."""
    assert_same(lambda: {"dataset": dataset(), "batch_sampler": batches, "collate_fn": inputs.as_list}, num_workers=1)


def test_a_single_index_keeps_its_type_when_there_are_no_batches():
    """batch_size=None: whatever the sampler yields is the index."""
    drawn = [np.int64(1), torch.tensor(2), "a", (1, 2), None, 1.5, [1, 2], {"k": 1}, 1 << 70]

    assert_same(
        lambda: {"dataset": inputs.EchoesIndex(), "sampler": drawn, "batch_size": None, "collate_fn": inputs.as_is},
        num_workers=2,
    )
