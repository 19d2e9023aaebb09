"""A pool whose tasks die, hang, raise and return what cannot travel: each costs itself, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Executor, as_completed
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from pickle import PicklingError
from typing import Any

import numpy as np
import psutil
import pytest

import outlive
import warm_server
from deadlines import wait_until
from outlive import FaultPolicy, IncidentKind, Pool, TaskCrashedError, TaskTimeoutError
from outlive.pool.failing import UnpicklableResultError, UnreadableResultError
from pool import task_faults, task_functions

METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 60.0


@pytest.mark.parametrize("method", METHODS)
def test_what_goes_wrong_costs_its_own_task(method):
    """Every kind of death and error among healthy tasks, twice as many as workers at a time."""
    with Pool(2, method) as pool:
        assert isinstance(pool, Executor)
        healthy = []
        futures: dict[str, Any] = {}
        for number, how in enumerate(task_functions.DEATHS):
            healthy.append(pool.submit(task_functions.square, number))
            futures[how] = pool.submit(task_functions.die, how)
        futures["odd"] = pool.submit(task_functions.raise_odd)
        futures["locked"] = pool.submit(task_functions.raise_unpicklable)
        futures["sys.exit"] = pool.submit(task_functions.leave)
        for what in task_functions.RESULTS:
            futures[what] = pool.submit(task_functions.returns, what)
        futures["argument"] = pool.submit(task_functions.square, task_functions.Unpicklable())
        healthy += [pool.submit(task_functions.square, number) for number in range(len(healthy), 40)]
        assert [future.result(DEADLINE_S) for future in healthy] == [n * n for n in range(40)]
        errors: dict[str, Any] = {how: future.exception(DEADLINE_S) for how, future in futures.items()}

    for how in task_functions.DEATHS:
        assert isinstance(errors[how], TaskCrashedError), how
        assert isinstance(errors[how], BrokenProcessPool), how
        assert errors[how].incident.described == (f"die('{how}')",)
        assert f"running task {errors[how].incident.index} (die('{how}'))" in str(errors[how])
    assert "SIGSEGV" in str(errors["SIGSEGV"])
    assert "null" in errors["SIGSEGV"].incident.verdict.name.value
    assert errors["exit"].incident.exit.code == 3
    assert (type(errors["odd"]), str(errors["odd"])) == (RuntimeError, "OddError: one")
    assert "raise OddError" in str(errors["odd"].__cause__)
    assert "with a lock" in str(errors["locked"])
    assert isinstance(errors["sys.exit"], SystemExit)
    assert errors["sys.exit"].code == 5
    for how in ("unpicklable", "generator"):
        assert isinstance(errors[how], UnpicklableResultError), errors[how]
        assert isinstance(errors[how], PicklingError), errors[how]
    assert isinstance(errors["exits pickled"], SystemExit)
    for how, error in (("unreadable", ValueError), ("exits read", SystemExit)):
        assert isinstance(errors[how], UnreadableResultError)
        assert isinstance(errors[how], BrokenProcessPool)
        assert isinstance(errors[how].__cause__, error)
    assert "not this one" in str(errors["argument"])
    crashed = [i.index for i in pool.incidents if i.kind is IncidentKind.CRASH]
    for how in task_functions.DEATHS:  # each was tried again; more often where its company had to be parted
        assert errors[how].incident.attempt == 2
        assert crashed.count(errors[how].incident.index) >= 2


@pytest.mark.parametrize("method", METHODS)
def test_a_task_that_hangs_is_ended_in_time_and_others_go_on(method):
    with Pool(2, method, task_timeout=0.5, retries=0) as pool:
        hung = pool.submit(task_functions.sleep_for_ever)
        assert list(pool.map(task_functions.square, range(50))) == [n * n for n in range(50)]
        error: Any = hung.exception(DEADLINE_S)

    assert isinstance(error, TaskTimeoutError)
    assert isinstance(error, FutureTimeoutError)
    assert "hung for" in str(error)
    assert error.incident.hung


def test_a_deadlocked_task_is_ended_soon_when_the_timeout_is_auto():
    """By what the worker does, as in a loader; its second try has half the time."""
    policy = FaultPolicy(hang_floor_s=0.4, hang_wait_s=60.0, hang_busy_s=60.0)
    with Pool(1, "fork", task_timeout="auto", retries=1, faults=policy) as pool:
        error: Any = pool.submit(task_functions.lock_twice).exception(DEADLINE_S)
        assert pool.submit(task_functions.square, 3).result(DEADLINE_S) == 9

    assert isinstance(error, TaskTimeoutError)
    hangs = [incident.evidence.seen for incident in pool.incidents if incident.hung]
    assert [seen.limit_s for seen in hangs if seen is not None] == [0.4, 0.2]


SLOW_TO_IMPORT = """
import os, time
if os.getpid() != PARENT:
    time.sleep(1.5)  # this is the import of something large
