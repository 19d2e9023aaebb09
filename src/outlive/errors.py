"""The errors that outlive raises, each with fields, so that nobody parses text.

Reads   incidents.
Writes  messages: who, how, doing what, what was done about it, what you can do.
Never   torch: the loader's errors are RuntimeErrors, as torch's are.
"""

from __future__ import annotations

import os
import signal as _signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from outlive.incident import Incident, IncidentKind, first_line
from outlive.places import file_name

_MOST_REMEDIES = 2
_MOST_FACTS = 3
_OWN_FOLDER = os.path.dirname(__file__)


class OutliveError(Exception):
    """What every error of outlive's own is."""


class WorkerCrashedError(OutliveError, RuntimeError):
    """A sample killed every worker that took it, or a worker died in a way that cannot be retried."""

    def __init__(self, message: str, incident: Incident | None = None) -> None:
        super().__init__(message)
        self.incident = incident

    def _repr_html_(self) -> str | None:
        """For a notebook that shows the error as a value; one that is raised it prints as text."""
        return self.incident._repr_html_() if self.incident is not None else None

    def __reduce__(self) -> tuple[type[WorkerCrashedError], tuple[str, Incident | None]]:
        return type(self), (str(self), self.incident)


class WorkerHungError(WorkerCrashedError):
    """A sample took longer than it may, in every worker that took it."""


class WorkerStartError(WorkerCrashedError):
    """A worker could not be started: an import, an unpickling or worker_init_fn failed."""


class TooManyFaultsError(OutliveError, RuntimeError):
    """A limit of the fault policy was exceeded: restarts, or bad samples."""

    def __init__(self, message: str, incidents: Sequence[Incident] = ()) -> None:
        super().__init__(message)
        self.incidents = tuple(incidents)

    def _repr_html_(self) -> str:
        from outlive import tables

        return tables.of_incidents(self.incidents)

    def __reduce__(self) -> tuple[type[TooManyFaultsError], tuple[Any, ...]]:
        return type(self), (str(self), self.incidents)


class SourceUnavailableError(TooManyFaultsError):
    """Where the samples come from was gone for longer than `breaker_patience`. No sample was condemned for it."""

    def __init__(
        self,
        message: str,
        incidents: Sequence[Incident] = (),
        incident: Incident | None = None,
        patience_s: float = 0.0,
    ) -> None:
        super().__init__(message, incidents)
        self.incident = incident  # what was found last
        self.patience_s = patience_s

    def __reduce__(self) -> tuple[type[TooManyFaultsError], tuple[Any, ...]]:
        return type(self), (str(self), self.incidents, self.incident, self.patience_s)


class PositionError(OutliveError, ValueError):
    """A loader's state cannot be taken up here: another dataset, other settings, or no state at all."""


class RankFailedError(OutliveError, RuntimeError):
    """Another rank of this job has failed: this one cannot go on alone."""

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank  # the one that failed

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class QuarantineFileError(OutliveError, ValueError):
    """A quarantine file cannot be read, or is of another dataset."""


class ForkedLoaderError(OutliveError, RuntimeError):
    """An iterator was used in a process that is not the one which made it."""


def two_threads_error() -> OutliveError:
    return OutliveError(
        "another thread is in next() of this iterator: one iterator serves one thread at a time; guard next() with a "
        "lock, or have one thread take the batches and hand them on, such as by a queue.Queue"
    )


def rank_error(rank: int, fallen: int, words: str) -> RankFailedError:
    return RankFailedError(
        f"{words}\n"
        f"  state    this rank, {rank}, is well, but its next collective would wait for rank {fallen} for ever\n"
        f"  next     what rank {fallen} wrote itself: its log, or `outlive incidents` on its machine",
        fallen,
    )


def crash_error(incident: Incident, *, healthy_slots: int, delivered: int) -> WorkerCrashedError:
    """The error for a sample that is poison under faults="raise"."""
    kind = WorkerHungError if incident.kind is IncidentKind.HANG else WorkerCrashedError
    return kind(crash_message(incident, healthy_slots=healthy_slots, delivered=delivered), incident)


