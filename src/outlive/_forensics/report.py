"""Everything that is known of one incident, in sections: what the terminal prints and what the page shows.

Reads   an entry of the journal.
Writes  nothing.
Never   decides how it looks: a section is a title with rows, or with text that keeps its lines.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outlive import private
from outlive._forensics import words
from outlive._forensics.job import Job
from outlive._forensics.journal import Entry
from outlive.crashes import CrashRecord
from outlive.errors import python_line
from outlive.incident import Incident

_MOST_FACTS = 20
_MOST_FRAMES = 24
_MOST_DESCRIBED = 20
_TITLE_INSTRUCTION = "Instruction and registers"
_BARS = "▁▂▃▄▅▆▇█"
_STATES = {
    "R": "runs",
    "S": "waits",
    "D": "waits for a device",
    "T": "stopped",
    "t": "traced",
    "Z": "dead",
    "I": "idle",
}


@dataclass(frozen=True)
class Section:
    title: str
    rows: tuple[tuple[str, str], ...] = ()
    text: str = ""  # lines that belong as they are: stacks, bytes, what a worker wrote


def headline(incident: Incident) -> str:
    return str(replace(incident, action=""))


def summary(incident: Incident) -> Section:
    """Why, where, what was done, what to do."""
    verdict = incident.verdict
    examined = incident.evidence.examined
    rows = [("cause", verdict.cause if verdict else incident.cause)]
    if verdict is not None:
        rows += [("sure", str(verdict.confidence))]
        facts = verdict.facts[:_MOST_FACTS]
        rows += [("facts" if n == 0 else "", fact) for n, fact in enumerate(facts)]
    if incident.indices:
        rows.append((incident.noun, incident.sample.removeprefix(incident.noun).removeprefix("s").strip()))
    if len(incident.indices) > 1:  # of a single one the words stand beside its index
        rows += [("", text) for text in incident.described[:_MOST_DESCRIBED]]
    if examined is not None and examined.place is not None:
        rows.append(("native", examined.place.words))
    python = python_line(incident.stack)
    if python:
        rows.append(("python", python))
    rows += [("others" if n == 0 else "", text) for n, text in enumerate(incident.consequences)]
    rows.append(("done", incident.action or "nothing"))
    remedies = [*verdict.remedies, f"outlive explain {verdict.name}"] if verdict else []
    rows += [("next" if n == 0 else "", remedy) for n, remedy in enumerate(remedies)]
    return Section("What happened", tuple(rows))


def sections(incident: Incident, job: Job | None = None) -> list[Section]:
    """The rest, in the order in which one looks for it; only what there is."""
    found = [
        _task(incident, job),
        _memory(incident),
        Section("Exception", text=incident.failure.traceback.strip("\n") if incident.failure else ""),
        Section("Python stacks", text=incident.stack.strip("\n")),
        Section("Native stack", text=_native(incident)),
        _instruction(incident),
        Section("Threads", text=_threads(incident)),
        Section(
            "Last words" if incident.role == "rank" else "Last words on standard error",
            text=incident.evidence.last_words.strip("\n"),
        ),
        _around(incident),
        _private(incident, job),
    ]
    return [section for section in found if section.rows or section.text]


def shareable(entry: Entry) -> Entry:
    """The same without what may be private: for a bug report, or any other place that others read."""
    with entry.shown() as incident:
        return replace(entry, job=entry.job.without_private(), json=private.without(incident).to_json())


def _private(incident: Incident, job: Job | None) -> Section:
    """What to think of before others read it."""
    names = list(incident.to_dict()["private"])
    if job is not None and job != job.without_private():
        names.append("job")
    rows = (("has", ", ".join(names)), ("without", f"outlive report {incident.id} --share"))
    return Section("What may be private", rows if names else ())


def _task(incident: Incident, job: Job | None) -> Section:
    worked = incident.evidence.worked
    units = "chunks" if incident.noun == "task" else "batches"
    rows = []
    if job is not None:
        rows += [("command", job.command or "python"), ("in", job.folder), ("process", job.place)]
    rows.append((incident.role, f"{incident.slot}, life {incident.incarnation}, pid {incident.pid}"))
    if incident.batch >= 0:
        rows.append(("batch", f"{incident.batch} of epoch {incident.epoch}"))
    rows.append(("stage", incident.stage_words))
    if incident.seconds_in_hand:
        rows.append(("in hand", f"{incident.seconds_in_hand:.2f} s"))
    rows.append(("attempt", f"{incident.attempt} of {incident.attempts_allowed}"))
    if worked.batches_done:
        rows.append(("before", f"{worked.batches_done} {units} done"))
    if worked.recent_indices:
        rows.append((f"{incident.noun}s", ", ".join(map(str, worked.recent_indices)) + " (the last ones it took up)"))
    elif worked.recent_batches:
        rows.append((units, ", ".join(map(str, worked.recent_batches)) + " (the last ones it took up)"))
    if worked.descriptors is not None:
        rows.append(("files", f"{worked.descriptors} descriptors open"))
    if worked.threads is not None:
        rows.append(("threads", str(worked.threads)))
    return Section("Job and task", tuple((name, text) for name, text in rows if text))


def _memory(incident: Incident) -> Section:
    worked, around = incident.evidence.worked, incident.evidence.surroundings
    rows = []
    if worked.memory:
        first, last = worked.memory[0], worked.memory[-1]
        if len(worked.memory) > 1:
            rows.append(("over time", sparkline([sample.resident_bytes for sample in worked.memory])))
        rows.append(("resident", f"{words.size(first.resident_bytes)} → {words.size(last.resident_bytes)}"))
        if last.private_bytes is not None:
            rows.append(("private", words.size(last.private_bytes)))
    if worked.peak_resident_bytes is not None:
        rows.append(("peak", words.size(worked.peak_resident_bytes)))
    if around is not None and rows:
        for name, count in (("limit", around.oom.group_limit_bytes), ("machine", around.total_bytes)):
            if count is not None:
                rows.append((name, words.size(count)))
    return Section(f"Memory of the {'rank' if incident.role == 'rank' else 'worker'}", tuple(rows))


def sparkline(values: list[int], width: int = 60) -> str:
    """A line of bars; the highest value of each stretch."""
    step = max(1, -(-len(values) // width))
    highest = [max(0, *values[i : i + step]) for i in range(0, len(values), step)]
    top = max(highest)
    return "".join(_BARS[value * len(_BARS) // (top + 1)] for value in highest)


def _native(incident: Incident) -> str:
    seen, examined = incident.evidence.seen, incident.evidence.examined
    if seen is not None and seen.native_stack:
        return seen.native_stack.strip("\n")
    if examined is None or not examined.frames:
        return ""
    return "\n".join(f"#{n:<2} {frame.words}" for n, frame in enumerate(examined.frames[:_MOST_FRAMES]))


def _instruction(incident: Incident) -> Section:
    crash, examined = incident.crash, incident.evidence.examined
    if crash is None:
        return Section(_TITLE_INSTRUCTION)
    rows = [("signal", f"{crash.signal_name}, {crash.code_name}")]
    if crash.address is not None:
        region = crash.region_of(crash.address)
        where = f" in {region.path or 'memory without a name'} ({region.permissions})" if region else ", not mapped"
        rows.append(("address", f"{crash.access or 'access'} of {crash.address:#x}{where}"))
    if crash.sender_pid is not None:
        rows.append(("sender", f"pid {crash.sender_pid}, user {crash.sender_uid}"))
    thread = f" «{crash.thread_name}»" if crash.thread_name else ""
    rows.append(("thread", f"{crash.thread}{thread}{', the main thread' if crash.thread == crash.pid else ''}"))
    if examined is not None and examined.instruction is not None:
        rows.append(("code", examined.instruction.text))
        if examined.instruction.features:
            rows.append(("needs", ", ".join(examined.instruction.features)))
        if examined.instruction.missing:
            rows.append(("missing", ", ".join(examined.instruction.missing)))
    if examined is not None and examined.cpu:
        rows.append(("cpu", examined.cpu))
    return Section(_TITLE_INSTRUCTION, tuple(rows), "\n\n".join(filter(None, (_bytes(crash), _registers(crash)))))


def _bytes(crash: CrashRecord) -> str:
    if crash.instruction_pointer is None or not crash.instruction:
        return ""
    lines = []
    for start in range(0, len(crash.instruction), 16):
        piece = crash.instruction[start : start + 16]
        lines.append(f"{crash.instruction_pointer + start:#018x}  {piece.hex(' ')}")
    return "\n".join(lines)


def _registers(crash: CrashRecord) -> str:
    widest = max(map(len, crash.registers), default=0)
    cells = [f"{name:<{widest}} {value:#018x}" for name, value in crash.registers.items()]
    in_row = max(1, words.WIDTH // (widest + 21))
    return "\n".join("  ".join(cells[i : i + in_row]) for i in range(0, len(cells), in_row))


def _threads(incident: Incident) -> str:
    seen = incident.evidence.seen
    lines = []
    for thread in seen.threads if seen is not None else ():
        state = _STATES.get(thread.state, thread.state or "state unknown")
        call = f" in {thread.system_call}" if thread.system_call else ""
        target = f" on {thread.target}" if thread.target else ""
        waits = f" ({thread.waits_in})" if thread.waits_in else ""
        lines.append(
            f"{thread.number:<8} {thread.name:<16} {state}{call}{target}{waits}{', busy' if thread.busy else ''}"
        )
        lines += [f"         {line}" for line in thread.kernel_stack]
    return "\n".join(lines)


def _around(incident: Incident) -> Section:
    around = incident.evidence.surroundings
    if around is None:
        return Section("The machine")
    rows: list[tuple[str, str]] = []
    if around.available_bytes is not None and around.total_bytes is not None:
        rows.append(("memory", f"{words.size(around.available_bytes)} of {words.size(around.total_bytes)} available"))
    if around.oom.group:
        rows.append(("cgroup", around.oom.group))
    if around.oom.group_used_bytes is not None and around.oom.group_limit_bytes is not None:
        used, limit = words.size(around.oom.group_used_bytes), words.size(around.oom.group_limit_bytes)
        rows.append(("", f"{used} of {limit} used"))
    for name, kills in (("cgroup", around.oom.group_kills), ("machine", around.oom.machine_kills)):
        if kills:
            rows.append(("oom kills", f"{kills} by the {name}"))
    if around.oom.log:
        rows.append(("kernel", around.oom.log))
    if around.pressure:
        rows.append(("pressure", around.pressure))
    if around.shm_bytes is not None and around.shm_free_bytes is not None:
        rows.append(("/dev/shm", f"{words.size(around.shm_free_bytes)} of {words.size(around.shm_bytes)} free"))
    limits = ", ".join(f"{name} {count}" for name, count in around.limits.items() if count >= 0)
    if limits:
        rows.append(("limits", limits))
    return Section("The machine", tuple(rows))
