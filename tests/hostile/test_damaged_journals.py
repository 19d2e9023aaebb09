"""A state folder and a journal that others, a bad disk or a newer version had their hands in.

Reads   what is left of them, and what the commands say.
Writes  journals in temporary folders; damages them.
Never   the user's own: OUTLIVE_HOME is set for every test.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import operator
import os
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from click.testing import CliRunner
from hypothesis import strategies as st

import outlive
from forensics import example_incidents
from outlive._forensics import journal, tally
from outlive._forensics.job import Job
from outlive._system import safe_files
from outlive.cli import main, report
from outlive.dashboard import past

DEADLINE_S = 60.0


def add_incidents(count: int = 3) -> None:
    for number in range(count):
        journal.add(example_incidents.segfault(id=f"{number:08x}", when=1e9 + number))
    assert journal.flush(DEADLINE_S)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(journal, "failure_logged", False)
    return tmp_path / "home"


def read_all(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("spoil", ["mode", "owner", "target of a link"])
def test_a_state_folder_that_others_may_write_to_is_neither_written_nor_read(home, tmp_path, caplog, spoil):
    """Another user could have put a journal there, links, or the state of a check: the log says so once."""
    expected = "can be written to by other users"
    add_incidents()
    if spoil == "mode":
        home.chmod(0o777)
    elif spoil == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a folder away")
        expected = "belongs to another user"
        os.chown(home, 65534, 65534)
    else:
        home.rename(tmp_path / "elsewhere")
        (tmp_path / "elsewhere").chmod(0o777)
        home.symlink_to("elsewhere")
    before = read_all(tmp_path)

    add_incidents()

    assert [expected in line for line in caplog.messages] == [True]
    with pytest.raises(safe_files.UnsafeFolder, match=expected):
        journal.find()
    with pytest.raises(safe_files.UnsafeFolder, match=expected):
        journal.forget()
    for verb in ("incidents", "report"):
        asked = CliRunner().invoke(main, [verb])
        assert asked.exit_code == 1
        assert expected in asked.stderr
    checked = CliRunner().invoke(main, ["check", "hostile.examples:numbers", "--start-method", "fork"])
    assert checked.exit_code == 2
    assert expected in checked.stderr.replace("\n", " ")
    assert read_all(tmp_path) == before


def test_a_state_folder_that_the_user_moved_and_left_a_link_to_is_used(home, tmp_path):
    """To a larger disk, say."""
    (tmp_path / "scratch").mkdir(mode=0o700)
    home.symlink_to("scratch")

    add_incidents()

    assert len(journal.find()) == 3


def test_the_state_folder_is_made_for_this_user_only_whatever_the_umask_is(home):
    """By an incident and by a check: one that the group may write to would not be used the next time."""
    before = os.umask(0o002)
    try:
        checked = CliRunner().invoke(main, ["check", "hostile.examples:numbers", "--start-method", "fork"])
    finally:
        os.umask(before)

    assert checked.exit_code == 0, checked.output
    assert home.stat().st_mode & 0o777 == 0o700
    add_incidents()
    assert len(journal.find()) == 3


def test_a_database_of_another_program_is_neither_changed_nor_removed(home, caplog):
    """It has the name of a journal; incidents are not written, and the log says why."""
    home.mkdir(mode=0o700)
    path = home / "journal.sqlite3"
    other = sqlite3.connect(path)
    other.executescript("CREATE TABLE diary (text); INSERT INTO diary VALUES ('dear diary');")
    other.close()
    before = path.read_bytes()

    add_incidents()

    assert "a database of another program's" in caplog.text
    asked = CliRunner().invoke(main, ["incidents"])
    assert (asked.exit_code, "another program" in asked.stderr) == (1, True)
    assert CliRunner().invoke(main, ["forget", "--all", "--yes"]).exit_code == 1
    assert path.read_bytes() == before
    assert [each.name for each in home.iterdir()] == [path.name]


def test_a_damaged_journal_is_set_aside_and_replaces_nothing(home, caplog):
    """Three times at most, and then the log says what to remove."""
    home.mkdir(mode=0o700)
    for number in range(5):
        (home / "journal.sqlite3").write_bytes(f"damaged {number}".encode() * 1000)
        add_incidents()

    kept = {path.name: path.read_bytes()[:9] for path in home.glob("*damaged*") if "-wal" not in path.name}
    assert kept == {
        "journal.sqlite3.damaged": b"damaged 0",
        "journal.sqlite3.damaged-2": b"damaged 1",
        "journal.sqlite3.damaged-3": b"damaged 2",
    }
    assert (home / "journal.sqlite3").read_bytes()[:9] == b"damaged 4"
    (line,) = caplog.messages
    assert f"remove {home / 'journal.sqlite3.damaged'}*" in line


ROWS = {
    "a time that is none": ("time", "yesterday"),
    "a time without end": ("time", float("inf")),
    "a blob for a sentence": ("sentence", b"\xff\x00"),
    "a text for a slot": ("slot", "three"),
    "a blob for samples": ("samples", b"1"),
    "a number for JSON": ("json", b"12"),
    "a rank that is none": ("rank", "first"),
}


@pytest.mark.parametrize("column", ROWS)
def test_a_damaged_row_is_passed_over_and_counted(home, column):
    """SQLite keeps anything in any column. The others are listed, and the report has the newest of them."""
    add_incidents()
    spoil_newest(home, *ROWS[column])

    listed = CliRunner().invoke(main, ["incidents"])
    shown = CliRunner().invoke(main, ["report"])

    assert (listed.exit_code, shown.exit_code) == (0, 0), (listed.output, shown.output)
    assert [f"0000000{number}" in listed.stdout for number in range(3)] == [True, True, False]
    assert shown.stdout.startswith("00000001")
    for asked in (listed, shown):
        assert f"1 incident in {home / 'journal.sqlite3'} cannot be read" in asked.stderr


def spoil_newest(home: Path, column: str, value: object) -> None:
    connection = sqlite3.connect(home / "journal.sqlite3")
    with connection:
        connection.execute(f"UPDATE incidents SET {column} = ? WHERE id = '00000002'", [value])
    connection.close()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '{"kind": "of a newer version"}', '{"verdict": 3}', "[" * 100_000]
)
def test_an_incident_whose_json_cannot_be_read_is_passed_over_and_told(home, text):
    """The list goes by the columns; for programs and in the report, it is left out and named."""
    add_incidents()
    spoil_newest(home, "json", text)

    listed = CliRunner().invoke(main, ["incidents"])
    for_programs = CliRunner().invoke(main, ["incidents", "--json"])
    newest = CliRunner().invoke(main, ["report"])
    named = CliRunner().invoke(main, ["report", "00000002"])

    assert listed.exit_code == 0
    assert "00000002" in listed.stdout
    assert for_programs.exit_code == newest.exit_code == 0, (for_programs.output, newest.output)
    assert {"00000000", "00000001"} <= {json.loads(line)["id"] for line in for_programs.stdout.splitlines()}
    assert newest.stdout.startswith("00000001")
    assert "incident 00000002 is damaged, or written by a newer version" in newest.stderr
    assert named.exit_code == 1
    assert "incident 00000002 is damaged, or written by a newer version" in named.stderr


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=5,
)


def places_in(told: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value in a JSON document."""
    inner = told.items() if isinstance(told, dict) else enumerate(told) if isinstance(told, list) else ()
    for key, value in inner:
        yield (*path, key)
        yield from places_in(value, (*path, key))


