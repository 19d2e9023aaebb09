"""Ranks as a group: who was first, what became of the others, restarts, the environment, the context.

Reads   the errors of `spawn`, the journal, files that ranks leave.
Writes  marker files.
Never   by the clock: ranks wait for each other by files and handles.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import select
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import outlive
from deadlines import wait_until
from launch import rank_functions
from outlive._forensics import journal, report
from outlive.incident import Exit, Failure
from outlive.launch import group, story
from outlive.launch.story import Fall, Other
from outlive.verdicts import Name

METHODS = ("fork", "spawn", "forkserver")


# ---------------------------------------------------------------- who was first


@pytest.mark.parametrize("method", METHODS)
def test_the_first_to_fail_is_named_whatever_its_number(tmp_path, method, monkeypatch):
    """Rank 2 is killed, rank 0 complains of it, rank 1 is ended, rank 3 had returned."""
    wait_for_end = group.SpawnContext._wait_for_end

    def until_rank_0_has_failed(context, seconds):
        """The aftermath takes as long as rank 0 does: a busy machine may hold it up."""
        if seconds == group.AFTERMATH_S:
            wait_until(lambda: context._attend(0.0) or bool(context._ranks[0].noticed), 60)
        wait_for_end(context, seconds)

    monkeypatch.setattr(group.SpawnContext, "_wait_for_end", until_rank_0_has_failed)

    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.die_before_others, (tmp_path,), 4, start_method=method)

    failed, ended, finished = caught.value.incident.consequences
    assert caught.value.error_index == 2
    assert failed.startswith("rank 0 failed ")
    assert failed.endswith("with ConnectionError: peer 2 hung up, probably because of it")
    assert (ended, finished) == ("rank 1 was ended after it", "rank 3 had finished")
    assert all(clause in str(caught.value) for clause in (failed, ended, finished))


def test_the_first_to_raise_is_named_when_it_takes_long_to_end(tmp_path):
    """It says so itself: a thread of its own keeps it from ending until another has died."""
    with pytest.raises(outlive.RankRaisedError, match="rank 1 was the first") as caught:
        outlive.spawn(rank_functions.raise_and_linger, (tmp_path,), 2, start_method="fork")

    assert caught.value.error_index == 1


def test_a_failure_is_raised_when_its_rank_never_ends():
    """Torch waits for ever where a thread of the rank does not end."""
    context = outlive.spawn(rank_functions.raise_and_stay, (), 2, False, start_method="fork")

    with pytest.raises(outlive.RankRaisedError, match="it stays") as caught:
        context.join(grace_period=0.1)

    assert caught.value.error_index == 1
    assert [process.is_alive() for process in context.processes] == [False, False]


def test_a_rank_waiting_for_others_is_not_blamed_when_all_hang():
    """In a collective operation everybody waits for the one that does something else."""
    in_collective = 'File "/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce'
    waiting = (Name.WAITING_FOR_LOCK, in_collective)
    sleeping = (Name.SLEEPING, in_collective)
    elsewhere = (Name.WAITING_FOR_LOCK, 'File "train.py", line 3 in save')
    stopped = (Name.STOPPED, "")
    unknown = (None, "")

    assert sorted([waiting, unknown, sleeping, elsewhere, stopped], key=lambda seen: story.blame(*seen)) == [
        stopped,
        elsewhere,
        unknown,
        sleeping,
        waiting,
    ]


class SlowPoll:
    """A launcher that is woken, and does nothing until both ranks have ended, as on a busy machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._poll = select.poll()
        self.register = self._poll.register

    def poll(self, timeout_ms: float) -> list[tuple[int, int]]:
        ready = self._poll.poll(timeout_ms)
        if ready and not (self._folder / "go").exists():
            (self._folder / "go").touch()
            assert wait_until(lambda: [p.status() for p in psutil.Process().children()].count("zombie") == 2, 60.0)
        return ready


def test_a_complaint_is_not_the_first_failure_when_the_launcher_was_busy(tmp_path, monkeypatch):
    """Between waking and asking for the time, one rank was killed and another had time to say so."""
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(group, "select", SimpleNamespace(poll=lambda: SlowPoll(tmp_path), POLLIN=select.POLLIN))

    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.fall_silent, (str(tmp_path),), 2, start_method="fork")

    assert (caught.value.error_index, caught.value.signal_name) == (1, "SIGKILL")


def test_no_rank_is_blamed_for_others_when_all_fail_alike():
    """One bug in all ranks is no chain of events."""
    with pytest.raises(outlive.RankRaisedError) as caught:
        outlive.spawn(rank_functions.raise_together, (), 3, start_method="fork")

    assert "because of it" not in str(caught.value)


