"""Deaths that come from outside: workers and their zygote, killed in the middle of anything."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from deadlines import Deadline
from faults.faulty_datasets import BATCH, SIZE, FaultPlacement, Samples, Stream, make_loader, undisturbed, values_of
from outlive import FaultPolicy

DEADLINE_S = 20.0


def wait_until(condition: Any) -> None:
    """Wait for something that is bound to happen."""
    deadline = Deadline(DEADLINE_S)
    while not condition():
        assert not deadline.passed, f"not within {DEADLINE_S:g} s"
        time.sleep(0.005)


def pids_of(loader: Any) -> list[int]:
    return [slot.pid for slot in loader.statistics().slots if slot.pid is not None]


def zygote_of(loader: Any) -> int | None:
    """The parent of a worker, as long as it lives: afterwards its orphans are adopted, by pytest of all processes."""
    for pid in pids_of(loader):
        try:
            parent = psutil.Process(psutil.Process(pid).ppid())
            if parent.name() == "outlive-zygote" and parent.status() != psutil.STATUS_ZOMBIE:
                return parent.pid
        except psutil.NoSuchProcess:
            pass  # The loader has yet to learn that this worker is gone.
    return None


@pytest.mark.parametrize(("kind", "method"), [(Samples, "fork"), (Stream, "fork"), (Samples, "spawn")])
def test_not_one_bit_differs_when_the_zygote_is_killed(kind: type, method: str) -> None:
    """All workers die with their zygote; a new one is made and the epoch goes on where it was."""
    loader = make_loader(FaultPlacement(), dataset=kind(SIZE, FaultPlacement()), multiprocessing_context=method)
    iterator = iter(loader)
    delivered = [values_of(next(iterator))]
    wait_until(lambda: zygote_of(loader))

    os.kill(zygote_of(loader), signal.SIGKILL)
    delivered += [values_of(batch) for batch in iterator]

    assert delivered == undisturbed(kind)
    assert dict(loader.quarantine) == {}


def test_not_one_bit_differs_when_zygotes_are_killed_again_and_again() -> None:
    """A zygote is no more special than a worker: each death of one costs some milliseconds."""
    loader = make_loader(FaultPlacement(), size=1200)  # a busy machine may deliver many before a new zygote is seen
    delivered = []
    killed: set[int] = set()

    for batch in loader:
        delivered.append(values_of(batch))
        zygote = zygote_of(loader) if len(killed) < 5 else None
        if zygote is not None:
            killed.add(zygote)
            os.kill(zygote, signal.SIGKILL)

    assert delivered == undisturbed(Samples, 1200)
    assert len(killed) == 5


@pytest.mark.parametrize("kind", [Samples, Stream])
def test_not_one_bit_differs_when_workers_are_killed_at_random(kind: type) -> None:
    """Thirty SIGKILLs at any moment of 300 batches: nobody can tell from what is delivered."""
    size = 1200
    dice = random.Random(4)
    kills = sorted(dice.sample(range(300), 30))
    loader = make_loader(FaultPlacement(), FaultPolicy(retries=5), dataset=kind(size, FaultPlacement()))
    delivered = []

    for step, batch in enumerate(loader):
        delivered.append(values_of(batch))
        if step in kills and pids_of(loader):
            _kill(dice.choice(pids_of(loader)))

    assert delivered == undisturbed(kind, size)
    assert dict(loader.quarantine) == {}
    assert loader.statistics().restarts >= 20


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It had ended by itself: its stream was at its end.


class NotesSamples(Samples):
    """Writes down every sample that it opens."""

    def __init__(self, notes: Path) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.notes = notes
        notes.touch()

    def __getitem__(self, index: int) -> Any:
        with self.notes.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


def idle_after(loader: Any, notes: Path, count: int) -> Any:
    """Whether the only worker has opened so many samples and sent what it made of them."""
    return lambda: (
        len(notes.read_text().split()) == count and loader.statistics().slots[0].doing == "idle" and pids_of(loader)
    )


def test_finished_batches_are_delivered_when_their_worker_is_killed(tmp_path: Path) -> None:
    """What a worker had finished before it died is not lost, and not made again."""
    dataset = NotesSamples(tmp_path / "opened")
    loader = make_loader(FaultPlacement(), dataset=dataset, num_workers=1, prefetch_factor=SIZE)
    iterator = iter(loader)
    delivered = [values_of(next(iterator))]
    wait_until(idle_after(loader, dataset.notes, SIZE))

    os.kill(pids_of(loader)[0], signal.SIGKILL)
    delivered += [values_of(batch) for batch in iterator]

    assert delivered == undisturbed(Samples, workers=1)
    assert len(dataset.notes.read_text().split()) == SIZE


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL])
def test_the_epoch_goes_on_when_workers_are_sent_a_signal(number: int) -> None:
    """Somebody's kill, whatever the signal, costs a worker at most."""
    loader = make_loader(FaultPlacement(), size=200)
    iterator = iter(loader)
    delivered = [values_of(next(iterator))]
    wait_until(lambda: len(pids_of(loader)) == 2)

    for pid in pids_of(loader):
        os.kill(pid, number)
    delivered += [values_of(batch) for batch in iterator]

    assert delivered == undisturbed(Samples, 200)


def test_the_epoch_goes_on_when_an_idle_worker_is_stopped(tmp_path: Path) -> None:
    """SIGSTOP from outside to a worker that has nothing in hand: it is noticed when it gets work."""
    dataset = NotesSamples(tmp_path / "opened")
    loader = make_loader(FaultPlacement(), FaultPolicy(hang_floor_s=0.3), dataset=dataset, num_workers=1)
    iterator = iter(loader)
    delivered = [values_of(next(iterator))]
    wait_until(idle_after(loader, dataset.notes, 3 * BATCH))

    os.kill(pids_of(loader)[0], signal.SIGSTOP)
    delivered += [values_of(batch) for batch in iterator]

    assert delivered == undisturbed(Samples, workers=1)