def work(number):
    return number + 1
"""


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_imports_are_no_part_of_what_a_task_may_take(method, tmp_path, monkeypatch):
    """Every fresh worker imports a task's module: that must not count as a hang of its first task."""
    (tmp_path / "slow_to_import.py").write_text(SLOW_TO_IMPORT.replace("PARENT", str(os.getpid())))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "slow_to_import", raising=False)
    work = importlib.import_module("slow_to_import").work
    with Pool(1, method, retries=0, task_timeout=0.5) as pool:
        assert pool.submit(work, 1).result(DEADLINE_S) == 2


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", ["closed-descriptors", "left-fork"])
def test_a_death_is_seen_whatever_became_of_its_descriptors(method, way):
    """Closed while the task goes on, or held by a child of its when it has ended; without a `task_timeout`."""
    with Pool(2, method, retries=0) as pool:
        bad = pool.submit(task_faults.misbehave, way)
        assert list(pool.map(task_functions.square, range(50))) == [n * n for n in range(50)]
        assert isinstance(bad.exception(DEADLINE_S), TaskCrashedError)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 7, "auto"])
def test_map_keeps_order_and_leaves_out_only_the_failed(method, chunk):
    """In chunks, too: who was in company with a killer is not taken along."""

    def sometimes(number: int) -> int:
        if number % 50 == 13:
            os._exit(1)
        if number % 50 == 31:
            raise ValueError(number)
        return number

    with Pool(2, method, retries=1) as pool:
        results = list(pool.map(sometimes, range(150), chunksize=chunk, faults="none"))
        left = list(pool.map(sometimes, range(150), chunksize=chunk, faults="skip"))
        unordered = set(pool.map(sometimes, range(150), chunksize=chunk, faults="skip", ordered=False))

    bad = {13, 31, 63, 81, 113, 131}
    assert results == [None if n in bad else n for n in range(150)]
    assert left == [n for n in range(150) if n not in bad]
    assert unordered == set(left)
    assert [failed.args[0] for failed in pool.failures[:6]] == sorted(bad)
    assert {type(failed.error).__name__ for failed in pool.failures} == {"TaskCrashedError", "ValueError"}
    assert all(failed.incident is not None for failed in pool.failures)


