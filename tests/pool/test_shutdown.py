"""A pool that is told to end ends: by an exception that leaves its block, by Ctrl-C, by a program that fails.

Reads   futures, pids, and the files in which tasks leave word.
Writes  those files.
Never   a time: a task that is not ended returns long after, and says so.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import psutil
import pytest

import warm_server
from deadlines import wait_until
from outlive import Pool
from outlive.pool import manager
from pool import task_functions

METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 60.0
ENDING = Path(__file__).with_name("programs") / "ending.py"


@pytest.mark.parametrize(
    ("error", "method"),
    [
        (ValueError, "fork"),
        (KeyboardInterrupt, "spawn"),
        pytest.param(SystemExit, "forkserver", marks=pytest.mark.full),
    ],
)
def test_an_exception_that_leaves_the_block_ends_the_pool(error, method, tmp_path):
    """Tasks that have not begun are cancelled. A task that ignores SIGTERM loses its worker after a second."""
    with contextlib.suppress(error), Pool(2, method) as pool:
        staying = [pool.submit(task_functions.stay, str(tmp_path), n) for n in range(2)]
        assert wait_until(lambda: len(os.listdir(tmp_path)) == 2, DEADLINE_S)
        pending = [pool.submit(task_functions.note, str(tmp_path), n) for n in range(2, 50)]
        pids = pool.pids
        raise error

    assert [type(future.exception()).__mro__.count(BrokenProcessPool) for future in staying] == [1, 1]
    assert all(future.cancelled() for future in pending[2:])
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)), DEADLINE_S)


def test_a_task_that_is_under_way_may_finish_before_its_worker_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(manager, "END_S", DEADLINE_S)  # a busy machine may take longer than the second of users
    with contextlib.suppress(ValueError), Pool(1) as pool:
        first = pool.submit(task_functions.wait_for, str(tmp_path / "go"))
        assert wait_until(first.running, DEADLINE_S)
        rest = [pool.submit(task_functions.square, n) for n in range(50)]

        def let_go() -> None:
            wait_until(rest[-1].cancelled, DEADLINE_S)
            (tmp_path / "go").touch()

        opener = threading.Thread(target=let_go)
        opener.start()
        raise ValueError

    opener.join()
    assert first.result() is None


@pytest.mark.parametrize(
    ("how", "method"),
    [
        ("fail", "fork"),
        ("interrupt in the block", "forkserver"),
        ("interrupt while the block waits", "fork"),
        ("interrupt while the exit waits", "spawn"),
        pytest.param("fail", "spawn", marks=pytest.mark.full),
        pytest.param("interrupt", "fork", marks=pytest.mark.full),
    ],
)
def test_a_program_that_fails_or_is_interrupted_waits_for_no_task(how, method, tmp_path):
    """Also one that was interrupted in its last wait, for tasks that would be finished otherwise."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = warm_server.run(
        [sys.executable, str(ENDING), method, how, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )

    assert ("ValueError: the program failed" if how == "fail" else "KeyboardInterrupt") in ended.stderr
    assert sorted(os.listdir(tmp_path)) == ["0", "1"]
