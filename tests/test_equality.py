"""Equality with torch's own loader: the same batches, errors and warnings, bit for bit, with and without deaths.

Reads   what both loaders deliver for the same arguments and the same seed (`loader_comparison`), on `loader_inputs`.
Writes  marker files that make a worker die at a chosen moment.
Never   a tolerance.

Where workers die, the undisturbed run of torch's loader is the reference: deaths must not show.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Callable
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import loader_inputs as s
import outlive
from loader_comparison import OURS, TORCH, Raised, Run, differences, raised_by, run, without_addresses

Arguments = Callable[[], dict[str, Any]]


def assert_same(arguments: Arguments, **how: Any) -> tuple[Run, Run]:
    ours = run(OURS, arguments, **how)
    theirs = run(TORCH, arguments, **how)

    assert differences(ours, theirs) == []
    return ours, theirs


@pytest.fixture(autouse=True)
def _no_thread_of_torchs():
    """torch sends indices that are tensors through a thread of multiprocessing's, which then stays."""
    yield
    resource_sharer.stop(timeout=5)


# ---------------------------------------------------------------- the grid

CORE: dict[str, Arguments] = {
    "map": lambda: {"dataset": s.Noisy()},
    "map, batches of 3": lambda: {"dataset": s.Noisy(), "batch_size": 3},
    "map, batches of 3, drop_last": lambda: {"dataset": s.Noisy(), "batch_size": 3, "drop_last": True},
    "map, no batches": lambda: {"dataset": s.Noisy(), "batch_size": None},
    "map, shuffled": lambda: {"dataset": s.Noisy(), "batch_size": 3, "shuffle": True},
    "map, shuffled by a generator": lambda: {
        "dataset": s.Noisy(),
        "batch_size": 3,
        "shuffle": True,
        "generator": s.generator(),
    },
    "map, __getitems__": lambda: {"dataset": s.NoisyMany(), "batch_size": 4, "shuffle": True},
    "map, fewer batches than workers": lambda: {"dataset": s.Noisy(2)},
    "map, empty": lambda: {"dataset": s.Noisy(0)},
    "stream, batches of 3": lambda: {"dataset": s.Stream(9, 4, 13), "batch_size": 3},
    "stream, batches of 3, drop_last": lambda: {"dataset": s.Stream(9, 4, 13), "batch_size": 3, "drop_last": True},
    "stream, no batches": lambda: {"dataset": s.Stream(5, 0, 7), "batch_size": None},
    "generator stream": lambda: {"dataset": s.GeneratorStream(3, 8, 5), "batch_size": 2},
}


@pytest.mark.parametrize("num_workers", [0, 1, 2, 3])
@pytest.mark.parametrize("arguments", CORE.values(), ids=CORE)
def test_batches_are_torchs_for_any_number_of_workers(arguments, num_workers):
    """With the same seed: the same batches, order, number, warnings, and random state of the trainer."""
    assert_same(arguments, num_workers=num_workers)


