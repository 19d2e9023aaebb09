"""`install()` and `installed()`: loaders of torch's, and of libraries, are supervised without knowing it.

Reads   what loaders deliver under installation and without it.
Writes  nothing.
Never   leaves anything installed.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import pickle
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_loader

import epoch_datasets
import loader_inputs as inputs
import outlive
from adoption import loaders
from adoption.loaders import BAD, DEADLY, SIZE, Faulty, Healthy, indices
from loader_comparison import TORCH, differences, run
from outlive.adoption import installing

METHODS = ("fork", "spawn", "forkserver")
LEFT = [i for i in range(SIZE) if i not in (DEADLY, BAD)]
STOCK = {
    (owner, name): vars(owner)[name]
    for owner, name in (
        (torch_loader._MultiProcessingDataLoaderIter, "__init__"),
        (torch_loader._SingleProcessDataLoaderIter, "__init__"),
        (loaders.ForeignLoader, "_get_iterator"),
        (loaders.OwnIteratorLoader, "_get_iterator"),
    )
}


@pytest.fixture(autouse=True)
def _all_is_restored() -> Iterator[None]:
    installing.named_classes.clear()
    yield
    assert installing.active == []
    assert {key: vars(key[0])[key[1]] for key in STOCK} == STOCK
    assert "__init_subclass__" not in vars(DataLoader)


@pytest.mark.parametrize("method", METHODS)
def test_a_stock_loader_survives_when_installed(method):
    """A sample that kills and one that raises cost themselves and nothing else."""
    loader = DataLoader(Faulty(), batch_size=4, num_workers=2, multiprocessing_context=method)
    with outlive.installed("skip") as adoption:
        delivered = indices(loader)

    assert delivered == LEFT
    assert {index for incident in adoption.incidents for index in incident.indices} == {DEADLY, BAD}
    assert type(loader) is DataLoader


@pytest.mark.parametrize("kind", [loaders.WrapsIterator, loaders.Endless])
def test_a_librarys_loader_survives_when_it_asks_torch_for_its_iterator(kind):
    """Whatever subclass it is, and whenever it makes its iterator."""
    with outlive.installed("skip"):
        assert indices(kind(Faulty(), batch_size=4, num_workers=2)) == LEFT


def test_exceptions_are_dealt_with_when_there_are_no_workers():
    """The policy counts in the trainer's own process, too."""
    with outlive.installed("skip"):
        assert indices(DataLoader(Faulty(), batch_size=4)) == [i for i in range(SIZE) if i != BAD]


GRID = {
    "shuffled": (lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "shuffle": True}, {"num_workers": 2}),
    "no workers": (lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "shuffle": True}, {"num_workers": 0}),
    "generator": (
        lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "shuffle": True, "generator": inputs.generator()},
        {"num_workers": 2, "prefetch_factor": 3},
    ),
    "stream": (lambda: {"dataset": inputs.Stream(9, 4, 13), "batch_size": 3, "drop_last": True}, {"num_workers": 3}),
    "persistent": (
        lambda: {"dataset": inputs.Noisy(), "batch_size": 3, "shuffle": True},
        {"num_workers": 2, "persistent_workers": True},
    ),
    "out of order": (lambda: {"dataset": inputs.Noisy(), "batch_size": 4}, {"num_workers": 1, "in_order": False}),
}


@pytest.mark.parametrize(("arguments", "more"), GRID.values(), ids=GRID)
def test_batches_and_draws_are_torchs_when_nothing_fails(arguments, more):
    """With the same seed: the same batches, warnings, and random state of the trainer, over epochs."""
    theirs = run(TORCH, arguments, epochs=2, **more)
    with outlive.installed(faults="replace"):
        ours = run(TORCH, arguments, epochs=2, **more)

    assert differences(ours, theirs) == []
    iterator = ours.loader._iterator
    if iterator is not None:
        assert isinstance(iterator, torch_loader._MultiProcessingDataLoaderIter)
        assert type(iterator) is not torch_loader._MultiProcessingDataLoaderIter
        iterator._shutdown_workers()


def test_a_loader_stays_what_it_was_when_it_was_supervised():
    """Libraries copy, pickle and take loaders apart: they find nothing of ours in them."""
    loader = DataLoader(Healthy(), batch_size=4, num_workers=1)
    before = dict(vars(loader))
    with outlive.installed():
        copy = pickle.loads(pickle.dumps(loader))
        assert indices(loader) == indices(copy) == list(range(SIZE))
    gone = weakref.ref(copy)
    del copy
    gc.collect()

    assert vars(loader) == before
    assert gone() is None


def test_changes_count_when_a_library_makes_them_after_creation():
    """Lightning and Accelerate exchange samplers in loaders that there are."""
    loader = DataLoader(Healthy(), batch_size=4, num_workers=1)
    with outlive.installed():
        indices(loader)
        object.__setattr__(loader, "batch_sampler", [[3, 1], [2]])
        loader.collate_fn = torch.stack
        loader.num_workers = 2

        assert indices(loader) == [3, 1, 2]


@pytest.mark.parametrize("kind", [DataLoader, loaders.KeepsIterator])
def test_a_persistent_loader_begins_anew_when_its_workers_had_given_up(kind, tmp_path):
    """An epoch that ended with an error is not the loader's end, whoever holds its iterator."""
    dataset = epoch_datasets.EpochAware(SIZE, inputs.Kills(tmp_path, {(0, 5): {1}}))
    loader = kind(dataset, batch_size=4, num_workers=2, persistent_workers=True)
    with outlive.installed(outlive.FaultPolicy(max_restarts=0)):
        with pytest.raises(outlive.TooManyFaultsError):
            list(loader)

        for _ in range(2):
            assert [int(i) for _, batch in loader for i in batch] == list(range(SIZE))
    loader._iterator._shutdown_workers()


