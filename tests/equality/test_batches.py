"""Batches are those of torch's loader, for every argument and any number of workers.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  nothing.
Never   a tolerance.
"""

from __future__ import annotations

import multiprocessing

import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import loader_inputs as inputs
from equality.assertions import Arguments, assert_same
from loader_comparison import OURS, TORCH, differences, run

CORE: dict[str, Arguments] = {
    "map": lambda: {"dataset": inputs.Noisy()},
    "map, batches of 3": lambda: {"dataset": inputs.Noisy(), "batch_size": 3},
    "map, batches of 3, drop_last": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "drop_last": True},
    "map, no batches": lambda: {"dataset": inputs.Noisy(), "batch_size": None},
    "map, shuffled": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "shuffle": True},
    "map, shuffled by a generator": lambda: {
        "dataset": inputs.Noisy(),
        "batch_size": 3,
        "shuffle": True,
        "generator": inputs.generator(),
    },
    "map, __getitems__": lambda: {"dataset": inputs.NoisyMany(), "batch_size": 4, "shuffle": True},
    "map, fewer batches than workers": lambda: {"dataset": inputs.Noisy(2)},
    "map, empty": lambda: {"dataset": inputs.Noisy(0)},
    "stream, batches of 3": lambda: {"dataset": inputs.Stream(9, 4, 13), "batch_size": 3},
    "stream, batches of 3, drop_last": lambda: {"dataset": inputs.Stream(9, 4, 13), "batch_size": 3, "drop_last": True},
    "stream, no batches": lambda: {"dataset": inputs.Stream(5, 0, 7), "batch_size": None},
    "generator stream": lambda: {"dataset": inputs.GeneratorStream(3, 8, 5), "batch_size": 2},
}


