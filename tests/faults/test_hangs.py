"""What counts as a hang, and what does not."""

from __future__ import annotations

import logging
import re
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
    """The first sample takes until a file is there."""

    def __init__(self, word: Path) -> None:
        super().__init__(SIZE, FaultPlacement())
        self.word = word

    def __getitem__(self, index: int) -> Any:
        if index == FIRST:
            wait_for_word(self.word, 20.0)
        return super().__getitem__(index)


def wait_for_word(word: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not word.exists() and time.monotonic() < end:
        time.sleep(0.01)  # between two looks, with a deadline


def test_a_slow_sample_is_suspected_and_not_shot_when_the_timeout_is_auto(tmp_path: Path) -> None:
    """Under "auto" a healthy slow sample is reported, with its stack, and delivered."""
    # It comes first: the limit follows the slowest sample so far, and this machine may be slow by itself.
    word = tmp_path / "suspected"
    policy = FaultPolicy(hang_floor_s=0.5, hang_wait_s=30.0)

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


class TouchOnSecondLine(logging.Handler):
    """Keeps what the log says of a sample, and touches a file once it has said so twice."""

    def __init__(self, sample: int, word: Path) -> None:
        super().__init__()
        self.sample = sample
        self.word = word
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if f"fetching sample {self.sample} " in (line := record.getMessage()):
            self.lines.append(line)
            if len(self.lines) >= 2:
                self.word.touch()


def test_the_log_says_again_and_again_what_is_waited_for_and_until_when(tmp_path: Path) -> None:
    """Nobody waits in silence; and however often it is said, it is one incident."""
    word = tmp_path / "said"
    policy = FaultPolicy(hang_floor_s=0.3, hang_wait_s=30.0)
    listener = TouchOnSecondLine(FIRST, word)
    loader = make_loader(
        FaultPlacement(), policy, dataset=SlowUntil(word), num_workers=1, describe=lambda index: f"img{index}.jpg"
    )
    log = logging.getLogger("outlive")
    log.addHandler(listener)
    try:
        delivered = all_indices(loader)
    finally:
        log.removeHandler(listener)

    assert delivered == all_batches(GETITEM)
    pattern = (
        r"worker 0 has shown no progress for [\d.]+ s while fetching sample 0 \(img0.jpg\): it sleeps at "
        r"test_hangs.py:\d+ wait_for_word. It is ended at 30 s, in [\d.]+ s from now, unless it goes on"
    )
    assert [line for line in listener.lines if not re.fullmatch(pattern, line)] == []
    assert [incident.kind for incident in loader.incidents if incident.index == FIRST] == [IncidentKind.SUSPECTED_HANG]


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
    loader = make_loader(FaultPlacement(), FaultPolicy(hang_floor_s=0.3, hang_wait_s=60), dataset=Waits(wait))

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert loader.statistics().restarts == 0


def test_nothing_is_suspected_when_samples_have_been_slow_before() -> None:
    """After two samples of 1.2 s, one more is nothing special."""
    policy = FaultPolicy(hang_floor_s=0.1, hang_wait_s=60.0)
    loader = make_loader(FaultPlacement(), policy, dataset=Slow({0: 1.2, 1: 1.2, BAD: 1.2}), num_workers=1)

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert [incident for incident in loader.incidents if incident.index == BAD] == []


def test_nothing_is_done_when_there_is_no_timeout() -> None:
    """sample_timeout=None: neither suspected nor replaced."""
    policy = FaultPolicy(sample_timeout=None, hang_floor_s=0.1, hang_wait_s=0.1)
    loader = make_loader(FaultPlacement(), policy, dataset=Slow({BAD: 1.5}))

    delivered = all_indices(loader)

    assert delivered == all_batches(GETITEM)
    assert loader.incidents == ()


@pytest.mark.parametrize(("name", "limit_s"), [("sleep", 1.2), ("gil-loop", 3.0)])
def test_a_hang_is_acted_on_by_what_the_worker_does_when_the_timeout_is_auto(name: str, limit_s: float) -> None:
    """One that may still go on is suspected first, and replaced later: one that sleeps sooner than one that works."""
    policy = FaultPolicy(on_error="skip", hang_floor_s=0.3, retries=0)
    loader = make_loader(FaultPlacement(getitem={FIRST: PlantedFault(name)}), policy, num_workers=1)

    delivered = all_indices(loader)

    assert flat(delivered) == list(range(1, SIZE))
    suspected, acted_on = [incident for incident in loader.incidents if incident.index == FIRST]
    assert suspected.kind is IncidentKind.SUSPECTED_HANG
    assert acted_on.kind is IncidentKind.HANG
    assert suspected.seconds_in_hand < acted_on.seconds_in_hand
    assert acted_on.evidence.seen is not None
    assert acted_on.evidence.seen.limit_s == limit_s
    assert acted_on.seconds_in_hand >= limit_s
    assert FAULTS[name].fire.__name__ in suspected.stack
    assert FAULTS[name].fire.__name__ in acted_on.stack


def test_a_deadlock_is_acted_on_though_samples_before_it_took_long() -> None:
    """It will never end, however long healthy ones take; and its second try has half the time."""
    policy = FaultPolicy(on_error="skip", hang_floor_s=0.5, hang_wait_s=60.0, hang_busy_s=600.0)
    dataset = SlowThenDeadlocked(dict.fromkeys(range(2), 1.0), BAD)
    loader = make_loader(FaultPlacement(), policy, dataset=dataset, num_workers=1)

    delivered = all_indices(loader)

    assert delivered == without_bad(GETITEM)
    hangs = [incident for incident in loader.incidents if incident.kind is IncidentKind.HANG]
    assert [incident.index for incident in hangs] == [BAD, BAD]
    limits = [incident.evidence.seen and incident.evidence.seen.limit_s for incident in hangs]
    assert limits == [0.5, 0.25]


class SlowThenDeadlocked(Slow):
    def __init__(self, seconds: dict[int, float], stuck: int) -> None:
        super().__init__(seconds)
        self.stuck = stuck

    def __getitem__(self, index: int) -> Any:
        if index == self.stuck:
            PlantedFault("deadlock")()
        return super().__getitem__(index)


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