def test_a_loader_of_ours_keeps_its_options_when_others_are_installed():
    """What the program says itself counts."""
    loader = outlive.DataLoader(Faulty(), batch_size=4, num_workers=1, faults="skip")
    with outlive.installed("raise"):
        assert indices(loader) == LEFT
    inline = outlive.DataLoader(Faulty(), batch_size=4)
    with outlive.installed("skip"), pytest.raises(ValueError, match="sample 9 is bad"):
        indices(inline)


def test_incidents_of_every_loader_are_known_when_several_are_at_work():
    """Also those of one that had none before another began; a loader that is gone and had none leaves nothing."""
    with outlive.installed("skip") as adoption:
        first = DataLoader(Faulty(), batch_size=4, num_workers=1)
        begun = iter(first)
        assert indices(next(begun)) == [0, 1, 2, 3]
        for _ in range(3):
            assert indices(DataLoader(Healthy(), batch_size=4, num_workers=1)) == list(range(SIZE))
        rest = indices(begun)

    assert rest == LEFT[4:]
    assert [i.indices for i in adoption.incidents if i.action == "left out"] == [(DEADLY,), (BAD,)]
    assert adoption.loader_count == 2


def test_a_file_of_bad_samples_is_obeyed_by_the_loaders_that_it_is_of(tmp_path, caplog):
    """With workers and without, nothing of it is tried; another dataset's loader is told of once, and goes on."""
    file = tmp_path / "bad.json"
    outlive.check(Faulty(), workers=1, start_method="fork", output=file)
    caplog.clear()
    with outlive.installed(quarantine=file) as adoption:
        assert indices(DataLoader(Faulty(), batch_size=4, num_workers=2)) == LEFT
        assert indices(DataLoader(Faulty(), batch_size=4)) == LEFT
        assert not caplog.records
        for workers in (1, 0, 1):
            assert indices(DataLoader(Healthy(), batch_size=4, num_workers=workers)) == list(range(SIZE))
    with outlive.installed(), pytest.raises(ValueError, match="sample 9 is bad"):
        indices(DataLoader(Faulty(), batch_size=4))

    assert not adoption.incidents
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith(f"{file} was made for another dataset (")
    assert "it was a Faulty, and is a Healthy. It does not count for the loader of this Healthy: all samples" in said


def test_it_is_said_once_when_a_class_makes_its_own_iterator(caplog):
    """Those are left alone, and work as ever."""
    caplog.set_level(logging.WARNING, "outlive")
    with outlive.installed("skip"):

        class LateLoader(DataLoader):
            def _get_iterator(self):
                return iter([torch.arange(SIZE)])

        for kind in (loaders.OwnIteratorLoader, loaders.ForeignLoader, LateLoader, loaders.OwnIteratorLoader):
            assert indices(kind(Healthy(), batch_size=4, num_workers=1)) == list(range(SIZE))

    assert [record.getMessage().partition(": ")[0] for record in caplog.records] == [
        "OwnIteratorLoader makes its iterator, OwnIterator, by itself",
        "ForeignLoader makes its iterator, list_iterator, by itself",
        "LateLoader makes its iterator, list_iterator, by itself",
    ]


def test_a_context_is_left_alone_when_its_workers_are_no_processes():
    """tests/clients has the loader of MONAI's that this is for."""
    contexts = (None, torch.multiprocessing, multiprocessing, multiprocessing.get_context("spawn"))

    assert all(map(installing.starts_processes, contexts))
    assert not installing.starts_processes(loaders.ThreadContext())


def test_the_inner_one_counts_when_installations_are_nested(monkeypatch):
    """A block's options hold for the block; the variables fill in what nobody said; OUTLIVE=0 is stronger than all."""
    monkeypatch.setenv("OUTLIVE_FAULTS", "skip")
    monkeypatch.setenv("OUTLIVE_MEMORY_LIMIT", "2GiB")
    outer = outlive.install()
    try:
        assert outer.options["memory_limit"] == "2GiB"
        assert indices(DataLoader(Faulty(), batch_size=4, num_workers=1)) == LEFT
        inline = DataLoader(Faulty(), batch_size=4)
        for _ in range(2):  # the same loader, now with these options, now with those
            with outlive.installed("raise"), pytest.raises(ValueError, match="sample 9 is bad"):
                indices(inline)
            assert indices(inline) == [i for i in range(SIZE) if i != BAD]
    finally:
        outlive.uninstall()
    monkeypatch.setenv("OUTLIVE", "0")
    with outlive.installed("skip"), pytest.raises(ValueError, match="sample 9 is bad"):
        indices(DataLoader(Faulty(), batch_size=4))


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"faults": "ignore"}, 'faults must be "raise", "skip", "replace" or a callable'),
        ({"retries": 3}, "takes no option 'retries'; it takes describe"),
        ({"memory_limit": "much"}, "memory_limit must be a size"),
        ({"quarantine": "no-such.json"}, "there is no quarantine file no-such.json; make it with `outlive check"),
        ({"quarantine": 7}, "quarantine must be a file by `outlive check`, or several, got 7"),
    ],
)
def test_a_wrong_option_is_an_error_when_it_is_installed(wrong, said):
    """Not hours later, at the first loader."""
    with pytest.raises((ValueError, TypeError), match=said):
        outlive.install(**wrong)


def test_workers_of_an_adopted_loader_may_be_started_by_any_context():
    """A context object, as well as its name."""
    context = multiprocessing.get_context("forkserver")
    with outlive.installed("skip"):
        assert indices(DataLoader(Faulty(), batch_size=4, num_workers=1, multiprocessing_context=context)) == LEFT
