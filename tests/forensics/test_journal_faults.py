"""The journal costs the job nothing: full disks, damaged files, locks, forks, many writers at once.

Reads   journals in temporary folders.
Writes  them, from this process, from threads, forks and programs; damages them.
Never   the user's own: OUTLIVE_HOME is set for every test.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import outlive
from deadlines import Deadline
from forensics import example_incidents
from forensics.journal_writers import DEADLINE_S, FOR_EVER_S, STRANGER_S, ended, program, written
from outlive._forensics import journal


def obstructed(kind: str, home: Path) -> None:
    """Make a journal that cannot be written."""
    if kind == "a file in place of the folder":
        home.write_text("")
    elif kind == "a folder in place of the file":
        (home / "journal.sqlite3").mkdir(parents=True)
    elif kind == "a newer version":
        written(1)
        connection = sqlite3.connect(home / "journal.sqlite3")
        connection.execute("PRAGMA user_version = 99")
        connection.close()


@pytest.mark.parametrize(
    "kind",
    [
        "a file in place of the folder",
        "a folder in place of the file",
        "a newer version",
    ],
)
def test_the_job_goes_on_when_the_journal_cannot_be_written(home, caplog, kind):
    """One warning that says what to set, however many incidents there are; no error."""
    obstructed(kind, home)
    caplog.set_level(logging.WARNING, "outlive")

    for n in range(200):
        journal.add(example_incidents.segfault(id=str(n)))
    assert journal.flush(DEADLINE_S)

    (line,) = caplog.messages
    assert f"the journal in {home} cannot be written" in line
    assert "OUTLIVE_HOME" in line
    assert "OUTLIVE_JOURNAL=0" in line


def test_a_folder_that_may_not_be_written_costs_only_the_journal(tmp_path):
    """A home that is read-only; root would not notice, so the program becomes nobody."""
    home = tmp_path / "home"
    home.mkdir(mode=0o500)
    tmp_path.chmod(0o755)
    source = """
    import json, secrets, sqlite3, msgspec, psutil, logging; logging.basicConfig(level=logging.WARNING)
    import multiprocessing.util
    from outlive import plain
    from outlive._forensics import journal_file
    if os.geteuid() == 0: os.setuid(65534)
    for n in range(10):
        journal.add(example_incidents.segfault(id=f"{n:08x}"))
    print(journal.flush())
    """
    process = program(source, env={"OUTLIVE_HOME": str(home)})

    out, err = process.communicate(timeout=STRANGER_S)

    assert (process.returncode, out) == (0, "True\n"), err
    assert err.count("cannot be written") == 1
    assert list(home.iterdir()) == []


def test_a_disk_that_is_really_full_costs_only_the_journal(tmp_path):
    """A file system of 64 KiB; needs the right to mount one."""
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k,mode=0700", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        source = """
        import logging; logging.basicConfig(level=logging.WARNING)
        for n in range(100):
            journal.add(example_incidents.segfault(id=f"{n:08x}"))
        journal.flush()
        print("trained")
        """
        process = program(source, env={"OUTLIVE_HOME": str(small)})
        out, err = process.communicate(timeout=STRANGER_S)
        assert (process.returncode, out) == (0, "trained\n")
        assert err.count("cannot be written") == 1
        assert "full" in err
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.parametrize("content", [b"this is no database at all" * 400, b"SQLite format 3\0" + bytes(8000)])
def test_a_damaged_journal_is_set_aside_and_a_new_one_begun(home, content):
    """What was there is kept, beside; nothing is lost from now on."""
    home.mkdir()
    (home / "journal.sqlite3").write_bytes(content)

    assert len(written(2)) == 2
    assert (home / "journal.sqlite3.damaged").read_bytes() == content


def test_a_journal_damaged_in_the_middle_is_set_aside(home):
    """The header is whole, the tables are not."""
    written(60)
    path = home / "journal.sqlite3"
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)

    assert [entry.id for entry in written(1)] == ["00000000"]
    assert (home / "journal.sqlite3.damaged").read_bytes() == content


def test_an_incident_waits_while_another_process_holds_the_lock(home, monkeypatch):
    """It is written when the lock is free; who added it has long gone on."""
    written(1)
    monkeypatch.setattr(journal, "WRITE_TIMEOUT_S", FOR_EVER_S)
    holder = sqlite3.connect(home / "journal.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    journal.add(
        example_incidents.segfault(id="late")
    )  # waiting here for the lock would never end: it is released below
    assert not journal.flush(0.3)
    holder.execute("COMMIT")
    holder.close()

    assert journal.flush(DEADLINE_S)
    assert len(journal.find(id_prefix="late")) == 1


def test_a_lock_that_is_never_released_costs_only_the_incident(home, monkeypatch, caplog):
    """After a while it is given up, with one warning."""
    written(1)
    monkeypatch.setattr(journal, "WRITE_TIMEOUT_S", 0.3)
    holder = sqlite3.connect(home / "journal.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        journal.add(example_incidents.segfault(id="lost"))
        assert journal.flush(DEADLINE_S)
    finally:
        holder.close()

    assert journal.find(id_prefix="lost") == []
    assert [m for m in caplog.messages if "cannot be written" in m]


def test_the_thread_ends_when_it_is_idle(home):
    """A job without incidents has no thread of ours."""
    written(1)

    deadline = Deadline(DEADLINE_S)
    while any(t.name == "outlive-journal" for t in threading.enumerate()):
        assert not deadline.passed
        time.sleep(0.01)  # between two looks, with a deadline
    assert len(written(2)) == 2


def test_everything_is_written_when_the_program_ends_at_once(home):
    """The last incident is the one that people look for."""
    # The two seconds of grace are another test's: this one's machine may be busy.
    source = """
    from outlive._forensics import courier
    courier.EXIT_S = 50.0
    for n in range(300):
        journal.add(example_incidents.segfault(id=f"{n:08x}"))
    """
    ended(program(source))

    assert len(journal.find()) == 300


def test_the_end_of_a_program_waits_two_seconds_at_most(home):
    """For a journal that is locked; the program's own end matters more."""
    written(1)
    holder = sqlite3.connect(home / "journal.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        # The lock is never released, and the journal itself would wait for it for ever: the program ends all the same.
        # How long it waits is what it hands to the wait, by a clock that stands.
        source = f"""
        from types import SimpleNamespace
        from multiprocessing import util
        from outlive._forensics import courier
        journal._WRITE_S = {FOR_EVER_S}
        journal.add(example_incidents.segfault(id="late"))
        courier.time = SimpleNamespace(monotonic=lambda: 0.0)
        flush = courier.Courier.flush
        courier.Courier.flush = lambda self, deadline_s: print(deadline_s) or flush(self, deadline_s)
        util._exit_function()
        """
        waited_s = ended(program(source))
    finally:
        holder.close()

    assert waited_s == "2.0\n"


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_rank_that_multiprocessing_started_writes_its_incidents(home, tmp_path, method):
    """Such processes end without atexit."""
    source = tmp_path / "ranks.py"
    source.write_text(
        textwrap.dedent(
            f"""
            import multiprocessing
            from forensics import example_incidents
            from outlive._forensics import courier, journal

            courier.EXIT_S = 50.0

            def rank(n):
                journal.add(example_incidents.segfault(id=f"rank{{n}}"))

            if __name__ == "__main__":
                context = multiprocessing.get_context({method!r})
                ranks = [context.Process(target=rank, args=(n,)) for n in range(2)]
                [r.start() for r in ranks]
                [r.join() for r in ranks]
            """
        )
    )
    path = os.pathsep.join([str(Path(outlive.__file__).parents[1]), str(Path(__file__).parents[1])])
    subprocess.run(
        [sys.executable, str(source)], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=STRANGER_S
    )

    assert {entry.id for entry in journal.find()} == {"rank0", "rank1"}


def test_a_fork_neither_writes_twice_nor_hangs(home):
    """Forks at any moment of the writing; each child adds one of its own and ends through the usual exits."""
    source = """
    from outlive._forensics import courier
    courier.EXIT_S = journal.WRITE_TIMEOUT_S = journal.FORK_WAIT_S = 50.0  # a busy machine is no hanging disk
    children = []
    for n in range(60):
        journal.add(example_incidents.segfault(id=f"parent{n:02}", when=float(n)))
        child = os.fork()
        if child == 0:
            journal.add(example_incidents.segfault(id=f"child{n:02}", when=float(n)))
            flushed = journal.flush(50)
            os._exit(0 if flushed else 3)
        children.append(child)
    print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children].count(0))
    """
    clean = int(ended(program(source)))

    ids = [entry.id for entry in journal.find()]
    assert clean == 60
    assert len(ids) == len(set(ids))
    assert {i for i in ids if i.startswith("parent")} == {f"parent{n:02}" for n in range(60)}
    assert {i for i in ids if i.startswith("child")} == {f"child{n:02}" for n in range(60)}


def test_a_child_that_was_forked_while_the_disk_hung_leaves_the_journal_alone(home, monkeypatch):
    """SQLite's locks may be held there by a thread that does not exist: better no journal than a hang."""
    source = """
    import threading
    inside, go_on = threading.Event(), threading.Event()
    def hang(rows):
        journal.fork_gate.watch()
        with journal.fork_gate:
            inside.set(); go_on.wait()
    journal.writer.deliver = hang
    journal.add(example_incidents.segfault())
    inside.wait(30)
    child = os.fork()  # to wait here until the disk has answered would be to wait for ever
    if child == 0:
        os._exit(7 if not journal.is_on() else 1)
    go_on.set()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), journal.is_on())
    """

    assert ended(program(source)) == "7 True\n"


def test_many_programs_write_at_once(home):
    """Ranks and jobs share one journal: every incident of each is there once, and the file is sound."""
    source = """
    journal.WRITE_TIMEOUT_S = 50.0
    sys.stdin.readline()
    for n in range(40):
        journal.add(example_incidents.segfault(id=f"{sys.argv[1]}-{n:02}"))
        if n % 4 == 0: journal.flush()
    assert journal.flush(50)
    """
    programs = [program(source, str(n)) for n in range(6)]
    for process in programs:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in programs:
        ended(process)

    assert sorted(entry.id for entry in journal.find()) == sorted(f"{p}-{n:02}" for p in range(6) for n in range(40))
    connection = sqlite3.connect(home / "journal.sqlite3")
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    connection.close()


def test_a_killed_writer_leaves_a_sound_journal(home):
    """SIGKILL at any moment costs at most what was not yet written."""
    source = """
    n = 0
    while True:
        journal.add(example_incidents.segfault(id=f"{n:08x}")); n += 1
        if n == 50: print("ready", flush=True)
        journal.flush()
    """
    process = program(source)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=STRANGER_S)

    assert len(journal.find()) >= 49
    assert len(written(1, when=3e9)) >= 50


def test_a_read_only_journal_can_be_read(home):
    """Somebody else's, or an archive."""
    written(2)
    for path in home.iterdir():
        path.chmod(0o400)
    home.chmod(0o500)
    try:
        assert len(journal.find()) == 2
    finally:
        home.chmod(0o700)


def test_a_file_that_is_not_there_is_an_empty_journal(home):
    """And looking does not make it."""
    assert journal.find() == []
    assert journal.forget() == 0
    assert not home.exists()


def test_an_incident_that_cannot_be_told_takes_no_other_along(home):
    """Whatever is wrong with one, its neighbours are written."""
    journal.add(example_incidents.segfault(id="bad", evidence=object()))

    assert [entry.id for entry in written(1)] == ["00000000"]
