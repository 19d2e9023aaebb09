"""Every row of the fault table as a task of a pool: it costs itself, and is explained; every other task is done once.

Reads   futures, incidents, files that count executions.
Writes  those files.
Never   one pool per row: what a row does to its neighbours is what is tested.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from faults.table import FAULTS, TORN
from outlive import IncidentKind, Pool, TaskCrashedError, TaskTimeoutError
from outlive.pool.failing import UnpicklableResultError
from outlive.verdicts import Name
from pool import task_faults, task_functions

DEADLINE_S = 60.0


class Row(NamedTuple):
    """What comes of a task."""

    error: type[BaseException]
    verdict: Name | tuple[Name, ...]  # several: as it was found in the moment of looking
    kind: IncidentKind = IncidentKind.CRASH


def _raises(error: type[BaseException]) -> Row:
    return Row(error, Name.EXCEPTION, IncidentKind.EXCEPTION)


def _kills(verdict: Name) -> Row:
    return Row(TaskCrashedError, verdict)


def _hangs(*verdict: Name) -> Row:
    return Row(TaskTimeoutError, verdict, IncidentKind.HANG)


_UNPICKLABLE = Row(UnpicklableResultError, Name.UNPICKLABLE_RESULT, IncidentKind.EXCEPTION)
ROWS = {
    "exception": _raises(ValueError),
    "unpicklable-exception": _raises(RuntimeError),
    "odd-exception": _raises(RuntimeError),
    "local-exception": _raises(Exception),
    "memory-error": _raises(MemoryError),
    "recursion": _raises(RecursionError),
    "base-exception": _raises(BaseException),
    "sys-exit": _raises(SystemExit),
    "keyboard-interrupt": _raises(KeyboardInterrupt),
    "generator-exit": _raises(GeneratorExit),
    "lock-as-result": _UNPICKLABLE,
    "unpicklable-result": _UNPICKLABLE,
    "os-exit": _kills(Name.EXITED),
    "exit-0": _kills(Name.EXITED),
    "sigkill": _kills(Name.KILLED),
    "sigsegv": _kills(Name.NULL_POINTER),
    "sigill": _kills(Name.DELIBERATE_TRAP),
    "sigbus": _kills(Name.TRUNCATED_FILE),
    "abort": _kills(Name.ABORTED),
    "sigfpe": _kills(Name.ARITHMETIC_FAULT),
    "stack-overflow": _kills(Name.STACK_OVERFLOW),
    "children": _kills(Name.KILLED),
    "dies-when-pickled": _kills(Name.KILLED),
    "dies-while-sent": _kills(Name.KILLED),
    "closed-descriptors": _kills(Name.KILLED),
    "gil-loop": _hangs(Name.SPINNING_IN_NATIVE_CODE),
    # The main thread waits for that thread to end, and takes a look every few milliseconds.
    "gil-thread": _hangs(Name.WAITING_FOR_LOCK, Name.SPINNING_IN_PYTHON, Name.SPINNING_IN_NATIVE_CODE),
    "sleep": _hangs(Name.SLEEPING),
    "deadlock": _hangs(Name.WAITING_FOR_LOCK),
    "sigstop": _hangs(Name.STOPPED),
}
assert set(FAULTS) <= set(ROWS) | {"function-as-result"}  # which can travel: by value


@pytest.mark.parametrize(("method", "retries"), [("fork", 1), ("fork", 0), ("spawn", 0), ("forkserver", 1)])
def test_each_row_costs_its_own_task(method, retries, tmp_path):
    folder = str(tmp_path)
    futures: dict[str, Any] = {}
    healthy: dict[int, Any] = {}
    numbers: dict[str, int] = {}
    with Pool(3, method, retries=retries, task_timeout=2.0) as pool:
        number = 0
        for name in ROWS:
            for _ in range(3):
                healthy[number] = pool.submit(task_functions.note, folder, number)
                number += 1
            numbers[name] = number
            futures[name] = pool.submit(task_faults.note_and_misbehave, folder, number, name)
            number += 1
        assert {n: future.result(DEADLINE_S) for n, future in healthy.items()} == {n: n for n in healthy}
        errors: dict[str, Any] = {name: future.exception(DEADLINE_S) for name, future in futures.items()}

    begun = task_functions.count_starts(tmp_path)
    for name, row in ROWS.items():
        error = errors[name]
        incident = getattr(error, "incident", None)
        assert isinstance(error, row.error), (name, error)
        assert incident is not None, name
        assert (incident.index, incident.noun) == (numbers[name], "task"), name
        assert incident.described[0].startswith("note_and_misbehave("), name
        assert incident.kind is row.kind, name
        verdicts = row.verdict if isinstance(row.verdict, tuple) else (row.verdict,)
        assert incident.verdict.name in verdicts, (name, str(error))
        assert name not in FAULTS or not FAULTS[name].says_torn or TORN in str(error)
        if retries == 0:
            assert begun[numbers[name]] == 1, name
        else:  # what raises is not tried again, unless it was in one chunk with what kills
            assert begun[numbers[name]] >= (1 if row.kind is IncidentKind.EXCEPTION else 2), name
    assert all(begun[n] == 1 if retries == 0 else begun[n] >= 1 for n in healthy)
