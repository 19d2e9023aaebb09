"""A real group with a real limit: the kernel kills workers in it, or refuses them threads and processes.

Needs root, and a controller that lets us make a group below our own; elsewhere these tests are skipped, and
test_surroundings.py has the same by hand. The group goes when the test does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_groups import group_of, memory_group, run_in
from outlive._forensics import surroundings

__all__ = ["memory_group"]


PROGRAM = Path(__file__).parent / "programs" / "resource_hog.py"
PROCESSES = 60
HEALTHY_OF_MEMORY = [0, 1, 2, 5, 6, 7, 9]


@pytest.fixture
def process_group() -> Iterator[Path]:
    with group_of("pids") as (folder, _):
        limit = folder / "pids.max"
        if not limit.exists():
            pytest.skip("the controller of processes is not handed down to groups below this one")
        limit.write_text(str(PROCESSES))
        yield folder


@pytest.mark.parametrize(("method", "log"), [("fork", "with"), ("spawn", "with"), ("fork", "without")])
def test_workers_that_the_limit_kills_are_told_from_one_that_is_killed_by_hand(
    memory_group: Path, method: str, log: str
) -> None:
    """Two that eat at the same time each get their own kill; the third gets none. The log only adds certainty."""
    ended = run_in(memory_group, PROGRAM, "memory", method, log)

    assert ended["delivered"] == HEALTHY_OF_MEMORY
    told = ended["told"]
    assert set(told) == {"3", "4", "8"}
    with contextlib.closing(surroundings.KernelLog()) as kernel_log:
        readable = log == "with" and kernel_log.readable
    for index in ("3", "4"):
        assert told[index]["name"] == "cgroup-limit", told[index]
        assert told[index]["confidence"] == ("certain" if readable else "likely"), told[index]
        assert f"{memory_group.name} reached its memory limit of 600 MiB" in told[index]["cause"]
        assert any(str(memory_group) in fact for fact in told[index]["facts"])
        assert "GiB instead of 600 MiB" in told[index]["remedies"][0]
        assert told[index]["indices"] == [int(index)]
    assert told["8"]["name"] == "killed", told["8"]
    assert told["8"]["indices"] == [8]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_limit_of_processes_is_told_for_threads_and_for_forks(process_group: Path, method: str) -> None:
    """RLIMIT_NPROC does not bind root, a container's limit does: both look the same from inside."""
    ended = run_in(process_group, PROGRAM, "processes", method, "with")

    assert ended["delivered"] == [0, 1, 2, 4, 6, 7, 8, 9]
    told = ended["told"]
    assert {index: row["name"] for index, row in told.items()} == dict.fromkeys(("3", "5"), "processes-exhausted")
    assert "no further thread, at resource_hog.py:" in told["3"]["cause"]
    assert "no further process, at resource_hog.py:" in told["5"]["cause"]
    assert "--pids-limit" in told["3"]["remedies"][0]