def crash_message(incident: Incident, *, healthy_slots: int, delivered: int) -> str:
    """The five lines of a death: cause, python, task, state, next."""
    rows = [("cause", _cause(incident)), *where(incident)]
    rows.append(("task", _task(incident)))
    others = f"the other {healthy_slots} workers go on; " if healthy_slots > 1 else ""
    others = "the other worker goes on; " if healthy_slots == 1 else others
    done = f"{delivered} batch{'' if delivered == 1 else 'es'} delivered"
    if incident.stuck:
        rows.append(("state", f"{others}{done}; the rest of worker {incident.slot}'s stream cannot be reached"))
        rows.append(("next", "give the iterator a method skip(n) that steps over n samples without making them"))
        return _message(incident, rows)
    rows.append(("state", f"{others}{done}; next() goes on with the batch after this"))
    advice = [f'faults="skip"            leave {_it(incident)} out and finish the epoch']
    if incident.kind is IncidentKind.HANG:
        seconds = max(60, round(incident.seconds_in_hand * 10))
        advice.append(f"FaultPolicy(sample_timeout={seconds})   if such a sample is only slow")
    else:
        advice.append('faults="replace"         put another sample in its place, so that batches keep their size')
    if "OUTLIVE_RUN" in os.environ:  # the loader may be a library's, and out of the reader's reach
        advice.append("outlive run --faults skip …   the same, where the program is not to be changed")
    advice += remedies(incident, told=advice)
    rows.append(("next", advice[0]))
    rows += [("", line) for line in advice[1:]]
    return _message(incident, rows)


def task_message(incident: Incident) -> str:
    """The same for a task of a pool."""
    rows = [("cause", _cause(incident, who="")), *where(incident)]
    seconds = f", {incident.seconds_in_hand:.1f} s in hand" if incident.seconds_in_hand >= 0.1 else ""
    rows.append(("task", f"it has now cost {incident.attempt} of {incident.attempts_allowed} workers{seconds}"))
    rows.append(("state", "the worker was replaced; every other task goes on"))
    advice = ['pool.map(…, faults="skip")   to go on without it; pool.failures then has it']
    if incident.kind is IncidentKind.HANG:
        advice.append(
            f"Pool(task_timeout={max(60, round(incident.seconds_in_hand * 10))})   if such a task is only slow"
        )
    advice += remedies(incident, told=advice)
    rows.append(("next", advice[0]))
    rows += [("", line) for line in advice[1:]]
    return _message(incident, rows)


def renewal_error(incident: Incident, text: str, *, delivered: int) -> WorkerHungError:
    """The error where all workers would hang, and what they are to do cannot be sent to a clean process."""
    rows = [("cause", _cause(incident)), *where(incident)]
    parts = incident.evidence.unpicklable
    cannot = f"{parts[0].path} ({parts[0].type_name}) cannot be pickled" if parts else "it cannot be pickled"
    task = incident.noun == "task"
    sent = "the pool's initializer" if task else "the dataset"
    rows.append(("healing", f"workers from a clean process would not hang, but {sent} cannot get there: {cannot}"))
    rows.append(("", first_line(text)))
    if not task:
        rows.append(("state", f"{delivered} batch{'' if delivered == 1 else 'es'} delivered; no sample was blamed"))
    what, place = parts[0].path if parts else "that", "the initializer" if task else "worker_init_fn"
    advice = [
        f"make {what} lazily, on first use in the worker or in {place}, and leave it out in __getstate__",
        f'{"mp_context" if task else "multiprocessing_context"}="spawn"   workers then begin in a clean process',
    ]
    told = [*advice, *(incident.verdict.remedies if incident.verdict is not None else ())]
    rows += [("" if at else "next", line) for at, line in enumerate([*advice, *remedies(incident, told=told)])]
    return WorkerHungError(_message(incident, rows), incident)


def where(incident: Incident) -> list[tuple[str, str]]:
    """In which native code, and in which Python code."""
    rows = []
    examined = incident.evidence.examined
    if examined is not None and examined.place is not None and examined.place.library:
        rows.append(("native", examined.place.words))
    python = python_line(incident.stack)
    if python:
        rows.append(("python", python))
    return rows