MORE: dict[str, Arguments] = {
    "sampler": lambda: {"dataset": s.Noisy(), "batch_size": 3, "sampler": s.Reversed(23), "drop_last": True},
    "sampler that is an iterable and draws": lambda: {"dataset": s.Noisy(), "sampler": s.FreshGenerator(17)},
    "sampler that is a generator": lambda: {
        "dataset": s.Noisy(),
        "batch_size": 2,
        "sampler": (i * 2 for i in range(9)),
    },
    "context that is an object": lambda: {
        "dataset": s.Noisy(),
        "batch_size": 3,
        "multiprocessing_context": multiprocessing.get_context("fork"),
    },
    "sampler that is a list": lambda: {"dataset": s.Noisy(), "batch_size": 4, "sampler": [3, 3, 1, 22, 0]},
    "sampler of batches, no collating": lambda: {
        "dataset": s.EchoesIndex(),
        "batch_size": None,
        "sampler": [[1, 2], [3], []],
        "collate_fn": s.as_is,
    },
    "weighted sampler": lambda: {
        "dataset": s.Noisy(5),
        "sampler": torch.utils.data.WeightedRandomSampler([1.0, 2.0, 3.0, 0.1, 0.1], 12),
    },
    "batch sampler of lists": lambda: {"dataset": s.Noisy(), "batch_sampler": [[0, 1], [2], [22, 3, 4]]},
    "batch sampler of tuples": lambda: {"dataset": s.NoisyMany(), "batch_sampler": [(0, 1), (2,), (22, 3, 4)]},
    "batch sampler with empty batches": lambda: {
        "dataset": s.Noisy(),
        "batch_sampler": s.Batches([1, 2], [], [3], []),
        "collate_fn": s.as_list,
    },
    "batch sampler with empty batches, __getitems__": lambda: {
        "dataset": s.NoisyMany(),
        "batch_sampler": s.Batches([1, 2], [], [3], []),
        "collate_fn": s.as_list,
    },
    "batch sampler with empty batches, default collate": lambda: {
        "dataset": s.Noisy(),
        "batch_sampler": s.Batches([1, 2], [], [3], []),
    },
    "batch sampler of what is no batch": lambda: {"dataset": s.Noisy(), "batch_sampler": s.Batches([1], 5, [2])},
    "prefetch_factor 1": lambda: {"dataset": s.Noisy(), "batch_size": 2, "prefetch_factor": 1},
    "prefetch_factor 5": lambda: {"dataset": s.Stream(9, 14), "batch_size": 2, "prefetch_factor": 5},
    "random collate": lambda: {"dataset": s.Noisy(), "batch_size": 3, "collate_fn": s.RandomCollate()},
    "random collate of a stream": lambda: {
        "dataset": s.ShuffledStream(13, 16),
        "batch_size": 3,
        "collate_fn": s.RandomCollate(),
    },
    "collate to a namedtuple": lambda: {"dataset": s.Noisy(), "batch_size": 3, "collate_fn": s.as_point},
    "worker_init_fn that draws and writes": lambda: {
        "dataset": s.ShowsMark(),
        "batch_size": 2,
        "worker_init_fn": s.mark_by_worker,
    },
    "pin_memory without an accelerator": lambda: {"dataset": s.Noisy(), "batch_size": 3, "pin_memory": True},
    "pin_memory_device": lambda: {"dataset": s.Noisy(4), "pin_memory": True, "pin_memory_device": "cuda"},
    "timeout that does not pass": lambda: {"dataset": s.Noisy(), "batch_size": 3, "timeout": 60},
    "dataset that keeps what default_collate made": lambda: {"dataset": s.Caching(10), "batch_size": 2},
    "dataset that keeps what default_collate made, large": lambda: {"dataset": s.Caching(30_000), "batch_size": 2},
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
        "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(s.with_noise),
        "batch_size": 3,
        "generator": s.generator(),
    },
    "map data pipe": lambda: {"dataset": SequenceWrapper(range(20)).map(s.with_noise), "batch_size": 3},
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
    "map": lambda: {"dataset": s.Noisy(), "batch_size": 2, "shuffle": True},
    "map, prefetch_factor 5": lambda: {"dataset": s.Noisy(), "batch_size": 2, "prefetch_factor": 5},
    "map, __getitems__": lambda: {"dataset": s.NoisyMany(), "batch_size": 3, "shuffle": True},
    "map, one batch for two workers": lambda: {"dataset": s.Noisy(3), "batch_size": 3},
    "stream": lambda: {"dataset": s.Stream(9, 14), "batch_size": 2},
    "stream, prefetch_factor 1": lambda: {"dataset": s.Stream(9, 14), "batch_size": 2, "prefetch_factor": 1},
    "generator stream": lambda: {"dataset": s.GeneratorStream(9, 14), "batch_size": None},
    "shuffle buffer": lambda: {"dataset": s.ShuffledStream(9, 14), "batch_size": 3, "collate_fn": s.RandomCollate()},
    "stateful stream": lambda: {"dataset": s.StatefulStream(9, 14), "batch_size": 3},
    "worker_init_fn": lambda: {"dataset": s.ShowsMark(), "worker_init_fn": s.mark_by_worker},
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
        lambda: {"dataset": s.GeneratorStream(9, 0, 1), "batch_size": 2},
        num_workers=3,
        epochs=3,
        persistent_workers=True,
    )


def test_batches_are_torchs_when_two_iterators_of_one_loader_take_turns():
    """An iterator knows nothing of its siblings."""

    def turns(kind):
        torch.manual_seed(5)
        loader = kind(s.Noisy(), batch_size=4, num_workers=1, shuffle=True)
        return [*zip(loader, loader, strict=True)]

    assert differences(turns(OURS), turns(TORCH)) == []


