"""A control group of a test's own, where the machine lets one be made.

Reads   /proc/self/mountinfo, through the library's own search for groups.
Writes  a folder below our own group, for as long as a test needs it.
Never   leaves it behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deadlines import Deadline
from outlive._system import cgroups

DEADLINE_S = 20.0
LIMIT = 600 << 20


@contextlib.contextmanager
def group_in(home: Path) -> Iterator[Path]:
    """A group below `home`, for as long as it is needed."""
    folder = home / f"outlive-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no group can be made here: {error}")
    try:
        yield folder
    finally:
        deadline = Deadline(DEADLINE_S)
        while True:  # what ran in it takes a moment to be gone
            try:
                folder.rmdir()
                break
            except OSError:
                assert not deadline.passed, f"{folder} is still in use"
                time.sleep(0.01)  # between two tries, with a deadline


@contextlib.contextmanager
def group_of(controller: str) -> Iterator[tuple[Path, bool]]:
    """A group of this controller below our own, and whether it is one of v2."""
    found = cgroups.own_folders(controller)
    if not found or os.geteuid() != 0:
        pytest.skip(f"no {controller} controller, or not root")
    with group_in(Path(found[0].path)) as folder:
        yield folder, found[0].is_v2


@pytest.fixture
def memory_group() -> Iterator[Path]:
    with group_of("memory") as (folder, is_v2):
        limit = folder / ("memory.max" if is_v2 else "memory.limit_in_bytes")
        if not limit.exists():
            pytest.skip("the memory controller is not handed down to groups below this one")
        limit.write_text(str(LIMIT))
        yield folder


def run_in(group: Path, program: Path, *arguments: str) -> dict[str, Any]:
    """What a job in this group says of itself; it waits for a line before it begins."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    job = subprocess.Popen(
        [sys.executable, str(program), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        text=True,
    )
    with job:
        try:
            (group / "cgroup.procs").write_text(str(job.pid))
            out, err = job.communicate("go\n", timeout=90)
        except BaseException:
            job.kill()
            raise
    assert job.returncode == 0, err[-2000:]
    told: dict[str, Any] = json.loads(out)
    return told


@contextlib.contextmanager
def cpu_group(share: float) -> Iterator[Path]:
    """A group that may use so much of a CPU, and gets it: on a busy machine it would never reach its limit else."""
    with group_of("cpu") as (folder, is_v2):
        limit, weight = ("cpu.max", "cpu.weight") if is_v2 else ("cpu.cfs_quota_us", "cpu.shares")
        if not (folder / limit).exists():
            pytest.skip("the cpu controller is not handed down to groups below this one")
        quota = round(share * 100_000)
        (folder / limit).write_text(f"{quota} 100000" if is_v2 else str(quota))
        (folder / weight).write_text("10000" if is_v2 else "262144")
        yield folder
