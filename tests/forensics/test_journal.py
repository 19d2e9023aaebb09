"""The journal on disk: what is kept, where, and how much.

Reads   journals in temporary folders.
Writes  them, from this process, from threads, forks and programs; damages them.
Never   the user's own: OUTLIVE_HOME is set for every test.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

import outlive
from forensics import example_incidents
from forensics.journal_writers import DEADLINE_S, written
from outlive._forensics import journal
from outlive._forensics.job import Job


def test_an_incident_is_in_the_journal_with_its_job(home):
    """Everything that is known, and which command it happened in."""
    incident = example_incidents.segfault()
    journal.add(incident)
    assert journal.flush(DEADLINE_S)

    (entry,) = journal.find()

    assert entry.incident == incident
    assert (entry.id, entry.verdict, entry.kind, entry.slot) == ("7f3a12cd", "null-pointer", "crash", 3)
    assert entry.samples == ("18204",)
    assert (entry.job.pid, entry.job.folder) == (os.getpid(), os.getcwd())
    assert sys.argv[0] in entry.job.command


def test_incidents_of_a_loader_reach_the_journal(home):
    """By themselves; and the sample's value is not in it, only its index."""
    loader = outlive.DataLoader(Secrets(), batch_size=1, num_workers=1, multiprocessing_context="fork", faults="skip")

    assert len(list(loader)) == 3
    assert journal.flush(DEADLINE_S)

    (entry,) = journal.find()
    assert entry.id == loader.incidents[0].id
    assert entry.samples == ("2",)
    assert b"the value of sample" not in b"".join(path.read_bytes() for path in home.iterdir())


class Secrets:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        value = f"the value of sample {index}"
        if index == 2:
            raise ValueError(f"bad sample of {len(value)} characters")
        return value


@pytest.mark.parametrize(
    ("conditions", "found"),
    [
        ({}, [3, 2, 1, 0]),
        ({"limit": 2}, [3, 2]),
        ({"id_prefix": "0000000"}, [3, 2, 1, 0]),
        ({"id_prefix": "00000002"}, [2]),
        ({"id_prefix": "%"}, []),
        ({"since": 1e9 + 2}, [3, 2]),
        ({"before": 1e9 + 2}, [1, 0]),
        ({"verdict": "null-pointer"}, [3, 2, 1, 0]),
        ({"verdict": "exited"}, []),
        ({"sample": "1"}, [1]),
        ({"sample": "0\n1"}, []),
        ({"job": sys.argv[0]}, [3, 2, 1, 0]),
        ({"job": "no such job"}, []),
        ({"job": str(os.getpid())}, [3, 2, 1, 0]),
    ],
)
def test_incidents_are_found_by_what_is_known_of_them(home, conditions, found):
    """All conditions, newest first; no text is a pattern."""
    written(4)

    assert [int(entry.id, 16) for entry in journal.find(**conditions)] == found


def test_what_is_forgotten_is_gone_from_the_file(home):
    """Not only from the list: its bytes, too."""
    written(3)
    journal.add(example_incidents.segfault(id="secret", action="a word that must go", when=1e9))
    assert journal.flush(DEADLINE_S)

    assert journal.forget(id_prefix="secret") == 1

    assert [entry.id for entry in journal.find()] == ["00000002", "00000001", "00000000"]
    assert b"a word that must go" not in b"".join(path.read_bytes() for path in home.iterdir())
    assert journal.forget() == 3
    assert journal.find() == []


def test_names_that_are_no_unicode_are_kept(home):
    """Linux allows any bytes in a file name."""
    odd = "a\udc80\0\n\x1b[31mb"

    (entry,) = written(1, indices=(odd,), action=odd)

    assert entry.incident.indices == (odd,)
    assert entry.incident.action == odd


def test_a_very_long_text_loses_its_middle(home):
    """One exception with a page of numbers must not push out everything else."""
    (entry,) = written(1, stack="begin" + "x" * 10_000_000 + "end")

    assert len(entry.json) < 200_000
    assert entry.incident.stack.startswith("begin")
    assert "characters left out" in entry.incident.stack
    assert entry.incident.stack.endswith("end")


def test_only_the_user_may_read_it(home):
    """Commands and file names are nobody else's business."""
    written(1)

    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in home.iterdir()} == {0o600}


def test_two_incidents_with_one_id_are_both_kept(home):
    """Ids are short: some day two are the same."""
    written(1)
    journal.add(example_incidents.segfault(id="00000000", when=2e9))
    assert journal.flush(DEADLINE_S)

    assert len(journal.find(id_prefix="00000000")) == 2


def test_the_journal_lies_where_the_settings_say(tmp_path, monkeypatch):
    """OUTLIVE_HOME, else XDG's state folder, else the usual one."""
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "own"))
    assert journal.path() == tmp_path / "own" / "journal.sqlite3"

    monkeypatch.delenv("OUTLIVE_HOME")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert journal.home() == tmp_path / "outlive"

    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert journal.home() == tmp_path / ".local/state/outlive"


@pytest.mark.parametrize("word", ["0", "off", "False"])
def test_nothing_is_written_when_it_is_turned_off(home, monkeypatch, word):
    """OUTLIVE_JOURNAL=0."""
    monkeypatch.setenv("OUTLIVE_JOURNAL", word)

    assert written(1) == []
    assert not home.exists()


def test_the_oldest_make_room_when_it_is_full(home, monkeypatch):
    """The file stays within its size, and what is newest is in it."""
    monkeypatch.setenv("OUTLIVE_JOURNAL_MIB", "1")

    found = written(400)

    sizes = sum(path.stat().st_size for path in home.iterdir())
    assert sizes < 1.6 * 2**20  # with the transaction that went over it
    assert [entry.id for entry in found] == [f"{n:08x}" for n in range(399, 399 - len(found), -1)]
    assert 20 < len(found) < 400


@pytest.mark.parametrize(("text", "mib"), [("", 64), ("nonsense", 64), ("-1", 64), ("0.5", 0.5), ("1e999", 64)])
def test_a_size_that_says_nothing_means_the_default(monkeypatch, text, mib):
    """A typing error must not cost the journal."""
    monkeypatch.setenv("OUTLIVE_JOURNAL_MIB", text)

    assert journal.read_size_bytes() == mib * 2**20


def test_each_machine_has_its_own_file_on_a_network_file_system(home, monkeypatch):
    """Locks of different machines on one file cannot be relied on; all of them are read."""
    monkeypatch.setattr(journal, "is_network_folder", lambda folder: True)
    monkeypatch.setattr(journal, "this_job", lambda: Job("train.py", "/", 1, "node1"))
    written(1)
    monkeypatch.setattr(journal, "this_job", lambda: Job("train.py", "/", 1, "node2"))
    written(2)

    assert sorted(path.name for path in home.iterdir()) == ["journal-node1.sqlite3", "journal-node2.sqlite3"]
    assert len(journal.find()) == 3
    assert len(journal.find(job="node1")) == 1
    assert mode_of(home / "journal-node1.sqlite3") == "delete"


def test_a_local_journal_lets_readers_and_a_writer_work_at_once(home):
    """WAL, where the file system is this machine's own."""
    written(1)

    assert mode_of(home / "journal.sqlite3") == "wal"


def mode_of(path: Path) -> str:
    connection = sqlite3.connect(path)
    try:
        return str(connection.execute("PRAGMA journal_mode").fetchone()[0])
    finally:
        connection.close()
