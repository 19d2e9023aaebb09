"""Verdicts on SIGKILL and its like, and exits: who ended it.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from outlive.errors import python_line
from outlive.evidence import Oom, Surroundings, Worked
from outlive.incident import Incident
from outlive.verdicts import Confidence, Name, Verdict, size_words

_GIB = 1 << 30
_ENDED = " ended the process\n"  # a worker's own note, above the stack of what it died of
_INEXACT_S = 0.3  # the kernel counts ticks for the limit, and exact time for us
_PLENTY = 0.2  # of the machine's memory: with so much left it did not run out
_OUTSIDE = {
    "SIGTERM": "look for what ends processes here: a scheduler's time limit, a container being stopped, a pkill",
    "SIGINT": "look for who sends it: Ctrl-C in a terminal does not reach workers",
    "SIGHUP": "its terminal or session was closed: start the job with nohup, setsid, tmux or a scheduler",
    "SIGPIPE": "it wrote to a pipe or socket that nobody reads: handle the error where the sample writes",
    "SIGQUIT": "look for who sends it: a terminal's keys do not reach workers",
    "SIGUSR1": "a scheduler (sbatch --signal) or a tool sends it: handle it, signal.signal in worker_init_fn",
    "SIGUSR2": "a scheduler (sbatch --signal) or a tool sends it: handle it, signal.signal in worker_init_fn",
    "SIGXCPU": "a scheduler sends it at a limit of time: ask for more, or save and leave before",
    "SIGALRM": "code in this process calls signal.alarm() or setitimer(): give it a handler, or take it out",
}
_MEMORY_DAEMONS = (
    "look in the system's log for who did: journalctl --since -10min | grep -iE 'oomd|earlyoom|kill'",
    "if a scheduler or supervisor watches memory here, give the job more, or lower num_workers",
)


# ---------------------------------------------------------------- memory


def over_memory_limit(incident: Incident) -> Verdict | None:
    """outlive's own limit: it says so itself."""
    evidence = incident.evidence
    if evidence.over_limit_bytes is None:
        return None
    held = size_words(evidence.over_limit_bytes)
    limit = evidence.memory_limit_bytes
    named = f"its memory_limit of {size_words(limit)}" if limit is not None else "its memory_limit"
    return Verdict(
        Name.MEMORY_LIMIT,
        f"{'it was refused memory' if incident.failure is not None else 'outlive ended it'} at {held}, over {named}",
        facts=(f"it held {held}", *_growth(evidence.worked)),
        remedies=(
            f'memory_limit="{_gib(evidence.over_limit_bytes * 5 // 4)}", if such samples really need it',
            "find what grows: the report has its memory over time, and the samples before",
        ),
    )


