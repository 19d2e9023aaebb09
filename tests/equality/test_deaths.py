"""Deaths of workers do not show in what is delivered: the reference is torch's loader without deaths.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  marker files that make a worker die at a chosen moment.
Never   a tolerance.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data.datapipes.iter import IterableWrapper
from torch.utils.data.datapipes.map import SequenceWrapper

import loader_inputs as inputs
import outlive
from equality.assertions import Arguments
from loader_comparison import OURS, TORCH, Run, differences, run

Deadly = Callable[[inputs.Kills], dict[str, Any]]


MAP_DEATHS = {3: {1}, 4: {1}, 17: {1}, 22: {1}}


STREAM_DEATHS = {7: {1}, 103: {1}, 113: {1}}


DEATHS: dict[str, tuple[Deadly, dict[Any, set[int]]]] = {
    "map, in __getitem__": (
        lambda kills: {"dataset": inputs.Noisy(23, kills), "batch_size": 3, "shuffle": True},
        MAP_DEATHS,
    ),
    "map, no batches": (lambda kills: {"dataset": inputs.Noisy(23, kills), "batch_size": None}, MAP_DEATHS),
    "map, at the first and last sample": (lambda kills: {"dataset": inputs.Noisy(6, kills)}, {0: {1}, 1: {1}, 5: {1}}),
    "map, in __getitems__": (
        lambda kills: {"dataset": inputs.NoisyMany(23, kills), "batch_size": 3, "shuffle": True},
        {3: {1}, 17: {1}},
    ),
    "map, in collate": (
        lambda kills: {"dataset": inputs.Noisy(23), "batch_size": 3, "collate_fn": inputs.RandomCollate(kills)},
        {("collate", 3): {1}, ("collate", 17): {1}},
    ),
    "map, while a batch is sent": (
        lambda kills: {"dataset": inputs.KillsWhenSent(23, kills), "batch_size": 3, "collate_fn": inputs.as_list},
        {("sent", 3): {1}, ("sent", 17): {1}},
    ),
    "map, around errors": (
        lambda kills: {"dataset": inputs.Fails(inputs.ERRORS, 40, kills), "batch_size": 3},
        {0: {1}, 6: {1}, 15: {1}, 20: {1}},
    ),
    "map, with worker_init_fn": (
        lambda kills: {
            "dataset": inputs.NoisyShowsMark(kills),
            "batch_size": 2,
            "worker_init_fn": inputs.mark_by_worker,
        },
        {1: {1}, 6: {1}},
    ),
    "stream": (lambda kills: {"dataset": inputs.Stream(9, 14, kills=kills), "batch_size": 3}, STREAM_DEATHS),
    "stream, no batches": (
        lambda kills: {"dataset": inputs.Stream(9, 14, kills=kills), "batch_size": None},
        STREAM_DEATHS,
    ),
    "stream, drop_last": (
        lambda kills: {"dataset": inputs.Stream(9, 14, kills=kills), "batch_size": 4, "drop_last": True},
        STREAM_DEATHS,
    ),
    "stream, around errors": (
        lambda kills: {
            "dataset": inputs.FailingStream(14, 18, errors=inputs.STREAM_ERRORS, kills=kills),
            "batch_size": 3,
        },
        {4: {1}, 9: {1}, 107: {1}, 116: {1}},
    ),
    "stream, in collate": (
        lambda kills: {"dataset": inputs.Stream(9, 14), "batch_size": 3, "collate_fn": inputs.RandomCollate(kills)},
        {("collate", 7): {1}, ("collate", 103): {1}},
    ),
    "generator stream": (
        lambda kills: {"dataset": inputs.GeneratorStream(9, 14, kills=kills), "batch_size": 3},
        STREAM_DEATHS,
    ),
    "shuffle buffer": (
        lambda kills: {"dataset": inputs.ShuffledStream(19, 24, kills=kills), "batch_size": 3},
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "shuffle buffer, random collate": (
        lambda kills: {
            "dataset": inputs.ShuffledStream(19, 24, kills=kills),
            "batch_size": 3,
            "collate_fn": inputs.RandomCollate(),
        },
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "stateful stream": (
        lambda kills: {"dataset": inputs.StatefulStream(9, 14, kills=kills), "batch_size": 3},
        STREAM_DEATHS,
    ),
    "stateful stream, seldom saved": (
        lambda kills: {"dataset": inputs.StatefulStream(19, 24, kills=kills, costs_s=0.01), "batch_size": 2},
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "stateful stream, seldom saved, random collate": (
        lambda kills: {
            "dataset": inputs.StatefulStream(19, 24, kills=kills, costs_s=0.01),
            "batch_size": 2,
            "collate_fn": inputs.RandomCollate(),
        },
        {7: {1}, 12: {1}, 107: {1}, 120: {1}},
    ),
    "stateful iterator": (
        lambda kills: {"dataset": inputs.StatefulIteratorStream(9, 14, kills=kills), "batch_size": 3},
        STREAM_DEATHS,
    ),
    "iter data pipe": (
        lambda kills: {
            "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(inputs.DeadlyNoise(kills)),
            "batch_size": 3,
        },
        {3: {1}, 17: {1}},
    ),
    "map data pipe": (
        lambda kills: {"dataset": SequenceWrapper(range(20)).map(inputs.DeadlyNoise(kills)), "batch_size": 3},
        {3: {1}, 17: {1}},
    ),
}


def assert_deaths_do_not_show(make: Deadly, when: dict[Any, set[int]], folder: Path, **how: Any) -> Run:
    kills = inputs.Kills(folder, when)
    ours = run(OURS, lambda: make(kills), **how)
    theirs = run(TORCH, lambda: make(inputs.NoKills()), **{**how, "multiprocessing_context": "fork"})

    assert differences(ours, theirs) == []
    assert ours.loader.statistics().restarts == kills.total
    return ours


@pytest.mark.parametrize(("make", "when"), DEATHS.values(), ids=DEATHS)
def test_deaths_do_not_show_in_what_is_delivered(make, when, tmp_path):
    """The worker is replaced, its work done again: bit for bit what torch delivers when nobody dies."""
    assert_deaths_do_not_show(make, when, tmp_path, num_workers=2)


PERSISTENT_DEATHS: dict[str, tuple[Deadly, dict[Any, set[int]]]] = {
    # Each death is followed by one more try: odd numbers are first tries, in epochs 1, 2 and 3.
    "map": (
        lambda kills: {"dataset": inputs.Noisy(23, kills), "batch_size": 3, "shuffle": True},
        {3: {1, 3, 5}, 17: {1, 4}, 9: {2}},
    ),
    "stream, at its first sample": (
        lambda kills: {"dataset": inputs.Stream(9, 14, kills=kills), "batch_size": 3},
        {0: {1, 3, 5}, 100: {2}},
    ),
    "generator stream, at its last batch": (
        lambda kills: {"dataset": inputs.GeneratorStream(9, 14, kills=kills), "batch_size": 3},
        {7: {2, 4}, 113: {1, 3}},
    ),
    "shuffle buffer": (
        lambda kills: {"dataset": inputs.ShuffledStream(19, 24, kills=kills), "batch_size": 3},
        {7: {2}, 120: {3}},
    ),
    "stateful stream": (
        lambda kills: {"dataset": inputs.StatefulStream(9, 14, kills=kills), "batch_size": 3},
        {4: {2, 4}, 100: {2}},
    ),
    "stateful iterator": (
        lambda kills: {"dataset": inputs.StatefulIteratorStream(9, 14, kills=kills), "batch_size": 3},
        {4: {2, 4}, 100: {2}},
    ),
    "iter data pipe": (
        lambda kills: {
            "dataset": IterableWrapper(range(20)).shuffle().sharding_filter().map(inputs.DeadlyNoise(kills)),
            "batch_size": 3,
        },
        {3: {2}, 17: {3}},
    ),
}


@pytest.mark.parametrize(("make", "when"), PERSISTENT_DEATHS.values(), ids=PERSISTENT_DEATHS)
def test_deaths_do_not_show_in_any_epoch_when_workers_persist(make, when, tmp_path):
    """A replacement goes on with the random state and the epoch of the worker it replaces."""
    assert_deaths_do_not_show(make, when, tmp_path, num_workers=2, epochs=3, persistent_workers=True)


def test_deaths_do_not_show_when_an_epoch_with_deaths_is_broken_off(tmp_path):
    """What the broken epoch had asked for is finished by whoever lives, as torch's workers finish it."""
    assert_deaths_do_not_show(
        lambda kills: {"dataset": inputs.Noisy(23, kills), "batch_size": 3},
        {6: {1}, 9: {1, 3}, 22: {1}},
        tmp_path,
        num_workers=2,
        epochs=3,
        break_after=1,
        persistent_workers=True,
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_deaths_do_not_show_under_another_start_method(method, tmp_path):
    """The zygote is not the trainer's fork here, but holds the same dataset."""
    assert_deaths_do_not_show(
        lambda kills: {
            "dataset": inputs.NoisyShowsMark(kills),
            "batch_size": 2,
            "worker_init_fn": inputs.mark_by_worker,
        },
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
    "map": lambda: {"dataset": inputs.Noisy(40), "batch_size": 3, "shuffle": True},
    "map, __getitems__": lambda: {"dataset": inputs.NoisyMany(40), "batch_size": 3},
    "stream": lambda: {"dataset": inputs.Stream(20, 30), "batch_size": 3},
    "shuffle buffer": lambda: {"dataset": inputs.ShuffledStream(20, 30), "batch_size": 3},
    "stateful stream": lambda: {"dataset": inputs.StatefulStream(20, 30), "batch_size": 3},
    "map, with errors": lambda: {"dataset": inputs.Fails(inputs.ERRORS, 40), "batch_size": 3, "shuffle": True},
    "stream, with errors": lambda: {
        "dataset": inputs.FailingStream(20, 30, errors=inputs.STREAM_ERRORS),
        "batch_size": 3,
    },
}


@pytest.mark.parametrize("kind", [KillsWorkers, KillsZygotes], ids=["worker", "zygote"])
@pytest.mark.parametrize("arguments", SHOT.values(), ids=SHOT)
def test_kills_from_outside_do_not_show_whenever_they_come(arguments, kind):
    """Whatever the process was doing: idle, fetching, sending, starting, between two epochs."""
    ours = run(kind, arguments, num_workers=2, epochs=3, persistent_workers=True)
    theirs = run(TORCH, arguments, num_workers=2, epochs=3, persistent_workers=True)

    assert differences(ours, theirs) == []
    assert ours.loader.statistics().restarts > 0


def test_a_stateful_stream_is_restored_rather_than_run_again_when_its_worker_dies(tmp_path):
    """state_dict spares the samples that were made before: fewer are made than by starting again."""
    (tmp_path / "kills").mkdir()
    kills = inputs.Kills(tmp_path / "kills", {380: {1}})
    loader = OURS(inputs.StatefulStream(400, kills=kills, folder=tmp_path), batch_size=4, num_workers=1)

    indices = [index for batch in loader for index in batch["index"].tolist()]

    assert indices == list(range(400))
    assert loader.statistics().restarts == 1
    assert len((tmp_path / "made").read_bytes()) < 400 + 380
