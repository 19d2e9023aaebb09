"""A source that goes away: nobody is condemned for it, all is delivered when it is back; bad files still are bad."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deadlines import wait_until
from faults.sources import (
    DEADLINE_S,
    SIZE,
    FailsAfterReturn,
    Files,
    FilesAtOnce,
    HangsWhileAway,
    KeepsFolderOpen,
    ServerSamples,
    SourceFolder,
    WaitsForReturn,
    all_wait,
    breakers,
    make_loader,
    once_open,
    policy,
    serving,
    values,
)
from outlive import Incident, IncidentKind, SourceUnavailableError

OPENED = "opened the breaker, no sample is condemned, waiting for it"
CLOSED = "closed the breaker, going on"
everywhere = pytest.mark.parametrize("method", ["fork", "spawn", "forkserver", None])


@pytest.fixture
def home(tmp_path: Path) -> SourceFolder:
    return SourceFolder(tmp_path)


def undisturbed(
    home: SourceFolder, dataset: Any, method: str | None, faults: Any = "skip", **options: Any
) -> list[Any]:
    home.open_gate()
    batches = [values(batch) for batch in make_loader(dataset, method, faults, **options)]
    home.close_gate()
    return batches


def disturbed(loader: Any, begin: Callable[[], None], after: int = 3) -> list[Any]:
    """What is delivered when, after so many batches, something happens."""
    batches = []
    for number, batch in enumerate(loader, 1):
        batches.append(values(batch))
        if number == after:
            begin()
    return batches


@everywhere
def test_not_one_bit_differs_when_the_folder_goes_away_and_comes_back(home: SourceFolder, method: str | None) -> None:
    """Every sample is delivered once, with the random numbers of a run without the outage."""
    expected = undisturbed(home, Files(home.path), method)
    words = []
    loader: list[Any] = []

    def bring_back() -> None:
        words.append(loader[0].statistics().breaker)
        home.bring_back()

    def take_away() -> None:
        home.take_away()
        home.open_gate()

    loader += [make_loader(Files(home.path), method, on_incident=once_open(loader, bring_back))]
    delivered = disturbed(loader[0], take_away)

    assert delivered == expected
    assert dict(loader[0].quarantine) == {}
    assert breakers(loader[0]) == [OPENED, CLOSED]
    assert re.match(r"open since \d+ s: FileNotFoundError: \[Errno 2\] No such file", words[0])
    assert loader[0].statistics().breaker == "closed"


@pytest.mark.parametrize("dataset", [WaitsForReturn, FailsAfterReturn], ids=["next", "probe"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_sample_is_not_condemned_because_the_folder_is_back(
    home: SourceFolder, method: str, dataset: type[Files]
) -> None:
    """The next one came, or a probe does; its batch is done again: another worker has seen that the source was gone."""
    expected = undisturbed(home, dataset(home.path), method)

    def take_away() -> None:
        home.take_away()
        home.open_gate()

    def bring_back(incident: Incident) -> None:
        if incident.action == OPENED:
            home.bring_back()

    loader = make_loader(dataset(home.path), method, on_incident=bring_back)
    delivered = disturbed(loader, take_away)

    assert delivered == expected
    assert dict(loader.quarantine) == {}
    assert breakers(loader) == [OPENED, CLOSED]


@pytest.mark.parametrize(
    ("method", "dataset", "settings"),
    [
        ("fork", Files, {"on_error": "replace"}),
        ("fork", FilesAtOnce, {"on_error": "skip"}),
        # One worker: it is asked about each sample, and may not be asked while the other one's outage ends.
        ("one", Files, {"on_error": lambda incident: "skip"}),
        ("fork", Files, {"retry_on": (OSError,)}),
        (None, FilesAtOnce, {"retry_on": (OSError,)}),
    ],
    ids=["replace", "getitems", "callable", "raise", "raise-inline-getitems"],
)
def test_nothing_is_lost_whatever_the_policy(
    home: SourceFolder, method: str | None, dataset: type[Files], settings: dict[str, Any]
) -> None:
    """Under raise it takes retry_on: who says that an exception is worth another try means this."""
    faults = policy(**settings)
    options: dict[str, Any] = {}
    if method == "one":
        method, options = "fork", {"num_workers": 1}
    expected = undisturbed(home, dataset(home.path), method, faults, **options)
    loader: list[Any] = []

    def take_away() -> None:
        home.take_away()
        home.open_gate()

    listen = once_open(loader, home.bring_back)
    loader += [make_loader(dataset(home.path), method, faults, on_incident=listen, **options)]
    delivered = disturbed(loader[0], take_away)

    assert delivered == expected
    assert dict(loader[0].quarantine) == {}
    assert breakers(loader[0]) == [OPENED, CLOSED]


@everywhere
def test_one_error_ends_the_epoch_when_the_folder_does_not_come_back(home: SourceFolder, method: str | None) -> None:
    """It comes once, names cause and sample, and the quarantine is empty: the next epoch has everything again."""
    loader = make_loader(Files(home.path), method, policy(on_error="skip", breaker_patience=0.5))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    home.take_away()
    home.open_gate()

    with pytest.raises(SourceUnavailableError) as caught:
        list(iterator)

    message = str(caught.value)
    assert "different samples raised FileNotFoundError: [Errno 2] No such file or directory" in message
    assert "  python   " in message
    assert "  example  sample " in message
    assert "FaultPolicy(breaker_patience=600)   to wait longer; None: for ever" in message
    assert [i.action for i in caught.value.incidents] == [OPENED, "gave up"]
    assert dict(loader.quarantine) == {}
    assert loader.statistics().breaker.startswith("given up after ")
    with pytest.raises(StopIteration):
        next(iterator)
    home.bring_back()
    assert sum(len(batch) for batch in loader) == SIZE


@pytest.mark.parametrize("method", ["spawn", None])  # a fork would hold the port
def test_all_is_delivered_when_a_server_refuses_for_a_while(home: SourceFolder, method: str | None) -> None:
    """Connections are refused for real, and the server comes back at the same port."""
    with serving() as server:
        dataset = ServerSamples(home.path, server.port)
        expected = undisturbed(home, dataset, method)
        loader: list[Any] = []

        def stop() -> None:
            server.stop()
            home.open_gate()

        loader += [make_loader(dataset, method, on_incident=once_open(loader, server.start))]
        delivered = disturbed(loader[0], stop)

    assert delivered == expected
    assert dict(loader[0].quarantine) == {}
    assert breakers(loader[0]) == [OPENED, CLOSED]
    opened = next(i for i in loader[0].incidents if i.kind is IncidentKind.BREAKER)
    assert "raised ConnectionRefusedError: [Errno 111] Connection refused" in opened.cause


@pytest.mark.parametrize("persistent", [True, False])
def test_an_outage_between_two_epochs_is_noticed_too(home: SourceFolder, persistent: bool) -> None:
    """Workers of the second epoch have fetched nothing yet; what was good in the first is known to the loader."""
    home.open_gate()
    loader: list[Any] = []
    listen = once_open(loader, home.bring_back)
    loader += [make_loader(Files(home.path), "fork", on_incident=listen, persistent_workers=persistent)]
    first = [values(batch) for batch in loader[0]]
    home.take_away()

    second = [values(batch) for batch in loader[0]]

    assert [row[0] for batch in second for row in batch] == [row[0] for batch in first for row in batch]
    assert dict(loader[0].quarantine) == {}
    assert breakers(loader[0]) == [OPENED, CLOSED]


@everywhere
@pytest.mark.parametrize("bad", [range(0, SIZE, 5), range(20, 30)], ids=["every fifth", "ten in a row"])
def test_bad_files_are_left_out_while_others_are_good(home: SourceFolder, method: str | None, bad: range) -> None:
    """A sample that was good before is still good: the breaker stays closed, the samples are to blame."""
    home.open_gate()
    loader = make_loader(Files(home.path, tuple(bad)), method, policy(on_error="skip", max_bad=None))

    delivered = [int(row[0]) for batch in loader for row in values(batch)]

    assert delivered == [index for index in range(SIZE) if index not in bad]
    assert sorted(loader.quarantine) == list(bad)
    assert breakers(loader) == []


@pytest.mark.parametrize("dataset", [Files, FilesAtOnce])
@pytest.mark.parametrize("method", ["fork", None])
def test_bad_files_are_left_out_though_the_first_ten_are_bad(
    home: SourceFolder, method: str | None, dataset: Any
) -> None:
    """Nothing good is known yet: others are tried by chance, and as soon as one is good it is known."""
    home.open_gate()
    loader = make_loader(dataset(home.path, tuple(range(10))), method, policy(on_error="skip", max_bad=None))

    delivered = [int(row[0]) for batch in loader for row in values(batch)]

    assert delivered == list(range(10, SIZE))
    assert sorted(loader.quarantine) == list(range(10))
    assert loader.statistics().breaker == "closed"


def test_no_sample_is_blamed_when_idle_workers_are_killed(home: SourceFolder) -> None:
    """Their successors wait in turn, and all is delivered."""
    expected = undisturbed(home, Files(home.path), "fork")
    loader: list[Any] = []
    killed: list[int] = []

    def kill_all() -> None:
        for slot in loader[0].statistics().slots:
            os.kill(slot.pid, signal.SIGKILL)

    def take_away() -> None:
        home.take_away()
        home.open_gate()

    def listen(incident: Any) -> None:
        once_open(loader, kill_all)(incident)
        killed.append(incident.slot) if incident.kind is IncidentKind.CRASH else None
        if len(killed) == 2 and not home.folder.exists():
            # The tasks of the one that is just replaced are sent after this.
            assert wait_until(lambda: all_wait(loader[0], but=killed[1]), DEADLINE_S)
            home.bring_back()

    loader += [make_loader(Files(home.path), "fork", on_incident=listen)]
    delivered = disturbed(loader[0], take_away)

    assert delivered == expected
    assert dict(loader[0].quarantine) == {}
    crashes = [i for i in loader[0].incidents if i.kind is IncidentKind.CRASH]
    assert [i.action for i in crashes] == ["replaced", "replaced"]


def test_no_sample_is_blamed_when_a_probe_hangs(home: SourceFolder) -> None:
    """A mount that is gone may hang: the worker is replaced, what it had in hand was good."""
    expected = undisturbed(home, HangsWhileAway(home.path), "fork", num_workers=1)

    def listen(incident: Any) -> None:
        if incident.kind is IncidentKind.HANG:
            home.bring_back()

    faults = policy(on_error="skip", sample_timeout=1.0)
    loader = make_loader(HangsWhileAway(home.path), "fork", faults, on_incident=listen, num_workers=1)
    delivered = disturbed(loader, home.take_away)

    assert delivered == expected
    assert dict(loader.quarantine) == {}
    (hang,) = loader.incidents
    assert str(hang).endswith("while probing whether the source of its samples answers: replaced")


def test_workers_are_replaced_when_what_they_hold_open_is_dead(home: SourceFolder) -> None:
    """The source is back, but not for them: fresh ones reach it, and go on bit for bit."""
    expected = undisturbed(home, KeepsFolderOpen(home.path), "fork")
    loader: list[Any] = []

    def take_away() -> None:
        home.replace_by_copy()
        home.open_gate()

    loader += [make_loader(KeepsFolderOpen(home.path), "fork", on_incident=once_open(loader, home.bring_back))]
    delivered = disturbed(loader[0], take_away)

    assert delivered == expected
    assert dict(loader[0].quarantine) == {}
    assert {i.slot for i in loader[0].incidents if i.kind is IncidentKind.RECYCLED} == {0, 1}
    recycled = next(i for i in loader[0].incidents if i.kind is IncidentKind.RECYCLED)
    assert "the source of its samples is gone, and a fresh worker may be the first to reach it" in str(recycled)
    assert loader[0].statistics().restarts == 0
    assert breakers(loader[0]) == [OPENED, CLOSED]


def test_workers_that_wait_leave_when_the_loop_is_left(home: SourceFolder) -> None:
    """Nothing stays behind, though the source never comes back."""
    loader = make_loader(Files(home.path), "fork", policy(on_error="skip", backoff_s=30.0, backoff_max_s=30.0))
    iterator = iter(loader)
    for _ in range(3):
        next(iterator)
    home.take_away()
    home.open_gate()
    pids = [slot.pid for slot in loader.statistics().slots]
    assert wait_until(lambda: all_wait(loader), DEADLINE_S)

    del iterator

    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), DEADLINE_S)
    assert loader.statistics().breaker == "closed"
    assert loader.statistics().delivered == 3