WHOLE = [example_incidents.segfault().to_dict(), example_incidents.raised().to_dict()]
PLACES = [(number, place) for number, told in enumerate(WHOLE) for place in places_in(told)]


@hypothesis.settings(max_examples=80)
@hypothesis.given(st.lists(st.tuples(st.sampled_from(PLACES), ANYTHING), min_size=1, max_size=3))
def test_an_incident_with_anything_anywhere_is_shown_or_said_to_be_unreadable(changes):
    """Damaged in one place, or by a version that says it otherwise: as text, as a page, as sections."""
    number = changes[0][0][0]
    told = copy.deepcopy(WHOLE[number])
    for (other, place), value in changes:
        if other == number:
            with contextlib.suppress(LookupError, TypeError):
                functools.reduce(operator.getitem, place[:-1], told)[place[-1]] = value
    job = Job("train.py", "/home/me", 7, "here", None)
    entry = journal.Entry("00000000", 1e9, "", "crash", "", (), 0, job, json.dumps(told))

    for show in (lambda: report.lines(entry, 2e9), lambda: past.sections(entry), lambda: past.as_html(entry)):
        with contextlib.suppress(journal.UnreadableError):
            show()


def test_text_that_is_no_utf8_does_not_hide_other_incidents(home):
    """What can be read of it is shown."""
    add_incidents()
    connection = sqlite3.connect(home / "journal.sqlite3")
    with connection:
        connection.execute("UPDATE incidents SET sentence = CAST(x'ff41' AS TEXT) WHERE id = '00000002'")
    connection.close()

    listed = CliRunner().invoke(main, ["incidents"])

    assert listed.exit_code == 0, listed.output
    assert "\N{REPLACEMENT CHARACTER}A" in listed.stdout


