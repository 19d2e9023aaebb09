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

from holdfast.errors import python_line
from holdfast.incident import Incident

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
    names = ("id", "worker", incidents[0].noun, "verdict", "cause", "what was done")
    head = "".join(f"<th{_LEFT}>{name}</th>" for name in names)
    body = "".join(_line(i) for i in incidents[:_MOST_ROWS])
    more = len(incidents) - _MOST_ROWS
    rest = f"<p>and {more} more</p>" if more > 0 else ""
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"


def _line(incident: Incident) -> str:
    verdict = incident.verdict
    cells: Iterable[Any] = (
        incident.id,
        incident.slot,
        incident.sample.removeprefix(incident.noun).removeprefix("s").strip(),
        verdict.name if verdict else incident.kind,
        verdict.words if verdict else incident.cause,
        incident.action,
    )
    return "<tr>" + "".join(f"<td{_TEXT}>{_cell(cell)}</td>" for cell in cells) + "</tr>"


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
        ("more", f"holdfast report {incident.id}" if incident.id else ""),
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
