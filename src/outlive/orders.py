"""What a worker is told to do otherwise than usual. Plain data, apart from the other records: a worker needs no more of
them, and a new interpreter is ready sooner.

Reads   nothing.
Writes  nothing.
Never   a process, a file, torch.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOST_SUBSTITUTES = 8  # replacements that are tried in one place before the fault is raised


@dataclass(frozen=True)
class Plan:
    """How a batch differs from what the sampler drew, after what its samples did."""

    excluded: frozenset[int] = frozenset()
    substitutes: Mapping[int, int] = field(default_factory=dict)  # position → which candidate
    probe: tuple[int, ...] | None = None  # run these positions only and throw the result away


WHOLE = Plan()


class SourceWord(str, enum.Enum):
    """What a worker is told that doubts its source."""

    PROBE = "probe"  # see whether it answers, after a pause
    AGAIN = "again"  # it answers: do the batch again
    CONDEMN = "condemn"  # nothing speaks for it: the samples themselves are bad
    LEAVE = "leave"  # a fresh worker may reach it where this one's files and connections are dead


@dataclass(frozen=True)
class AnswerDoubt:
    slot: int
    incarnation: int
    word: SourceWord
    pause_s: float = 0.0
    good_batch: int = -1  # the last one of which every sample was good
    goods: tuple[Any, ...] = ()  # indices that were fetched well before
    others: tuple[Any, ...] = ()  # indices of which nothing is known
