"""Batches are torch's under every start method.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  nothing.
Never   a tolerance.
"""

from __future__ import annotations

import pytest
from torch.utils.data.datapipes.iter import IterableWrapper

import loader_inputs as inputs
from equality.assertions import Arguments, assert_same
from loader_comparison import OURS, TORCH, differences, run


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_batches_are_torchs_under_another_start_method(method):
    """Three epochs of a persistent fleet that imports and unpickles everything anew."""
    assert_same(
        lambda: {
            "dataset": inputs.ShowsMark(),
            "batch_size": 2,
            "shuffle": True,
            "worker_init_fn": inputs.mark_by_worker,
        },
        num_workers=2,
        epochs=3,
        break_after=1,
        persistent_workers=True,
        multiprocessing_context=method,
    )


# What torch delivers does not depend on how its workers are started: its quick run under fork is the reference here.
STARTED: dict[str, Arguments] = {
    "spawn, stream": lambda: {"dataset": inputs.Stream(9, 4), "batch_size": 3, "collate_fn": inputs.RandomCollate()},
    "forkserver, iter data pipe": lambda: {
        "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(inputs.with_noise),
        "batch_size": 3,
    },
    "spawn, values and errors": lambda: {"dataset": inputs.AllValuesWithErrors(), "collate_fn": inputs.as_list},
}


@pytest.mark.parametrize("case", STARTED)
def test_batches_are_those_under_fork_when_started_otherwise(case):
    """The start method does not show in what is delivered."""
    ours = run(OURS, STARTED[case], num_workers=2, multiprocessing_context=case.split(",")[0])
    theirs = run(TORCH, STARTED[case], num_workers=2, multiprocessing_context="fork")

    assert differences(ours, theirs) == []
