"""Verdicts on exceptions, results that cannot be pickled, failed starts, exhausted descriptors, processes and disks.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock; more than some microseconds: exceptions are frequent.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from outlive._forensics.rules.bus import more_shared_memory
from outlive.evidence import Full
from outlive.incident import Failure, Incident, IncidentKind, Stage, first_line
from outlive.places import file_name
from outlive.verdicts import Confidence, Name, Verdict, size_words

_NOT_USERS = (
    *("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ", "/torch/utils/data/"),
    *("/outlive/loader/", "/outlive/_worker/", "/outlive/_transport/", "/outlive/engines/"),
    *("/outlive/launch/", "/outlive/pool/"),
)
_MOST_FRAMES = 100
_DESCRIPTORS = ("Too many open files", "[Errno 24]", "[Errno 23]", "no descriptor left", "received 0 items of ancdata")
_THREADS = (
    *("can't start new thread", "Thread creation failed", "pthread_create failed", "pthread_create() failed"),
    "thread constructor failed",
)
_NO_FORK = ("no process can be started",)
_TRY_AGAIN = ("[Errno 11]", "Resource temporarily unavailable")
_NO_MEMORY = ("Cannot allocate memory", "can't allocate memory", "Unable to allocate", "[Errno 12]")
_NO_ROOM = ("No space left on device", "Disk quota exceeded")
_TRANSIENT = ("ConnectionError", "ConnectionResetError", "ConnectionRefusedError", "TimeoutError", "IncompleteRead")
_UNPICKLABLE = (
    re.compile(r"cannot pickle '([^']+)' object"),
    re.compile(r"[Cc]an't (?:pickle|get) local object '?([^'\n]+)'?"),
    re.compile(r"[Cc]an't pickle <([^>]+>?[^>]*)>"),
)
_SERIALIZING = re.compile(r"^when serializing (\S+) (?:item |reconstructor|state|object)?(.*)$", re.M)
_BYTES_WANTED = re.compile(r"tried to allocate (\d+) bytes")
_LAST_LINES = 6  # of standard error: what killed it is not far above the end


# ---------------------------------------------------------------- exhausted


def descriptors_exhausted(incident: Incident) -> Verdict | None:
    failure = incident.failure
    said = _said(incident, _DESCRIPTORS)
    if not said:
        return None
    open_ones = incident.evidence.worked.descriptors
    around = incident.evidence.surroundings
    limit = around.limits.get("nofile", -1) if around is not None else -1
    machine = "[Errno 23]" in said
    facts = [said]
    if limit >= 0:
        facts.append(f"its limit is {limit}" + (f", {open_ones} were open when last seen" if open_ones else ""))
    if machine:
        return Verdict(
            Name.DESCRIPTORS_EXHAUSTED,
            "the machine has no room for another open file",
            tuple(facts),
            ("sysctl -w fs.file-max=2097152, as root",),
        )
    of = f" of {limit}" if limit >= 0 else ""
    return Verdict(
        Name.DESCRIPTORS_EXHAUSTED,
        f"the process reached its limit{of} of open files" + _at(failure),
        tuple(facts),
        (
            f"ulimit -n {max(65536, 2 * limit)}, in the shell or job script that starts the training",
            "close what a sample opens: with open(…) as file, and no file or connection kept per sample",
        ),
        Confidence.CERTAIN if failure is not None else Confidence.LIKELY,
    )


def processes_exhausted(incident: Incident) -> Verdict | None:
    failure = incident.failure
    said = _said(incident, (*_THREADS, *_NO_FORK))
    if not said and failure is not None and _has(failure.message, _TRY_AGAIN) and "fork" in _innermost(failure):
        said = first_line(failure.message)  # without a fork it is a socket that has nothing to read
    if not said:
        return None
    threads = _has(said, _THREADS)
    around, had = incident.evidence.surroundings, incident.evidence.worked.threads
    limit = around.limits.get("nproc", -1) if around is not None else -1
    facts = [said]
    if limit >= 0:
        facts.append(f"its limit of processes and threads (ulimit -u) is {limit}")
    if had:
        facts.append(f"it had {had} threads when last seen")
    what = "thread" if threads else "process"
    return Verdict(
        Name.PROCESSES_EXHAUSTED,
        f"the system allows no further {what}" + _at(failure),
        tuple(facts),
        (
            f"ulimit -u {max(65536, 2 * limit)}, or a larger limit of the container: docker run --pids-limit",
            "fewer threads in each worker: OMP_NUM_THREADS=1, cv2.setNumThreads(0), or a lower num_workers",
        ),
        Confidence.CERTAIN if failure is not None else Confidence.LIKELY,
    )


def _said(incident: Incident, marks: tuple[str, ...]) -> str:
    """Where one of these stands: in the exception, or in the last lines that a worker wrote before it ended itself."""
    if incident.failure is not None:
        message = incident.failure.message
        return first_line(message) if _has(message, marks) else ""
    end = incident.exit
    if end is None or incident.hung or not (end.code or end.signal_name == "SIGABRT"):
        return ""
    lines = incident.evidence.last_words.strip().splitlines()[-_LAST_LINES:]
    return next((line.strip() for line in reversed(lines) if _has(line, marks)), "")


# ---------------------------------------------------------------- exceptions


def unpicklable_result(incident: Incident) -> Verdict | None:
    """A batch that cannot go through pickle, at either end."""
    failure = incident.failure
    if (
        incident.kind is not IncidentKind.EXCEPTION
        or failure is None
        or failure.stage is not Stage.SENDING
        or failure.type_name in ("MemoryError", "OSError")
        or _has(failure.message, _NO_MEMORY)
    ):
        return None
    if " in unpack\n" in failure.traceback:
        return _not_unpicklable(failure)
    found = next(filter(None, (pattern.search(failure.message) for pattern in _UNPICKLABLE)), None)
    what = _kind_words(found[1]) if found else f"an object in it ({failure.type_name})"
    place = failure.place or _place_told(failure.traceback)
    packing = " in pack\n" in failure.traceback or failure.type_name == "UnpicklableResultError"  # a loader's, a pool's
    if found is None and not place and not packing:
        return None  # something else that is done before a batch is sent, such as a stream's state_dict
    where = f", at batch{place}" if place else ""
    return Verdict(
        Name.UNPICKLABLE_RESULT,
        f"the batch cannot be sent to the trainer: {what} cannot be pickled{where}",
        (f"{failure.type_name}: {first_line(failure.message)}",),
        (
            "leave it out of what __getitem__ returns, or return plain values (tensors, arrays, numbers, text) instead",
            "drop it in collate_fn, if __getitem__ must return it",
        ),
    )


def _not_unpicklable(failure: Failure) -> Verdict:
    return Verdict(
        Name.UNPICKLABLE_RESULT,
        f"the batch has arrived and cannot be unpickled in the trainer{_at(failure)}",
        (f"{_named(failure)}: {first_line(failure.message)}",),
        (
            "see that the class's __setstate__, __reduce__ or __init__ can make it again from what it pickled",
            "return plain values (tensors, arrays, numbers, text) from __getitem__ instead",
        ),
    )


def _kind_words(text: str) -> str:
    if "<lambda>" in text:
        return f"a lambda ({text})"
    if "<locals>" in text:
        return f"{text}, which is defined inside a function,"
    return f"an object of type {text}" if re.fullmatch(r"[\w.]+", text) else text


def _place_told(traceback: str) -> str:
    """Newer Pythons say it, innermost first."""
    if "when serializing " not in traceback:
        return ""
    steps = _SERIALIZING.findall(traceback)
    return "".join(f"[{name}]" if kind in ("dict", "list", "tuple") else "" for kind, name in reversed(steps))


def out_of_memory(incident: Incident) -> Verdict | None:
    failure = incident.failure
    if failure is None or not (incident.kind is IncidentKind.EXCEPTION or _is_own(failure)):
        return None
    if incident.evidence.over_limit_bytes is not None:
        return None  # a limit of outlive's own, which has a rule of its own
    if failure.type_name != "MemoryError" and not _has(failure.message, _NO_MEMORY):
        return None
    wanted = _BYTES_WANTED.search(failure.message)
    asked = f" of {size_words(int(wanted[1]))}" if wanted else ""
    return Verdict(
        Name.EXCEPTION,
        f"{_named(failure)}: no memory for an allocation{asked}{_at(failure)}",
        ("the system refused memory: by ulimit -v, by vm.overcommit_memory=2, or because so much is not there",),
        (
            "see that the sample asks for a sane size: a damaged header often claims gigabytes",
            "ulimit -v unlimited, or a lower num_workers, if it really needs so much",
        ),
    )


def file_too_large(incident: Incident) -> Verdict | None:
    failure = incident.failure
    if incident.kind is not IncidentKind.EXCEPTION or failure is None or "[Errno 27]" not in failure.message:
        return None
    return Verdict(
        Name.RESOURCE_LIMIT,
        f"a file would grow beyond what is allowed (RLIMIT_FSIZE, or the file system's own limit){_at(failure)}",
        (f"{_named(failure)}: {first_line(failure.message)}",),
        ("ulimit -f unlimited, in the shell or job script that starts the training",),
    )


def no_room(incident: Incident) -> Verdict | None:
    """A full disk, or a full /dev/shm, that a write was told of. Who only touches a map dies instead: rules/bus.py."""
    failure = incident.failure
    if failure is None or (failure.full is None and not _has(failure.message, _NO_ROOM)):
        return None
    full = failure.full
    in_shm = "shared memory(shm)" in failure.message or (full is not None and full.mount == "/dev/shm")
    where = full.mount if full is not None else "/dev/shm" if in_shm else "the disk that it wrote to"
    left = f": {size_words(full.free_bytes)} left of {size_words(full.size_bytes)}" if full is not None else ""
    if "Disk quota exceeded" in failure.message:
        cause = f"the quota on {where} is used up"
    elif full is not None and full.no_files:
        cause = f"{where} has no room for another file: all of its inodes are in use"
    else:
        cause = f"{where} {'is full' if full is not None and full.still else 'had no room for so much'}{left}"
    return Verdict(
        Name.SHARED_MEMORY_FULL if in_shm else Name.DISK_FULL,
        cause + _at(failure),
        (f"{_named(failure)}: {first_line(failure.message)}",),
        _make_room(full, in_shm),
        Confidence.CERTAIN if full is not None and full.still else Confidence.LIKELY,
    )


def _make_room(full: Full | None, in_shm: bool) -> tuple[str, ...]:
    shown = full.mount if full is not None else "."
    if full is not None and full.no_files:
        return (
            f"delete files that nobody needs: df -i {shown}, du --inodes -x {shown} | sort -n | tail",
            "fewer and larger files: archives (tar, zip, HDF5) instead of a file per sample",
        )
    if in_shm:
        return more_shared_memory(max(1 << 30, 2 * full.size_bytes if full is not None else 0))
    return (
        f"make room: df -h {shown}, du -xh {shown} | sort -h | tail",
        "if samples write to a cache or to temporary files: TMPDIR=/somewhere/larger, or a cache with a bound",
    )


def raised(incident: Incident) -> Verdict | None:
    failure = incident.failure
    if failure is not None and _is_own(failure):
        said = f"{_named(failure)}: {first_line(failure.message)}"
        facts = ("the batch itself was ready: no sample is to blame",)
        return Verdict(Name.EXCEPTION, f"the worker could not send its batch: {said}", facts, ())
    if incident.kind is not IncidentKind.EXCEPTION or failure is None:
        return None
    if incident.evidence.over_limit_bytes is not None:
        return None
    told = first_line(failure.message)
    remedies = []
    if failure.type_name in _TRANSIENT:
        remedies.append(f"FaultPolicy(retry_on=({failure.type_name},), retries=3), if it may pass by itself")
    if incident.index is not None and failure.stage is Stage.FETCHING:
        remedies.append(f"dataset[{incident.index!r}] in a shell or debugger raises it again")
    remedies.append('faults="skip" leaves such samples out and lists them in loader.quarantine')
    return Verdict(
        Name.EXCEPTION,
        _named(failure) + (f": {told}" if told else "") + _at(failure),
        (f"raised while {failure.stage.words}",) + ((f"try {failure.attempts}",) if failure.attempts > 1 else ()),
        tuple(remedies),
    )


def _is_own(failure: Failure) -> bool:
    """Whether a worker failed to send what it had made."""
    return failure.stage is Stage.DELIVERING


def _named(failure: Failure) -> str:
    return failure.type_name or "an error"


def _has(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark in text for mark in marks)


# ---------------------------------------------------------------- tracebacks


def _at(failure: Failure | None) -> str:
    """«, at dataset.py:88 decode»: the innermost line that is the user's own."""
    frame = user_frame(failure.traceback) if failure is not None else ""
    return f", at {frame}" if frame else ""


def user_frame(traceback: str) -> str:
    """The innermost frame outside of libraries; the innermost of all where there is none. Empty: no frame."""
    end = len(traceback)
    begin = max(0, traceback.rfind("Traceback (most recent call last):"))
    innermost = ""
    for _ in range(_MOST_FRAMES):
        at = traceback.rfind('  File "', begin, end)
        if at < 0:
            break
        path, _, rest = traceback[at + 8 : traceback.find("\n", at)].partition('", line ')
        number, _, function = rest.partition(", in ")
        frame = f"{file_name(path)}:{number} {function}".strip()
        if not _has(path, _NOT_USERS):
            return frame
        innermost = innermost or frame
        end = at
    return innermost


def _innermost(failure: Failure) -> str:
    """The text of the innermost frame, and the line it is at."""
    return failure.traceback[max(0, failure.traceback.rfind('  File "')) :]


RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    descriptors_exhausted,
    processes_exhausted,
    unpicklable_result,
    out_of_memory,
    file_too_large,
    no_room,
    raised,
)