def test_a_silent_death_comes_before_a_complaint_when_both_were_seen_at_once():
    """A rank that is killed notes nothing; one that raises notes when. The launcher may see them in one look."""
    killed = Fall(1, seen=10.0, before=9.0)
    complained = Fall(0, seen=10.0, before=9.0, noted=9.5)
    earlier = Fall(2, seen=10.0, before=9.0, noted=8.9)

    assert story.first_of([complained, killed]) == killed
    assert story.first_of([complained, killed, earlier]) == earlier


def test_consequences_are_told_in_few_words():
    """Many ranks, few lines."""
    boom = Failure("OSError", "gone\nand more", "")
    others = [
        *(Other(rank, Exit(signal=15)) for rank in (0, 1, 2, 3, 5, 6, 8)),
        Other(7, Exit(code=1), boom, later_s=0.34),
        Other(4, Exit(code=1), boom, later_s=0.21),
        Other(9, Exit(signal=6), later_s=0.003),
        Other(10, Exit(code=1), boom, later_s=0.5, alike=True),
        Other(11, Exit(code=0), succeeded=True),
    ]

    assert story.consequences(others) == (
        "rank 9 failed 3 ms later of SIGABRT, probably because of it",
        "ranks 4, 7 failed 0.2 s later with OSError: gone, probably because of it",
        "rank 10 failed in the same way, 0.5 s later",
        "ranks 0–3, 5, 6, 8 were ended after it",
        "rank 11 had finished",
    )


# ---------------------------------------------------------------- restarts


def test_a_sum_over_ranks_comes_out_when_one_was_killed_in_the_first_attempt(tmp_path, caplog):
    """All are started again together, and env:// finds a port that is free; the log has the verdict."""
    told = []

    with caplog.at_level(logging.WARNING, "outlive"):
        outlive.spawn(rank_functions.fail_in_first_attempt, (tmp_path,), 2, max_restarts=2, on_incident=told.append)

    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["3.0 1", "3.0 1"]
    assert [(incident.slot, incident.signal, incident.attempt) for incident in told] == [(1, 9, 1)]
    lines = [r.getMessage() for r in caplog.records if "started again, restart 1 of 2" in r.getMessage()]
    assert len(lines) == 1
    assert "killed by SIGKILL" in lines[0]


def join_all(context):
    while not context.join():
        pass


def test_every_attempt_has_its_incident_when_restarts_are_used_up():
    """The error is about the last; the context has all."""
    context = outlive.spawn(rank_functions.fire_at, (0, "os-exit"), 2, False, start_method="fork", max_restarts=2)

    with pytest.raises(outlive.RankExitedError, match="attempt 3 of 3; no restart is left") as caught:
        join_all(context)

    assert [incident.attempt for incident in caught.value.incidents] == [1, 2, 3]
    assert context.incidents == caught.value.incidents
    assert context.restarts == 2
    with pytest.raises(outlive.RankExitedError):
        context.join()


# ---------------------------------------------------------------- the environment