@pytest.mark.parametrize("dataset", [s.EchoesIndex(30), s.Stream(9, 4)], ids=["map", "stream"])
def test_the_same_samples_come_when_order_is_left_to_chance(dataset):
    """in_order=False: the same samples as torch's, each once, in whatever order they are ready."""

    def indices(kind):
        loader = kind(dataset, batch_size=2, num_workers=2, in_order=False, collate_fn=s.as_list)
        return sorted(x[0] if isinstance(x, tuple) else x["index"] for batch in loader for x in batch)

    assert indices(OURS) == indices(TORCH)


def test_a_batch_that_collate_fn_keeps_is_its_own_when_the_trainer_lets_go_of_it():
    """What the worker's code still holds is not overwritten by later batches, large or small."""

    def sums(kind, floats):
        samples = [torch.arange(floats) + 1000.0 * i for i in range(24)]
        loader = kind(s.ReadySamples(*samples), batch_size=2, num_workers=1, collate_fn=s.KeepsLast())
        return [(batch.sum().item(), last if last is None else last.sum().item()) for batch, last in loader]

    for floats in (20, 9_000, 100_000):
        assert sums(OURS, floats) == sums(TORCH, floats), f"{floats} floats"


# ---------------------------------------------------------------- what travels

SHELVES: dict[str, Arguments] = {
    "as it is": lambda: {"sampler": list(s.values()), "batch_size": None, "collate_fn": s.as_is},
    "in a list": lambda: {"sampler": list(s.values()), "batch_size": 1, "collate_fn": s.as_list},
    "by default_convert": lambda: {"sampler": list(s.values()), "batch_size": None},
    "by default_collate": lambda: {"batch_sampler": [[name, name] for name in s.STACKABLE]},
}


@functools.cache
def _differences_in_values(way: str) -> list[list[str]]:
    """One run of each loader serves all values; none of them is kept, lest it look like a leak."""
    ours = run(OURS, SHELVES[way], dataset=s.AllValues(), num_workers=2).epochs[0]
    theirs = run(TORCH, SHELVES[way], dataset=s.AllValues(), num_workers=2).epochs[0]
    assert len(ours) == len(theirs)
    return [differences(our, their) for our, their in zip(ours, theirs, strict=True)]


