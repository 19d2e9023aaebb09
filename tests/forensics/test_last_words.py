"""What workers write to standard error arrives where it always did, and its end in the incident."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import pwd
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import warm_server
from deadlines import wait_until
from forensics.programs.stderr_writer import WHAT
from outlive._capture.last_words import KEPT_BYTES

PROGRAM = Path(__file__).parent / "programs" / "stderr_writer.py"
METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 60


class StderrReader:
    """Somewhere for standard error to go."""

    def __init__(self, reading: int, writing: int) -> None:
        self.reading, self.writing = reading, writing
        self.received = b""

    def read_all(self) -> None:
        """Everything, to its end."""
        while True:
            try:
                data = os.read(self.reading, 1 << 16)
            except OSError:  # what a terminal says when nobody has it open any more
                return
            if not data:
                return
            self.received += data


@contextmanager
def reader_of(kind: str, folder: Path) -> Iterator[StderrReader]:
    if kind == "file":
        fd = os.open(folder / "stderr", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        reader = StderrReader(os.open(folder / "stderr", os.O_RDONLY), fd)
    elif kind == "terminal":
        reader = StderrReader(*pty.openpty())
    elif kind == "socket":
        ours, theirs = socket.socketpair()
        reader = StderrReader(ours.detach(), theirs.detach())
    else:
        reader = StderrReader(*os.pipe())
    try:
        yield reader
    finally:
        os.close(reader.reading)


def run(method: str, what: str, reader: StderrReader, *, late: str = "", user: str = "") -> list[Any]:
    """Run the program; `late`: nothing reads before a worker, or the trainer, waits.

    `user`: standard error is made that user's, who is not the program's: as under `su`, it can be written to and not
    opened again.
    """
    if user:
        os.fchown(reader.writing, pwd.getpwnam(user).pw_uid, -1)
        os.fchmod(reader.writing, 0o600)
    program = warm_server.Popen(
        [sys.executable, str(PROGRAM), method, what, *([user] if user else [])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=reader.writing,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        text=True,
    )
    os.close(reader.writing)
    with program:
        assert program.stdin is not None
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        listener = threading.Thread(target=reader.read_all)
        if not late:
            listener.start()
        program.stdin.write("go\n")
        program.stdin.flush()
        if late:
            wait_until_blocked(program.pid, late)
            listener.start()
        told, _ = program.communicate(timeout=DEADLINE_S)
        listener.join(DEADLINE_S)
        reader.read_all()  # a file ends wherever it is read
    assert program.returncode == 0
    return json.loads(told)


def wait_until_blocked(pid: int, who: str) -> None:
    """Until the trainer, or some worker of it, waits in a write."""

    def blocked() -> bool:
        trainer = psutil.Process(pid)
        for process in [trainer] if who == "trainer" else trainer.children(recursive=True):
            try:
                if Path(f"/proc/{process.pid}/wchan").read_text().startswith(("pipe_write", "anon_pipe_write")):
                    return True
            except OSError:
                continue
        return False

    assert wait_until(blocked, DEADLINE_S)


def expected(what: str) -> bytes:
    return b"".join(WHAT[what] % index for index in (1, 3, 5))


def assert_all_there(reader: StderrReader, what: str) -> None:
    """Every byte of it. The trainer's log may come between any two: they have the pipe in common."""
    assert [reader.received.count(b"~"), reader.received.count(b"the end\n")] == [expected(what).count(b"~"), 3]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["pipe", "file", "terminal", "socket"])
def test_last_words_arrive_where_they_went_and_in_the_incident(kind, method, tmp_path):
    """Byte for byte, from workers that die and from those that do not."""
    with reader_of(kind, tmp_path) as reader:
        delivered, kept = run(method, "line", reader)

    # A terminal makes two characters of an end of line. The log says its own lines in between.
    received = reader.received.replace(b"\r\n", b"\n")
    assert [line for line in received.splitlines(True) if b"a line of" in line] == expected("line").splitlines(True)
    assert delivered == [0, 1, 2, 4, 5]
    assert kept == ["a line of sample 1\na line of sample 3\n"]


@pytest.mark.parametrize("what", ["no newline", "bytes"])
def test_any_bytes_pass(what, tmp_path):
    """Also what is no text."""
    with reader_of("file", tmp_path) as reader:
        _, kept = run("fork", what, reader)

    for index in (1, 3, 5):
        assert WHAT[what] % index in reader.received
    assert kept == [(WHAT[what] % 1 + WHAT[what] % 3).decode("utf-8", "replace")]


@pytest.mark.parametrize("kind", ["pipe", "socket"])
def test_nothing_is_lost_when_the_listener_pauses(kind, tmp_path):
    """The worker waits, as it would have without us; then everything arrives, and the end of it is kept."""
    with reader_of(kind, tmp_path) as reader:
        _, kept = run("fork", "much", reader, late="worker")

    assert_all_there(reader, "much")
    assert len(kept[0]) == KEPT_BYTES
    assert kept[0].endswith("the end\n")


def test_what_a_dead_worker_had_said_waits_for_the_listener(tmp_path):
    """A small pipe: the worker's own is full of words when it dies, and the trainer waits to tell of its death."""
    with reader_of("pipe", tmp_path) as reader:
        fcntl.fcntl(reader.writing, fcntl.F_SETPIPE_SZ, 4096)
        _, kept = run("fork", "some", reader, late="trainer")

    assert_all_there(reader, "some")
    assert kept[0].endswith("the end\n")


def test_the_job_goes_on_when_the_listener_leaves(tmp_path):
    """Nobody can be told any more: that is no reason to stop."""
    with reader_of("pipe", tmp_path) as reader:
        os.close(reader.reading)
        reader.reading = os.open(os.devnull, os.O_RDONLY)
        delivered, kept = run("fork", "line", reader)

    assert delivered == [0, 1, 2, 4, 5]
    assert len(kept) == 1


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


@as_root
@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_last_words_are_kept_when_standard_error_cannot_be_opened_again(kind, tmp_path):
    """`su … 2>&1 | cat`: another user's pipe or terminal. Every byte arrives, and no traceback of the zygote's."""
    with reader_of(kind, tmp_path) as reader:
        delivered, kept = run("fork", "line", reader, user="nobody")

    received = reader.received.replace(b"\r\n", b"\n")
    assert [line for line in received.splitlines(True) if b"a line of" in line] == expected("line").splitlines(True)
    assert b"Traceback" not in received
    assert delivered == [0, 1, 2, 4, 5]
    assert kept == ["a line of sample 1\na line of sample 3\n"]


@as_root
def test_nothing_is_lost_when_the_listener_of_another_users_pipe_pauses(tmp_path):
    """The worker waits and the zygote does not: it cannot change how that pipe is written to, and need not."""
    with reader_of("pipe", tmp_path) as reader:
        _, kept = run("fork", "much", reader, late="worker", user="nobody")

    assert_all_there(reader, "much")
    assert kept[0].endswith("the end\n")


@as_root
def test_the_job_goes_on_when_the_listener_of_another_users_pipe_leaves(tmp_path):
    """Nothing is left to be told, and that ends nothing."""
    with reader_of("pipe", tmp_path) as reader:
        os.close(reader.reading)
        reader.reading = os.open(os.devnull, os.O_RDONLY)
        delivered, kept = run("fork", "line", reader, user="nobody")

    assert delivered == [0, 1, 2, 4, 5]
    assert len(kept) == 1