def killed_for_memory(incident: Incident) -> Verdict | None:
    """The kernel's OOM killer: for the machine, or for a cgroup's limit."""
    around = incident.evidence.surroundings
    if _signal(incident) != "SIGKILL" or around is None:
        return None
    oom, worked = around.oom, incident.evidence.worked
    if not oom.killed:
        return None
    confidence = Confidence.CERTAIN if oom.log else Confidence.LIKELY
    facts = (*_kernel_said(oom), *_held(worked), *_growth(worked), *_machine(around))
    if not _by_group(around, worked):
        return _machine_ran_out(around, worked, facts, confidence)
    limit = oom.group_limit_bytes
    held = _largest(worked)
    remedies: tuple[str, ...] = ()
    if limit is None:
        limited = "a cgroup above the one that can be seen from here reached its memory limit"
    else:
        limited = f"the cgroup {_short(oom.group)} reached its memory limit of {size_words(limit)}"
        needed = limit + max(held or 0, limit // 4)
        remedies = (
            f"a limit of at least {_gib(needed)} instead of {size_words(limit)}: docker run --memory, "
            "Kubernetes resources.limits.memory, sbatch --mem",
        )
    return Verdict(
        Name.CGROUP_LIMIT,
        f"killed by the kernel: {limited}" + (f", and this worker held {size_words(held)}" if held else ""),
        facts,
        (*remedies, *_use_less(held)),
        confidence,
    )


def _machine_ran_out(around: Surroundings, worked: Worked, facts: tuple[str, ...], confidence: Confidence) -> Verdict:
    held = _largest(worked)
    of_all = f" of {size_words(around.total_bytes)}" if around.total_bytes else ""
    return Verdict(
        Name.OOM_KILLER,
        "killed by the kernel's OOM killer: the machine's memory ran out"
        + (f", and this worker held {size_words(held)}{of_all}" if held else ""),
        facts,
        (*_use_less(held), "see what else takes memory: ps aux --sort -rss | head"),
        confidence,
    )


def _by_group(around: Surroundings, worked: Worked) -> bool:
    """Whether a cgroup ran out, and not the machine."""
    oom = around.oom
    if oom.log:
        return "CONSTRAINT_MEMCG" in oom.log or "Memory cgroup out of memory" in oom.log
    if oom.limit_hits:
        return True
    if oom.group_kills is None or around.available_bytes is None or not around.total_bytes:
        return False
    # A group that we cannot see, such as a pod's. What the worker held is free by now: it was not free then.
    before = around.available_bytes - (_largest(worked) or 0)
    return before > _PLENTY * around.total_bytes


def _kernel_said(oom: Oom) -> tuple[str, ...]:
    facts = [f"the kernel's log: {line}" for line in oom.log.splitlines()]
    if oom.group_kills:
        facts.append("the cgroup's count of OOM kills went up when it died")
    elif oom.group_kills is None and oom.machine_kills:
        facts.append("the machine's count of OOM kills went up when it died")
    if oom.group_limit_bytes is not None:
        used = f", used at most {size_words(oom.group_used_bytes)}" if oom.group_used_bytes is not None else ""
        facts.append(f"{oom.group or 'the cgroup'}: limit {size_words(oom.group_limit_bytes)}{used}")
    return tuple(facts)


def _held(worked: Worked) -> tuple[str, ...]:
    if worked.peak_resident_bytes is None:
        return ()
    last = f"{size_words(worked.memory[-1].resident_bytes)} when last seen, " if worked.memory else ""
    return (f"the worker's memory: {last}{size_words(worked.peak_resident_bytes)} at most",)


def _growth(worked: Worked) -> tuple[str, ...]:
    """A leak, or a large sample: what the samples over time say."""
    if len(worked.memory) < 2:
        return ()
    first, last = worked.memory[0], worked.memory[-1]
    grown = last.resident_bytes - first.resident_bytes
    if grown < 64 << 20 or grown < first.resident_bytes // 4:
        return ()
    seconds = first.seconds_before - last.seconds_before
    sizes = f"from {size_words(first.resident_bytes)} to {size_words(last.resident_bytes)}"
    return (f"its memory had grown {sizes} in {seconds:.0f} s",)


def _machine(around: Surroundings) -> tuple[str, ...]:
    facts = []
    if around.available_bytes is not None and around.total_bytes:
        left, whole = size_words(around.available_bytes), size_words(around.total_bytes)
        facts.append(f"after its death the machine had {left} of {whole} available")
    if around.pressure:
        facts.append(f"memory pressure: {around.pressure}")
    return tuple(facts)


def _largest(worked: Worked) -> int | None:
    return worked.peak_resident_bytes or (worked.memory[-1].resident_bytes if worked.memory else None)


def _use_less(held: int | None) -> tuple[str, ...]:
    freed = f": one worker less leaves up to {size_words(held)}" if held else ""
    return (
        f"lower num_workers{freed}",
        "lower prefetch_factor (2 unless you set it) or batch_size: each worker has so many batches in memory",
    )


def _short(path: str) -> str:
    """Facts have the whole path; a pod's is longer than a line."""
    return path if len(path) <= 40 else f"…/{path.rpartition('/')[2]}"


def _gib(size_bytes: int) -> str:
    return f"{math.ceil(size_bytes / _GIB * 10) / 10:g}GiB"


# ---------------------------------------------------------------- limits


def over_resource_limit(incident: Incident) -> Verdict | None:
    """SIGXCPU, SIGXFSZ, and the SIGKILL of the hard limit of processor time."""
    name = _signal(incident)
    around, used_s = incident.evidence.surroundings, incident.evidence.worked.cpu_s
    limits = around.limits if around is not None else {}
    used = (f"it used {used_s:.1f} s of processor time",) if used_s is not None else ()
    hard = limits.get("cpu_hard", -1)
    if incident.crash is not None and incident.crash.is_sent:
        return None  # somebody sent it, a scheduler for one
    if name == "SIGXCPU" or (name == "SIGKILL" and used_s is not None and 0 <= hard <= used_s + _INEXACT_S):
        limit = hard if name == "SIGKILL" else limits.get("cpu", -1) - 1  # the kernel adds a second when it warns
        of = f" of {limit} s" if limit >= 0 else ""
        return Verdict(
            Name.RESOURCE_LIMIT,
            f"it reached its limit of processor time (RLIMIT_CPU{of})",
            used,
            ("ulimit -t unlimited, in the shell or job script that starts the training",),
            Confidence.CERTAIN if name == "SIGXCPU" else Confidence.LIKELY,
        )
    if name == "SIGXFSZ":
        limit = limits.get("fsize", -1)
        of = f" of {size_words(limit)}" if limit >= 0 else ""
        return Verdict(
            Name.RESOURCE_LIMIT,
            f"it wrote to a file beyond the limit of a file's size (RLIMIT_FSIZE{of})",
            remedies=("ulimit -f unlimited, in the shell or job script that starts the training",),
        )
    return None


# ---------------------------------------------------------------- somebody


def killed_by_outlive(incident: Incident) -> Verdict | None:
    """For its manners, not for a hang or its memory."""
    why = incident.evidence.ended_because
    if not why or _signal(incident) != "SIGKILL":
        return None
    if "not its own" in why:
        remedy = (
            "have the sample's code close and write to its own descriptors only: no os.closerange, no guessed numbers"
        )
    else:
        remedy = "ulimit -n 65536, in the shell or job script that starts the training, or keep fewer batches"
    return Verdict(Name.KILLED, f"outlive killed it: {why}", remedies=(remedy,))


def killed_by_somebody(incident: Incident) -> Verdict | None:
    name = _signal(incident)
    if name is None or incident.hung:
        return None
    crash = incident.crash
    if crash is not None and crash.is_sent and crash.signal == incident.signal:
        if crash.sender_pid in (incident.pid, crash.pid):
            return _killed_itself(incident, name)
        return _sent(incident, name, crash.sender_pid, crash.sender_uid)
    if name == "SIGKILL":
        return _sigkill(incident)
    if name in _OUTSIDE:
        return _sent(incident, name, None, None)
    return None


def _killed_itself(incident: Incident, name: str) -> Verdict | None:
    if name == "SIGABRT":
        return None  # abort() does just that: it has rules of its own
    python = python_line(incident.stack, depth=1)
    return Verdict(
        Name.KILLED,
        f"the worker sent {name} to itself" + (f", at {python}" if python else ""),
        (f"the sender of {name} was the worker's own pid, {incident.pid}",),
        ("look for os.kill, signal.raise_signal or raise() in the code of the sample and the libraries it calls",),
    )


def _sent(incident: Incident, name: str, pid: int | None, uid: int | None) -> Verdict:
    around = incident.evidence.surroundings
    command = around.sender if around is not None else ""
    if pid is None:
        by = "sent from outside, by whom nobody recorded"
        facts: tuple[str, ...] = ()
    else:
        by = f"sent by process {pid}" + (f" ({command})" if command else ", which is gone")
        facts = (f"the kernel named the sender of {name}: pid {pid}, user {uid}",)
    remedy = _OUTSIDE.get(name, f"have process {pid} leave outlive's workers alone" if pid else "look for who sends it")
    return Verdict(Name.KILLED, f"killed by {name}, {by}", facts, (remedy,))


def _sigkill(incident: Incident) -> Verdict:
    around = incident.evidence.surroundings
    unseen = "the kernel does not tell who sends SIGKILL"
    if around is None or (around.oom.group_kills is None and around.oom.machine_kills is None):
        return Verdict(
            Name.KILLED,
            "killed by SIGKILL from outside: somebody's kill -9, or the kernel's OOM killer",
            (unseen, "this system does not count OOM kills where outlive could read it"),
            _MEMORY_DAEMONS,
            Confidence.POSSIBLE,
        )
    facts = [unseen, "the kernel counted no OOM kill that could be this one"]
    facts += [*_held(incident.evidence.worked), *_machine(around)]
    return Verdict(
        Name.KILLED,
        "killed by SIGKILL that some process sent (kill -9), not by the kernel for want of memory",
        tuple(facts),
        _MEMORY_DAEMONS,
        Confidence.LIKELY,
    )


# ---------------------------------------------------------------- exits


def exited(incident: Incident) -> Verdict | None:
    end = incident.exit
    if end is None or end.code is None or incident.failure is not None:
        return None
    python = python_line(incident.stack, depth=1)
    at = f", at {python}" if python else ""
    words = incident.evidence.last_words.strip().splitlines()
    facts = (f"it exited with code {end.code}",) + ((f"it last wrote: {words[-1]}",) if words else ())
    wrap = (
        "take the exit out of the sample's code, or raise an exception instead: it names the sample and costs no worker"
    )
    by_exit = incident.evidence.worked.left_by_exit
    if by_exit:
        return Verdict(Name.EXITED, f"sys.exit({end.code}) was called{at}", facts, (wrap,))
    if end.code in (1, 130) and _ENDED in incident.stack:  # the latter where it was interrupted, as shells have it
        error = incident.stack[: incident.stack.index(_ENDED)].split()[-1]
        return Verdict(
            Name.EXCEPTION,
            f"{error} left the sample's code and ended the worker{at}",
            (*facts, "it is no Exception, or was raised where no sample is in hand: nothing caught it"),
            (
                f"raise an Exception instead of {error}: it names the sample and costs no worker",
                *(("look for who sends SIGINT, if no code raises it",) if error == "KeyboardInterrupt" else ()),
            ),
        )
    if by_exit is None:
        return Verdict(Name.EXITED, f"something ended it with code {end.code}{at}", facts, (wrap,), Confidence.POSSIBLE)
    return Verdict(
        Name.EXITED,
        f"os._exit({end.code}), or exit({end.code}) in native code, was called",
        (*facts, "no SystemExit passed through the worker"),
        ("search the sample's code and its libraries for os._exit and exit(): nothing else ends a process so", wrap),
        Confidence.LIKELY,
    )


def lost_with_zygote(incident: Incident) -> Verdict | None:
    end = incident.exit
    if end is None or end.signal is not None or end.code is not None:
        return None
    return Verdict(
        Name.ZYGOTE_LOST,
        "the process that forks the workers (outlive-zygote) was killed, and its workers with it",
        ("workers are bound to their zygote: the kernel kills them when it goes", "no sample is to blame"),
        (
            "if the machine or the container was short of memory, lower num_workers: dmesg | grep -i 'killed process'",
            "leave processes named outlive-zygote out of what your scripts kill",
        ),
    )


def _signal(incident: Incident) -> str | None:
    return incident.exit.signal_name if incident.exit is not None and not incident.hung else None


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    over_memory_limit,
    killed_for_memory,
    over_resource_limit,
    killed_by_outlive,
    killed_by_somebody,
    exited,
    lost_with_zygote,
)
