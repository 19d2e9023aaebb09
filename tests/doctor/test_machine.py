"""What the doctor says of a machine or a container: in real control groups, with real limits, and made-up ones.

Reads   what an examination in a process of its own found.
Writes  control groups and a mount namespace, each for one process; small trees like /proc in temporary folders.
Never   a setting of this machine: overcommit and swap are made up here, and real in test_whole_machine.py.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import control_groups
from doctor.examination import Found, examined, examined_in
from outlive.doctor import examine
from outlive.doctor.findings import Rank

MANY = "100000"
memory_group = control_groups.memory_group


def machine(prepare: Any = None, before: tuple[str, ...] = (), **variables: str) -> Found:
    return examined(prepare=prepare, before=before, **variables)["machine"]


def limited(number: int, soft: int, hard: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(number, (soft, hard))


def with_shm(size: str) -> tuple[str, ...]:
    """In a mount namespace of its own, where /dev/shm is so large."""
    if os.geteuid() != 0 or os.system("unshare -m true 2>/dev/null") != 0:
        pytest.skip("no mount namespace can be made here")
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size} tmpfs /dev/shm && exec "$0" "$@"')


def test_nothing_is_found_on_this_machine():
    """Or else the other tests could not tell: a fit machine has no findings."""
    found = machine()

    assert found.ranks == {}
    assert found.unseen == []
    assert found.told["machine"]["cpus"] > 0
    assert found.told["machine"]["memory_bytes"] > found.told["machine"]["left_bytes"] > 0


def test_little_memory_is_found_in_a_cgroup(memory_group):
    """What counts is the group's limit, not the machine's memory."""
    v2 = memory_group / "memory.max"
    (v2 if v2.exists() else memory_group / "memory.limit_in_bytes").write_text(str(300 << 20))

    found = examined_in(memory_group)["machine"]

    assert found.ranks == {"little-memory": "may kill"}
    assert found.told["machine"]["memory_bytes"] == 300 << 20
    assert memory_group.name in found.told["machine"]["memory_limit"]
    assert f"the limit of the cgroup {found.told['machine']['memory_limit']} is 300 MiB" in found.text("little-memory")
    assert any("--memory=" in remedy or "--mem=" in remedy for remedy in found.remedies("little-memory"))


def test_few_descriptors_are_found():
    """As `ulimit -n` leaves them: too few for safety, and too few for the workers that there will be."""
    few = machine(limited(resource.RLIMIT_NOFILE, 400, 400))
    raisable = machine(limited(resource.RLIMIT_NOFILE, 400, 8192), WORKERS="64")

    assert few.ranks == {"few-descriptors": "may kill"}
    assert "the hard limit is 400" in few.text("few-descriptors")
    assert "docker run --ulimit nofile=4096:4096 …" in few.remedies("few-descriptors")
    assert raisable.ranks == {"few-descriptors": "will kill"}
    assert raisable.remedies("few-descriptors")[0] == "ulimit -n 4096"
    assert raisable.remedies("few-descriptors")[1].startswith("num_workers=4")


def test_few_processes_are_found_by_user():
    """`ulimit -u` counts what the user runs; root is above it."""
    if os.geteuid() != 0:
        pytest.skip("only root becomes somebody else")
    nobody = machine(limited(resource.RLIMIT_NPROC, 10, 10), AS_USER=MANY, WORKERS="16")
    root = machine(limited(resource.RLIMIT_NPROC, 10, 10), WORKERS="16")

    assert nobody.ranks == {"few-processes": "will kill"}
    assert "ulimit -u is 10, " in nobody.text("few-processes")
    assert nobody.remedies("few-processes")[0].startswith("ulimit -u ")
    assert root.ranks == {}


def test_few_processes_are_found_in_a_cgroup():
    """pids.max counts threads, too."""
    with control_groups.group_of("pids") as (group, _):
        (group / "pids.max").write_text("24")
        found = examined_in(group, WORKERS="8")["machine"]
        (group / "pids.max").write_text("300")
        enough = examined_in(group, WORKERS="8")["machine"]

    assert found.ranks == {"few-processes": "may kill"}
    assert "pids.max of the cgroup /" in found.text("few-processes")
    assert found.remedies("few-processes")[0].startswith("docker run --pids-limit=")
    assert found.remedies("few-processes")[1].startswith("num_workers=")
    assert enough.ranks == {}


def test_a_cpu_limit_is_found_that_libraries_do_not_see():
    """They ask how many CPUs the machine has."""
    with control_groups.cpu_group(0.4) as group:
        found = examined_in(group)["machine"]
        told = examined_in(group, OMP_NUM_THREADS="1")["machine"]

    assert found.ranks == {"hidden-cpu-limit": "slows down"}
    assert found.told["machine"]["cpus"] == pytest.approx(0.4)
    assert found.remedies("hidden-cpu-limit")[0].startswith("OMP_NUM_THREADS=1 ")
    assert told.ranks == {}


def test_a_small_shm_is_found():
    """Docker's 64 MB, with the remedy in the words of where one is."""
    docker = machine(before=with_shm("64m"))
    pod = machine(before=with_shm("64m"), KUBERNETES_SERVICE_HOST="10.0.0.1")

    assert docker.ranks == {"small-shm": "may kill"}
    assert "64 MiB, docker's default" in docker.text("small-shm")
    assert "--shm-size=4g" in docker.remedies("small-shm")[0]
    assert pod.remedies("small-shm")[0] == (
        "volumes: [{name: shm, emptyDir: {medium: Memory, sizeLimit: 4Gi}}], mounted at /dev/shm"
    )
    assert pod.told["machine"]["container"] == "kubernetes"


