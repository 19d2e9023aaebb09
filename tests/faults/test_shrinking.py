"""Workers that do not all fit into memory: the fleet goes on with fewer, and every batch is what it would have been."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

import outlive
from control_groups import memory_group, run_in
from deadlines import Deadline
from faults.programs import memory_pressure
from outlive import IncidentKind
from outlive._fleet import crew
from outlive.limits import budget_of

__all__ = ["memory_group"]

METHODS = ("fork", "spawn", "forkserver")
PROGRAM = Path(__file__).parent / "programs" / "memory_pressure.py"
MIB = 1 << 20
DEADLINE_S = 60.0
BUDGET = "330MiB"


class Light(Dataset[Any]):
    """What the crowded job delivers, without the weight."""

    def __len__(self) -> int:
        return memory_pressure.SAMPLES

    def __getitem__(self, index: int) -> Any:
        return [index, float(torch.rand(()))]


def undisturbed(persistent: bool) -> list[Any]:
    torch.manual_seed(3)
    options: Any = {"num_workers": memory_pressure.WORKERS, "batch_size": 2, "persistent_workers": persistent}
    loader: Any = torch.utils.data.DataLoader(Light(), collate_fn=list, **options)
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("persistent", [False, True])
def test_what_the_kernel_kills_for_memory_is_done_by_fewer(memory_group: Path, method: str, persistent: bool) -> None:
    """600 MiB do not hold four workers of 115 MiB and the job itself: nobody is blamed, nothing is lost."""
    told = run_in(memory_group, PROGRAM, method, "persistent" if persistent else "fresh")

    assert told["batches"] == undisturbed(persistent)
    assert told["counts"] == [0, 0]
    assert told["others"] == []
    assert told["resized"], told
    assert all("goes on with" in text for text in told["resized"])
    assert set(told["verdicts"]) <= {"cgroup-limit"}


class Growing(Dataset[Any]):
    """Every worker keeps a weight from its first sample on."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Any:
        if not memory_pressure.held:
            memory_pressure.held.append(bytearray(b"x") * (100 * MIB))
        return index, torch.rand(2)


@pytest.mark.parametrize("method", METHODS)
def test_a_memory_budget_is_kept_by_running_fewer_workers(method):
    """Three workers of 100 MiB and more, and a budget of 330 MiB: one leaves, and the slots take turns."""
    torch.manual_seed(5)
    stock = iter(torch.utils.data.DataLoader(_Weightless(), num_workers=3))
    torch.manual_seed(5)
    loader: Any = outlive.DataLoader(
        Growing(), num_workers=3, multiprocessing_context=method, memory_budget=BUDGET, timeout=DEADLINE_S
    )
    deadline = Deadline(DEADLINE_S)
    seen = None
    for count, (ours, theirs) in enumerate(zip(loader, stock)):
        assert int(ours[0]) == int(theirs[0]) == count
        assert torch.equal(ours[1], theirs[1])
        assert not deadline.passed, "the fleet has kept its size" if seen is None else "it hardly goes on"
        if seen is None and any(incident.kind is IncidentKind.RESIZED for incident in loader.incidents):
            seen = count
            deadline = Deadline(DEADLINE_S)  # for the rest
        if seen is not None and count > seen + 200:
            break

    resized = [incident for incident in loader.incidents if incident.kind is IncidentKind.RESIZED]
    assert str(resized[0]).startswith("the fleet goes on with 2 of 3 workers: workers use ")
    assert {incident.kind for incident in loader.incidents} == {IncidentKind.RESIZED}
    assert sum(slot.pid is not None for slot in loader.statistics().slots) <= 2
    assert loader.statistics().restarts == 0


class Shedding(Growing):
    """Puts its weight down as soon as there is a file that says so."""

    def __init__(self, word: Path) -> None:
        self.word = word

    def __getitem__(self, index: int) -> Any:
        if self.word.exists():
            memory_pressure.held.clear()
            return index, torch.rand(2)
        return super().__getitem__(index)


def test_the_fleet_grows_back_when_there_is_room(tmp_path, monkeypatch):
    """Not sooner than it may; then one by one, with the same batches."""
    monkeypatch.setattr(crew, "HOLD_S", 0.1)
    monkeypatch.setattr(crew, "SETTLE_S", 0.1)
    word = tmp_path / "shed"
    torch.manual_seed(5)
    stock = iter(torch.utils.data.DataLoader(_Weightless(), num_workers=3))
    torch.manual_seed(5)
    loader: Any = outlive.DataLoader(Shedding(word), num_workers=3, memory_budget=BUDGET, timeout=DEADLINE_S)
    deadline = Deadline(DEADLINE_S)
    for ours, theirs in zip(loader, stock):
        assert torch.equal(ours[1], theirs[1])
        assert not deadline.passed, loader.incidents
        resized = [str(incident) for incident in loader.incidents if incident.kind is IncidentKind.RESIZED]
        if resized and not word.exists():
            word.touch()
        if resized and resized[-1].startswith("the fleet goes on with 3 of 3 workers: there is room for another"):
            break

    assert "goes on with 2 of 3 workers" in resized[0]


class _Weightless(Growing):
    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(2)


def test_what_memory_budget_takes_is_checked(monkeypatch):
    """A clear word at once, from the argument or from the environment."""
    data: Any = list(range(4))
    for wrong in ("lots", "120%", 0, True, 1.5):
        with pytest.raises((TypeError, ValueError), match="memory_budget"):
            outlive.DataLoader(data, memory_budget=wrong)  # type: ignore[arg-type]
    monkeypatch.setenv("OUTLIVE_MEMORY_BUDGET", "much")
    with pytest.raises(TypeError, match="OUTLIVE_MEMORY_BUDGET must be a size"):
        outlive.DataLoader(data)
    monkeypatch.setenv("OUTLIVE_MEMORY_BUDGET", "2GiB")
    assert budget_of(outlive.DataLoader(data).memory_budget) == "2GiB"
    assert budget_of(outlive.DataLoader(data, memory_budget="80%").memory_budget) == "80%"
