"""What counts as a hang, and what does not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from faults.expectations import BAD, all_batches, loader_with, without_bad
from faults.faulty_datasets import SIZE, FaultPlacement, Samples, all_indices, flat, make_loader
from faults.table import FAULTS, FaultSite, Moment, PlantedFault
from outlive import FaultPolicy, Incident, IncidentKind, WorkerHungError

GETITEM = FaultSite(Moment.GETITEM)
FIRST = 0


class Slow(Samples):
    """Some samples take their time, and are healthy."""

    def __init__(self, seconds: dict[int, float], size: int = SIZE) -> None:
        super().__init__(size, FaultPlacement())
        self.seconds = seconds

    def __getitem__(self, index: int) -> Any:
        take_time(self.seconds.get(index, 0.0))
        return super().__getitem__(index)


def take_time(seconds: float) -> None:
    time.sleep(seconds)


def busy(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


class SlowUntil(Samples):
    """The first sample takes until a file is there; not so long that it would be condemned."""

    def __init__(self, word: Path) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.word = word

    def __getitem__(self, index: int) -> Any:
        if index == FIRST:
            wait_for_word(self.word, 4.0)
        return super().__getitem__(index)


def wait_for_word(word: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not word.exists() and time.monotonic() < end:
        time.sleep(0.01)  # between two looks, with a deadline


def test_a_slow_sample_is_suspected_and_not_shot_when_the_timeout_is_auto(tmp_path: Path) -> None:
    """Under "auto" a healthy slow sample is reported, with its stack, and delivered."""
    # It comes first: the limit follows the slowest sample so far, and this machine may be slow by itself.
    word = tmp_path / "suspected"
    policy = FaultPolicy(hang_floor_s=0.5)  # it would be condemned after 5 s

    def let_go(incident: Incident) -> None:
        if incident.index == FIRST:
            word.touch()

    loader = make_loader(FaultPlacement(), policy, dataset=SlowUntil(word), num_workers=1, on_incident=let_go)

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert loader.statistics().restarts == 0
    (incident,) = [incident for incident in loader.incidents if incident.index == FIRST]
    assert incident.kind is IncidentKind.SUSPECTED_HANG
    assert incident.action == "watched"
    assert incident.seconds_in_hand >= 0.5
    assert "wait_for_word" in incident.stack


def wait_for_sleeping_thread() -> None:
    thread = threading.Thread(target=time.sleep, args=(1.0,))
    thread.start()
    thread.join()


def wait_for_working_thread() -> None:
    thread = threading.Thread(target=busy, args=(1.0,))
    thread.start()
    thread.join()


def wait_with_timeout() -> None:
    threading.Event().wait(1.0)


class Waits(Samples):
    """One sample waits for a lock, for a while."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.wait = wait

    def __getitem__(self, index: int) -> Any:
        if index == BAD:
            self.wait()
        return super().__getitem__(index)


@pytest.mark.parametrize("wait", [wait_for_sleeping_thread, wait_for_working_thread, wait_with_timeout])
def test_a_wait_that_will_end_is_not_taken_for_a_deadlock_when_the_timeout_is_auto(wait: Callable[[], None]) -> None:
    """Waiting for a lock is a deadlock only if every thread does, for ever, without using any CPU."""
    loader = make_loader(FaultPlacement(), FaultPolicy(hang_floor_s=0.3), dataset=Waits(wait))

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert loader.statistics().restarts == 0


def test_nothing_is_suspected_when_samples_have_been_slow_before() -> None:
    """The limit is 20 times the slowest healthy sample: after one of 0.2 s, one of 0.8 s is nothing special."""
    loader = make_loader(
        FaultPlacement(), FaultPolicy(hang_floor_s=0.1), dataset=Slow({0: 0.09, 1: 0.2, BAD: 0.8}), num_workers=1
    )

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert [incident for incident in loader.incidents if incident.index == BAD] == []


def test_nothing_is_done_when_there_is_no_timeout() -> None:
    """sample_timeout=None: neither suspected nor replaced."""
    policy = FaultPolicy(sample_timeout=None, hang_floor_s=0.1)
    loader = make_loader(FaultPlacement(), policy, dataset=Slow({BAD: 1.5}))

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert loader.incidents == ()