def remedies(incident: Incident, told: Sequence[str] = ()) -> list[str]:
    """What the verdict advises beyond what was told already, and where to read on."""
    verdict = incident.verdict
    if verdict is None:
        return []
    new = [remedy for remedy in verdict.remedies if remedy not in told]
    read_on = [f"outlive explain {verdict.name}   what this means, and what else helps"]
    if incident.id and os.environ.get("OUTLIVE_JOURNAL") != "0":
        read_on.append(f"outlive report {incident.id}   everything that was saved")
    return [*new[:_MOST_REMEDIES], *read_on]


def _message(incident: Incident, rows: list[tuple[str, str]]) -> str:
    body = "\n".join(f"  {name:<8} {text}" for name, text in rows)
    return f"worker {incident.slot} {incident.cause} while {incident.doing}\n\n{body}\n"


def _it(incident: Incident) -> str:
    return "this sample" if len(incident.indices) == 1 else "these samples"


def _cause(incident: Incident, who: str = "DataLoader ") -> str:
    if incident.kind is IncidentKind.HANG:
        why = f": {incident.verdict.words}" if incident.verdict is not None else ""
        return f"no progress for {incident.seconds_in_hand:.1f} s (worker pid {incident.pid}){why}"
    if incident.exit is None:
        return "unknown"
    if incident.exit.signal is not None:
        # The sentence that torch says, and that people's code may look for.
        name = _signal.strsignal(incident.exit.signal) or incident.exit.signal_name
        said = f"{who}worker (pid {incident.pid}) is killed by signal: {name}."
    else:
        said = f"{who}worker (pid(s) {incident.pid}) exited unexpectedly"
    cause = incident.verdict.words if incident.verdict is not None else incident.exit.explanation
    return f"{cause}\n           {said}"


def _task(incident: Incident) -> str:
    deaths = f"{incident.attempt} of {incident.attempts_allowed}"
    seconds = f", {incident.seconds_in_hand:.1f} s in hand" if incident.seconds_in_hand >= 0.1 else ""
    have = "has" if len(incident.indices) == 1 else "have"
    return (
        f"batch {incident.batch} of epoch {incident.epoch}; {_it(incident)} {have} now cost {deaths} workers{seconds}"
    )


def python_line(stack: str, depth: int = 3) -> str:
    """«dataset.py:88 decode ← dataset.py:61 __getitem__» from what faulthandler wrote."""
    frames: list[str] = []
    for line in _dying_thread(stack):
        path, _, rest = line[6:].partition('", line ')
        number, _, function = rest.partition(" in ")
        if os.path.dirname(path).startswith(_OWN_FOLDER):
            break
        frames.append(f"{file_name(path)}:{number} {function}")
    return "  ←  ".join(frames[:depth])


def _dying_thread(stack: str) -> list[str]:
    """The frames of the thread that died; of the main thread, which comes last, where none is marked."""
    threads: list[tuple[str, list[str]]] = []
    for line in stack.splitlines():
        if "(most recent call first)" in line:
            threads.append((line, []))
        elif threads and line.strip().startswith('File "'):
            threads[-1][1].append(line.strip())
    marked = [frames for header, frames in threads if header.startswith("Current thread")]
    return marked[-1] if marked else (threads[-1][1] if threads else [])


def verdict_note(incident: Incident) -> str:
    """The verdict as a note on somebody else's error: what was the cause, what it rests on, what to do."""
    verdict = incident.verdict
    if verdict is None:
        return ""
    rows = [("cause", verdict.words), *(("", fact) for fact in verdict.facts[:_MOST_FACTS])]
    rows += [("" if at else "next", line) for at, line in enumerate(remedies(incident))]
    return "\n".join(["outlive:", *(f"  {name:<8} {text}" for name, text in rows)])


