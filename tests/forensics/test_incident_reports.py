"""What a loader tells of its incidents: to listeners, in the user's words, in the log, with what came before."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import pytest
from torch.utils.data import Dataset, IterableDataset

import outlive
from outlive import FaultPolicy, Incident
from outlive._forensics import journal
from outlive._forensics.ledger import KEPT_WHOLE, Ledger
from outlive.evidence import RECENT_SAMPLES, Evidence
from outlive.incident import IncidentKind, InHand, Stage

METHODS = ("fork", "spawn", "forkserver")
SIZE = 400
SKIP = FaultPolicy(on_error="skip", retries=0, max_bad=None)


class Bad(Dataset[int]):
    """Sample 301 ends its worker, 303 raises."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if index == 301:
            os._exit(9)
        if index == 303:
            raise ValueError("a bad one")
        return index


def file_name(index: Any) -> str:
    return f"img/{index:05}.jpg"


def loader_of(**more: Any) -> outlive.DataLoader[Any]:
    options = {"batch_size": 4, "num_workers": 2, "faults": SKIP}
    return outlive.DataLoader(Bad(), **{**options, **more})


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_the_last_samples_of_the_worker_are_told(method, batch_size):
    """Those that it took up, in that order, the one in hand last; of other workers' none."""
    loader = loader_of(batch_size=batch_size, multiprocessing_context=method)
    list(loader)

    death = next(incident for incident in loader.incidents if incident.exit is not None)

    batch = 301 // batch_size
    worker = [i for i in range(302) if i // batch_size % 2 == batch % 2]
    assert death.evidence.worked.recent_indices == tuple(worker[-RECENT_SAMPLES:])
    assert death.indices == (301,)
    assert death.evidence.worked.batches_done == len({i // batch_size for i in worker}) - 1


def test_samples_of_an_earlier_epoch_are_not_among_the_last():
    """Batches are numbered anew with each."""
    loader = loader_of(persistent_workers=True, num_workers=1, faults=FaultPolicy("skip", retries=0, max_bad=None))
    list(loader)
    list(loader)

    for incident in loader.incidents:
        if incident.exit is not None and incident.epoch == 1:
            assert incident.evidence.worked.recent_indices[-1] == 301
    assert {incident.epoch for incident in loader.incidents} == {0, 1}


@pytest.mark.parametrize(("method", "how"), [("fork", True), ("spawn", True), ("fork", False), ("spawn", False)])
def test_sys_exit_is_told_from_os_exit(method, how):
    """The one passes through Python, the other does not."""
    loader = outlive.DataLoader(Leaving(how), num_workers=1, multiprocessing_context=method, faults=SKIP)

    list(loader)

    (incident,) = loader.incidents
    assert incident.exit.code == 5
    assert incident.evidence.worked.left_by_exit is how


class Leaving(Dataset[int]):
    def __init__(self, by_python: bool) -> None:
        self.by_python = by_python

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        if index:
            sys.exit(5) if self.by_python else os._exit(5)
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_are_named_in_the_users_words(workers, caplog):
    """In the incident, the log and every message."""
    loader = loader_of(num_workers=workers, describe=file_name, sampler=[0, 1, 2, 303, 5])

    list(loader)

    (incident,) = loader.incidents
    assert incident.described == ("img/00303.jpg",)
    assert incident.sample == "sample 303 (img/00303.jpg)"
    assert "sample 303 (img/00303.jpg)" in caplog.text


def test_the_error_names_the_sample_in_the_users_words():
    """Also the one that ends the epoch."""
    loader = loader_of(describe=file_name, faults="raise", sampler=[301, 1])

    with pytest.raises(outlive.WorkerCrashedError, match=r"while fetching sample 301 \(img/00301\.jpg\)"):
        list(loader)


def test_the_error_names_the_report_unless_there_is_no_journal(monkeypatch):
    """What it leads to must be there."""
    with pytest.raises(outlive.WorkerCrashedError) as told:
        list(loader_of(faults="raise", sampler=[301]))
    assert f"outlive report {told.value.incident.id}   everything that was saved" in str(told.value)

    monkeypatch.setenv("OUTLIVE_JOURNAL", "0")
    with pytest.raises(outlive.WorkerCrashedError) as told:
        list(loader_of(faults="raise", sampler=[301]))
    assert "outlive report" not in str(told.value)
    assert "outlive explain exited" in str(told.value)


def test_an_incident_survives_when_its_text_cannot_be_made():
    """A describe that fails says so in its place."""
    loader = loader_of(describe=lambda index: {}[index], sampler=[1, 303])

    list(loader)

    assert loader.incidents[0].described == ("describe raised KeyError: 303",)


class WordlessError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def without_words(index: int) -> str:
    raise WordlessError


@pytest.mark.parametrize("workers", [0, 1])
def test_an_incident_survives_when_describe_raises_what_has_no_text(workers):
    """An exception whose own `__str__` raises is no reason to end the epoch."""
    loader = loader_of(num_workers=workers, describe=without_words, sampler=[1, 303])

    assert [int(number) for batch in loader for number in batch] == [1]
    assert loader.incidents[0].described == ("describe raised WordlessError: <its __str__ raised RuntimeError>",)


@pytest.mark.parametrize("workers", [0, 2])
def test_listeners_hear_every_incident_once_and_in_order(workers):
    """As they happen, and with their verdicts."""
    heard: list[Incident] = []
    sampler = [0, 303, 1, 303] if workers == 0 else [0, 301, 1, 303]
    loader = loader_of(num_workers=workers, on_incident=[heard.append], sampler=sampler, batch_size=1)

    list(loader)

    assert heard == list(loader.incidents)
    assert len(heard) == 2
    assert all(incident.verdict is not None for incident in heard)


def test_a_listener_that_fails_is_logged_once_and_stops_no_other(caplog):
    """Neither the job nor the listener after it."""
    heard: list[Incident] = []

    def fail(incident: Incident) -> None:
        raise RuntimeError("no")

    loader = loader_of(on_incident=(fail, heard.append), sampler=[0, 301, 1, 303])

    assert [int(i) for batch in loader for i in batch] == [0, 1]

    assert len(heard) == 2
    assert [record.message.count("failed; the job goes on") for record in caplog.records].count(1) == 1


@pytest.mark.parametrize(("name", "value"), [("describe", 5), ("on_incident", "x"), ("on_incident", [print, 3])])
def test_what_is_no_callable_is_refused(name, value):
    """At once, with what was given."""
    with pytest.raises(TypeError, match=f"{name} must be"):
        loader_of(**{name: value})


@pytest.mark.parametrize("workers", [0, 2])
def test_an_epoch_with_incidents_is_summed_up_in_the_log(workers, caplog):
    """Once, by verdict, with the samples that are out; an epoch without says nothing."""
    sampler = [0, 303, 1, 2] if workers == 0 else [0, 301, 1, 303]
    loader = loader_of(num_workers=workers, sampler=sampler, batch_size=1)

    list(loader)

    told = [record.message for record in caplog.records if "ended with" in record.message]
    assert len(told) == 1
    assert told[0].startswith(f"epoch 0 ended with {1 if workers == 0 else 2} incident")
    assert "303" in told[0].rpartition("left out or replaced")[2]
    assert str(journal.path()) in told[0]

    caplog.clear()
    loader = loader_of(num_workers=workers, sampler=[0, 1])
    list(loader)
    assert [record for record in caplog.records if record.levelno >= logging.INFO] == []


def test_an_epoch_that_was_left_early_is_summed_up_when_the_next_begins(caplog):
    """Nobody says when a loop is left."""
    loader = loader_of(sampler=[303, *range(100)], batch_size=1)
    next(iter(loader))
    list(loader)

    told = [record.message for record in caplog.records if "ended with" in record.message]
    assert [line.split(" with ")[0] for line in told] == ["epoch 0 ended", "epoch 1 ended"]


class BadStream(IterableDataset[int]):
    def __iter__(self) -> Any:
        yield from range(3)
        os._exit(1)


def test_samples_of_a_stream_are_described_by_their_place():
    """They have no index."""
    loader = outlive.DataLoader(BadStream(), num_workers=1, faults=SKIP, describe=str)

    with pytest.raises(outlive.OutliveError):
        list(loader)

    assert loader.incidents[-1].described == ("3 of worker 0's stream",)
    assert loader.incidents[-1].evidence.worked.recent_indices == ((0, 0), (0, 1), (0, 2), (0, 3))


def test_the_log_names_the_cause_of_a_death(caplog):
    """Not only its signal."""
    loader = loader_of(sampler=[0, 301])

    list(loader)

    assert loader.incidents[0].verdict.cause in caplog.text


def test_incidents_of_long_ago_go_on_without_their_evidence():
    """A million of them must not fill the trainer's memory; those of late keep everything."""
    ledger = Ledger()
    for number in range(KEPT_WHOLE + 3):
        hand = InHand(Stage.FETCHING, number, 0)
        incident = Incident(
            *(IncidentKind.CRASH, 0, number, 1, number, hand), indices=(number,), evidence=Evidence(last_words="help")
        )
        ledger.quarantine.put(number, incident)
        ledger.add(incident)

    assert [bool(incident.evidence.last_words) for incident in ledger.incidents] == [False] * 3 + [True] * KEPT_WHOLE
    assert list(ledger.quarantine.values()) == ledger.incidents