def test_a_journal_of_another_machine_that_cannot_be_read_hides_no_other(home):
    """Damaged, another program's, or by a newer version: it is named, and the rest is shown."""
    add_incidents()
    (home / "journal-a.sqlite3").write_bytes(b"no database" * 1000)
    for name, statement in (("b", "CREATE TABLE diary (text)"), ("c", "PRAGMA user_version = 99")):
        shutil.copy(home / "journal.sqlite3", home / "journal-c.sqlite3")
        other = sqlite3.connect(home / f"journal-{name}.sqlite3")
        other.execute(statement)
        other.close()

    listed = CliRunner().invoke(main, ["incidents"])

    assert listed.exit_code == 0, listed.output
    assert listed.stdout.count("null-pointer") == 3
    for name in "abc":
        assert f"{home / f'journal-{name}.sqlite3'} cannot be read" in listed.stderr


# ---------------------------------------------------------------- what is promised of it


class Raising:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index % 2:
            raise ValueError(index)
        return index


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    return next(line for line in reversed(caplog.messages) if " ended with " in line)


def test_the_journal_is_said_to_have_all_incidents_only_where_it_has(home, caplog):
    """It cannot be written in the second epoch, and can again in the third."""
    loader = outlive.DataLoader(Raising(), faults="skip")
    list(loader)
    assert f"«outlive incidents» has them all, from {home / 'journal.sqlite3'}" in last_line(caplog)
    home.chmod(0o777)
    list(loader)
    assert "has them all, from" not in last_line(caplog)
    assert f"not all of them are in the journal in {home}, loader.incidents has them" in last_line(caplog)
    home.chmod(0o700)
    list(loader)
    assert "has them all, from" in last_line(caplog)

    assert len(loader.incidents) == 6
    assert len(journal.find()) == 4


def test_what_had_to_make_room_is_not_said_to_be_there(home, caplog, monkeypatch):
    """A small journal keeps the newest."""
    monkeypatch.setenv("OUTLIVE_JOURNAL_MIB", "0.000001")
    monkeypatch.setattr(journal, "removed_until", 0.0)

    list(outlive.DataLoader(Raising(), faults="skip"))

    assert "not all of them are in the journal" in last_line(caplog)


@pytest.mark.parametrize("there", [0, 1, 2])
def test_the_summary_of_a_run_promises_what_the_journal_has(home, there):
    """Where to look is said only of what is there."""
    add_incidents(there)
    note = {"kind": "crash", "cause": "killed", "died": True, "out": ["a\x1bb"], "when": 1e9}

    text = tally.summary(note | {"id": f"{number:08x}"} for number in range(2))

    assert "2 workers were lost" in text
    assert "a\\x1bb" in text
    assert (f"none of these could be written to {home}" in text) == (there == 0)
    assert ("1 of these is not in it" in text) == (there == 1)
    assert ("outlive incidents    each of them" in text) == (there > 0)
