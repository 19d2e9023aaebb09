"""An examination as a page for a terminal.

Reads   findings, rows of facts.
Writes  lines of at most 80 columns.
Never   a control character that came with somebody's exception or path.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from outlive._forensics import words
from outlive.doctor.findings import Finding, Rank

_HEADINGS = {
    Rank.WILL_KILL: "Will kill",
    Rank.MAY_KILL: "May kill",
    Rank.CHANGES_DATA: "Changes data",
    Rank.SLOWS_DOWN: "Slows down",
}


def lines(
    facts: Sequence[tuple[str, str]], findings: Sequence[Finding], notes: Sequence[str], unseen: Sequence[str]
) -> list[str]:
    out = words.rows(list(facts), width=words.WIDTH)
    for rank, heading in _HEADINGS.items():
        of_rank = [finding for finding in findings if finding.rank is rank]
        if of_rank:
            out += ["", heading, "─" * len(heading)]
        for at, finding in enumerate(of_rank):
            out += [""] if at else []
            out += _wrapped(finding.title, "  ", "  ")
            for fact in finding.facts:
                out += _wrapped(fact, "    ", "    ")
            for remedy in finding.remedies:
                out += _wrapped(remedy, "    → ", "      ")
    if not findings:
        out += ["", "Nothing was found that kills workers, changes samples or slows them down."]
    for heading, texts in (("Good to know", notes), ("Not looked at", unseen)):
        if texts:
            out += ["", heading, "─" * len(heading)]
            out += [line for text in texts for line in _wrapped(text, "  ", "    ")]
    return out


def _wrapped(text: str, first: str, other: str) -> list[str]:
    return textwrap.wrap(
        " ".join(words.tame(text).split()),
        words.WIDTH,
        initial_indent=first,
        subsequent_indent=other,
        break_on_hyphens=False,
        break_long_words=False,
    )
