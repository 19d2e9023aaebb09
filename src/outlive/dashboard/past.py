"""Incidents of the journal for the page: past runs, one incident in sections, downloads.

Reads   the journal.
Writes  nothing.
Never   markup: the page gets texts, and puts them in as texts. The download as HTML is `_forensics/page.py`'s.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

from outlive._forensics import journal, page, report
from outlive._forensics.journal import Entry

_ID = re.compile("[0-9a-f]{2,64}")
_MOST = 500
_MOST_OF_A_RUN = 50


def runs(limit: int = _MOST) -> dict[str, Any]:
    """Past and present runs, the newest first, with their last incidents; and what of the journal cannot be read."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    entries = journal.find(limit=limit)
    for entry in entries:
        job = entry.job
        run = found.setdefault(
            (job.host, job.pid, job.command, job.folder, job.rank),
            {**asdict(job), "first": entry.time, "last": entry.time, "count": 0, "verdicts": {}, "incidents": []},
        )
        run["first"] = entry.time
        run["count"] += 1
        name = entry.verdict or entry.kind
        run["verdicts"][name] = run["verdicts"].get(name, 0) + 1
        if len(run["incidents"]) < _MOST_OF_A_RUN:
            run["incidents"].append(_row(entry))
    return {"runs": list(found.values()), "problems": entries.problems}


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "id": entry.id,
        "time": entry.time,
        "verdict": entry.verdict or entry.kind,
        "sentence": entry.sentence,
        "samples": list(entry.samples[:16]),
        "slot": entry.slot,
    }


def one(ident: str) -> Entry | None:
    """The incident of an id; None: there is none, or not yet."""
    if not _ID.fullmatch(ident):
        return None
    return next((entry for entry in journal.find(id_prefix=ident, limit=2) if entry.id == ident), None)


def sections(entry: Entry) -> dict[str, Any]:
    with entry.shown() as incident:
        verdict = incident.verdict
        found: Sequence[report.Section] = [report.summary(incident), *report.sections(incident, entry.job)]
        return {
            "id": entry.id,
            "time": entry.time,
            "headline": report.headline(incident),
            "verdict": entry.verdict or entry.kind,
            "confidence": str(verdict.confidence) if verdict else "",
            "sections": [{"title": each.title, "rows": list(each.rows), "text": each.text} for each in found],
        }


def as_json(entry: Entry) -> str:
    return json.dumps(entry.to_dict(), indent=2)


def as_html(entry: Entry) -> str:
    with entry.shown() as incident:
        return page.of_incident(incident, entry.job, now=time.time(), version=metadata.version("outlive"))
