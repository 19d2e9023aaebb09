"""What this machine, or the container that it is, gives to a loader, and what of it is too little for any.

Reads   cgroups (v1 and v2), the affinity mask, /proc, /dev/shm, limits of this process; below another root in tests.
Writes  nothing.
Never   fails: what the system does not tell is None, and nothing is found about it.
"""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outlive._capture import vitals
from outlive._forensics import surroundings
from outlive._system import cgroups, cpus
from outlive.doctor.findings import Finding, Rank
from outlive.doctor.plan import Plan
from outlive.quantities import in_words

_DOCKERS_SHM = 64 << 20  # the size of /dev/shm in a container that nobody asked for more
_LITTLE_SHM = 256 << 20
_LITTLE_MEMORY = 512 << 20
_FEW_DESCRIPTORS = 1024  # the smallest number that any distribution gives
_ROOM_FOR_OTHERS = 64  # descriptors that libraries and logs may want
_OF_A_WORKER = 8  # descriptors that the trainer has of a worker: sockets, bell, black box, and a few on their journey
_USUAL_WORKERS = 8  # where no loader says how many
_TASKS_BESIDE = 8  # processes and threads that come and go: the zygote, a shell, a compiler
_THROTTLED = 0.1
_SWAPPED = 256 << 20
_CAP_SYS_ADMIN, _CAP_SYS_RESOURCE = 21, 24  # whoever has one of them may start as many processes as he likes


