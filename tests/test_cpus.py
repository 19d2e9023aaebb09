"""How many CPUs there really are, and how often a limit makes everybody stop: real machines, and folders by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from control_groups import cpu_group
from outlive._system import cpus
from outlive._system.cpus import Cpus, Throttled, throttled_share, usable_cpus

BURN = """
import sys, time
from outlive._system import cpus
sys.stdin.readline()
before = cpus.look().throttling
give_up_at = time.monotonic() + 60
while time.monotonic() < give_up_at and (cpus.throttled_share(before, cpus.look().throttling) or 0) == 0:
    sum(range(100_000))
now = cpus.look().throttling
print(cpus.usable_cpus(), cpus.look().limit, cpus.throttled_share(before, now), max(c.seconds for c in now))
"""


class System:
    """Files as a kernel shows them."""

    def __init__(self, root: Path, is_v2: bool, path: str) -> None:
        self.root = root
        self.is_v2 = is_v2
        kind = "cgroup2 cgroup2 rw" if is_v2 else "cgroup cgroup rw,cpu,cpuacct"
        self._write("proc/self/mountinfo", f"30 23 0:26 / /sys/fs/cgroup rw - {kind}\n")
        self._write("proc/self/cgroup", f"0::{path}\n" if is_v2 else f"3:cpu,cpuacct:{path}\n0::/\n")

    def limit(self, group: str, quota: str, period: int = 100_000) -> None:
        if self.is_v2:
            self._write(f"sys/fs/cgroup{group}/cpu.max", f"{quota.replace('-1', 'max')} {period}\n")
        else:
            self._write(f"sys/fs/cgroup{group}/cpu.cfs_quota_us", f"{quota}\n")
            self._write(f"sys/fs/cgroup{group}/cpu.cfs_period_us", f"{period}\n")

    def count(self, group: str, periods: int, throttled: int, seconds: float) -> None:
        stood = f"throttled_usec {seconds * 1e6:.0f}" if self.is_v2 else f"throttled_time {seconds * 1e9:.0f}"
        head = "usage_usec 5\n" if self.is_v2 else ""
        text = f"{head}nr_periods {periods}\nnr_throttled {throttled}\n{stood}\n"
        self._write(f"sys/fs/cgroup{group}/cpu.stat", text)

    def _write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)


@pytest.fixture(params=["v2", "v1"])
def system(request, tmp_path) -> System:
    return System(tmp_path, request.param == "v2", "/pod/box")


# ---------------------------------------------------------------- by hand


@pytest.mark.parametrize(
    ("limits", "least"),
    [
        ({}, None),
        ({"/pod/box": "-1", "": "-1"}, None),
        ({"/pod/box": "250000"}, 2.5),
        ({"/pod/box": "800000", "/pod": "150000"}, 1.5),  # the pod's limit, although the container has more
        ({"/pod/box": "50000", "/pod": "400000"}, 0.5),
        ({"/pod/box": "0"}, None),
        ({"/pod/box": "nonsense"}, None),
    ],
)
def test_the_least_limit_of_all_groups_counts(system, limits, least):
    """Fractions are kept; what says nothing is no limit."""
    for group, quota in limits.items():
        system.limit(group, quota)

    assert cpus.look(str(system.root)).limit == least
    mask = len(os.sched_getaffinity(0))
    assert usable_cpus(str(system.root)) == (mask if least is None else min(mask, least))


def test_a_period_of_another_length_makes_the_same_limit(system):
    """100 ms is only the usual one."""
    system.limit("/pod/box", "15000", period=10_000)

    assert cpus.look(str(system.root)).limit == 1.5


def test_throttling_is_told_of_the_group_where_it_was_worst(system):
    """Since the earlier count, not since the group was made."""
    system.count("/pod/box", 100, 90, 4.5)
    system.count("/pod", 1000, 0, 0)
    before = cpus.look(str(system.root)).throttling
    system.count("/pod/box", 200, 110, 5.5)
    system.count("/pod", 1100, 83, 2.0)
    now = cpus.look(str(system.root)).throttling

    assert before[:2] == (Throttled(100, 90, 4.5), Throttled(1000, 0, 0.0))
    assert throttled_share(before, now) == 0.83
    assert throttled_share(now, now) is None


def test_without_groups_the_affinity_mask_counts(tmp_path):
    """No /proc, no group: nothing fails, nothing is made up."""
    assert cpus.look(str(tmp_path)) == Cpus(len(os.sched_getaffinity(0)))
    assert usable_cpus(str(tmp_path)) == len(os.sched_getaffinity(0))


def test_a_system_without_masks_has_the_machines_cpus(monkeypatch, tmp_path):
    """As macOS and Windows."""
    monkeypatch.delattr(os, "sched_getaffinity")

    assert usable_cpus(str(tmp_path)) == os.cpu_count()


# ---------------------------------------------------------------- the real machine


def test_the_affinity_mask_of_a_real_process_is_minded():
    """As taskset and job schedulers set it."""
    one = min(os.sched_getaffinity(0))
    program = f"import os; os.sched_setaffinity(0, {{{one}}}); from outlive._system import cpus"

    ended = subprocess.run(
        [sys.executable, "-c", f"{program}; print(cpus.usable_cpus())"], capture_output=True, text=True, check=True
    )

    assert 0 < float(ended.stdout) <= 1
    assert 0 < usable_cpus() <= len(os.sched_getaffinity(0))
    assert all(counts.periods >= counts.throttled >= 0 for counts in cpus.look().throttling)


def test_a_real_limit_is_seen_from_inside_and_so_is_its_throttling():
    """A fifth of a CPU: whoever wants more than that is stopped in nearly every period."""
    with cpu_group(0.2) as group:
        job = subprocess.Popen([sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with job:
            try:
                (group / "cgroup.procs").write_text(str(job.pid))
                out, _ = job.communicate("go\n", timeout=90)
            except BaseException:
                job.kill()
                raise
    usable, least, share, seconds = map(float, out.split())

    assert (usable, least) == (0.2, 0.2)
    assert 0 < share <= 1
    assert seconds > 0
