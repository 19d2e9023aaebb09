"""A worker that made a batch and cannot send it: the worker's fault, never a sample's, and never an endless loop."""

from __future__ import annotations

import contextlib
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from machine.events import begun, death, handle, of, ready, submit
from outlive import DataLoader, Pool, TooManyFaultsError
from outlive import records as r
from outlive.incident import Stage
from outlive.verdicts import Name

TEXT = "x" * 40_000  # two of them are more than a message holds: they travel in memory of their own
LIMIT = 64


def use_up_descriptors() -> list[int]:
    """Open files until there is no descriptor left in this process."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    opened = []
    with contextlib.suppress(OSError):
        while True:
            opened.append(os.open("/dev/null", os.O_RDONLY))
    return opened


class Texts(Dataset[Any]):
    """Sample 5 leaves its process no descriptor: the first `times` workers that fetch it."""

    def __init__(self, folder: Path, times: int) -> None:
        self.folder, self.times = folder, times

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> str:
        if index == 5:
            taken = len(list(self.folder.iterdir()))
            if taken < self.times:
                (self.folder / str(taken)).touch()
                use_up_descriptors()
        return f"{index}{TEXT}"


class TextStream(IterableDataset[Any]):
    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Any:
        return (self.texts[index] for index in range(8))


def numbers(batches: Any) -> list[list[int]]:
    return [[int(text[0]) for text in batch] for batch in batches]


WHOLE = [[0, 1], [2, 3], [4, 5], [6, 7]]


@pytest.mark.parametrize("policy", ["raise", "skip", "replace"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_sample_arrives_when_two_workers_cannot_send(tmp_path, policy, stream):
    """The worker is replaced, its batch is made again, and no sample is blamed."""
    dataset: Any = Texts(tmp_path, 2)
    loader = DataLoader(TextStream(dataset) if stream else dataset, batch_size=2, num_workers=1, faults=policy)

    assert numbers(loader) == WHOLE

    assert (len(loader.quarantine), loader.statistics().restarts) == (0, 2)
    incident = loader.incidents[0]
    assert incident.verdict.name is Name.DESCRIPTORS_EXHAUSTED
    assert "failed with OSError: [Errno 24]" in str(incident)
    assert "replaced, its batch is made again" in str(incident)


def test_one_error_ends_the_epoch_when_no_worker_can_send_a_batch(tmp_path):
    """It names what is missing and the remedy. No sample is blamed, and nothing is tried for ever."""
    loader = DataLoader(Texts(tmp_path, 99), batch_size=2, num_workers=1, faults="skip")
    got = []

    with pytest.raises(TooManyFaultsError) as raised:
        got.extend(numbers([batch])[0] for batch in loader)

    assert got == WHOLE[:2]
    assert len(loader.quarantine) == 0
    assert "6 workers have made batch 2, and none of them could send it" in str(raised.value)
    assert "ulimit -n" in str(raised.value)


class Images(Texts):
    """Samples that travel in cells."""

    def __getitem__(self, index: int) -> Any:
        return int(super().__getitem__(index)[0]) + torch.zeros(50_000)


def test_a_worker_that_cannot_make_a_cell_is_replaced(tmp_path):
    """While collating, before anything is sent: that is our memory, and not the collate function's error."""
    loader = DataLoader(Images(tmp_path, 1), batch_size=2, num_workers=1, faults="skip")

    kept = list(loader)  # so that no cell comes back, and the next batch needs another

    assert [batch[:, 0].tolist() for batch in kept] == WHOLE
    assert (len(loader.quarantine), loader.statistics().restarts) == (0, 1)


def text_of(folder: Path, number: int) -> str:
    return Texts(folder, 1)[number] * 2


def test_a_pools_task_is_done_again_when_its_worker_cannot_send_the_result(tmp_path):
    """The worker is replaced; the other tasks do not notice."""
    with Pool(1) as pool:
        results = [pool.submit(text_of, tmp_path, number) for number in (4, 5, 6)]

        assert [int(result.result()[0]) for result in results] == [4, 5, 6]
        assert [str(incident) for incident in pool.incidents if "failed with OSError: [Errno 24]" in str(incident)]


class CollatesBadly:
    """Raises at every call, or every other call, of a batch that has sample 2."""

    def __init__(self, folder: Path, calls: set[int]) -> None:
        self.folder, self.calls = folder, calls

    def __call__(self, samples: list[int]) -> list[int]:
        if 2 in samples:
            call = len(list(self.folder.iterdir()))
            (self.folder / str(call)).touch()
            if call in self.calls:
                raise ValueError("not now")
        return samples


@pytest.mark.parametrize("size", [1, 2])
def test_no_sample_is_left_out_when_a_step_works_at_the_second_try(tmp_path, size):
    """An error that does not come again is no sample's."""
    loader = DataLoader(
        range(4), batch_size=size, num_workers=1, faults="skip", collate_fn=CollatesBadly(tmp_path, {0})
    )

    assert [number for batch in loader for number in batch] == [0, 1, 2, 3]
    assert len(loader.quarantine) == 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
def test_a_batch_is_left_out_when_it_fails_again_and_again_and_no_sample_explains_it(tmp_path, size, workers):
    """It fails when it is made, and works whenever it is examined: the epoch ends all the same."""
    collate = CollatesBadly(tmp_path, set(range(0, 1000, 2)))
    loader = DataLoader(range(4), batch_size=size, num_workers=workers, faults="skip", collate_fn=collate)

    assert [number for batch in loader for number in batch] == ([0, 1, 3] if size == 1 else [0, 1])
    assert len(list(tmp_path.iterdir())) < 20


class ManyBadly(Dataset[int]):
    """Raises in `__getitems__` at some calls that ask for sample 2."""

    def __init__(self, calls: CollatesBadly) -> None:
        self.calls = calls

    def __len__(self) -> int:
        return 4

    def __getitems__(self, indices: list[int]) -> list[int]:
        return self.calls(indices)


@pytest.mark.parametrize(("calls", "expected"), [({0}, [0, 1, 2, 3]), (set(range(0, 1000, 2)), [0, 1])])
def test_samples_fetched_together_are_left_out_only_when_the_error_comes_again(tmp_path, calls, expected):
    """`__getitems__` that fails once costs nothing; one that fails for ever costs its batch."""
    loader = DataLoader(ManyBadly(CollatesBadly(tmp_path, calls)), batch_size=2, num_workers=1, faults="skip")

    assert [int(number) for batch in loader for number in batch] == expected


def test_the_machine_gives_up_when_workers_die_slowly_and_nothing_is_finished():
    """However far apart the deaths are, they count as long as no batch comes between them."""
    machine = begun(max_restarts=3, restart_window_s=10)
    submit(machine, 0)
    ends: list[Any] = []

    for number in range(1, 8):
        ends += of(r.GiveUp, handle(machine, death(number, Stage.WAITING, 0), ready(number + 1), now=100.0 * number))

    [end] = ends
    assert end.text.startswith("workers died more than 3 times in 300 s, and nothing was finished in that time")


def test_deaths_are_forgotten_when_the_window_has_passed_and_a_batch_came():
    """One death an hour ends no job that gets on."""
    machine = begun(max_restarts=3, restart_window_s=10)
    ends: list[Any] = []

    for number in range(1, 20):
        submit(machine, number)
        came = r.TaskFinished(0, number, number)
        ends += of(r.GiveUp, handle(machine, came, death(number, Stage.IDLE), ready(number + 1), now=100.0 * number))

    assert ends == []
