"""What happened under `outlive run`: noted by every process of it, told once, by the outermost Python.

Reads   OUTLIVE_RUN, which names the outermost Python and its list of notes.
Writes  a line per incident into that list, which is nameless memory; the summary, to standard error.
Never   fails a program for it, or tells anything when nothing happened. A program that is killed tells nothing: the
        log and the journal have it.

Imports nothing that Python has not imported when it starts: it is begun in every Python under `outlive run`.
"""

from __future__ import annotations

import atexit
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from outlive.incident import Incident

VARIABLE = "OUTLIVE_RUN"
_NAME = "outlive-run"
_MOST_BYTES = 16 << 20
_MOST_SAMPLES = 12
_QUIET = ("recycled", "suspected hang", "growth", "resized")  # nothing was lost


def begin() -> None:
    """Be the outermost Python of a run, unless another is."""
    if _notes() or not hasattr(os, "memfd_create"):
        return
    try:
        fd = os.memfd_create(_NAME)
    except OSError:
        return  # no descriptor to be had, or not allowed: no summary
    os.environ[VARIABLE] = f"{os.getpid()}:{fd}"
    atexit.register(_end, os.getpid(), fd)


def _notes() -> str:
    """Where notes are written; empty when nobody reads them."""
    pid, _, fd = os.environ.get(VARIABLE, "").partition(":")
    if not (pid.isdecimal() and fd.isdecimal()):
        return ""
    path = f"/proc/{pid}/fd/{fd}"
    try:
        return path if os.readlink(path).startswith(f"/memfd:{_NAME}") else ""
    except OSError:
        return ""  # it has ended, or became another program, or lives where we cannot see it


def note(incident: Incident) -> None:
    """Have an incident in the summary, if there is to be one."""
    if VARIABLE not in os.environ:
        return
    path = _notes()
    if not path:
        return
    import json

    died = incident.pid > 0 and incident.exit is not None and incident.kind.value in ("crash", "hang")
    out = incident.action.startswith(("left out", "replaced by another"))
    told = {
        "cause": incident.verdict.name.value if incident.verdict is not None else incident.kind.value,
        "kind": incident.kind.value,
        "id": incident.id,
        "when": incident.when,
        "died": died,
        "out": [str(index)[:60] for index in incident.indices[:100]] if out else [],
    }
    try:
        fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < _MOST_BYTES:
                os.write(fd, json.dumps(told).encode() + b"\n")
        finally:
            os.close(fd)
    except OSError:
        pass  # the outermost Python has just ended: nobody reads it


def _end(pid: int, fd: int) -> None:
    if os.getpid() != pid:
        return  # a fork of it
    try:
        size = os.fstat(fd).st_size
        if not size:
            return
        import json

        lines = os.pread(fd, size, 0).decode("utf-8", "replace").splitlines()
        text = summary(json.loads(line) for line in lines)
        if text:
            sys.stdout.flush()
            sys.stderr.write(text)
            sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass  # streams that are closed: nobody reads it


def summary(notes: Iterable[dict[str, Any]]) -> str:
    """What the outermost Python says at the end; empty when there is nothing to say."""
    from collections import Counter

    deaths: Counter[str] = Counter()
    others: Counter[str] = Counter()
    out: dict[str, None] = {}
    told_of = [one for one in notes if one["kind"] not in _QUIET]
    for one in told_of:
        (deaths if one["died"] else others)[one["cause"]] += 1
        out.update(dict.fromkeys(one["out"]))
    if not deaths and not others:
        return ""
    told = []
    if deaths:
        count = deaths.total()
        told.append(f"{count} worker{' was' if count == 1 else 's were'} lost ({_listed(deaths)})")
    if others:
        count = others.total()
        told.append(f"{count} other incident{'' if count == 1 else 's'} ({_listed(others)})")
    rows = [f"outlive: {', '.join(told)}"]
    if out:
        from outlive.printable import printable

        named = printable(", ".join(list(out)[:_MOST_SAMPLES])) + (", …" if len(out) > _MOST_SAMPLES else "")
        rows.append(f"  out      {len(out)} sample{'' if len(out) == 1 else 's'} left out or replaced: {named}")
    return "\n".join(rows + _of_journal(told_of)) + "\n"


def _of_journal(notes: list[dict[str, Any]]) -> list[str]:
    """Where to read more: what is not in the journal is not promised."""
    from outlive._forensics import journal

    if not journal.is_on():
        return []
    wanted = {one["id"] for one in notes if one.get("id")}
    try:
        since = min((one["when"] for one in notes if one.get("when")), default=0.0)
        there = wanted & {entry.id for entry in journal.find(since=since)}
    except Exception:  # whatever is wrong with it: it has none of them, then
        there = set()
    missing = len(wanted) - len(there)
    if missing and not there:
        return [f"  journal  none of these could be written to {journal.home()}"]
    more = f" ({missing} of these {'is' if missing == 1 else 'are'} not in it)" if missing else ""
    return [
        f"  journal  {journal.path()}{more}",
        "  next     outlive incidents    each of them; outlive report ID explains one",
    ]


def _listed(counts: Any) -> str:
    return ", ".join(f"{count} × {name}" for name, count in counts.most_common())
