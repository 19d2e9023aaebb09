"""Whole programs: how they end, and where their functions come from.

Reads   what programs print, and which of their processes are left.
Writes  signals to them.
Never   leaves one of them running.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from deadlines import wait_until
from outlive.testing.leaks import POLL_S, Patience

PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
METHODS = ("fork", "spawn", "forkserver")
GONE_WITHIN_S = 2.5  # seconds in which they have CPUs
NO_TORCH = "import sys; sys.modules['torch'] = None\n"
PROMPT = """
import outlive
base = 5
def work(rank, add):
    print("worked", rank, add(base))

outlive.spawn(work, (lambda value: value + 1,), nprocs=2, start_method=METHOD)
def fail(rank):
    raise ValueError("from a prompt")

try:
    outlive.spawn(fail, start_method=METHOD)
except outlive.RankRaisedError as error:
    print("raised", error.incident.failure.type_name, type(error).__mro__[3].__module__)

"""


def run(*command: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=ENVIRONMENT, capture_output=True, text=True, timeout=100, **options
    )


# ---------------------------------------------------------------- where functions come from


@pytest.mark.parametrize("method", METHODS)
def test_functions_travel_from_a_script(method):
    """What ranks can import they import; what stands under the guard is sent."""
    ended = run(str(PROGRAMS / "guarded.py"), method)

    assert ended.stderr == ""
    assert ended.stdout == "[rank 0] worked 30\n" * 2


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_functions_travel_from_a_prompt_and_without_torch(method):
    """Nothing there can be imported: all of it is sent. Errors are outlive's own where torch is not installed."""
    ended = run("-i", "-q", input=NO_TORCH + PROMPT.replace("METHOD", repr(method)))

    lines = ended.stdout.splitlines()
    assert sorted(lines) == ["[rank 0] worked 0 6", "[rank 1] worked 1 6", "raised ValueError outlive.launch.raising"]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_missing_guard_is_named_and_nothing_multiplies(method):
    """One sentence, from the launcher; ranks say nothing."""
    ended = run(str(PROGRAMS / "unguarded.py"), method)

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert "RankStartError: process " in ended.stderr
    assert 'unguarded.py:12 calls outlive.spawn outside of  if __name__ == "__main__":' in ended.stderr
    assert ended.stderr.count("Traceback") == 1


def test_a_hang_is_told_when_it_is_in_the_import_of_the_main_module():
    """The rank has not come to our code yet, and nobody asks it for stacks."""
    ended = run(str(PROGRAMS / "slow_import.py"))

    assert ended.returncode == 1
    assert "RankHungError: process 0 terminated with signal SIGKILL" in ended.stderr
    assert "rank 0 (pid" in ended.stderr


# ---------------------------------------------------------------- endings


@contextlib.contextmanager
def started(folder: Path, function: str, method: str, join: str):
    """A launcher whose two ranks are at work, and all pids of those and of what they started."""
    command = [sys.executable, str(PROGRAMS / "job.py"), function, method, join, str(folder)]
    launcher = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    files = [folder / f"pids-{rank}" for rank in range(2)]
    family = []
    try:
        assert wait_until(lambda: all(file.exists() for file in files), 60), launcher.poll()
        family = [psutil.Process(pid) for file in files for pid in json.loads(file.read_text())]
        yield launcher, family
    finally:
        launcher.kill()
        launcher.communicate()
        for process in family:  # not by number: that may be somebody else's by now
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that are still there when they have had their time."""
    patience = Patience(GONE_WITHIN_S)
    while True:
        left = [process for process in processes if process.is_running() and not is_zombie(process)]
        if not left or patience.is_over(process.pid for process in left):
            return left
        time.sleep(POLL_S)  # between two looks, with a deadline


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True  # and reaped by now


@pytest.mark.parametrize(("method", "join"), [("fork", "join"), ("spawn", "join"), ("forkserver", "other")])
def test_nothing_is_left_when_the_launcher_is_interrupted(tmp_path, method, join):
    """Ctrl-C: ranks that hear nothing, their children, a child in a session of its own; in join() or elsewhere."""
    with started(tmp_path, "be_hostile", method, join) as (launcher, family):
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=60)

        assert living(family) == []
        assert launcher.returncode == -signal.SIGINT
        assert said.rstrip().endswith("KeyboardInterrupt")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_go_when_the_launcher_is_killed(tmp_path, method, number):
    """The kernel ends them, and what is in their groups: nobody else is left to do it."""
    with started(tmp_path, "have_child", method, "join") as (launcher, family):
        launcher.send_signal(number)
        launcher.communicate(timeout=60)

        assert living(family) == []
