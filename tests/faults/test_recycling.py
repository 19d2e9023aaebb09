"""Workers that are recycled: the epoch does not notice, memory stays under its limit, nothing is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

import outlive
from outlive import FaultPolicy, IncidentKind
from outlive._capture.vitals import own_bytes
from outlive.limits import Limits, limits_of
from outlive.verdicts import Name

METHODS = ("fork", "spawn", "forkserver")
MIB = 1 << 20
LEAK = 2 * MIB
LIMIT = 200 * MIB
SIZE = 240

_kept: list[bytearray] = []


def leak(size: int) -> None:
    block = bytearray(size)
    np.frombuffer(block, np.uint8)[::4096] = 1
    _kept.append(block)


class Leaking(Dataset[Any]):
    """Each sample keeps 2 MiB for ever, and tells how much its worker has by then."""

    def __init__(self, leaks: bool = True) -> None:
        self.leaks = leaks

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        if self.leaks:
            leak(LEAK)
        return torch.rand(4) + index, own_bytes("self") or 0


def epochs(method: str, count: int, leaks: bool, **more: Any) -> tuple[list[Any], outlive.DataLoader[Any]]:
    torch.manual_seed(7)
    loader = outlive.DataLoader(
        Leaking(leaks), batch_size=4, shuffle=True, num_workers=2, multiprocessing_context=method, **more
    )
    return [batch for _ in range(count) for batch in loader], loader


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", METHODS)
def test_a_leak_stays_under_its_limit_and_the_epochs_do_not_notice(method, persistent):
    """Two epochs that leak 960 MiB, bit for bit as without a leak, with no worker over its limit."""
    batches, loader = epochs(method, 2, True, memory_limit=LIMIT, persistent_workers=persistent)
    healthy, _ = epochs(method, 2, False, persistent_workers=persistent)

    assert len(batches) == 2 * SIZE // 4
    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, healthy, strict=True))
    assert max(int(batch[1].max()) for batch in batches) <= LIMIT
    statistics = loader.statistics()
    # 170 MiB hold 85 samples of 2 MiB; a worker takes 120 in an epoch.
    assert statistics.recycled >= 2 * 2
    assert (statistics.restarts, statistics.quarantined) == (0, 0)
    assert {incident.kind for incident in loader.incidents} == {IncidentKind.RECYCLED}
    assert "of 200 MiB" in str(loader.incidents[0])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("after", "times"), [(10, 4), ("10 batches", 4), ("40 samples", 4), ("100MiB", 2)])
def test_workers_are_recycled_on_time(method, after, times):
    """By batches, by samples, by growth; the batches are those of an undisturbed run."""
    batches, loader = epochs(method, 1, after == "100MiB", recycle_after=after)
    healthy, _ = epochs(method, 1, False)

    assert all(torch.equal(one[0], other[0]) for one, other in zip(batches, healthy, strict=True))
    assert times <= loader.statistics().recycled <= times + 2
    assert loader.statistics().restarts == 0


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        worker = get_worker_info()
        for number in range(worker.id, SIZE, worker.num_workers):
            yield torch.rand(2) + number


@pytest.mark.parametrize("method", METHODS)
def test_a_stream_goes_on_where_the_recycled_worker_was(method):
    """Every sample once, in order, with the same random numbers."""

    def run(**more: Any) -> list[Any]:
        torch.manual_seed(3)
        return list(outlive.DataLoader(Stream(), 4, num_workers=2, multiprocessing_context=method, **more))

    recycled, healthy = run(recycle_after=7), run()

    assert len(recycled) == SIZE // 4
    assert all(torch.equal(one, other) for one, other in zip(recycled, healthy, strict=True))


class Greedy(Dataset[int]):
    """Sample 11 alone needs more than there is."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> int:
        if index == 11:
            if self.how == "python":
                leak(400 * MIB)
            elif self.how == "numpy":
                np.zeros(400 * MIB, np.uint8)[::4096] = 1
            else:
                torch.ones(400 * MIB, dtype=torch.uint8)
        return index


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("how", ["python", "numpy", "torch"])
def test_a_sample_that_needs_more_than_the_limit_is_treated_as_one_that_kills(method, how):
    """It costs a fresh worker as well, and then itself; the others arrive."""
    policy = FaultPolicy(on_error="skip", max_bad=None)
    loader = outlive.DataLoader(
        Greedy(how), 4, num_workers=2, multiprocessing_context=method, memory_limit=LIMIT, faults=policy
    )

    delivered = [int(index) for batch in loader for index in batch]

    assert delivered == [index for index in range(24) if index != 11]
    assert list(loader.quarantine) == [11]
    verdict = loader.quarantine[11].verdict
    assert verdict is not None
    assert verdict.name is Name.MEMORY_LIMIT
    assert "200 MiB" in verdict.cause
    assert loader.statistics().restarts == 2


def test_without_a_limit_a_refusal_is_an_exception_like_others():
    """The user's own RLIMIT, not ours: nobody is replaced for it."""
    policy = FaultPolicy(on_error="skip", max_bad=None)
    loader = outlive.DataLoader(Refusing(), 4, num_workers=1, faults=policy)

    list(loader)

    assert loader.quarantine[3].failure.type_name == "MemoryError"
    assert loader.statistics().restarts == 0


class Refusing(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise MemoryError
        return index


@pytest.mark.parametrize(
    ("memory_limit", "recycle_after", "limits"),
    [
        (None, None, Limits()),
        ("1GiB", None, Limits(1 << 30)),
        (None, 5, Limits(after_batches=5)),
        (None, "1 batch", Limits(after_batches=1)),
        (None, "20000 samples", Limits(after_samples=20000)),
        (1 << 20, "0.5 GiB", Limits(1 << 20, after_growth_bytes=1 << 29)),
    ],
)
def test_limits_mean_what_they_say(memory_limit, recycle_after, limits):
    """In the words that people use."""
    assert limits_of(memory_limit, recycle_after) == limits


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "soon", "0 batches", "5", "10 epochs", [5]])
def test_what_makes_no_sense_is_refused_when_it_is_set(value):
    """With what would."""
    with pytest.raises(ValueError, match="recycle_after must be a number of batches"):
        outlive.DataLoader(Refusing(), recycle_after=value)


def test_a_memory_limit_that_is_no_size_is_refused_when_it_is_set():
    """Not when the first worker starts."""
    with pytest.raises(TypeError, match="memory_limit must be a size"):
        outlive.DataLoader(Refusing(), memory_limit="lots")