@dataclass(frozen=True)
class Machine:
    """What one look showed."""

    container: str = ""  # «docker», «podman», «kubernetes», «slurm»; "" where nothing says so
    cpus: float = 1.0  # that may be used
    all_cpus: int = 1  # that libraries see
    cpu_limit: float | None = None  # of the container
    throttled: float = 0.0  # share of periods since the container began
    memory_bytes: int | None = None  # all of it: the machine's, or the container's limit
    left_bytes: int | None = None
    memory_limit: str = ""  # the group whose limit counts; "": the machine's own memory does
    swap_bytes: int = 0
    swap_used_bytes: int = 0
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    descriptors: int | None = None
    descriptors_hard: int | None = None
    descriptors_open: int = 0
    tasks: int | None = None  # processes and threads that there may be; None: no limit
    tasks_used: int = 0
    tasks_by: str = ""  # who says so: «pids.max of /docker/ab», «ulimit -u»
    overcommit: int = 0
    commit_limit_bytes: int | None = None
    committed_bytes: int | None = None

    @property
    def task_room(self) -> int | None:
        return None if self.tasks is None else max(0, self.tasks - self.tasks_used)

    def rows(self) -> list[tuple[str, str]]:
        """For people."""
        of = f" of {self.all_cpus}" if self.cpus < self.all_cpus else ""
        first = [f"{self.cpus:.3g}{of} CPU{'' if self.cpus == 1 and not of else 's'}"]
        if self.memory_bytes is not None:
            left = f", {in_words(self.left_bytes)} left" if self.left_bytes is not None else ""
            limit = " by its cgroup" if self.memory_limit else ""
            first.append(f"{in_words(self.memory_bytes)} of memory{limit}{left}")
        first.append(f"{in_words(self.swap_bytes)} of swap" if self.swap_bytes else "no swap")
        second = []
        if self.shm_bytes is not None and self.shm_free_bytes is not None:
            second.append(f"/dev/shm {in_words(self.shm_bytes)}, {in_words(self.shm_free_bytes)} free")
        if self.descriptors is not None:
            second.append(f"{self.descriptors} descriptors")
        second.append("any number of processes" if self.tasks is None else f"{self.tasks} processes and threads")
        inside = [f"in {self.container}"] if self.container else []
        return [("machine", ", ".join([*inside, *first])), ("", ", ".join(second))]

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def look(root: str = "/") -> Machine:
    there = cpus.look(root)
    memory = surroundings.table(f"{root}/proc/meminfo")
    group, left = _memory_left(root)
    room = surroundings.room(f"{root}/dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks, used, by = _tasks(root)
    overcommit = cgroups.number(f"{root}/proc/sys/vm/overcommit_memory") or 0
    swap, free = (_bytes(memory, name) or 0 for name in ("SwapTotal", "SwapFree"))
    return Machine(
        container=_container(root),
        cpus=there.usable,
        all_cpus=max(os.cpu_count() or 1, math.ceil(there.usable)),
        cpu_limit=there.limit,
        throttled=max((counts.share for counts in there.throttling), default=0.0),
        memory_bytes=surroundings.total_bytes(root),
        left_bytes=left,
        memory_limit=group,
        swap_bytes=swap,
        swap_used_bytes=swap - free,
        shm_bytes=room[0],
        shm_free_bytes=room[1],
        descriptors=None if soft == resource.RLIM_INFINITY else soft,
        descriptors_hard=None if hard == resource.RLIM_INFINITY else hard,
        descriptors_open=_open_here(),
        tasks=tasks,
        tasks_used=used,
        tasks_by=by,
        overcommit=overcommit,
        commit_limit_bytes=_bytes(memory, "CommitLimit"),
        committed_bytes=_bytes(memory, "Committed_AS"),
    )


def findings(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """What is too little for any loader, or for the number of workers that this one has."""
    yield from _of_memory(machine)
    yield from _of_shm(machine, plan)
    yield from _of_descriptors(machine, plan)
    yield from _of_tasks(machine, plan)
    yield from _of_overcommit(machine, plan)
    yield from _of_cpus(machine)


# ---------------------------------------------------------------- findings


def _of_memory(machine: Machine) -> Iterator[Finding]:
    left, total = machine.left_bytes, machine.memory_bytes
    if left is not None and total is not None and left < _LITTLE_MEMORY:
        by = f"the limit of the cgroup {machine.memory_limit}" if machine.memory_limit else "the machine's memory"
        yield Finding(
            "little-memory",
            Rank.MAY_KILL,
            f"only {in_words(left)} of memory are left of {in_words(total)}",
            (f"{by} is {in_words(total)}; a worker that imports torch has about 200 MiB of its own",),
            (more_memory(machine, total - left + (2 << 30)), 'memory_budget="80%", so that workers stay within it'),
        )
    if machine.swap_used_bytes > _SWAPPED and machine.swap_used_bytes * 2 > machine.swap_bytes:
        yield Finding(
            "swapping",
            Rank.SLOWS_DOWN,
            f"{in_words(machine.swap_used_bytes)} of {in_words(machine.swap_bytes)} swap are in use",
            ("what a worker reads may have to come back from disk first",),
            (more_memory(machine, (total or 0) + machine.swap_used_bytes), "sudo swapoff -a && sudo swapon -a"),
        )


def _of_shm(machine: Machine, plan: Plan) -> Iterator[Finding]:
    """What is needed there is known only once samples were seen: see `arithmetic`."""
    size, free = machine.shm_bytes, machine.shm_free_bytes
    if plan.loader is not None and (plan.is_ours or not plan.workers):
        return
    if size is None or free is None or free >= _LITTLE_SHM:
        return
    default = ", docker's default" if size == _DOCKERS_SHM else ""
    yield Finding(
        "small-shm",
        Rank.MAY_KILL,
        f"/dev/shm has {in_words(size)}{default}, {in_words(free)} free",
        (
            "torch's own DataLoader puts every batch there, and its workers die of SIGBUS when it is full;"
            " outlive's does not use it",
        ),
        (more_shm(machine, 4 << 30), "from outlive import DataLoader"),
    )


def _of_descriptors(machine: Machine, plan: Plan) -> Iterator[Finding]:
    limit = machine.descriptors
    if limit is None:
        return
    needed = machine.descriptors_open + _ROOM_FOR_OTHERS + plan.workers * _OF_A_WORKER
    enough = max(4096, 2 ** math.ceil(math.log2(needed * 2)))
    facts = [f"{machine.descriptors_open} are open now; {plan.workers} workers take about {_OF_A_WORKER} each"]
    if machine.descriptors_hard is not None and machine.descriptors_hard < enough:
        facts.append(f"the hard limit is {machine.descriptors_hard}: only root raises it")
        remedies = [f"docker run --ulimit nofile={enough}:{enough} …", f"LimitNOFILE={enough} in the systemd unit"]
    else:
        remedies = [f"ulimit -n {enough}"]
    if needed > limit:
        room = (limit - machine.descriptors_open - _ROOM_FOR_OTHERS) // _OF_A_WORKER
        if plan.workers and room >= 1:
            remedies.append(f"num_workers={room}")
        title = f"{limit} descriptors are too few: about {needed} are needed"
        yield Finding("few-descriptors", Rank.WILL_KILL, title, tuple(facts), tuple(remedies))
    elif limit < _FEW_DESCRIPTORS:
        title = f"a process may have only {limit} descriptors («Too many open files»)"
        yield Finding("few-descriptors", Rank.MAY_KILL, title, tuple(facts), tuple(remedies))


def _of_tasks(machine: Machine, plan: Plan) -> Iterator[Finding]:
    room = machine.task_room
    workers = plan.workers or (_USUAL_WORKERS if plan.dataset is None else 0)
    if room is None or not workers:
        return
    most = _TASKS_BESIDE + (workers + 1) * (1 + (plan.threads or math.ceil(machine.cpus)))
    if room >= most:
        return
    enough = machine.tasks_used + 2 * max(most, 256)
    remedies = [f"ulimit -u {enough}"]
    if machine.tasks_by != "ulimit -u":
        remedies = [f"docker run --pids-limit={enough} …"]
        if machine.container == "kubernetes":
            remedies = [f"podPidsLimit: {enough}, in the kubelet's configuration"]
    fewer = (room - _TASKS_BESIDE) // (1 + (plan.threads or math.ceil(machine.cpus))) - 1
    if plan.workers and 1 <= fewer < workers:
        remedies.append(f"num_workers={fewer}")
    yield Finding(
        "few-processes",
        Rank.WILL_KILL if plan.workers and room < workers + 1 else Rank.MAY_KILL,
        f"{room} more processes or threads may be started; {_plural(workers, 'worker')} may want {most}",
        (f"{machine.tasks_by} is {machine.tasks}, {machine.tasks_used} are there now",),
        tuple(remedies),
    )


def _of_overcommit(machine: Machine, plan: Plan) -> Iterator[Finding]:
    limit, committed = machine.commit_limit_bytes, machine.committed_bytes
    if machine.overcommit != 2 or limit is None or committed is None:
        return
    room = max(0, limit - committed)
    ours = _own_commitment() * max(1, plan.workers)
    yield Finding(
        "strict-overcommit",
        Rank.WILL_KILL if ours > room else Rank.MAY_KILL,
        f"the kernel promises no memory beyond {in_words(limit)} (vm.overcommit_memory=2), {in_words(room)} are left",
        ("a fork is counted in full, though it shares its memory: «Cannot allocate memory» with memory to spare",),
        ("sudo sysctl vm.overcommit_memory=0", 'multiprocessing_context="forkserver"'),
    )


def _of_cpus(machine: Machine) -> Iterator[Finding]:
    fit = max(1, math.floor(machine.cpus))
    limit = machine.cpu_limit
    if limit is not None and machine.all_cpus > 2 * limit and not os.environ.get("OMP_NUM_THREADS"):
        facts = ["libraries ask the machine and start a thread for each; the cgroup then stops all of them in turn"]
        if machine.throttled > _THROTTLED:
            facts.append(f"it was stopped in {machine.throttled:.0%} of its periods until now")
        yield Finding(
            "hidden-cpu-limit",
            Rank.SLOWS_DOWN,
            f"{limit:.3g} CPUs may be used, and libraries see {machine.all_cpus}",
            tuple(facts),
            (f"OMP_NUM_THREADS={fit} in the trainer's environment (outlive's workers have worker_threads=1)",),
        )


# ---------------------------------------------------------------- remedies, in the words of where we are


def more_memory(machine: Machine, size: int) -> str:
    gib = _gib(size)
    if machine.container == "kubernetes":
        return f"resources.limits.memory: {gib}Gi, in the pod's container"
    if machine.container == "slurm":
        return f"sbatch --mem={gib}G …"
    if machine.container or machine.memory_limit:
        return f"docker run --memory={gib}g …"
    return f"a machine with {gib} GiB"


def more_shm(machine: Machine, size: int) -> str:
    gib = _gib(size)
    if machine.container == "kubernetes":
        return f"volumes: [{{name: shm, emptyDir: {{medium: Memory, sizeLimit: {gib}Gi}}}}], mounted at /dev/shm"
    if machine.container in ("docker", "podman"):
        return f"{machine.container} run --shm-size={gib}g …"
    return f"sudo mount -o remount,size={gib}G /dev/shm (a container: --shm-size={gib}g)"


def _gib(size: int) -> int:
    """Whole, and rather more: somebody is to type it."""
    whole = max(1, math.ceil(size / (1 << 30)))
    return whole if whole <= 4 else math.ceil(whole / 4) * 4


# ---------------------------------------------------------------- small readers


def _memory_left(root: str) -> tuple[str, int | None]:
    """Which group's limit leaves the least, if it is a group's, and how much is left."""
    name, left = "", surroundings.available_bytes(root)
    for group in surroundings.own_groups(root):
        limit, held = group.limit_bytes, group.held_bytes
        if limit is not None and held is not None and (left is None or limit - held < left):
            name, left = _short_group(group.folder), limit - held
    return name, None if left is None else max(0, left)


def _tasks(root: str) -> tuple[int | None, int, str]:
    """The limit that leaves the least room, how many count against it, and whose it is."""
    found: list[tuple[int, int, str]] = []
    for folder in cgroups.own_folders("pids", root):
        most, now = (cgroups.number(f"{folder.path}/pids.{name}") for name in ("max", "current"))
        if most is not None and now is not None:
            found.append((most, now, f"pids.max of the cgroup {_short_group(folder.path)}"))
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and not _is_above_limits(root):
        found.append((soft, _own_tasks(root), "ulimit -u"))
    if not found:
        return None, 0, ""
    return min(found, key=lambda each: each[0] - each[1])


def _is_above_limits(root: str) -> bool:
    if os.getuid() == 0:
        return True
    for line in cgroups.text(f"{root}/proc/self/status").splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
            return bool(mask >> _CAP_SYS_ADMIN & 1 or mask >> _CAP_SYS_RESOURCE & 1)
    return False


def _own_tasks(root: str) -> int:
    """Processes and threads of this user."""
    count, user = 0, os.getuid()
    try:
        names = [name for name in os.listdir(f"{root}/proc") if name.isdigit()]
    except OSError:
        return 0
    for name in names:
        try:
            if os.stat(f"{root}/proc/{name}").st_uid == user:
                count += surroundings.table(f"{root}/proc/{name}/status").get("Threads", 1)
        except OSError:
            continue  # gone meanwhile
    return count


def _open_here() -> int:
    try:
        return vitals.descriptors_of(os.getpid())
    except OSError:
        return 0


def _own_commitment() -> int:
    """About what a fork of this process is counted as: its data."""
    return (surroundings.table("/proc/self/status").get("VmData") or 0) * 1024


def _container(root: str) -> str:
    if os.environ.get("KUBERNETES_SERVICE_HOST") or os.path.isdir(f"{root}/var/run/secrets/kubernetes.io"):
        return "kubernetes"
    if os.path.exists(f"{root}/.dockerenv"):
        return "docker"
    if os.path.exists(f"{root}/run/.containerenv"):
        return "podman"
    return "slurm" if os.environ.get("SLURM_JOB_ID") else ""


def _short_group(folder: str) -> str:
    for mark in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids", "/sys/fs/cgroup"):
        if mark in folder:
            return folder.partition(mark)[2] or "/"
    return folder


def _bytes(table: dict[str, int], name: str) -> int | None:
    value = table.get(name)
    return None if value is None else value * 1024


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