def environments(folder):
    return [json.loads(path.read_text()) for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("method", METHODS)
def test_ranks_find_what_torchrun_would_set(tmp_path, monkeypatch, method):
    """All that init_process_group("gloo", init_method="env://") asks for."""
    for name in (*rank_functions.NAMES, *rank_functions.COUNTS):
        monkeypatch.delenv(name, raising=False)

    outlive.spawn(rank_functions.note_environment, (tmp_path,), 2, start_method=method)

    first, second = environments(tmp_path)
    port = first.pop("MASTER_PORT")
    assert second.pop("MASTER_PORT") == port
    assert 0 < int(port) < 65536
    common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    counts = {"RESTART_COUNT": "0", "TORCHELASTIC_RESTART_COUNT": "0"}
    assert first == {"RANK": "0", "LOCAL_RANK": "0", **common, **counts}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", **common, **counts}


def test_settings_of_the_user_stay_as_they_are(tmp_path, monkeypatch):
    """A scheduler's address, the rank of a node; not what an outer spawn has set."""
    monkeypatch.setenv("MASTER_ADDR", "node7")
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("OUTLIVE_SPAWN", "RANK LOCAL_RANK")

    outlive.spawn(rank_functions.note_environment, (tmp_path,), 1, start_method="fork")

    (told,) = environments(tmp_path)
    assert (told["MASTER_ADDR"], told["WORLD_SIZE"], told["RANK"]) == ("node7", "4", "0")


# ---------------------------------------------------------------- the context


@pytest.mark.parametrize("method", METHODS)
def test_a_context_is_joined_as_torchs_is(method):
    """One join per rank at most, True when all have ended; arguments of multiprocessing's travel."""
    queue = multiprocessing.get_context(method).SimpleQueue()
    context = outlive.spawn(rank_functions.put, (queue,), 2, False, False, method)

    assert len(context.pids()) == len(set(context.pids())) == 2
    assert [process.pid for process in context.processes] == context.pids()
    context.join(timeout=None)
    context.join(timeout=None)
    assert context.join(timeout=None) is True
    assert sorted([queue.get(), queue.get()]) == [0, 1]
    assert [process.exitcode for process in context.processes] == [0, 0]
    queue.close()


def test_join_returns_in_time_and_stop_ends_all():
    """Nothing is raised for ranks that we ended ourselves."""
    context = outlive.spawn(rank_functions.fire_at, (-1, ""), 2, join=False, daemon=True, start_method="fork")

    assert context.join(timeout=0.01) is False
    assert [process.daemon for process in context.processes] == [True, True]
    context.stop()

    assert [process.is_alive() for process in context.processes] == [False, False]
    assert context.join() is True


def test_a_context_works_in_any_thread():
    """Ranks outlive the thread that started them, as long as the launcher lives."""
    found = []
    starter = threading.Thread(
        target=lambda: found.append(outlive.spawn(rank_functions.fire_at, (-1, ""), 1, False, start_method="fork"))
    )
    starter.start()
    starter.join()

    assert found[0].join(timeout=0.3) is False
    found[0].stop()


def test_the_journal_has_the_incident_of_a_rank():
    """`outlive report` says rank, function, and what became of the others."""
    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.fire_at, (1, "os-exit"), 2, start_method="fork")

    assert journal.flush()
    (entry,) = [entry for entry in journal.find() if entry.id == caught.value.incident.id]
    assert entry.slot == 1
    assert entry.sentence == "rank 1 exited with code 3 while running fire_at: raised"
    assert entry.incident == caught.value.incident
    rows = dict(report.summary(entry.incident).rows)
    assert rows["others"] == "rank 0 was ended after it"


def test_ends_are_known_when_the_launcher_ignores_sigchld():
    """Then the kernel reaps, and nobody is told how a process ended: what the rank itself noted serves."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        outlive.spawn(rank_functions.do_nothing, (), 2, start_method="fork")
        with pytest.raises(outlive.RankRaisedError, match="all of us"):
            outlive.spawn(rank_functions.raise_together, (), 2, start_method="fork")
        with pytest.raises(outlive.RankExitedError) as caught:
            outlive.spawn(rank_functions.fire_at, (1, "sigkill"), 2, start_method="fork")
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert (caught.value.error_index, caught.value.exit_code) == (1, 255)


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fn": 3}, "fn must be a function that takes the rank and args, got 3"),
        ({"args": 3}, "args must be a tuple of what fn takes after the rank, such as (model,), got 3"),
        ({"nprocs": 0}, "nprocs must be at least 1, got 0"),
        ({"start_method": "thread"}, 'start_method must be "spawn", "fork" or "forkserver", got \'thread\''),
        ({"max_restarts": -1}, "max_restarts must be at least 0, got -1"),
        ({"memory_limit": "much"}, "memory_limit must be a size such as \"4GiB\" or a number of bytes, got 'much'"),
        ({"timeout": 0}, "timeout must be more than 0 seconds (None: no limit), got 0"),
        ({"on_incident": 3}, "on_incident must be a callable that takes an Incident, or several, got 3"),
    ],
)
def test_a_wrong_option_is_an_error_that_says_what_is_right(options, message):
    """Before any process is started."""
    with pytest.raises((TypeError, ValueError)) as caught:
        outlive.spawn(**{"fn": rank_functions.do_nothing, **options})

    assert str(caught.value) == message


def test_an_argument_is_named_when_it_cannot_be_pickled():
    """By the path to it; the ranks that were started go."""
    with pytest.raises(TypeError) as caught:
        outlive.spawn(rank_functions.put, ({"lock": threading.Lock()},), 2)

    if hasattr(caught.value, "__notes__"):  # Python 3.11 has them
        assert "args[0]['lock'] is a _thread.lock" in caught.value.__notes__[0]


def test_another_process_cannot_join():
    """A fork of the launcher has neither the handles nor the right to end anything."""
    context = outlive.spawn(rank_functions.fire_at, (-1, ""), 1, False, start_method="fork")
    pid = os.fork()
    if pid == 0:
        try:
            context.join()
        except outlive.OutliveError:
            context.stop()
            os._exit(7)
        os._exit(1)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert context.join(timeout=0) is False
    context.stop()
