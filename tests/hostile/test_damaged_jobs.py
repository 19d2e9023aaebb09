"""What a job publishes, damaged or by another version: viewers skip it, say so, and show the other jobs.

Reads   what `top`, the hub of the dashboard and the metrics say.
Writes  folders of jobs, boards and events, with anything in them.
Never   the user's own runtime folder.
"""

from __future__ import annotations

import copy
import json
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

from deadlines import wait_until
from outlive._metrics import families, fold, history, layout, publishing, runtime, viewing
from outlive.cli import main, top_screen
from outlive.dashboard import hub

DEADLINE_S = 60.0
NAMES = iter(range(10**6))


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTLIVE_RUNTIME", str(tmp_path))
    return tmp_path / "outlive"


@pytest.fixture
def sound() -> Iterator[publishing.Publisher]:
    """What a loader that lives and has delivered two batches publishes."""
    publisher = publishing.new("loader", "sound", 2, {})
    assert publisher is not None
    publisher.make()
    publisher.words[layout.BASE] = 2 + publisher.words[layout.LEFT]
    yield publisher
    publisher.end()


def me() -> dict[str, Any]:
    return {"pid": os.getpid(), "start": runtime.start_of(os.getpid())}


def publish(who: Any, events: bytes = b"", board: bytes = b"") -> Path:
    folder = runtime.make(f"7-{next(NAMES)}-a")
    (folder / runtime.BOARD).write_bytes(board or bytes(layout.size_bytes(2)))
    (folder / runtime.EVENTS).write_bytes(events)
    (folder / runtime.WHO).write_bytes(who if isinstance(who, bytes) else json.dumps(who).encode())
    return folder


def board(**more: int) -> array[int]:
    words = array("q", bytes(layout.size_bytes(2)))
    layout.begin(words, 2)
    for name, value in more.items():
        words[layout.AT[name]] = value
    return words


ODD = {
    "nothing": b"",
    "half": b'{"pid": 7, "ru',
    "a list": b"[]",
    "brackets without end": b"[" * 100_000,
    "a text for a pid": b'{"pid": "seven"}',
    "no pid": b"{}",
    "the pid of every process": b'{"pid": -1}',
    "a pid beyond all pids": b'{"pid": 1000000000000000000000}',
    "a bool for a pid": b'{"pid": true}',
    "a text for a time": b'{"pid": 7, "began": "yesterday"}',
    "a time without end": b'{"pid": 7, "began": 1e999}',
    "no number": b'{"pid": 7, "began": NaN}',
    "a text for a rank": b'{"pid": 7, "rank": "first"}',
    "limits of limits": b'{"pid": 7, "limits": {"memory": {"soft": 1}}}',
    "limits that are none": b'{"pid": 7, "limits": 7}',
    "no text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("who", ODD)
def test_a_job_that_says_odd_things_of_itself_is_counted_and_the_others_are_shown(sound, who):
    """`top` lists the sound one, and says that another cannot be read."""
    publish(ODD[who])

    shown = CliRunner().invoke(main, ["top", "--once"])
    for_programs = CliRunner().invoke(main, ["top", "--json"])

    assert (shown.exit_code, for_programs.exit_code) == (0, 0), (shown.output, for_programs.output)
    assert f"pid {os.getpid()}" in shown.stdout
    assert "1 job cannot be read" in shown.stdout
    told = json.loads(for_programs.stdout)
    assert (len(told["jobs"]), told["unreadable"]) == (1, 1)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(sound):
    """No process will ever write into it."""
    folder = publish({})
    (folder / runtime.WHO).unlink()
    os.mkfifo(folder / runtime.WHO)

    assert viewing.jobs().unreadable == 1


EVENTS = [
    {"kind": "incident", "id": "ab", "incident": "crash", "sentence": "it died", "verdict": "killed", "cause": "why"}
    | {"action": "left out", "slot": 0, "incarnation": 1, "pid": 7, "batch": 1, "epoch": 0, "samples": [3, "a"]}
    | {"described": ["a.png"], "seconds": 1.5},
    {"kind": "tick", **dict.fromkeys(("delivered", "samples", "bytes", "restarts", "retries", "recycled"), 1)}
    | {"quarantined": 0, "incidents": 1, "workers": 2, "wait_seconds": 0.5, "trainer_seconds": 1, "cells": 0}
    | {"slots": [{"slot": 0, "incarnation": 1, "doing": "idle", "private": 5, "shared": 6, "cpu": 0.5}]},
    {"kind": "worker-died", "slot": 0, "incarnation": 1, "pid": 7, "how": "died", "hung": False, "doing": "idle"}
    | {"batch": 1, "seconds": 1.0},
    {"kind": "worker-ready", "slot": 0, "incarnation": 2},
    {"kind": "quarantine", "id": "ab", "verdict": "killed", "slot": 0, "samples": [3], "replaced": False},
    {"kind": "breaker", "id": "ab", "sentence": "gone", "open": True},
    {"kind": "epoch-began", "epoch": 0},
]
WHOLE: list[dict[str, Any]] = [{"n": number, "time": 1e9 + number, **told} for number, told in enumerate(EVENTS, 1)]
PLACES = [(number, name) for number, event in enumerate(WHOLE) for name in event]
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=4,
)


