"""Wrong arguments are refused in torch's words, and attributes behave as torch's do.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  nothing.
Never   a tolerance.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import loader_inputs as inputs
from loader_comparison import OURS, TORCH, raised_by, without_addresses

REFUSED: dict[str, dict[str, Any]] = {
    "negative num_workers": {"num_workers": -1},
    "negative timeout": {"timeout": -1},
    "timeout that is a string": {"timeout": "3"},
    "prefetch_factor without workers": {"prefetch_factor": 2},
    "negative prefetch_factor": {"num_workers": 2, "prefetch_factor": -1},
    "persistent_workers without workers": {"persistent_workers": True},
    "sampler and shuffle": {"sampler": [1], "shuffle": True},
    "batch_sampler and batch_size": {"batch_sampler": [[1]], "batch_size": 2},
    "batch_sampler and shuffle": {"batch_sampler": [[1]], "shuffle": True},
    "batch_sampler and drop_last": {"batch_sampler": [[1]], "drop_last": True},
    "batch_sampler and sampler": {"batch_sampler": [[1]], "sampler": [1]},
    "drop_last without batches": {"batch_size": None, "drop_last": True},
    "batch_size 0": {"batch_size": 0},
    "batch_size that is a string": {"batch_size": "x"},
    "batch_size that is a float": {"batch_size": 2.0},
    "batch_size that is a bool": {"batch_size": True},
    "drop_last that is a string": {"drop_last": "yes"},
    "multiprocessing_context without workers": {"multiprocessing_context": "fork"},
    "unknown multiprocessing_context": {"num_workers": 1, "multiprocessing_context": "sporn"},
    "multiprocessing_context that is none": {"num_workers": 1, "multiprocessing_context": 5},
    "an argument that torch does not know": {"nonsense": 1},
    "shuffling nothing": {"dataset": [], "shuffle": True},
    "shuffling a stream": {"dataset": inputs.Stream(3), "shuffle": True},
    "a stream with a sampler": {"dataset": inputs.Stream(3), "sampler": [1]},
    "a stream with a batch_sampler": {"dataset": inputs.Stream(3), "batch_sampler": [[1]]},
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused_in_torchs_words(arguments):
    """The same type of exception, the same text."""

    ours, theirs = (raised_by(kind, **{"dataset": inputs.EchoesIndex(), **arguments}) for kind in (OURS, TORCH))

    assert ours == theirs


REFUSED_LATE: dict[str, dict[str, Any]] = {
    "timeout without workers": {"timeout": 3},
    "prefetch_factor 0": {"num_workers": 1, "prefetch_factor": 0},
    "a sampler that cannot be iterated": {"num_workers": 1, "sampler": 5},
    "a lambda under spawn": {"num_workers": 1, "multiprocessing_context": "spawn", "collate_fn": lambda x: x},
    "a lambda under forkserver": {
        "num_workers": 1,
        "multiprocessing_context": "forkserver",
        "worker_init_fn": lambda x: x,
    },
}


# torch's own iterator fails in its __del__ after it was refused.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("arguments", REFUSED_LATE.values(), ids=REFUSED_LATE)
def test_iteration_is_refused_in_torchs_words(arguments):
    """What shows only when iteration begins: the same exception and the same warnings."""

    def refusal(kind):
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            loader = kind(inputs.ReadySamples(1, 2, 3), **arguments)
            raised = raised_by(iter, loader)
        return raised, [(w.category, str(w.message)) for w in warned if "use of fork" not in str(w.message)]

    assert refusal(OURS) == refusal(TORCH)


@pytest.mark.parametrize(
    "name", ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers"]
)
def test_fields_are_fixed_in_torchs_words_once_the_loader_is_made(name):
    """torch refuses to change these; so do we, in the same words."""

    ours, theirs = (raised_by(setattr, kind(inputs.EchoesIndex()), name, 1) for kind in (OURS, TORCH))

    assert ours == theirs


def test_a_loader_passes_for_torchs_wherever_types_are_looked_at():
    """isinstance, subscripting, repr, length, and the fields that libraries read."""
    ours = OURS(inputs.EchoesIndex(), batch_size=5, num_workers=2, prefetch_factor=3, timeout=4)
    theirs = TORCH(inputs.EchoesIndex(), batch_size=5, num_workers=2, prefetch_factor=3, timeout=4)

    assert isinstance(ours, TORCH)
    assert "DataLoader" in repr(ours)
    assert "DataLoader[int]" in repr(OURS[int])
    assert len(ours) == len(theirs) == 3
    assert set(vars(theirs)) <= set(vars(ours))
    fields = ("batch_size", "num_workers", "prefetch_factor", "timeout", "pin_memory", "in_order", "drop_last")
    assert [getattr(ours, name) for name in fields] == [getattr(theirs, name) for name in fields]
    iterator = iter(ours)
    assert isinstance(iterator, torch.utils.data.dataloader._BaseDataLoaderIter)
    assert len(iterator) == 3


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("batch_size", [None, 2])
def test_a_stream_that_understates_its_length_is_warned_of_in_torchs_words(num_workers, batch_size):
    """One warning for each sample beyond what len(loader) said."""

    def warned(kind):
        loader = kind(inputs.SizedStream(9, 12, says=3), batch_size=batch_size, num_workers=num_workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            length = len(loader)
            batches = len(list(loader))
        return length, batches, [without_addresses(str(w.message)) for w in caught if "Length of" in str(w.message)]

    ours, theirs = warned(OURS), warned(TORCH)
    assert ours == theirs
    assert ours[2]