@pytest.mark.parametrize(
    "num_workers", [0, pytest.param(1, marks=pytest.mark.full), 2, pytest.param(3, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("arguments", CORE.values(), ids=CORE)
def test_batches_are_torchs_for_any_number_of_workers(arguments, num_workers):
    """With the same seed: the same batches, order, number, warnings, and random state of the trainer."""
    assert_same(arguments, num_workers=num_workers)


MORE: dict[str, Arguments] = {
    "sampler": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "sampler": inputs.Reversed(23), "drop_last": True},
    "sampler that is an iterable and draws": lambda: {"dataset": inputs.Noisy(), "sampler": inputs.FreshGenerator(17)},
    "sampler that is a generator": lambda: {
        "dataset": inputs.Noisy(),
        "batch_size": 2,
        "sampler": (i * 2 for i in range(9)),
    },
    "context that is an object": lambda: {
        "dataset": inputs.Noisy(),
        "batch_size": 3,
        "multiprocessing_context": multiprocessing.get_context("fork"),
    },
    "sampler that is a list": lambda: {"dataset": inputs.Noisy(), "batch_size": 4, "sampler": [3, 3, 1, 22, 0]},
    "sampler of batches, no collating": lambda: {
        "dataset": inputs.EchoesIndex(),
        "batch_size": None,
        "sampler": [[1, 2], [3], []],
        "collate_fn": inputs.as_is,
    },
    "weighted sampler": lambda: {
        "dataset": inputs.Noisy(5),
        "sampler": torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0, 0.1, 0.1], 12),
    },
    "batch sampler of lists": lambda: {"dataset": inputs.Noisy(), "batch_sampler": [[0, 1], [2], [22, 3, 4]]},
    "batch sampler of tuples": lambda: {"dataset": inputs.NoisyMany(), "batch_sampler": [(0, 1), (2,), (22, 3, 4)]},
    "batch sampler with empty batches": lambda: {
        "dataset": inputs.Noisy(),
        "batch_sampler": inputs.Batches([1, 2], [], [3], []),
        "collate_fn": inputs.as_list,
    },
    "batch sampler with empty batches, __getitems__": lambda: {
        "dataset": inputs.NoisyMany(),
        "batch_sampler": inputs.Batches([1, 2], [], [3], []),
        "collate_fn": inputs.as_list,
    },
    "batch sampler with empty batches, default collate": lambda: {
        "dataset": inputs.Noisy(),
        "batch_sampler": inputs.Batches([1, 2], [], [3], []),
    },
    "batch sampler of what is no batch": lambda: {
        "dataset": inputs.Noisy(),
        "batch_sampler": inputs.Batches([1], 5, [2]),
    },
    "prefetch_factor 1": lambda: {"dataset": inputs.Noisy(), "batch_size": 2, "prefetch_factor": 1},
    "prefetch_factor 5": lambda: {"dataset": inputs.Stream(9, 14), "batch_size": 2, "prefetch_factor": 5},
    "random collate": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "collate_fn": inputs.RandomCollate()},
    "random collate of a stream": lambda: {
        "dataset": inputs.ShuffledStream(13, 16),
        "batch_size": 3,
        "collate_fn": inputs.RandomCollate(),
    },
    "collate to a namedtuple": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "collate_fn": inputs.as_point},
    "worker_init_fn that draws and writes": lambda: {
        "dataset": inputs.ShowsMark(),
        "batch_size": 2,
        "worker_init_fn": inputs.mark_by_worker,
    },
    "pin_memory without an accelerator": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "pin_memory": True},
    "pin_memory_device": lambda: {"dataset": inputs.Noisy(4), "pin_memory": True, "pin_memory_device": "cuda"},
    "timeout that does not pass": lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "timeout": 60},
    "dataset that keeps what default_collate made": lambda: {"dataset": inputs.Caching(10), "batch_size": 2},
    "dataset that keeps what default_collate made, large": lambda: {"dataset": inputs.Caching(30_000), "batch_size": 2},
    "iter data pipe": lambda: {
        "dataset": IterableWrapper(range(20)).shuffle().sharding_filter(),
        "batch_size": 3,
        "shuffle": True,
    },
    "iter data pipe, unshuffled": lambda: {
        "dataset": IterableWrapper(range(20)).shuffle().sharding_filter(),
        "batch_size": 3,
        "shuffle": False,
    },
    "iter data pipe, with a generator": lambda: {
        "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(inputs.with_noise),
        "batch_size": 3,
        "generator": inputs.generator(),
    },
    "map data pipe": lambda: {"dataset": SequenceWrapper(range(20)).map(inputs.with_noise), "batch_size": 3},
}


@pytest.mark.parametrize("arguments", MORE.values(), ids=MORE)
def test_batches_are_torchs_for_every_argument(arguments):
    """Two epochs of a fresh fleet each."""
    assert_same(arguments, num_workers=2, epochs=2)


POLICIES = {"skip": "skip", "replace": "replace", "callable": lambda incident: "skip"}


HERE = {name: MORE[name] for name in MORE if "sampler" in name or "pipe" in name or "collate" in name}


