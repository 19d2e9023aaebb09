"""Counters, groups and the kernel log, read below a root that is made by hand: v1, v2, containers, nothing at all."""

from __future__ import annotations

import os
import resource
import signal
import time
from pathlib import Path

import pytest

from outlive._forensics import surroundings
from outlive._forensics.surroundings import Group, OomWatch, own_groups

GIB = 1 << 30
FIRST_NAMESPACE = "pid:[4026531836]"
KILLED = "3,{n},1,-;Memory cgroup out of memory: Killed process {pid} (python) total-vm:1kB\n"


class System:
    """Files as a kernel shows them."""

    def __init__(self, root: Path, *, log: bool = False) -> None:
        self.root = root
        self.write("proc/vmstat", "nr_free_pages 5\noom_kill 4\n")
        self.write("proc/meminfo", "MemTotal:       1000 kB\nMemFree: 10 kB\nMemAvailable:    400 kB\n")
        self.write("proc/pressure/memory", "some avg10=1.50 avg60=0.00\nfull avg10=0.00\n")
        (root / "dev/shm").mkdir(parents=True)
        (root / "proc/self/ns").mkdir(parents=True)
        (root / "proc/self/ns/pid").symlink_to(FIRST_NAMESPACE)
        if log:
            self.write("dev/kmsg", KILLED.format(n=1, pid=1))
        self.lines = 1

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def v2(self, path: str = "/job", mounted: str = "/") -> System:
        self.write(
            "proc/self/mountinfo", f"30 23 0:26 {mounted} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
        )
        self.write("proc/self/cgroup", f"0::{path}\n")
        return self

    def v1(self, path: str = "/job", mounted: str = "/") -> System:
        self.write(
            "proc/self/mountinfo",
            "29 25 0:24 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
            f"30 25 0:25 {mounted} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n",
        )
        self.write("proc/self/cgroup", f"4:memory:{path}\n3:cpuset:/\n0::/\n")
        return self

    def group_v2(self, path: str, kills: int, limit: str = "max", hits: int = 0, peak: int | None = None) -> None:
        self.write(f"sys/fs/cgroup{path}/memory.events", f"low 0\nhigh 0\nmax {hits}\noom {hits}\noom_kill {kills}\n")
        self.write(f"sys/fs/cgroup{path}/memory.max", f"{limit}\n")
        self.write(f"sys/fs/cgroup{path}/memory.current", "7\n")
        if peak is not None:
            self.write(f"sys/fs/cgroup{path}/memory.peak", f"{peak}\n")

    def group_v1(self, path: str, kills: int, limit: int = 9223372036854771712, hits: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory{path}"
        self.write(f"{folder}/memory.oom_control", f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n")
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.failcnt", f"{hits}\n")
        self.write(f"{folder}/memory.max_usage_in_bytes", "9\n")

    def log(self, pid: int) -> None:
        self.lines += 1
        with open(self.root / "dev/kmsg", "a") as file:
            file.write(KILLED.format(n=self.lines, pid=pid))

    def watch(self) -> OomWatch:
        return OomWatch(str(self.root))

    def folders(self) -> list[str]:
        return [group.folder.removeprefix(str(self.root)) for group in own_groups(str(self.root))]


@pytest.fixture
def system(tmp_path: Path) -> System:
    return System(tmp_path)


# ---------------------------------------------------------------- groups


def test_the_groups_of_v2_are_found(system: System) -> None:
    """From its own up to what is mounted."""
    assert system.v2("/a/b").folders() == ["/sys/fs/cgroup/a/b", "/sys/fs/cgroup/a", "/sys/fs/cgroup"]


def test_the_memory_groups_of_v1_are_found_beside_others(system: System) -> None:
    """A mixed system has both; memory is counted where its controller is."""
    assert system.v1("/a").folders() == ["/sys/fs/cgroup/memory/a", "/sys/fs/cgroup/memory"]


@pytest.mark.parametrize(
    ("path", "mounted"), [("/docker/ab", "/docker/ab"), ("/../x", "/"), ("/elsewhere", "/docker/ab")]
)
def test_a_container_that_sees_the_hosts_path_uses_what_is_mounted(system: System, path: str, mounted: str) -> None:
    """Without a namespace of cgroups the path names folders that are not there."""
    assert system.v1(path, mounted).folders() == ["/sys/fs/cgroup/memory"]


def test_a_group_below_the_containers_is_found(system: System) -> None:
    """What is mounted is the path's beginning."""
    assert system.v1("/docker/ab/job", "/docker/ab").folders()[0] == "/sys/fs/cgroup/memory/job"


def test_this_machine_has_groups_or_none_without_an_error() -> None:
    """The real files, whatever they are."""
    for group in own_groups():
        assert group.kills is None or group.kills >= 0
        assert group.limit_bytes is None or group.limit_bytes > 0


@pytest.mark.parametrize("is_v2", [True, False])
def test_a_group_without_files_knows_nothing(tmp_path: Path, is_v2: bool) -> None:
    """The root of v2 has none of them."""
    group = Group(str(tmp_path), is_v2)

    assert (group.kills, group.hits, group.limit_bytes, group.used_bytes) == (None, None, None, None)


# ---------------------------------------------------------------- claims


def test_a_kill_by_a_limit_is_told_with_its_group(system: System) -> None:
    """Counters since the watch began: those before are nobody's here."""
    system.v2("/pod/job").group_v2("/pod/job", kills=5)
    system.group_v2("/pod", kills=5, limit=str(2 * GIB), hits=5, peak=2 * GIB)
    watch = system.watch()
    assert watch.surroundings(os.getpid(), killed=True).oom.group_kills == 0

    system.group_v2("/pod/job", kills=6)
    system.group_v2("/pod", kills=6, limit=str(2 * GIB), hits=6, peak=2 * GIB)
    oom = watch.surroundings(os.getpid(), killed=True).oom

    assert (oom.group_kills, oom.limit_hits) == (1, 1)
    assert (oom.group_limit_bytes, oom.group_used_bytes) == (2 * GIB, 2 * GIB)
    assert oom.group.endswith("/sys/fs/cgroup/pod")


def test_kills_are_counted_in_cgroup_v1(system: System) -> None:
    """Other files, the same answers; a limit of 2^63 is none."""
    system.v1("/job").group_v1("/job", kills=0, limit=GIB)
    system.group_v1("", kills=0)
    watch = system.watch()
    system.group_v1("/job", kills=1, limit=GIB, hits=30)
    oom = watch.surroundings(os.getpid(), killed=True).oom

    assert (oom.group_kills, oom.limit_hits, oom.group_limit_bytes, oom.group_used_bytes) == (1, 30, GIB, 9)


def test_a_kill_in_a_group_below_ours_is_not_ours(system: System) -> None:
    """v2 adds it to ours; the local count, where the kernel has one, does not."""
    system.v2().group_v2("/job", kills=0)
    system.write("sys/fs/cgroup/job/memory.events.local", "oom 0\noom_kill 0\n")
    watch = system.watch()
    system.group_v2("/job", kills=1)

    assert watch.surroundings(os.getpid(), killed=True).oom.group_kills == 0


def test_two_workers_killed_at_once_get_one_kill_each(system: System) -> None:
    """And a third, whom somebody else kills right after, gets none."""
    system.v2().group_v2("/job", kills=0)
    watch = system.watch()
    system.group_v2("/job", kills=2)

    assert [watch.surroundings(os.getpid(), killed=True).oom.group_kills for _ in range(3)] == [1, 1, 0]


def test_a_death_of_another_kind_claims_nothing(system: System) -> None:
    """The kill is still there for the worker that it belongs to."""
    system.v2().group_v2("/job", kills=0)
    watch = system.watch()
    system.group_v2("/job", kills=1)

    assert watch.surroundings(os.getpid(), killed=False).oom.group_kills is None
    assert watch.surroundings(os.getpid(), killed=True).oom.group_kills == 1


def test_an_unclaimed_kill_grows_stale(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour in the group was killed; who is killed by hand a minute later was not."""
    system.v2().group_v2("/job", kills=0)
    watch = system.watch()
    system.group_v2("/job", kills=1)
    now = time.monotonic()
    watch.look(now)
    monkeypatch.setattr(surroundings.time, "monotonic", lambda: now + 60)

    assert watch.surroundings(os.getpid(), killed=True).oom.group_kills == 0


def test_a_look_every_second_reads_once(system: System) -> None:
    """It is called as often as the zygote wakes up."""
    system.v2().group_v2("/job", kills=0)
    watch = system.watch()
    watch.look(100.0)
    system.group_v2("/job", kills=1)
    watch.look(100.5)
    assert watch.unclaimed == 0

    watch.look(101.0)

    assert watch.unclaimed == 1


def test_the_machines_counter_serves_where_no_group_counts(system: System) -> None:
    """A host without cgroups, or the root of v2."""
    watch = system.watch()
    system.write("proc/vmstat", "oom_kill 5\n")
    first = watch.surroundings(os.getpid(), killed=True).oom
    second = watch.surroundings(os.getpid(), killed=True).oom

    assert (first.group_kills, first.machine_kills, first.limit_hits) == (None, 1, None)
    assert second.machine_kills == 0


def test_nothing_is_known_where_there_is_nothing_to_read(tmp_path: Path) -> None:
    """No /proc at all: no error, no counter, no memory."""
    around = OomWatch(str(tmp_path)).surroundings(os.getpid(), killed=True)

    assert (around.oom.group_kills, around.oom.machine_kills, around.total_bytes) == (None, None, None)
    assert (around.pressure, around.shm_bytes) == ("", None)


# ---------------------------------------------------------------- the log


def test_the_log_names_the_process_that_was_killed(tmp_path: Path) -> None:
    """And nobody else takes the kill, whoever dies first."""
    system = System(tmp_path, log=True)
    system.v2().group_v2("/job", kills=0)
    watch = system.watch()
    system.group_v2("/job", kills=1)
    system.log(pid=os.getpid())

    bystander = watch.surroundings(1, killed=True).oom
    victim = watch.surroundings(os.getpid(), killed=True).oom
    watch.close()

    assert (bystander.group_kills, bystander.log) == (0, "")
    assert victim.group_kills == 1
    assert victim.log == f"Memory cgroup out of memory: Killed process {os.getpid()} (python) total-vm:1kB"


def test_what_the_log_said_before_is_not_read(tmp_path: Path) -> None:
    """Pids come again."""
    system = System(tmp_path, log=True)
    watch = system.watch()
    oom = watch.surroundings(1, killed=True).oom
    watch.close()

    assert oom.log == ""


def test_the_log_is_left_alone_in_a_namespace_of_pids(tmp_path: Path) -> None:
    """Its numbers are not ours."""
    system = System(tmp_path, log=True)
    (tmp_path / "proc/self/ns/pid").unlink()
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532345]")

    assert not system.watch().log.readable


# ---------------------------------------------------------------- the rest


def test_memory_pressure_and_limits_are_told(system: System) -> None:
    """As the files have them."""
    around = system.watch().surroundings(os.getpid(), killed=False)

    assert (around.total_bytes, around.available_bytes) == (1000 * 1024, 400 * 1024)
    assert around.pressure == "some avg10=1.50 avg60=0.00"
    assert around.limits["nofile"] == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert around.shm_bytes is not None


def test_the_limits_of_a_dead_process_are_known_until_it_is_reaped() -> None:
    """They may be its own, set after the fork."""
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12345, 12345))
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)

    limits = surroundings.limits_of(pid)
    os.waitpid(pid, 0)

    assert limits["fsize"] == 12345
    assert surroundings.limits_of(pid) == {}


def test_the_command_of_a_process_is_told() -> None:
    """What it was started as; nothing where it is gone."""
    assert "python" in surroundings.command_of(os.getpid())
    assert surroundings.command_of(1 << 22) == ""