@pytest.mark.parametrize("name", ["sleep", "gil-loop"])
def test_a_hang_is_acted_on_at_ten_times_the_limit_when_the_timeout_is_auto(name: str) -> None:
    """What neither is stopped nor waits for a lock is suspected first, and replaced at ten times that."""
    policy = FaultPolicy(on_error="skip", hang_floor_s=0.3, retries=0)
    loader = make_loader(FaultPlacement(getitem={FIRST: PlantedFault(name)}), policy, num_workers=1)

    delivered = all_indices(loader)

    assert flat(delivered) == list(range(1, SIZE))
    suspected, acted_on = [incident for incident in loader.incidents if incident.index == FIRST]
    assert suspected.kind is IncidentKind.SUSPECTED_HANG
    assert acted_on.kind is IncidentKind.HANG
    assert suspected.seconds_in_hand < acted_on.seconds_in_hand
    assert acted_on.seconds_in_hand >= 3.0
    assert FAULTS[name].fire.__name__ in suspected.stack
    assert FAULTS[name].fire.__name__ in acted_on.stack


def test_seconds_in_hand_are_those_of_the_sample_when_it_hangs(tmp_path: Path) -> None:
    """What an incident says about time is the time of this sample, not of its batch or its worker."""
    policy = FaultPolicy(on_error="skip", sample_timeout=0.5, retries=0)
    told: list[float] = []

    def note(incident: Incident) -> None:
        if incident.index == BAD:
            told.append(time.monotonic() - incident.seconds_in_hand)

    loader = make_loader(
        FaultPlacement(), policy, dataset=SlowThenStuck({12: 0.3}, BAD, tmp_path / "begun"), on_incident=note
    )

    delivered = all_indices(loader)

    assert delivered == without_bad(GETITEM)
    assert loader.quarantine[BAD].seconds_in_hand >= 0.5
    # An order, not a time: so long before it was told, the sample before this one had ended.
    assert told[0] >= float((tmp_path / "begun").read_text())


class SlowThenStuck(Slow):
    """One sample hangs; when the one before it had ended is written down."""

    def __init__(self, seconds: dict[int, float], stuck: int, note: Path) -> None:
        super().__init__(seconds)
        self.stuck = stuck
        self.note = note

    def __getitem__(self, index: int) -> Any:
        if index == self.stuck:
            PlantedFault("sleep")()
        sample = super().__getitem__(index)
        if index == self.stuck - 1 and not self.note.exists():  # it is fetched again once the other is left out
            self.note.write_text(str(time.monotonic()))
        return sample


@pytest.mark.parametrize("name", ["gil-loop", "sleep", "deadlock", "sigstop"])
def test_other_batches_come_meanwhile_when_one_worker_hangs(name: str) -> None:
    """While a worker hangs the others work on: what is delivered before the error was not held up by it."""
    for_ever = iter(loader_with(FAULTS[name], GETITEM, "raise", retries=0, sample_timeout=None))
    assert len([next(for_ever) for _ in range(3)]) == 3  # nobody ends the hang, so nobody can have waited for that
    for_ever._shutdown_workers()
    loader = loader_with(FAULTS[name], GETITEM, "raise", retries=0, sample_timeout=1.0)
    iterator = iter(loader)

    before = [next(iterator) for _ in range(3)]

    assert len(before) == 3
    with pytest.raises(WorkerHungError) as caught:
        next(iterator)
    assert caught.value.incident is not None
    assert caught.value.incident.index == BAD
    assert caught.value.incident.seconds_in_hand >= 1.0
    assert len(list(iterator)) == 2


def test_a_batch_has_time_for_each_of_its_samples_when_they_are_fetched_at_once() -> None:
    """sample_timeout counts per sample: four slow samples in one __getitems__ are no hang."""
    dataset = SlowMany(dict.fromkeys(range(12, 16), 0.15))
    loader = make_loader(FaultPlacement(), FaultPolicy(sample_timeout=0.4), dataset=dataset)

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert loader.incidents == ()


class SlowMany(Slow):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def test_the_trainer_may_sleep_when_workers_are_idle() -> None:
    """A consumer that takes its time does not make its workers look stuck."""
    policy = FaultPolicy(sample_timeout=0.1, hang_floor_s=0.05)
    loader = make_loader(FaultPlacement(), policy)

    delivered = []
    for batch in loader:
        busy(0.3)
        delivered.append([int(row[0]) for row in batch["samples"].tolist()])

    assert delivered == all_batches(GETITEM)
    assert [incident for incident in loader.incidents if incident.kind is IncidentKind.HANG] == []