def changed(place: tuple[int, str], *value: Any) -> bytes:
    event = copy.deepcopy(WHOLE[place[0]])
    del event[place[1]]
    if value:
        event[place[1]] = value[0]
    return json.dumps(event).encode()


LINES = st.one_of(
    st.tuples(st.sampled_from(PLACES), ANYTHING).map(lambda change: changed(*change)),
    st.sampled_from(PLACES).map(changed),
    ANYTHING.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=20).map(lambda line: line.replace(b"\n", b"")),
)


def is_event(line: bytes) -> bool:
    try:
        return fold.is_sound(runtime.parse(line))
    except ValueError:
        return False


@hypothesis.settings(max_examples=80, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(st.lists(LINES, max_size=6), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4))
def test_no_event_and_no_word_of_a_board_ends_a_viewer(home, lines, words):
    """Whatever is in them: the screen, the page's findings and the metrics are made, in JSON that browsers take."""
    whole = [json.dumps(event).encode() for event in WHOLE]
    picture = board(slots=2, base=5, left=1)
    for word in words:
        picture[3 + word % (len(picture) - 3)] = word  # not the sequence, which says that a job is at it
    path = publish(me(), b"\n".join([*whole, *lines, b""]), picture.tobytes())
    (job,) = [job for job in viewing.jobs() if job.path == path]

    seen, watched = top_screen.Seen(job), hub.Watched(job)
    seen.look()
    watched.read({})
    shown = [line.text for line in top_screen.body_of(top_screen.View([seen]), 80)]
    json.dumps([watched.about(), watched.snapshot, watched.findings, watched.history()], allow_nan=False)
    families.exposition([(job, job.snapshot())])

    assert any("it died" in line for line in shown)
    assert job.unreadable == sum(not is_event(line) for line in lines)
    job.close()
    runtime.remove(path)


def test_events_that_are_passed_over_are_counted_once_and_told(sound):
    """On the screen, in JSON and as a finding; also where the file has become the earlier one meanwhile."""
    (job,) = viewing.jobs()
    events = job.path / runtime.EVENTS
    with events.open("ab") as file:
        file.write(b"damaged\n" + changed((0, "id"), 7) + b'\n{"n": 900, "time": 1.0, "kind": "of a newer one"}\n')
    job.events(0)
    events.rename(job.path / runtime.EARLIER)
    history.Writer(job.path).write([{"kind": "resized", "why": "news"}, {"kind": "tick"}])
    job.events(0)
    job.events(0)

    shown = CliRunner().invoke(main, ["top", "--once"])
    told = json.loads(CliRunner().invoke(main, ["top", "--json"]).stdout)
    watched = hub.Watched(job)
    watched.read({})

    assert job.unreadable == 3
    assert "3 events cannot be read" in shown.stdout
    assert told["jobs"][0]["unreadable"] == 3
    titles = [each["title"] for each in watched.findings if each["kind"] == "unreadable"]
    assert titles == ["3 events of this job cannot be read"]


def test_a_job_that_cannot_be_read_hides_no_other_from_the_page(sound, monkeypatch, caplog):
    """Whatever goes wrong with one of them: the log says so once, and the page counts it."""
    bad = publish(me(), board=board().tobytes()).name
    read = hub.Watched.read

    def fail_for_one(watched: hub.Watched, remedies: dict[str, list[str]]) -> list[dict[str, Any]]:
        if watched.job.key == bad:
            raise ZeroDivisionError
        return read(watched, remedies)

    monkeypatch.setattr(hub.Watched, "read", fail_for_one)
    monkeypatch.setattr(hub, "EVERY_S", 0.0)
    seen = hub.Hub()
    seen.start()
    try:
        assert wait_until(lambda: any(job["snapshot"].get("delivered") == 2 for job in seen.jobs()), DEADLINE_S)
        sound.words[layout.BASE] += 2
        assert wait_until(lambda: any(job["snapshot"].get("delivered") == 4 for job in seen.jobs()), DEADLINE_S)
    finally:
        seen.close()

    assert [f"could not read job {bad}" in line for line in caplog.messages] == [True]