def test_overcommit_and_swap_are_found(tmp_path):
    """Made up: these are settings of the whole machine."""
    sizes = {"MemTotal": 64, "MemAvailable": 32, "SwapTotal": 8, "SwapFree": 1, "CommitLimit": 60, "Committed_AS": 19}
    write(tmp_path, "proc/meminfo", "".join(f"{name}: {gib << 20} kB\n" for name, gib in sizes.items()))
    write(tmp_path, "proc/sys/vm/overcommit_memory", "2\n")

    told = examine(root=str(tmp_path), compiled=False)
    write(tmp_path, "proc/sys/vm/overcommit_memory", "0\n")
    sizes["SwapFree"] = 8
    write(tmp_path, "proc/meminfo", "".join(f"{name}: {gib << 20} kB\n" for name, gib in sizes.items()))

    assert [(finding.name, finding.rank) for finding in told.findings] == [
        ("strict-overcommit", Rank.MAY_KILL),
        ("swapping", Rank.SLOWS_DOWN),
    ]
    assert told.findings[0].remedies[0] == "sudo sysctl vm.overcommit_memory=0"
    assert "7 GiB of 8 GiB swap" in told.findings[1].title
    assert examine(root=str(tmp_path), compiled=False).findings == ()


@pytest.mark.parametrize("version", [1, 2])
def test_limits_of_groups_are_read(tmp_path, version):
    """Memory, CPUs and processes, in the words of both versions."""
    kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory,cpu,pids"
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    write(tmp_path, "proc/self/mountinfo", f"30 20 0:26 / /sys/fs/cgroup rw - {kind}\n")
    write(tmp_path, "proc/self/cgroup", "0::/pod\n" if version == 2 else "3:memory,cpu,pids:/pod\n0::/\n")
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n")
    for name, value in zip(names, (2 << 30, 1 << 30)):
        write(tmp_path, f"sys/fs/cgroup/pod/{name}", str(value))
    write(tmp_path, "sys/fs/cgroup/pod/pids.max", "40\n")
    write(tmp_path, "sys/fs/cgroup/pod/pids.current", "39\n")
    if version == 2:
        write(tmp_path, "sys/fs/cgroup/pod/cpu.max", "50000 100000\n")
    else:
        write(tmp_path, "sys/fs/cgroup/pod/cpu.cfs_quota_us", "50000\n")
        write(tmp_path, "sys/fs/cgroup/pod/cpu.cfs_period_us", "100000\n")

    told = examine(root=str(tmp_path), workers=4, compiled=False)

    assert (told.machine.memory_bytes, told.machine.left_bytes) == (2 << 30, 1 << 30)
    assert (told.machine.memory_limit, told.machine.cpus, told.machine.task_room) == ("/pod", 0.5, 1)
    assert told.findings[0].name == "few-processes"
    assert told.findings[0].rank is Rank.WILL_KILL


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": -1}, "workers must be at least 0"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"start_method": "thread"}, "start_method must be one of fork, spawn, forkserver, got 'thread'"),
        ({"samples": 1.5}, "samples must be a whole number"),
        ({"time_limit": -1}, "time_limit must be at least 0"),
    ],
)
def test_an_option_that_makes_no_sense_is_an_error(options, words):
    """Which says what would."""
    with pytest.raises((ValueError, TypeError)) as raised:
        examine(**options)

    assert words in str(raised.value)


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)
