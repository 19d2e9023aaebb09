"""A large bag of tasks of which one in a hundred kills its worker: everything else is done, once.

Reads   results, failures and incidents of a pool.
Writes  a file per task, where executions are counted.
Never   a limit raised for it: a pool bears this as it is.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from outlive import Pool, TaskCrashedError, TaskTimeoutError
from outlive.incident import IncidentKind
from outlive.verdicts import Name
from pool import task_faults

pytestmark = [pytest.mark.full, pytest.mark.alone, pytest.mark.timeout(300)]

SIZE = 10_000
WAYS = {
    "sigkill": Name.KILLED,
    "sigsegv": Name.NULL_POINTER,
    "sigill": Name.DELIBERATE_TRAP,
    "sigfpe": Name.ARITHMETIC_FAULT,
    "sigbus": Name.TRUNCATED_FILE,
    "abort": Name.ABORTED,
    "os-exit": Name.EXITED,
    "stack-overflow": Name.STACK_OVERFLOW,
    "exhaust_memory": Name.MEMORY_LIMIT,
    "sleep": Name.SLEEPING,
}
# Anywhere, so that some are each other's neighbours in a chunk; the same in every run.
PLACES = random.Random(6).sample(range(SIZE), 10 * len(WAYS))
KILLERS = {place: tuple(WAYS)[at % len(WAYS)] for at, place in enumerate(PLACES)}
HEALTHY = [n * n for n in range(SIZE) if n not in KILLERS]


def fill(method: str, **options: Any) -> Pool:
    return Pool(2, method, task_timeout=2.0, memory_limit="256MiB", **options)


def assert_each_killer_is_explained(errors: dict[int, Any], pool: Pool, deaths_each: int) -> None:
    """One error per killer, with its task's number and verdict; no other task was ever blamed."""
    assert sorted(errors) == sorted(KILLERS)
    for place, way in KILLERS.items():
        incident = errors[place].incident
        assert type(errors[place]) is (TaskTimeoutError if way == "sleep" else TaskCrashedError), way
        assert (incident.index, incident.verdict.name) == (place, WAYS[way])
        assert incident.described == (f"square_or_die({place}, '{way}')",)
    assert {i.kind for i in pool.incidents} == {IncidentKind.CRASH, IncidentKind.HANG}
    assert Counter(i.index for i in pool.incidents) == dict.fromkeys(KILLERS, deaths_each)


def test_a_bag_with_killers_is_mapped_to_its_end():
    """Under the defaults: each killer is tried twice, in chunks with others; the others come once, in order."""
    ways = [KILLERS.get(n) for n in range(SIZE)]
    with fill("fork") as pool:
        results = list(pool.map(task_faults.square_or_die, range(SIZE), ways, faults="skip"))

    assert {f.args[0]: str(f.error) for f in pool.failures if f.args[0] not in KILLERS} == {}
    assert results == HEALTHY
    assert len(pool.failures) == len(KILLERS)
    assert_each_killer_is_explained({f.args[0]: f.error for f in pool.failures}, pool, 2)


def test_a_bag_with_killers_is_submitted_and_no_task_is_begun_twice():
    """100 deaths, 100 incidents."""
    with fill("spawn", retries=0) as pool:
        futures = [pool.submit(task_faults.square_or_die, n, KILLERS.get(n)) for n in range(SIZE)]
        outcomes = {n: future.exception() for n, future in enumerate(futures)}

    assert {n: str(error) for n, error in outcomes.items() if error is not None and n not in KILLERS} == {}
    assert [f.result() for f in futures if f.exception() is None] == HEALTHY
    assert_each_killer_is_explained({n: e for n, e in outcomes.items() if e is not None}, pool, 1)
    assert len(pool.incidents) == len(KILLERS)