@pytest.mark.parametrize(
    ("way", "at", "name"),
    [(way, at, name) for way in list(SHELVES)[:3] for at, name in enumerate(s.values())]
    + [("by default_collate", at, name) for at, name in enumerate(s.STACKABLE)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_arrives_as_torch_delivers_it(way, at, name):
    """Type, dtype, layout, bits, whether it can be written to; or the same error."""
    found = _differences_in_values(way)

    assert found[at] == []


def test_arrived_batches_can_be_written_to_and_kept_when_their_loader_is_gone():
    """A batch is the consumer's own: for ever, and to do with as it likes."""
    samples = [torch.arange(n, dtype=torch.float32) for n in (5, 30_000, 400_000)] * 4
    loader = OURS(s.ReadySamples(*samples), batch_size=None, num_workers=2)

    kept = list(loader)
    for tensor in kept:
        tensor += 1
    del loader
    gc.collect()

    assert differences(kept, [tensor + 1 for tensor in samples]) == []


INDICES = {
    "numpy integers": s.Batches([s.np.int64(1), s.np.int32(2)], [s.np.uint8(3)]),
    "numpy arrays": s.Batches(s.np.arange(3), s.np.array([2.5])),
    "tensors": s.Batches([torch.tensor(1), torch.tensor([2, 3])], torch.arange(3)),
    "strings": s.Batches(["a", "b"], ["c"]),
    "tuples": s.Batches([(1, 2), (3,)], ((), (None,))),
    "bools, floats, None": s.Batches([True, False], [1.5], [None]),
    "huge integers": s.Batches([1 << 70, 1], [-(1 << 63)]),
    "ranges and tuples of integers": s.Batches(range(3), (4, 5)),
    "subclasses of int": s.Batches([signal.SIGKILL, True, 3]),
}


@pytest.mark.parametrize("dataset", [s.EchoesIndex, s.EchoesIndices], ids=["__getitem__", "__getitems__"])
@pytest.mark.parametrize("batches", INDICES.values(), ids=INDICES)
def test_a_dataset_gets_the_very_indices_that_the_sampler_drew(dataset, batches):
    """An index keeps its type on the way to the worker; so does the batch of them."""
    assert_same(lambda: {"dataset": dataset(), "batch_sampler": batches, "collate_fn": s.as_list}, num_workers=1)


def test_a_single_index_keeps_its_type_when_there_are_no_batches():
    """batch_size=None: whatever the sampler yields is the index."""
    drawn = [s.np.int64(1), torch.tensor(2), "a", (1, 2), None, 1.5, [1, 2], {"k": 1}, 1 << 70]

    assert_same(
        lambda: {"dataset": s.EchoesIndex(), "sampler": drawn, "batch_size": None, "collate_fn": s.as_is}, num_workers=2
    )


# ---------------------------------------------------------------- arguments that make no sense

REFUSED: dict[str, dict[str, Any]] = {
    "negative num_workers": {"num_workers": -1},
    "num_workers that is a string": {"num_workers": "2"},
    "num_workers that is None": {"num_workers": None},
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
    "shuffling a stream": {"dataset": s.Stream(3), "shuffle": True},
    "a stream with a sampler": {"dataset": s.Stream(3), "sampler": [1]},
    "a stream with a batch_sampler": {"dataset": s.Stream(3), "batch_sampler": [[1]]},
}


@pytest.mark.parametrize("arguments", REFUSED.values(), ids=REFUSED)
def test_wrong_arguments_are_refused_in_torchs_words(arguments):
    """The same type of exception, the same text."""

    ours, theirs = (raised_by(kind, **{"dataset": s.EchoesIndex(), **arguments}) for kind in (OURS, TORCH))

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
            loader = kind(s.ReadySamples(1, 2, 3), **arguments)
            raised = raised_by(iter, loader)
        return raised, [(w.category, str(w.message)) for w in warned if "use of fork" not in str(w.message)]

    assert refusal(OURS) == refusal(TORCH)


@pytest.mark.parametrize(
    "name", ["dataset", "batch_size", "sampler", "batch_sampler", "drop_last", "persistent_workers"]
)
def test_fields_are_fixed_in_torchs_words_once_the_loader_is_made(name):
    """torch refuses to change these; so do we, in the same words."""

    ours, theirs = (raised_by(setattr, kind(s.EchoesIndex()), name, 1) for kind in (OURS, TORCH))

    assert ours == theirs


def test_a_loader_passes_for_torchs_wherever_types_are_looked_at():
    """isinstance, subscripting, repr, length, and the fields that libraries read."""
    ours = OURS(s.EchoesIndex(), batch_size=5, num_workers=2, prefetch_factor=3, timeout=4)
    theirs = TORCH(s.EchoesIndex(), batch_size=5, num_workers=2, prefetch_factor=3, timeout=4)

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
        loader = kind(s.SizedStream(9, 12, says=3), batch_size=batch_size, num_workers=num_workers)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            length = len(loader)
            batches = len(list(loader))
        return length, batches, [without_addresses(str(w.message)) for w in caught if "Length of" in str(w.message)]

    ours, theirs = warned(OURS), warned(TORCH)
    assert ours == theirs
    assert ours[2]


# ---------------------------------------------------------------- errors

ERRORS = {
    1: s.key_error,
    4: s.odd_error,
    5: s.message_error,
    8: s.unicode_error,
    9: s.assertion_error,
    10: s.chained_error,
    12: s.stop_iteration,
    13: s.mute_error,
}
STREAM_ERRORS = {3: s.key_error, 104: s.odd_error, 105: s.assertion_error, 111: s.unicode_error}

FAILING: dict[str, Arguments] = {
    "map": lambda: {"dataset": s.Fails(ERRORS)},
    "map, batches of 3": lambda: {"dataset": s.Fails(ERRORS, 40), "batch_size": 3},
    "map, no batches": lambda: {"dataset": s.Fails(ERRORS, 20), "batch_size": None},
    "map, __getitems__": lambda: {"dataset": s.FailsMany(ERRORS, 40), "batch_size": 3},
    "map, persistent": lambda: {"dataset": s.Fails(ERRORS, 20), "batch_size": 2, "persistent_workers": True},
    "collate": lambda: {"dataset": s.Noisy(), "batch_size": 3, "collate_fn": s.FailingCollate(4, 13)},
    "stream": lambda: {"dataset": s.FailingStream(9, 14, errors=STREAM_ERRORS), "batch_size": 3},
    "stream, no batches": lambda: {"dataset": s.FailingStream(9, 14, errors=STREAM_ERRORS), "batch_size": None},
    "stream, persistent": lambda: {
        "dataset": s.FailingStream(9, 14, errors=STREAM_ERRORS),
        "batch_size": 3,
        "persistent_workers": True,
    },
    "stream that is a generator": lambda: {
        "dataset": s.FailingGenerator(9, 14, errors=STREAM_ERRORS),
        "batch_size": 3,
    },
    "collate of a stream": lambda: {
        "dataset": s.Stream(9, 14),
        "batch_size": 3,
        "collate_fn": s.FailingCollate(4, 107),
    },
    "collate of a stream raises StopIteration": lambda: {
        "dataset": s.Stream(9, 14),
        "batch_size": 3,
        "collate_fn": s.FailingCollate(4, kind=StopIteration),
    },
}


@pytest.mark.parametrize("arguments", FAILING.values(), ids=FAILING)
def test_errors_are_torchs_and_what_follows_is_too(arguments):
    """The same exception at the same place; a consumer that goes on gets torch's batches, random numbers included."""
    ours, _ = assert_same(arguments, num_workers=2, epochs=2)

    assert len(ours.loader.incidents) == len(ours.raised)


@pytest.mark.parametrize("dataset", [s.Noisy(), s.Stream(5, 5)], ids=["map", "stream"])
def test_the_first_error_is_torchs_when_worker_init_fn_raises(dataset):
    """worker_init_fn's own exception reaches the trainer, with torch's text."""

    def first_error(kind):
        iterator = iter(kind(dataset, num_workers=1, worker_init_fn=s.refuse_to_start))
        raised = raised_by(next, iterator)
        iterator._shutdown_workers()  # torch's would wait five seconds if the collector had to find it
        return raised

    assert first_error(OURS) == first_error(TORCH)


def test_an_error_of_the_sampler_is_torchs():
    """It is raised where torch raises it. The batch that torch loses by it comes with the next call."""
    arguments = {"batch_size": 2, "num_workers": 2}
    ours = run(OURS, lambda: {"dataset": s.Noisy(), "sampler": s.FailingSampler(14), **arguments})
    theirs = run(TORCH, lambda: {"dataset": s.Noisy(), "sampler": s.FailingSampler(14), **arguments})
    healthy = run(TORCH, lambda: {"dataset": s.Noisy(), "sampler": list(range(14)), **arguments})

    steps = ours.epochs[0]
    at = next(n for n, step in enumerate(steps) if isinstance(step, Raised))
    assert differences(ours.delivered, healthy.delivered) == []
    assert differences([*steps[: at + 1], *steps[at + 2 :]], theirs.epochs[0]) == []


def patiently(iterator):
    """The next batch, however often the wait for it times out; a minute at most."""
    give_up_at = time.monotonic() + 60
    while True:
        try:
            return next(iterator)
        except RuntimeError as error:
            if "timed out" not in str(error) or time.monotonic() > give_up_at:
                raise


def test_a_timeout_is_torchs_and_the_late_batch_still_comes(tmp_path):
    """timeout=: RuntimeError in torch's words, each time it passes; the batch is not lost by it."""

    def steps(kind, folder):
        folder.mkdir()
        torch.manual_seed(1)
        iterator = iter(kind(s.Gated(folder / "open"), batch_size=2, num_workers=1, timeout=0.4))
        before = patiently(iterator)
        late = raised_by(next, iterator)
        (folder / "open").touch()
        return before, late, [patiently(iterator) for _ in range(2)]

    assert differences(steps(OURS, tmp_path / "ours"), steps(TORCH, tmp_path / "torch")) == []


# ---------------------------------------------------------------- other start methods


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_batches_are_torchs_under_another_start_method(method):
    """Three epochs of a persistent fleet that imports and unpickles everything anew."""
    assert_same(
        lambda: {"dataset": s.ShowsMark(), "batch_size": 2, "shuffle": True, "worker_init_fn": s.mark_by_worker},
        num_workers=2,
        epochs=3,
        break_after=1,
        persistent_workers=True,
        multiprocessing_context=method,
    )


# What torch delivers does not depend on how its workers are started: its quick run under fork is the reference here.
STARTED: dict[str, Arguments] = {
    "spawn, stream": lambda: {"dataset": s.Stream(9, 4), "batch_size": 3, "collate_fn": s.RandomCollate()},
    "forkserver, iter data pipe": lambda: {
        "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(s.with_noise),
        "batch_size": 3,
    },
    "spawn, values and errors": lambda: {"dataset": s.AllValuesWithErrors(), "collate_fn": s.as_list},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", STARTED)
def test_batches_are_those_under_fork_when_started_otherwise(case):
    """The start method does not show in what is delivered."""
    ours = run(OURS, STARTED[case], num_workers=2, multiprocessing_context=case.split(",")[0])
    theirs = run(TORCH, STARTED[case], num_workers=2, multiprocessing_context="fork")

    assert differences(ours, theirs) == []


# ---------------------------------------------------------------- deaths

Deadly = Callable[[s.Kills], dict[str, Any]]

MAP_DEATHS = {3: {1}, 4: {1}, 17: {1}, 22: {1}}
STREAM_DEATHS = {7: {1}, 103: {1}, 113: {1}}

DEATHS: dict[str, tuple[Deadly, dict[Any, set[int]]]] = {
    "map, in __getitem__": (
        lambda kills: {"dataset": s.Noisy(23, kills), "batch_size": 3, "shuffle": True},
        MAP_DEATHS,
    ),
    "map, no batches": (lambda kills: {"dataset": s.Noisy(23, kills), "batch_size": None}, MAP_DEATHS),
    "map, at the first and last sample": (lambda kills: {"dataset": s.Noisy(6, kills)}, {0: {1}, 1: {1}, 5: {1}}),
    "map, in __getitems__": (
        lambda kills: {"dataset": s.NoisyMany(23, kills), "batch_size": 3, "shuffle": True},
        {3: {1}, 17: {1}},
    ),
    "map, in collate": (
        lambda kills: {"dataset": s.Noisy(23), "batch_size": 3, "collate_fn": s.RandomCollate(kills)},
        {("collate", 3): {1}, ("collate", 17): {1}},
    ),
    "map, while a batch is sent": (
        lambda kills: {"dataset": s.KillsWhenSent(23, kills), "batch_size": 3, "collate_fn": s.as_list},
        {("sent", 3): {1}, ("sent", 17): {1}},
    ),
    "map, around errors": (
        lambda kills: {"dataset": s.Fails(ERRORS, 40, kills), "batch_size": 3},
        {0: {1}, 6: {1}, 15: {1}, 20: {1}},
    ),
    "map, with worker_init_fn": (
        lambda kills: {"dataset": s.NoisyShowsMark(kills), "batch_size": 2, "worker_init_fn": s.mark_by_worker},
        {1: {1}, 6: {1}},
    ),
    "stream": (lambda kills: {"dataset": s.Stream(9, 14, kills=kills), "batch_size": 3}, STREAM_DEATHS),
    "stream, no batches": (
        lambda kills: {"dataset": s.Stream(9, 14, kills=kills), "batch_size": None},
        STREAM_DEATHS,
    ),
    "stream, drop_last": (
        lambda kills: {"dataset": s.Stream(9, 14, kills=kills), "batch_size": 4, "drop_last": True},
        STREAM_DEATHS,
    ),
    "stream, around errors": (
        lambda kills: {"dataset": s.FailingStream(14, 18, errors=STREAM_ERRORS, kills=kills), "batch_size": 3},
        {4: {1}, 9: {1}, 107: {1}, 116: {1}},
    ),
    "stream, in collate": (
        lambda kills: {"dataset": s.Stream(9, 14), "batch_size": 3, "collate_fn": s.RandomCollate(kills)},
        {("collate", 7): {1}, ("collate", 103): {1}},
    ),
    "generator stream": (
        lambda kills: {"dataset": s.GeneratorStream(9, 14, kills=kills), "batch_size": 3},
        STREAM_DEATHS,
    ),
    "shuffle buffer": (
        lambda kills: {"dataset": s.ShuffledStream(19, 24, kills=kills), "batch_size": 3},
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "shuffle buffer, random collate": (
        lambda kills: {
            "dataset": s.ShuffledStream(19, 24, kills=kills),
            "batch_size": 3,
            "collate_fn": s.RandomCollate(),
        },
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "stateful stream": (
        lambda kills: {"dataset": s.StatefulStream(9, 14, kills=kills), "batch_size": 3},
        STREAM_DEATHS,
    ),
    "stateful stream, seldom saved": (
        lambda kills: {"dataset": s.StatefulStream(19, 24, kills=kills, costs_s=0.01), "batch_size": 2},
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "stateful stream, seldom saved, random collate": (
        lambda kills: {
            "dataset": s.StatefulStream(19, 24, kills=kills, costs_s=0.01),
            "batch_size": 2,
            "collate_fn": s.RandomCollate(),
        },
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "stateful iterator": (
        lambda kills: {"dataset": s.StatefulIteratorStream(9, 14, kills=kills), "batch_size": 3},
        STREAM_DEATHS,
    ),
    "iter data pipe": (
        lambda kills: {
            "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(s.DeadlyNoise(kills)),
            "batch_size": 3,
        },
        {3: {1}, 17: {1}},
    ),
    "map data pipe": (
        lambda kills: {"dataset": SequenceWrapper(range(20)).map(s.DeadlyNoise(kills)), "batch_size": 3},
        {3: {1}, 17: {1}},
    ),
}


def assert_deaths_do_not_show(make: Deadly, when: dict[Any, set[int]], folder: Path, **how: Any) -> Run:
    kills = s.Kills(folder, when)
    ours = run(OURS, lambda: make(kills), **how)
    theirs = run(TORCH, lambda: make(s.NoKills()), **{**how, "multiprocessing_context": "fork"})

    assert differences(ours, theirs) == []
    assert ours.loader.statistics().restarts == kills.total
    return ours


@pytest.mark.faults
@pytest.mark.parametrize(("make", "when"), DEATHS.values(), ids=DEATHS)
def test_deaths_do_not_show_in_what_is_delivered(make, when, tmp_path):
    """The worker is replaced, its work done again: bit for bit what torch delivers when nobody dies."""
    assert_deaths_do_not_show(make, when, tmp_path, num_workers=2)


PERSISTENT_DEATHS: dict[str, tuple[Deadly, dict[Any, set[int]]]] = {
    # Each death is followed by one more try: odd numbers are first tries, in epochs 1, 2 and 3.
    "map": (
        lambda kills: {"dataset": s.Noisy(23, kills), "batch_size": 3, "shuffle": True},
        {3: {1, 3, 5}, 17: {1, 4}, 9: {2}},
    ),
    "stream, at its first sample": (
        lambda kills: {"dataset": s.Stream(9, 14, kills=kills), "batch_size": 3},
        {0: {1, 3, 5}, 100: {2}},
    ),
    "generator stream, at its last batch": (
        lambda kills: {"dataset": s.GeneratorStream(9, 14, kills=kills), "batch_size": 3},
        {7: {2, 4}, 113: {1, 3}},
    ),
    "shuffle buffer": (
        lambda kills: {"dataset": s.ShuffledStream(19, 24, kills=kills), "batch_size": 3},
        {7: {2}, 120: {3}},
    ),
    "stateful stream": (
        lambda kills: {"dataset": s.StatefulStream(9, 14, kills=kills), "batch_size": 3},
        {4: {2, 4}, 100: {2}},
    ),
    "stateful iterator": (
        lambda kills: {"dataset": s.StatefulIteratorStream(9, 14, kills=kills), "batch_size": 3},
        {4: {2, 4}, 100: {2}},
    ),
    "iter data pipe": (
        lambda kills: {
            "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(s.DeadlyNoise(kills)),
            "batch_size": 3,
        },
        {3: {2}, 17: {3}},
    ),
}


@pytest.mark.faults
@pytest.mark.parametrize(("make", "when"), PERSISTENT_DEATHS.values(), ids=PERSISTENT_DEATHS)
def test_deaths_do_not_show_in_any_epoch_when_workers_persist(make, when, tmp_path):
    """A replacement goes on with the random state and the epoch of the worker it replaces."""
    assert_deaths_do_not_show(make, when, tmp_path, num_workers=2, epochs=3, persistent_workers=True)


@pytest.mark.faults
def test_deaths_do_not_show_when_an_epoch_with_deaths_is_broken_off(tmp_path):
    """What the broken epoch had asked for is finished by whoever lives, as torch's workers finish it."""
    assert_deaths_do_not_show(
        lambda kills: {"dataset": s.Noisy(23, kills), "batch_size": 3},
        {6: {1}, 9: {1, 3}, 22: {1}},
        tmp_path,
        num_workers=2,
        epochs=3,
        break_after=1,
        persistent_workers=True,
    )


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_deaths_do_not_show_under_another_start_method(method, tmp_path):
    """The zygote is not the trainer's fork here, but holds the same dataset."""
    assert_deaths_do_not_show(
        lambda kills: {"dataset": s.NoisyShowsMark(kills), "batch_size": 2, "worker_init_fn": s.mark_by_worker},
        {1: {1, 3}, 6: {2}, 13: {1}},
        tmp_path,
        num_workers=2,
        epochs=3,
        persistent_workers=True,
        multiprocessing_context=method,
    )


class _KillsProcesses(outlive.DataLoader[Any]):
    """Loses a process from outside after every third step, and all of them after each epoch."""

    def kill_process(self, number: int) -> None:
        raise NotImplementedError

    def __iter__(self) -> Any:
        return _KillingIterator(self, super().__iter__())


class _KillingIterator:
    """No generator: that would end with the first error of a sample."""

    def __init__(self, loader: _KillsProcesses, iterator: Any) -> None:
        self._loader = loader
        self._iterator = iterator
        self._number = -1

    def __next__(self) -> Any:
        self._number += 1
        try:
            step = next(self._iterator)
        except StopIteration as end:
            if not end.args and self._loader.persistent_workers:
                for number in range(self._loader.num_workers):
                    self._loader.kill_process(number)
            raise
        if self._number % 3 == 1:
            self._loader.kill_process(self._number)
        return step


class KillsWorkers(_KillsProcesses):
    def kill_process(self, number: int) -> None:
        pids = [slot.pid for slot in self.statistics().slots if slot.pid]
        if pids:
            _kill(pids[number % len(pids)])


class KillsZygotes(_KillsProcesses):
    def kill_process(self, number: int) -> None:
        for child in psutil.Process().children():
            if child.name() == "outlive-zygote":
                _kill(child.pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It had ended by itself, as workers of ended streams may.


SHOT: dict[str, Arguments] = {
    "map": lambda: {"dataset": s.Noisy(40), "batch_size": 3, "shuffle": True},
    "map, __getitems__": lambda: {"dataset": s.NoisyMany(40), "batch_size": 3},
    "stream": lambda: {"dataset": s.Stream(20, 30), "batch_size": 3},
    "shuffle buffer": lambda: {"dataset": s.ShuffledStream(20, 30), "batch_size": 3},
    "stateful stream": lambda: {"dataset": s.StatefulStream(20, 30), "batch_size": 3},
    "map, with errors": lambda: {"dataset": s.Fails(ERRORS, 40), "batch_size": 3, "shuffle": True},
    "stream, with errors": lambda: {"dataset": s.FailingStream(20, 30, errors=STREAM_ERRORS), "batch_size": 3},
}


@pytest.mark.faults
@pytest.mark.parametrize("kind", [KillsWorkers, KillsZygotes], ids=["worker", "zygote"])
@pytest.mark.parametrize("arguments", SHOT.values(), ids=SHOT)
def test_kills_from_outside_do_not_show_whenever_they_come(arguments, kind):
    """Whatever the process was doing: idle, fetching, sending, starting, between two epochs."""
    ours = run(kind, arguments, num_workers=2, epochs=3, persistent_workers=True)
    theirs = run(TORCH, arguments, num_workers=2, epochs=3, persistent_workers=True)

    assert differences(ours, theirs) == []
    assert ours.loader.statistics().restarts > 0


@pytest.mark.faults
def test_a_stateful_stream_is_restored_rather_than_run_again_when_its_worker_dies(tmp_path):
    """state_dict spares the samples that were made before: fewer are made than by starting again."""
    (tmp_path / "kills").mkdir()
    kills = s.Kills(tmp_path / "kills", {380: {1}})
    loader = OURS(s.StatefulStream(400, kills=kills, folder=tmp_path), batch_size=4, num_workers=1)

    indices = [index for batch in loader for index in batch["index"].tolist()]

    assert indices == list(range(400))
    assert loader.statistics().restarts == 1
    assert len((tmp_path / "made").read_bytes()) < 400 + 380
