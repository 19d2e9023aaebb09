"""Finds the verdict on an incident: the first rule that knows one.

Reads   an incident with its evidence.
Writes  nothing.
Never   a process, a file, a lock, the clock.
"""

from __future__ import annotations

from outlive._forensics import task_words, wording
from outlive._forensics.rules import aborts, faults, forked_threads, growth, hangs, instructions, kills, python, starts
from outlive.incident import Incident
from outlive.verdicts import Confidence, Name, Verdict

# What has evidence of its own comes before what is known by its signal alone. Instructions come before faults: code
# that was to be run where there is none is no wild pointer, and hlt is no access to memory.
RULES = (
    *growth.RULES,
    *forked_threads.RULES,
    *hangs.RULES,
    *python.RULES,
    *starts.RULES,
    *instructions.RULES,
    *faults.RULES,
    *aborts.RULES,
    *kills.RULES,
)


def judge(incident: Incident) -> Verdict:
    verdict = next(filter(None, (rule(incident) for rule in RULES)), None)
    if verdict is None:
        return unknown(incident)
    return _in_words_of(incident, verdict)


def unknown(incident: Incident, *more: str) -> Verdict:
    """No rule knows it: everything that is known, instead of a guess."""
    return _in_words_of(incident, _unknown(incident, *more))


def _in_words_of(incident: Incident, verdict: Verdict) -> Verdict:
    """Rules speak of a loader's workers and samples."""
    if incident.role == "rank":
        return wording.for_rank(verdict, incident)
    return task_words.for_task(verdict, incident) if incident.noun == "task" else verdict


def _unknown(incident: Incident, *more: str) -> Verdict:
    facts = [incident.cause]
    cause = f"{incident.cause}, and nothing says why"
    if incident.exit is not None and not incident.hung:
        cause = incident.exit.explanation
    if incident.evidence.last_words:
        facts.append(f"it last wrote: {incident.evidence.last_words.strip().splitlines()[-1]}")
    return Verdict(
        Name.UNKNOWN,
        cause,
        facts=(*facts, *more),
        remedies=('run the sample alone: dataset[index] in a fresh interpreter, under "python -X faulthandler"',),
        confidence=Confidence.POSSIBLE,
    )
