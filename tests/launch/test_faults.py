"""Every way in which a rank can fail, and what the error says of it.

Reads   the errors of `spawn`.
Writes  nothing.
Never   torch in a rank: its import is not what is tested.
"""

from __future__ import annotations

import json
import pickle
import signal

import psutil
import pytest

import outlive
from deadlines import wait_until
from faults.table import FAULTS, TORN
from launch import rank_functions
from outlive import IncidentKind
from outlive.verdicts import Name

VERDICTS = {
    "exception": Name.EXCEPTION,
    "unpicklable-exception": Name.EXCEPTION,
    "odd-exception": Name.EXCEPTION,
    "local-exception": Name.EXCEPTION,
    "memory-error": Name.EXCEPTION,
    "base-exception": Name.EXCEPTION,
    "sys-exit": Name.EXITED,
    "os-exit": Name.EXITED,
    "sigkill": Name.KILLED,
    "sigsegv": Name.NULL_POINTER,
    "sigill": Name.DELIBERATE_TRAP,
    "sigbus": Name.TRUNCATED_FILE,
    "abort": Name.ABORTED,
    "sigfpe": Name.ARITHMETIC_FAULT,
    "stack-overflow": Name.STACK_OVERFLOW,
}
IN_FRESH_INTERPRETERS = ("unpicklable-exception", "sys-exit", "sigkill", "sigsegv")
# Each in a fresh interpreter, too; some under both methods.
CASES = [(fault, "fork") for fault in VERDICTS]
CASES += [(fault, method) for method in ("spawn", "forkserver") for fault in IN_FRESH_INTERPRETERS]
CASES += [
    (fault, ("spawn", "forkserver")[at % 2]) for at, fault in enumerate(VERDICTS) if fault not in IN_FRESH_INTERPRETERS
]


@pytest.mark.parametrize(("name", "method"), CASES)
def test_the_error_has_the_autopsy_when_a_rank_fails(name, method):
    """Which rank, how, the verdict; torch's exception with its attributes and its first line."""
    from torch.multiprocessing import ProcessExitedException, ProcessRaisedException

    fault = FAULTS[name]
    told = []
    raised = fault.type_name is not None or name == "base-exception"
    kind = outlive.RankRaisedError if raised else outlive.RankExitedError

    with pytest.raises(kind) as caught:
        outlive.spawn(rank_functions.fire_at, (1, name), 2, start_method=method, on_incident=told.append)

    error = caught.value
    incident = error.incident
    assert told == [incident]
    assert (incident.slot, incident.role, incident.pid) == (1, "rank", error.error_pid)
    assert error.error_index == 1
    assert incident.verdict.name is VERDICTS[name]
    assert incident.consequences == ("rank 0 was ended after it",)
    assert incident.verdict.cause in str(error)
    assert "sample" not in str(error)
    if raised:
        assert isinstance(error, ProcessRaisedException)
        assert str(error).startswith("\n\n-- Process 1 terminated with the following error:\n")
        assert not fault.says_torn or str(error).rstrip().endswith(TORN)
        assert "launch/inside.py" not in str(error)
    else:
        assert isinstance(error, ProcessExitedException)
        assert error.exit_code == (fault.code if fault.signal is None else -fault.signal)
        assert error.signal_name == (None if fault.signal is None else signal.Signals(fault.signal).name)
        ended = f"exit code {fault.code}" if fault.signal is None else f"signal {error.signal_name}"
        assert str(error).startswith(f"process 1 terminated with {ended}\n")


def test_all_are_ended_when_some_take_too_long():
    """Of ranks that run too long, each in its way, the one that could not run at all is to blame; all are told."""
    faults = ("deadlock", "gil-loop", "sigstop", "sleep")

    with pytest.raises(outlive.RankHungError) as caught:
        outlive.spawn(rank_functions.fire_each, (faults,), 4, start_method="fork", timeout=8)

    incident = caught.value.incident
    others = "\n".join(incident.consequences)
    assert (incident.kind, incident.slot, incident.verdict.name) == (IncidentKind.HANG, 2, Name.STOPPED)
    assert caught.value.exit_code == -signal.SIGKILL
    assert incident.seconds_in_hand > 2  # the last to start has run a little less than the first
    assert "rank 0 ran as long, perhaps waiting for it: " in others
    assert "rank 1 ran as long, perhaps waiting for it: " in others
    assert "deaths.py" in others.partition("rank 3 ran as long")[2]
    assert "FaultPolicy" not in str(caught.value)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_memory_is_refused_when_a_rank_passes_its_limit(method):
    """By an exception with a traceback, and the limit named as the cause."""
    with pytest.raises(outlive.RankRaisedError, match="MemoryError") as caught:
        outlive.spawn(rank_functions.allocate, (), 2, start_method=method, memory_limit="200MiB")

    incident = caught.value.incident
    assert (incident.slot, incident.verdict.name) == (0, Name.MEMORY_LIMIT)
    assert incident.evidence.memory_limit_bytes == 200 << 20
    assert "over its memory_limit of 200 MiB" in str(caught.value)


def test_an_exit_is_a_failure_or_not_as_its_code_says():
    """sys.exit() is a success, a text is code 1 and is passed on."""
    outlive.spawn(rank_functions.exit_with_nothing, nprocs=2, start_method="fork")
    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.exit_with_text, start_method="fork")

    assert caught.value.exit_code == 1
    assert "said     nothing to do here" in str(caught.value)


def test_a_rank_fails_when_it_alone_is_interrupted():
    """With torch it would count as done."""
    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.interrupt_self, start_method="fork")

    assert caught.value.exit_code == 130
    assert caught.value.incident.verdict.cause.startswith("KeyboardInterrupt left the function and ended the rank")


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_nothing_is_left_of_a_rank_that_killed_itself(method, tmp_path):
    """Not even what left its process group and session: the leak check looks for it, too."""
    with pytest.raises(outlive.RankExitedError):
        outlive.spawn(rank_functions.die_with_daemon, (str(tmp_path),), 2, start_method=method)

    _, daemon = json.loads((tmp_path / "pids-1").read_text())
    assert wait_until(lambda: _has_ended(daemon), 60)


def _has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_errors_travel_with_their_incidents():
    """From a launcher that is itself somebody's child process."""
    with pytest.raises(outlive.RankExitedError) as caught:
        outlive.spawn(rank_functions.fire_at, (0, "os-exit"), start_method="fork")

    again = pickle.loads(pickle.dumps(caught.value))

    assert (type(again), str(again), again.exit_code) == (type(caught.value), str(caught.value), 3)
    assert again.incident == caught.value.incident
    assert pickle.loads(pickle.dumps(outlive.RankRaisedError("Oh no!", 1, 1))).error_pid == 1