def test_map_raises_at_its_place_and_drops_the_rest():
    with Pool(2) as pool:
        results = pool.map(lambda n: 1 // (3 - n), range(1000), chunksize=1)
        assert [next(results) for _ in range(3)] == [0, 0, 1]
        with pytest.raises(ZeroDivisionError):
            next(results)
        with pytest.raises(StopIteration):
            next(results)
        assert pool.submit(task_functions.square, 3).result(DEADLINE_S) == 9


def test_map_is_lazy():
    """An endless iterable is read as far as there is room."""
    read = itertools.count()
    numbers = iter(lambda: next(read), None)
    with Pool(2) as pool:
        results = pool.map(task_functions.square, numbers, in_flight=40)
        assert [next(results) for _ in range(500)] == [n * n for n in range(500)]
        assert next(read) <= 500 + 41
        results.close()  # type: ignore[attr-defined]


def test_a_map_that_is_read_too_late_says_so():
    with Pool(2) as pool:
        short, long = (
            pool.map(task_functions.square, range(100)),
            pool.map(task_functions.square, range(5000), in_flight=100),
        )

    assert list(short) == [n * n for n in range(100)]
    with pytest.raises(RuntimeError, match="inside of the with block"):
        list(long)


def test_a_callback_cannot_end_the_pool(caplog):
    def leave(future: Any) -> None:
        sys.exit(3)

    with Pool(1) as pool:
        first = pool.submit(time.sleep, 0.05)
        first.add_done_callback(leave)
        assert pool.submit(task_functions.square, 3).result(DEADLINE_S) == 9
        assert first.result() is None

    assert "a callback of" in caplog.text


def test_a_pool_is_of_no_use_in_a_fork_and_says_so():
    """Also while the pool's own thread holds its lock, for which nobody is left in the fork."""
    with Pool(1) as pool:
        pool.submit(task_functions.square, 3).result(DEADLINE_S)
        holds, enough = threading.Event(), threading.Event()

        def hold() -> None:
            with pool._manager._lock:
                holds.set()
                enough.wait(DEADLINE_S)

        thread = threading.Thread(target=hold)
        thread.start()
        holds.wait(DEADLINE_S)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            try:
                pool.submit(task_functions.square, 3)
            except outlive.ForkedLoaderError:
                os._exit(7)
            os._exit(1)
        enough.set()
        thread.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_map_takes_several_iterables_and_starmap_rows():
    with Pool(2) as pool:
        assert list(pool.map(task_functions.add, [1, 2, 3], [10, 20])) == [11, 22]
        assert list(pool.starmap(task_functions.add, [(1, 2), (3,)])) == [3, 4]
        assert pool.submit(task_functions.add, 1, two=5).result(DEADLINE_S) == 6
        with pytest.raises(FutureTimeoutError):
            list(pool.map(time.sleep, [0.5], timeout=0.05))


@pytest.mark.parametrize("method", METHODS)
def test_without_retries_no_task_is_begun_twice(method, tmp_path):
    """Whatever dies, and whenever; what had not begun is done by others."""
    with Pool(3, method, retries=0) as pool:
        futures = [
            pool.submit(task_functions.die, "SIGKILL", str(tmp_path), n)
            if n % 7 == 3
            else pool.submit(task_functions.note, str(tmp_path), n)
            for n in range(80)
        ]
        mapped = list(pool.map(functools.partial(task_functions.note, str(tmp_path)), range(100, 150), chunksize=10))
        outcomes = [future.exception(DEADLINE_S) for future in futures]

    assert [isinstance(error, TaskCrashedError) for error in outcomes] == [n % 7 == 3 for n in range(80)]
    assert mapped == list(range(100, 150))
    assert task_functions.count_starts(tmp_path) == dict.fromkeys([*range(80), *range(100, 150)], 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_killed_from_outside_costs_nothing_with_retries(method):
    with Pool(2, method, retries=20) as pool:
        futures = [pool.submit(time.sleep, 0.01) for _ in range(100)]
        done = 0
        for future in as_completed(futures, DEADLINE_S):
            assert future.exception() is None
            done += 1
            if done % 20 == 0 and pool.pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pool.pids[0], 9)

    assert done == 100


@pytest.mark.parametrize("method", METHODS)
def test_functions_from_anywhere(method):
    """Lambdas, closures, classes of this function, partials, methods; by value where a worker could not import them."""
    offset = 7

    class Local:
        def __init__(self, value: int) -> None:
            self.value = value

        def more(self) -> Local:
            return Local(self.value + offset)

    with Pool(2, method) as pool:
        assert pool.submit(lambda: offset).result(DEADLINE_S) == 7
        assert pool.submit(Local(1).more).result(DEADLINE_S).value == 8
        assert pool.submit(functools.partial(task_functions.add, 1, two=offset)).result(DEADLINE_S) == 8
        assert list(pool.map(lambda n: n + offset, range(3))) == [7, 8, 9]


@pytest.mark.parametrize("method", METHODS)
def test_arrays_come_back_as_they_were(method):
    with Pool(2, method) as pool:
        big, small = pool.submit(np.arange, 1_000_000), pool.submit(np.arange, 10)
        assert np.array_equal(big.result(DEADLINE_S), np.arange(1_000_000))
        assert np.array_equal(small.result(), np.arange(10))
        given = np.random.default_rng(0).random((300, 1000))
        assert np.array_equal(pool.submit(np.negative, given).result(DEADLINE_S), -given)
        big.result()[0] = 5  # it is ours


@pytest.mark.parametrize("method", METHODS)
def test_an_initializer_runs_first_and_its_failure_is_told(method, capfd):
    with Pool(1, method, os.putenv, ("OUTLIVE_TEST", "x")) as pool:
        assert pool.submit(subprocess.getoutput, "echo $OUTLIVE_TEST").result(DEADLINE_S) == "x"
    with Pool(2, method, task_functions.fail_to_begin) as pool:
        with pytest.raises(BrokenProcessPool, match="no way to begin"):
            pool.submit(task_functions.square, 1).result(DEADLINE_S)
        with pytest.raises(BrokenProcessPool):
            pool.submit(task_functions.square, 1)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_does_as_many_tasks_as_it_may(method):
    """However short they are: who asks for one task per process has a reason."""
    with Pool(2, method, max_tasks_per_child=3) as pool:
        list(pool.map(task_functions.square, range(20)))  # so that it is known how short they are
        submitted = [future.result(DEADLINE_S) for future in [pool.submit(os.getpid) for _ in range(60)]]
        mapped = list(pool.starmap(os.getpid, [()] * 60))

    for pids in (submitted, mapped):
        assert max(pids.count(pid) for pid in pids) <= 3
    assert {i.kind for i in pool.incidents} == {IncidentKind.RECYCLED}
    assert "it has done 3 tasks" in str(pool.incidents[0])


def test_an_exception_is_tried_again_where_the_policy_says_so(tmp_path):
    policy = FaultPolicy(retry_on=OSError, retries=2, backoff_s=0.0)

    def flaky(number: int) -> int:
        task_functions.note(str(tmp_path), number)
        if task_functions.count_starts(tmp_path)[number] < 3:
            raise OSError("not yet")
        return number

    with Pool(2, faults=policy) as pool:
        assert list(pool.map(flaky, range(5))) == list(range(5))
    assert task_functions.count_starts(tmp_path) == dict.fromkeys(range(5), 3)


def test_a_retried_exception_is_told_when_the_next_attempt_kills(tmp_path):
    def worse(number: int) -> int:
        task_functions.note(str(tmp_path), number)
        if task_functions.count_starts(tmp_path)[number] == 1:
            raise OSError("not yet")
        if task_functions.count_starts(tmp_path)[number] == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return number

    with Pool(1, retries=2, faults=FaultPolicy(retry_on=OSError, backoff_s=0.0)) as pool:
        assert pool.submit(worse, 7).result(DEADLINE_S) == 7
    assert [incident.kind for incident in pool.incidents] == [IncidentKind.EXCEPTION, IncidentKind.CRASH]


def test_no_task_is_begun_twice_also_where_a_policy_is_given(tmp_path):
    """The pool's own `retries` outweigh the policy's."""
    with Pool(1, retries=0, faults=FaultPolicy(retry_on=OSError, retries=5)) as pool:
        died = pool.submit(task_functions.die, "SIGKILL", str(tmp_path), 0)
        assert isinstance(died.exception(DEADLINE_S), TaskCrashedError)
    with Pool(1, faults=FaultPolicy(retries=2)) as pool:
        died = pool.submit(task_functions.die, "SIGKILL", str(tmp_path), 1)
        assert isinstance(died.exception(DEADLINE_S), TaskCrashedError)

    assert task_functions.count_starts(tmp_path) == {0: 1, 1: 3}


def test_asyncio_runs_in_it():
    async def work(pool: Pool) -> list[Any]:
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(pool, task_functions.square, n) for n in range(10)]
        died = loop.run_in_executor(pool, task_functions.die, "SIGKILL")
        return await asyncio.gather(*calls, died, return_exceptions=True)

    with Pool(2) as pool:
        *squares, error = asyncio.run(work(pool))

    assert squares == [n * n for n in range(10)]
    assert isinstance(error, TaskCrashedError)


