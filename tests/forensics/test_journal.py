"""The journal on disk: complete, bounded, shared by many processes, and never a burden for the job.

Reads   journals in temporary folders.
Writes  them, from this process, from threads, forks and programs; damages them.
Never   the user's own: OUTLIVE_HOME is set for every test.
"""

from __future__ import annotations

import logging
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import outlive
import warm_server
from forensics import example_incidents
from outlive._forensics import journal
from outlive._forensics.job import Job

STRANGER_S = 60  # how long a program of a test may take


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("OUTLIVE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(journal, "_told", False)
    yield tmp_path / "home"
    assert journal.flush()


def written(count: int = 1, **more: Any) -> list[journal.Entry]:
    """Add incidents 0…count-1, and answer what is in the journal then."""
    for n in range(count):
        journal.add(example_incidents.segfault(**{"id": f"{n:08x}", "indices": (n,), "when": 1e9 + n} | more))
    assert journal.flush()
    return journal.find()


def program(source: str, *args: str, **more: Any) -> subprocess.Popen[str]:
    """A Python program of its own, which has `example_incidents` and `journal`."""
    head = "import os, sys, time\nfrom forensics import example_incidents\nfrom outlive._forensics import journal\n"
    path = os.pathsep.join([str(Path(outlive.__file__).parents[1]), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, **more.pop("env", {})}
    command = [sys.executable, "-c", head + textwrap.dedent(source), *args]
    return warm_server.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.PIPE,
        **more,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Standard output of a program that must end well."""
    out, err = process.communicate(timeout=STRANGER_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err, err
    return out


# ---------------------------------------------------------------- what is kept


def test_an_incident_is_in_the_journal_with_its_job(home):
    """Everything that is known, and which command it happened in."""
    incident = example_incidents.segfault()
    journal.add(incident)
    assert journal.flush()

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
    assert journal.flush()

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
    assert journal.flush()

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
    assert journal.flush()

    assert len(journal.find(id_prefix="00000000")) == 2


# ---------------------------------------------------------------- where, and how much


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

    assert journal._size_bytes() == mib * 2**20


def test_each_machine_has_its_own_file_on_a_network_file_system(home, monkeypatch):
    """Locks of different machines on one file cannot be relied on; all of them are read."""
    monkeypatch.setattr(journal, "_is_network", lambda folder: True)
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


# ---------------------------------------------------------------- nothing disturbs the job


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

    started = time.perf_counter()
    for n in range(200):
        journal.add(example_incidents.segfault(id=str(n)))
    took_s = time.perf_counter() - started
    assert journal.flush()

    assert took_s < 5.0
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
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)], capture_output=True, check=False
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


def test_an_incident_waits_while_another_process_holds_the_lock(home):
    """It is written when the lock is free; who added it has long gone on."""
    written(1)
    holder = sqlite3.connect(home / "journal.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")

    started = time.perf_counter()
    journal.add(example_incidents.segfault(id="late"))
    took_s = time.perf_counter() - started
    assert not journal.flush(0.3)
    holder.execute("COMMIT")
    holder.close()

    assert journal.flush()
    assert took_s < 8  # to wait for the lock would take ten seconds
    assert len(journal.find(id_prefix="late")) == 1


def test_a_lock_that_is_never_released_costs_only_the_incident(home, monkeypatch, caplog):
    """After a while it is given up, with one warning."""
    written(1)
    monkeypatch.setattr(journal, "_WRITE_S", 0.3)
    holder = sqlite3.connect(home / "journal.sqlite3", isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    try:
        journal.add(example_incidents.segfault(id="lost"))
        assert journal.flush()
    finally:
        holder.close()

    assert journal.find(id_prefix="lost") == []
    assert [m for m in caplog.messages if "cannot be written" in m]


def test_the_thread_ends_when_it_is_idle(home):
    """A job without incidents has no thread of ours."""
    written(1)

    give_up_at = time.monotonic() + 10
    while any(t.name == "outlive-journal" for t in threading.enumerate()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)  # between two looks, with a deadline
    assert len(written(2)) == 2


# ---------------------------------------------------------------- ends, forks, many at once


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
        source = """
        journal.add(example_incidents.segfault(id="late"))
        import atexit
        from multiprocessing import util
        started = time.monotonic()
        util._exit_function()
        print(time.monotonic() - started)
        """
        waited_s = float(ended(program(source)))
    finally:
        holder.close()

    assert 1.5 < waited_s < 8  # the journal itself would wait for ten


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
    warm_server.run(
        [sys.executable, str(source)], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=STRANGER_S
    )

    assert {entry.id for entry in journal.find()} == {"rank0", "rank1"}


def test_a_fork_neither_writes_twice_nor_hangs(home):
    """Forks at any moment of the writing; each child adds one of its own and ends through the usual exits."""
    source = """
    from outlive._forensics import courier
    courier.EXIT_S = journal._WRITE_S = journal._FORK_WAIT_S = 50.0  # a busy machine is no hanging disk
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
        journal._fork.watch()
        with journal._fork:
            inside.set(); go_on.wait(30)
    journal._writer._deliver = hang
    journal.add(example_incidents.segfault())
    inside.wait(30)
    started = time.monotonic()
    child = os.fork()
    took = time.monotonic() - started
    if child == 0:
        os._exit(7 if not journal.is_on() else 1)
    go_on.set()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), took < 20, journal.is_on())
    """

    assert ended(program(source)) == "7 True True\n"


def test_many_programs_write_at_once(home):
    """Ranks and jobs share one journal: every incident of each is there once, and the file is sound."""
    source = """
    journal._WRITE_S = 50.0
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