@pytest.mark.parametrize("faults", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("arguments", [*CORE.values(), *HERE.values()], ids=[*CORE, *HERE])
def test_batches_are_torchs_under_any_policy_without_workers(arguments, faults):
    """num_workers=0 goes another way when exceptions are not simply raised; it must not show."""
    ours = run(OURS, arguments, epochs=2, faults=faults)
    theirs = run(TORCH, arguments, epochs=2)

    assert differences(ours.delivered, theirs.delivered) == []
    assert differences(ours.randomness, theirs.randomness) == []


@pytest.mark.parametrize("faults", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("name", ["map, batches of 3", "map, __getitems__", "stream, batches of 3, drop_last"])
def test_batches_are_torchs_under_any_policy_when_nothing_fails(name, faults):
    """A policy that has nothing to decide changes nothing."""
    ours = run(OURS, CORE[name], num_workers=2, faults=faults)
    theirs = run(TORCH, CORE[name], num_workers=2)

    assert differences(ours, theirs) == []


PERSISTENT: dict[str, Arguments] = {
    "map": lambda: {"dataset": inputs.Noisy(), "batch_size": 2, "shuffle": True},
    "map, prefetch_factor 5": lambda: {"dataset": inputs.Noisy(), "batch_size": 2, "prefetch_factor": 5},
    "map, __getitems__": lambda: {"dataset": inputs.NoisyMany(), "batch_size": 3, "shuffle": True},
    "map, one batch for two workers": lambda: {"dataset": inputs.Noisy(3), "batch_size": 3},
    "stream": lambda: {"dataset": inputs.Stream(9, 14), "batch_size": 2},
    "stream, prefetch_factor 1": lambda: {"dataset": inputs.Stream(9, 14), "batch_size": 2, "prefetch_factor": 1},
    "generator stream": lambda: {"dataset": inputs.GeneratorStream(9, 14), "batch_size": None},
    "shuffle buffer": lambda: {
        "dataset": inputs.ShuffledStream(9, 14),
        "batch_size": 3,
        "collate_fn": inputs.RandomCollate(),
    },
    "stateful stream": lambda: {"dataset": inputs.StatefulStream(9, 14), "batch_size": 3},
    "worker_init_fn": lambda: {"dataset": inputs.ShowsMark(), "worker_init_fn": inputs.mark_by_worker},
    "iter data pipe": lambda: {"dataset": IterableWrapper(range(20)).shuffle().sharding_filter(), "batch_size": 3},
}


@pytest.mark.parametrize("break_after", [None, 1], ids=["whole epochs", "epoch 1 broken off"])
@pytest.mark.parametrize("arguments", PERSISTENT.values(), ids=PERSISTENT)
def test_three_epochs_are_torchs_when_workers_persist(arguments, break_after):
    """Random state goes on from epoch to epoch, through what an unfinished epoch had asked for."""
    assert_same(arguments, num_workers=2, epochs=3, break_after=break_after, persistent_workers=True)


def test_three_epochs_are_torchs_when_a_worker_has_nothing_to_give():
    """Its stream ends before the others' begin. (Broken off, such an epoch is not the same twice with torch itself.)"""
    assert_same(
        lambda: {"dataset": inputs.GeneratorStream(9, 0, 1), "batch_size": 2},
        num_workers=3,
        epochs=3,
        persistent_workers=True,
    )


def test_batches_are_torchs_when_two_iterators_of_one_loader_take_turns():
    """An iterator knows nothing of its siblings."""

    def turns(kind):
        torch.manual_seed(5)
        loader = kind(inputs.Noisy(), batch_size=4, num_workers=1, shuffle=True)
        return [*zip(loader, loader, strict=True)]

    assert differences(turns(OURS), turns(TORCH)) == []


@pytest.mark.parametrize("dataset", [inputs.EchoesIndex(30), inputs.Stream(9, 4)], ids=["map", "stream"])
def test_the_same_samples_come_when_order_is_left_to_chance(dataset):
    """in_order=False: the same samples as torch's, each once, in whatever order they are ready."""

    def indices(kind):
        loader = kind(dataset, batch_size=2, num_workers=2, in_order=False, collate_fn=inputs.as_list)
        return sorted(x[0] if isinstance(x, tuple) else x["index"] for batch in loader for x in batch)

    assert indices(OURS) == indices(TORCH)


def test_a_batch_that_collate_fn_keeps_is_its_own_when_the_trainer_lets_go_of_it():
    """What the worker's code still holds is not overwritten by later batches, large or small."""

    def sums(kind, floats):
        samples = [torch.arange(floats) + 1000.0 * i for i in range(24)]
        loader = kind(inputs.ReadySamples(*samples), batch_size=2, num_workers=1, collate_fn=inputs.KeepsLast())
        return [(batch.sum().item(), last if last is None else last.sum().item()) for batch, last in loader]

    for floats in (20, 9_000, 100_000):
        assert sums(OURS, floats) == sums(TORCH, floats), f"{floats} floats"