def start_error(incident: Incident, attempts: int) -> WorkerStartError:
    failure = incident.failure
    pid = f" (pid {incident.pid})" if incident.pid > 0 else ""
    lines = [f"worker {incident.slot}{pid} could not be started in {attempts} attempts"]
    task = incident.noun == "task"
    advice = "run worker_init_fn and dataset[0] once in this process, with num_workers=0, to see it fail here"
    advice = "call the initializer once in this process, to see it fail here" if task else advice
    if failure is not None:
        named = f"{failure.type_name}: " if failure.type_name else ""
        lines[0] += f": {named}{first_line(failure.message)}"
        if failure.traceback:
            lines += ["", failure.traceback]
        advice = (
            "under spawn and forkserver the main module is imported again: what starts the "
            f"{'pool' if task else 'training'} "
            'belongs under  if __name__ == "__main__":'
        )
    else:
        ended = incident.exit.words if incident.exit else "ended"
        what = f"it {incident.cause if incident.hung else ended} while {incident.stage_words}"
        cause = incident.exit.explanation if incident.exit else "unknown"
        cause = incident.verdict.words if incident.verdict is not None else cause
        lines += ["", f"  cause    {what}: {cause}"]
        python = python_line(incident.stack)
        if python:
            lines.append(f"  python   {python}")
        if incident.exit and incident.exit.signal is not None:
            said = _signal.strsignal(incident.exit.signal)
            lines.append(
                f"           {'' if task else 'DataLoader '}worker (pid {incident.pid}) is killed by signal: {said}."
            )
    if incident.verdict is not None:
        if failure is not None:
            lines += ["", f"  cause    {incident.verdict.words}"]
        first, *others = remedies(incident)
        lines += ["", f"  next     {first}", *(f"           {line}" for line in others)]
    else:
        lines += ["", f"  next     {advice}"]
    return WorkerStartError("\n".join(lines) + "\n", incident)


def limit_message(text: str, incidents: Sequence[Incident], remedy: str) -> str:
    """Sums up what happened before a limit ended the epoch."""
    causes = Counter(_short_cause(i) for i in incidents)
    lines = [text, ""]
    for cause, count in causes.most_common(6):
        examples = [i.sample for i in incidents if _short_cause(i) == cause and i.indices]
        named = list(dict.fromkeys(examples))
        lines.append(
            f"  {count:>5} ×  {cause}"
            + (f"  ({', '.join(named[:5])}{', …' if len(named) > 5 else ''})" if named else "")
        )
    if len(causes) > 6:
        lines.append(f"          and {len(causes) - 6} more causes")
    lines += ["", f"  next     {remedy}", "           loader.incidents     every one of them, with stacks"]
    return "\n".join(lines) + "\n"


def _short_cause(incident: Incident) -> str:
    if incident.kind is IncidentKind.EXCEPTION and incident.failure:
        return incident.failure.type_name
    if incident.kind is IncidentKind.HANG:
        return f"hang while {incident.stage_words}"
    if incident.exit and incident.failure is None:
        return f"{incident.exit.words} while {incident.stage_words}"
    return incident.cause


def source_error(
    text: str, incident: Incident, seen: Sequence[Incident], *, delivered: int, patience_s: float
) -> SourceUnavailableError:
    """The error that ends an epoch whose source has been gone for too long. `seen`: the breaker's incidents."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seen[0].when if seen else incident.when))
    rows = [("since", since)]
    if incident.indices:
        rows.append(("example", f"{incident.sample}, batch {incident.batch} of epoch {incident.epoch}"))
    if incident.failure is not None:
        rows.append(("python", last_frame(incident.failure.traceback)))
    done = f"{delivered} batch{'' if delivered == 1 else 'es'} delivered"
    rows.append(("state", f"{done}; no sample was condemned for it: a new epoch fetches them all"))
    if not delivered:
        rows.append(("next", "see that paths, hosts and credentials are right: not one batch was ever delivered"))
    else:
        rows.append(("next", "see that the disk, mount or host is there again, then start again"))
    longer = max(600, round(2 * patience_s))
    rows.append(("", f"FaultPolicy(breaker_patience={longer})   to wait longer; None: for ever"))
    rows.append(("", "loader.incidents     when it was gone, and when it was back"))
    body = "\n".join(f"  {name:<8} {line}" for name, line in rows)
    return SourceUnavailableError(f"{text}\n\n{body}\n", seen, incident, patience_s)


def last_frame(traceback: str) -> str:
    """«dataset.py:88 decode: open(path)» from a traceback as Python prints it."""
    lines = traceback.splitlines()
    frames = [at for at, line in enumerate(lines) if line.startswith('  File "') and '", line ' in line]
    if not frames:
        return first_line(traceback)
    at = frames[-1]
    path, _, rest = lines[at][8:].partition('", line ')
    number, _, function = rest.partition(", in ")
    code = lines[at + 1].strip() if at + 1 < len(lines) and lines[at + 1].startswith("    ") else ""
    return f"{file_name(path)}:{number} {function}" + (f": {first_line(code)}" if code else "")