def test_shutdown_finishes_or_cancels_what_was_submitted(tmp_path):
    pool = Pool(1)
    futures = [pool.submit(time.sleep, 0.01) for _ in range(20)]
    pool.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(task_functions.square, 1)
    assert [future.result(DEADLINE_S) for future in futures] == [None] * 20

    with Pool(1) as pool:
        first = pool.submit(task_functions.wait_for, str(tmp_path / "go"))
        assert wait_until(first.running, DEADLINE_S)
        rest = [pool.submit(task_functions.square, n) for n in range(50)]

        def let_go() -> None:
            wait_until(rest[-1].cancelled, DEADLINE_S)
            (tmp_path / "go").touch()

        opener = threading.Thread(target=let_go)
        opener.start()
        pool.shutdown(cancel_futures=True)
        opener.join()
        assert first.result() is None
        assert all(future.cancelled() for future in rest[5:])
        with pytest.raises(CancelledError):
            rest[-1].result()


def test_an_unreferenced_pool_finishes_and_goes():
    pool = Pool(2)
    futures = [pool.submit(time.sleep, 0.01) for _ in range(10)]
    pids = pool.pids
    del pool
    gc.collect()

    assert [future.result(DEADLINE_S) for future in futures] == [None] * 10
    assert wait_until(lambda: not any(map(psutil.pid_exists, pids)), DEADLINE_S)
    assert wait_until(lambda: "outlive-pool" not in [t.name for t in threading.enumerate()], DEADLINE_S)


