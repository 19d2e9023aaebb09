"""Workers are processes as multiprocessing's own: they may start others, have names, and know their parent.

Reads   results, and the processes that stem from this one.
Writes  files in which tasks leave word.
Never   leaves a process running: what a worker started ends with it, whoever is killed.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import outlive
import warm_server
from deadlines import wait_until
from outlive import Pool
from pool import kin_functions, task_functions, threaded_dataset

METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 60.0
PROGRAM = Path(__file__).with_name("programs") / "nested.py"


# ---------------------------------------------------------------- starting processes


@pytest.mark.parametrize(
    ("method", "ways"),
    [
        ("fork", list(kin_functions.WAYS)),
        ("spawn", ["Pool", "Process"]),
        pytest.param("spawn", list(kin_functions.WAYS), marks=pytest.mark.full),
        pytest.param("forkserver", list(kin_functions.WAYS), marks=pytest.mark.full),
    ],
)
def test_a_task_may_start_processes_of_any_kind(method, ways):
    with Pool(1, method) as pool:
        made = {way: pool.submit(kin_functions.run, way, method).result(DEADLINE_S) for way in ways}

    assert made == dict.fromkeys(ways, kin_functions.NUMBERS)
    assert not pool.incidents


@pytest.mark.parametrize("method", ["fork", *(pytest.param(method, marks=pytest.mark.full) for method in METHODS[1:])])
def test_a_dataset_may_start_processes_of_any_kind(method):
    loader: Any = outlive.DataLoader(
        kin_functions.Nested(method),  # type: ignore[arg-type]
        num_workers=1,
        multiprocessing_context=method,
    )

    assert [int(made) for made in loader] == [1] * len(kin_functions.WAYS)
    assert not loader.incidents


# ---------------------------------------------------------------- who they are


def described(pool: Pool, folder: Path, count: int) -> list[dict[str, Any]]:
    """What `count` workers of a pool say of themselves, by name."""
    folder.mkdir()
    tasks = [pool.submit(kin_functions.describe_together, str(folder), n, count) for n in range(count)]
    return sorted((task.result(DEADLINE_S) for task in tasks), key=lambda told: told["name"])


@pytest.mark.parametrize("method", METHODS)
def test_workers_have_names_by_slot_that_outlast_a_restart(method, tmp_path):
    """Distinct from those of another pool, too: files that are named by them do not collide."""
    with Pool(2, method, retries=0) as pool, Pool(1, method) as other:
        before = [*described(pool, tmp_path / "before", 2), *described(other, tmp_path / "other", 1)]
        for task in [pool.submit(kin_functions.die_together, str(tmp_path), n, 2) for n in range(2)]:
            assert task.exception(DEADLINE_S) is not None
        after = described(pool, tmp_path / "after", 2)

    assert len({told["name"] for told in before}) == len({told["identity"] for told in before}) == 3
    assert [(told["name"], told["identity"]) for told in after] == [
        (told["name"], told["identity"]) for told in before[:2]
    ]
    assert not {told["pid"] for told in before} & {told["pid"] for told in after}
    parent = (multiprocessing.current_process().name, os.getpid(), True)
    assert [(told["parent"], told["daemon"]) for told in [*before, *after]] == [(parent, False)] * 5


def test_a_worker_in_an_interpreter_of_its_own_is_such_a_process():
    loader: Any = outlive.DataLoader(
        threaded_dataset.ThreadedDescribed(),  # type: ignore[arg-type]
        num_workers=1,
        batch_size=None,
        multiprocessing_context="spawn",
    )

    told = list(loader)

    assert told[0]["parent"] == [multiprocessing.current_process().name, os.getpid(), True]
    assert (told[0]["name"].partition("-")[0], told[0]["daemon"]) == ("SpawnProcess", False)
    assert told[0] == told[1]


def test_a_worker_of_the_portable_layer_is_such_a_process(tmp_path):
    ended = subprocess.run(
        [sys.executable, str(PROGRAM), "describe", str(tmp_path)],
        env={**os.environ, "OUTLIVE_SYSTEM": "portable", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["SpawnProcess-1", "False", "True", "[0,", "1,", "4]"]


# ---------------------------------------------------------------- how they end


def below(process: psutil.Process, strangers: set[psutil.Process]) -> list[psutil.Process]:
    return [each for each in process.children(recursive=True) if each not in strangers]


@pytest.mark.parametrize("victim", ["worker", "program"])
def test_all_that_a_worker_has_started_ends_with_it(victim, tmp_path):
    """Pools in a task, and a process: those that they started, too. Here the worker is killed, or the program."""
    me = psutil.Process()
    strangers = set(me.children(recursive=True))
    program = warm_server.Popen(
        [sys.executable, str(PROGRAM), "stay", str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert program.stdout is not None
        worker = psutil.Process(int(program.stdout.readline()))
        assert wait_until(lambda: len(os.listdir(tmp_path)) == 4, DEADLINE_S)
        started = below(worker, strangers)
        assert len(started) >= 4
        (worker if victim == "worker" else program).kill()
        assert psutil.wait_procs([worker, *started], 10)[1] == []
        assert len(os.listdir(tmp_path)) == 4
        if victim == "worker":
            assert program.stdout.readline() == "TaskCrashedError\n"
    finally:
        program.kill()
        program.communicate()
    for left in below(me, strangers):
        with contextlib.suppress(psutil.NoSuchProcess):
            left.wait(10)


def test_a_worker_that_leaves_waits_for_no_process_that_goes_on(tmp_path):
    """Not to make room for a fresh one, and not at the end."""
    with Pool(1, max_tasks_per_child=1) as pool:
        pids = {pool.submit(kin_functions.leave_a_process, str(tmp_path)).result(DEADLINE_S) for _ in range(3)}

    assert len(pids) == 3
    assert set(os.listdir(tmp_path)) <= set(map(str, pids))  # one that comes to its end says more


def test_a_pool_in_a_process_of_multiprocessing_finishes_what_was_submitted(tmp_path):
    """Which ends the processes that it started before it waits for threads."""
    process = multiprocessing.get_context("fork").Process(target=kin_functions.submit_and_return, args=(str(tmp_path),))
    process.start()
    process.join(DEADLINE_S)

    assert process.exitcode == 0
    assert task_functions.count_starts(tmp_path) == dict.fromkeys(range(6), 1)
