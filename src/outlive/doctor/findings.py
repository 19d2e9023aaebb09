"""What the doctor has to say: one finding, and how bad it is.

Reads   nothing.
Writes  nothing.
Never   a finding without a remedy that can be typed.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any


class Rank(enum.Enum):
    """How bad it is, the worst first."""

    WILL_KILL = "will kill"
    MAY_KILL = "may kill"
    CHANGES_DATA = "changes data"  # nobody dies, but a sample is not what it was: no run can be repeated
    SLOWS_DOWN = "slows down"


@dataclass(frozen=True)
class Finding:
    name: str  # «two-openmp-runtimes»: for programs, and the same from release to release
    rank: Rank
    title: str  # one line, with the values that were seen
    facts: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()  # with values: «num_workers=6», not «fewer workers»

    def __post_init__(self) -> None:
        if not self.remedies:
            raise ValueError(f"the finding {self.name!r} has no remedy: say what to change")

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "rank": self.rank.value,
            "title": self.title,
            "facts": list(self.facts),
            "remedies": list(self.remedies),
        }


def ranked(findings: list[Finding]) -> list[Finding]:
    """The worst first; within a rank as they were found."""
    order = list(Rank)
    return sorted(findings, key=lambda finding: order.index(finding.rank))
