"""However the job ends, nothing of it is left: no worker, no zygote, nothing that a worker started."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import warm_server
from deadlines import Deadline
from outlive.testing.leaks import POLL_S, Patience

PROGRAM = Path(__file__).with_name("program.py")
METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 60.0
GONE_WITHIN_S = 2.5  # seconds in which they have CPUs


class Job:
    """The program, and everything that stems from it: pytest adopts what has lost its parent."""

    def __init__(self, ending: str, method: str, folder: Path) -> None:
        self.folder = folder
        self._strangers = set(psutil.Process().children(recursive=True))
        with (folder / "stderr").open("w") as stderr:
            self.process = warm_server.Popen(
                [sys.executable, str(PROGRAM), ending, method, str(folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    def wait_line(self, expected: str) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line == expected, (line, (self.folder / "stderr").read_text())

    def wait_number(self, name: str) -> int:
        """What a process of the job writes into a file, once it is there."""
        path = self.folder / name
        deadline = Deadline(DEADLINE_S)
        while not (path.exists() and path.read_text()):
            assert not deadline.passed, f"nobody wrote {name}"
            time.sleep(0.01)  # between two looks, with a deadline
        return int(path.read_text())

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.close()

    def living(self) -> list[psutil.Process]:
        """The job's processes that are not dead: by state, a zombie is not a survivor."""
        found = []
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process not in self._strangers and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_all_there(self) -> None:
        """Trainer, zygote, two workers and the three processes that one of them started."""
        deadline = Deadline(DEADLINE_S)
        while len(self.living()) < 7:
            assert not deadline.passed, [describe(p) for p in self.living()]
            time.sleep(0.01)  # between two looks, with a deadline

    def wait_nothing_left(self, except_pids: tuple[int, ...] = ()) -> list[str]:
        patience = Patience(GONE_WITHIN_S)
        while True:
            left = [p for p in self.living() if p.pid not in except_pids and not (except_pids and stdlib(p))]
            if not left or patience.is_over(p.pid for p in left):
                return [describe(p) for p in left]
            time.sleep(POLL_S)  # between two looks, with a deadline

    def close(self) -> None:
        for process in self.living():
            process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def stdlib(process: psutil.Process) -> bool:
    """multiprocessing's own servers live as long as any fork of the trainer does."""
    try:
        return any("from multiprocessing." in word for word in process.cmdline())
    except psutil.Error:
        return False


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.name()} {process.cmdline()}"
    except psutil.Error:
        return str(process.pid)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[object]:
    jobs: list[Job] = []

    def start_job(ending: str, method: str) -> Job:
        job = Job(ending, method, tmp_path)
        jobs.append(job)
        job.wait_line("ready")
        job.wait_all_there()
        job.go()
        return job

    yield start_job
    for job in jobs:
        job.close()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("ending", "code"), [("return", 0), ("del", 0), ("exception", 1), ("os_exit", 7), ("exit", 0)])
def test_nothing_is_left_when_the_job_ends_by_itself(start, ending: str, code: int, method: str) -> None:
    """Stuck workers, ignored signals, children and daemons of workers: all gone with the job."""
    job = start(ending, method)

    assert job.process.wait(DEADLINE_S) == code, (job.folder / "stderr").read_text()
    assert job.wait_nothing_left() == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_job_is_signalled(start, number: signal.Signals, method: str) -> None:
    """Ctrl-C, a scheduler's SIGTERM and a SIGKILL of the trainer leave nothing behind."""
    job = start("signalled", method)

    job.process.send_signal(number)

    job.process.wait(DEADLINE_S)
    assert job.wait_nothing_left() == []


@pytest.mark.parametrize("method", METHODS)
def test_a_fork_of_the_trainer_keeps_nothing_alive(start, method: str) -> None:
    """A copy of the trainer that somebody else forked, and that lives on, does not hold our processes."""
    job = start("bystander", method)
    job.wait_line("forked")
    bystander = job.wait_number("bystander")

    job.process.kill()

    job.process.wait(DEADLINE_S)
    assert job.wait_nothing_left(except_pids=(bystander,)) == []
    assert psutil.pid_exists(bystander)
