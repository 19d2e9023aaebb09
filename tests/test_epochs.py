"""`set_epoch` in the trainer reaches workers that persist.

Reads   what loaders deliver, epoch by epoch.
Writes  marker files that make a worker die at a chosen moment.
Never   a dataset that workers make anew.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, Subset

import outlive
from epoch_datasets import EpochAware, EpochAwareStream, NestedDatasets, NoisyEpochAware
from loader_inputs import Kills

METHODS = ("fork", "spawn", "forkserver")


def loader_of(dataset: Any, **more: Any) -> outlive.DataLoader[Any]:
    return outlive.DataLoader(dataset, batch_size=None, num_workers=2, persistent_workers=True, **more)


def samples_of(loader: outlive.DataLoader[Any]) -> list[tuple[int, ...]]:
    return sorted(map(tuple, loader))


@pytest.mark.parametrize("method", METHODS)
def test_workers_that_persist_see_the_epoch_when_the_trainer_sets_it(method, tmp_path):
    """Map-style and iterable; a replacement that comes in the middle of an epoch sees it as well."""
    for dataset in (
        EpochAware(kills=Kills(tmp_path, {(3, 5): {1}})),
        EpochAwareStream(kills=Kills(tmp_path, {(3, 6): {1}})),
    ):
        loader = loader_of(dataset, multiprocessing_context=method)
        first = samples_of(loader)
        pids = {slot.pid for slot in loader.statistics().slots}
        dataset.set_epoch(1)
        second = samples_of(loader)
        assert {slot.pid for slot in loader.statistics().slots} == pids
        dataset.set_epoch(2)
        dataset.set_epoch(epoch=3)
        third = samples_of(loader)

        assert first == [(0, index) for index in range(8)]
        assert second == [(1, index) for index in range(8)]
        assert third == [(3, index) for index in range(8)]
        assert samples_of(loader) == third
        assert loader.statistics().restarts == 1
        loader.close()


def test_datasets_inside_others_see_the_epoch():
    """A part of one, several in one, those in a list, and a transform."""
    inner = EpochAware()
    many = NestedDatasets()
    for dataset, targets in (
        (Subset(inner, range(4)), [inner]),
        (ConcatDataset([EpochAware(), Subset(inner, [1])]), [inner]),
        (many, [many.one, many.others[1], many.transform]),
    ):
        loader = loader_of(dataset)
        list(loader)
        for target in targets:
            target.set_epoch(4)

        assert set(samples_of(loader)[-1]) - {1, 3} == {4}  # beside indices
        loader.close()


def test_random_numbers_are_those_of_an_undisturbed_run_when_a_worker_dies_after_set_epoch(tmp_path):
    """What `set_epoch` itself draws in a worker is put back."""

    def third(kills: Kills | None) -> list[Any]:
        torch.manual_seed(3)
        dataset = NoisyEpochAware(kills=kills)
        loader = loader_of(dataset)
        for epoch in range(3):
            dataset.set_epoch(epoch)
            drawn = list(loader)
        loader.close()
        return drawn

    assert third(Kills(tmp_path, {(2, 1): {1}, (2, 4): {1}})) == third(None)


def test_nothing_is_kept_of_a_dataset_when_its_loader_is_gone():
    """And calls that nobody listens to cost nothing."""
    from outlive.loader import epochs

    dataset = EpochAware()
    loader = loader_of(dataset)
    list(loader)
    assert epochs.is_listening(dataset)
    loader.close()
    del loader

    assert not epochs.is_listening(dataset)
    dataset.set_epoch(7)
    assert dataset[0] == (7, 0)


def test_it_is_said_when_a_call_cannot_travel(caplog):
    """The workers go on with what they have."""
    caplog.set_level(logging.WARNING, "outlive")
    dataset = EpochAwareStream()
    loader = loader_of(dataset)
    list(loader)
    dataset.set_epoch(threading.Lock())  # type: ignore[arg-type]

    assert {epoch for epoch, _ in samples_of(loader)} == {0}
    assert "set_epoch does not reach the workers" in caplog.text
    loader.close()
