"""Incidents as small HTML tables: what a notebook shows of them.

Reads   incidents.
Writes  nothing.
Never   a text of the user's that is not escaped: a file name, an exception's message or a symbol may be anything.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from outlive.errors import python_line
from outlive.incident import Incident

_MOST_ROWS = 100
_LONGEST_CELL = 2000
_LEFT = ' style="text-align:left;vertical-align:top"'
_NAME = ' style="text-align:left;vertical-align:top;font-weight:600"'
_TEXT = ' style="text-align:left;vertical-align:top;white-space:pre-wrap"'


def escaped(text: Any) -> str:
    """Safe between tags and in attributes, control characters replaced, surrogates of odd file names too."""
    kept = "".join(c if c in "\n\t" or c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))
    return html.escape(kept, quote=True)


def of_incident(incident: Incident) -> str:
    """One incident: what, why, where, what was done, what to do."""
    rows = [(name, text) for name, text in _rows(incident) if text]
    body = "".join(f"<tr><th{_NAME}>{escaped(n)}</th><td{_TEXT}>{_cell(t)}</td></tr>" for n, t in rows)
    return f"<table><caption{_LEFT}>{_cell(_head(incident))}</caption><tbody>{body}</tbody></table>"


def of_incidents(incidents: Sequence[Incident]) -> str:
    """Many of them, a line each."""
    if not incidents:
        return "<p>no incidents</p>"
    roles, nouns = {i.role for i in incidents}, {i.noun for i in incidents if i.role == "worker"}
    names = ("id", " or ".join(sorted(roles)), " or ".join(sorted(nouns)), "verdict", "cause", "what was done")
    return _table(names, (_cells(i) for i in incidents[:_MOST_ROWS]), len(incidents))


def of_failures(failures: Sequence[tuple[str, BaseException]]) -> str:
    """Tasks that failed: their arguments, and why."""
    if not failures:
        return "<p>no failures</p>"
    names = ("arguments", "error", "verdict", "cause", "id")
    return _table(names, (_failure_cells(*failure) for failure in failures[:_MOST_ROWS]), len(failures))


def _table(names: Sequence[str], lines: Iterable[Iterable[Any]], number: int) -> str:
    head = "".join(f"<th{_LEFT}>{escaped(name)}</th>" for name in names)
    body = "".join("<tr>" + "".join(f"<td{_TEXT}>{_cell(cell)}</td>" for cell in cells) + "</tr>" for cells in lines)
    rest = f"<p>and {number - _MOST_ROWS} more</p>" if number > _MOST_ROWS else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _failure_cells(arguments: str, error: BaseException) -> Iterable[Any]:
    incident = getattr(error, "incident", None)
    verdict = incident.verdict if isinstance(incident, Incident) else None
    try:
        text = str(error)
    except Exception as broken:  # a user's __str__ may itself fail
        text = f"<its __str__ raised {type(broken).__name__}>"
    return (
        arguments,
        type(error).__name__,
        verdict.name if verdict else "",
        verdict.words if verdict else text.strip().partition("\n")[0],
        incident.id if isinstance(incident, Incident) else "",
    )


def _cells(incident: Incident) -> Iterable[Any]:
    verdict = incident.verdict
    return (
        incident.id,
        incident.slot,
        incident.sample.removeprefix(incident.noun).removeprefix("s").strip(),
        verdict.name if verdict else incident.kind,
        verdict.words if verdict else incident.cause,
        incident.action,
    )


def _rows(incident: Incident) -> list[tuple[str, Any]]:
    verdict, examined = incident.verdict, incident.evidence.examined
    native = examined.place.words if examined is not None and examined.place is not None else ""
    return [
        ("verdict", f"{verdict.name} ({verdict.confidence})" if verdict else ""),
        ("cause", verdict.cause if verdict else incident.cause),
        (incident.noun, incident.sample),
        ("", "\n".join(incident.described[:_MOST_ROWS]) if len(incident.indices) > 1 else ""),
        ("python", python_line(incident.stack) or _last_line(incident)),
        ("native", native),
        ("others", "\n".join(incident.consequences)),
        ("what was done", incident.action),
        ("what to do", "\n".join(verdict.remedies) if verdict else ""),
        ("more", f"outlive report {incident.id}" if incident.id else ""),
    ]


def _head(incident: Incident) -> str:
    return str(replace(incident, action=""))


def _last_line(incident: Incident) -> str:
    """Where an exception was raised."""
    lines = incident.failure.traceback.splitlines() if incident.failure else []
    return next((line.strip() for line in reversed(lines) if line.lstrip().startswith('File "')), "")


def _cell(text: Any) -> str:
    text = str(text)
    return escaped(text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…")