PROGRAM = """
import os, sys, time
from outlive import Pool
def work(n):
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.005)  # until the program has come to its end
    os.write(1, b"done %d\\n" % n)
if __name__ == "__main__":
    pool = Pool(2, sys.argv[1])
    for n in range(6):
        pool.submit(work, n)
    open(sys.argv[2], "w").close()
"""


@pytest.mark.parametrize("method", METHODS)
def test_what_was_submitted_is_finished_when_the_program_ends(method, tmp_path):
    """As with concurrent.futures: nobody waits, and nothing is lost. The function is the main module's own."""
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = warm_server.run(
        [sys.executable, str(tmp_path / "program.py"), method, str(tmp_path / "ended")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )

    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [f"done {n}" for n in range(6)]


def test_what_it_takes_is_checked():
    for arguments, words in [
        ({"max_workers": 0}, "greater than 0"),
        ({"max_workers": "two"}, "whole number"),
        ({"initializer": 3}, "callable"),
        ({"memory_limit": "lots"}, "memory_limit"),
        ({"faults": "skip"}, "FaultPolicy"),
        ({"max_tasks_per_child": 0}, ">= 1"),
        ({"recycle_after": "20 samples"}, "number of tasks"),
        ({"recycle_after": "often"}, "number of tasks"),
        ({"retries": -1}, "at least 0"),
        ({"task_timeout": 0}, "task_timeout must be more than 0"),
        ({"task_timeout": "never"}, "task_timeout must be a number"),
        ({"faults": FaultPolicy(sample_timeout=3.0)}, "task_timeout"),
        ({"faults": FaultPolicy("skip")}, r"map\("),
        ({"faults": FaultPolicy(max_bad=3)}, "own outcome"),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            Pool(**arguments)  # type: ignore[arg-type]
    with Pool(1) as pool:
        for options, words in [({"chunksize": 0}, "chunksize"), ({"faults": "no"}, "faults"), ({"in_flight": 0}, "in")]:
            with pytest.raises(ValueError, match=words):
                pool.map(task_functions.square, [1], **options)
    assert outlive.Pool is Pool
    assert Path(task_functions.__file__).exists()


def test_many_threads_submit_while_tasks_are_put_together():
    """What waits is looked through while others add to it; threads change places as often as they can."""
    usual = sys.getswitchinterval()
    results: list[int] = []

    def submit_some(pool: Pool) -> None:
        results.extend(
            future.result(DEADLINE_S) for future in [pool.submit(task_functions.square, n) for n in range(3000)]
        )

    with Pool(2) as pool:
        list(pool.map(task_functions.square, range(200)))
        threads = [threading.Thread(target=submit_some, args=(pool,)) for _ in range(4)]
        sys.setswitchinterval(1e-6)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(DEADLINE_S)
        finally:
            sys.setswitchinterval(usual)
    assert sorted(results) == sorted(4 * [n * n for n in range(3000)])
