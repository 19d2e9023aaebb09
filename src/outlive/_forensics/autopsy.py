"""The autopsy: examines what a crash left, and has the rules judge.

Reads   an incident; files of libraries that it names.
Writes  nothing.
Never   fails: an autopsy that goes wrong is a fact of its own, and no reason to lose the incident.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from outlive._forensics import callers, examine, mapped_files, verdict
from outlive.incident import Incident, IncidentKind

log = logging.getLogger("outlive")

_NO_DEATHS = (IncidentKind.RECYCLED, IncidentKind.RESIZED, IncidentKind.BREAKER)


def perform(incident: Incident) -> Incident:
    """The incident with its verdict."""
    if incident.verdict is not None or incident.kind in _NO_DEATHS:
        return incident
    incident = _examined(incident)
    try:
        crash = incident.crash
        if crash is not None:
            more = replace(incident.evidence, mapped=mapped_files.look(crash), callers=callers.confirmed(crash))
            incident = replace(incident, evidence=more)
        return replace(incident, verdict=verdict.judge(incident))
    except Exception as error:
        log.debug("the autopsy of %s failed", incident, exc_info=True)
        reason = f"the autopsy itself failed: {type(error).__name__}: {error}"
        return replace(incident, verdict=verdict.unknown(incident, reason))


def _examined(incident: Incident) -> Incident:
    """With what files and decoders say about its crash."""
    evidence = incident.evidence
    if evidence.crash is None or evidence.examined is not None:
        return incident
    try:
        return replace(incident, evidence=replace(evidence, examined=examine.examine(evidence.crash)))
    except Exception:
        log.debug("examining the crash of %s failed", incident, exc_info=True)
        return incident  # The record itself is there, and has the rules say what they can.
