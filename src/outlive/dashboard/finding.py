"""What a finding is, and the words that all of them are put in. Pure.

Reads   figures.
Writes  nothing.
Never   the clock, a file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MOST_NAMED = 6


@dataclass(frozen=True)
class Finding:
    kind: str
    level: str
    title: str
    which: str  # sample
    who: str  # worker
    since: float  # seconds after 1970; 0: from the beginning
    cost: str
    change: tuple[str, ...]
    why: str = ""
    incidents: tuple[str, ...] = field(default=())  # ids in the journal, the newest last
    at: str = ""  # the batch and epoch of `since`, where it is known

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self)}


def remedies_of(ids: Sequence[str], known: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """The remedies of the newest that the journal knows."""
    return next((tuple(known[ident]) for ident in reversed(ids) if known.get(ident)), ())


def named(samples: Mapping[Any, Any], noun: str) -> str:
    shown = [str(sample) for sample in list(samples)[:_MOST_NAMED]]
    more = len(samples) - len(shown)
    if len(shown) == 1:
        return f"{noun} {shown[0]}"
    return f"{noun}s {', '.join(shown)}" + (f" and {more} more" if more else "") if shown else ""


def with_words(known: Mapping[Any, str], samples: Mapping[Any, Any], noun: str) -> str:
    """With the user's words for each, where there are some."""
    shown = named(samples, noun)
    words = [known.get(sample, "") for sample in list(samples)[:_MOST_NAMED]]
    return f"{shown} ({', '.join(filter(None, words))})" if any(words) else shown


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def seconds_in_words(count: float) -> str:
    if count < 1:
        return f"{count * 1000:.0f} ms"
    if count < 100:
        return f"{count:.3g} s"
    minutes, seconds = divmod(round(count), 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def mean_of(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def upper(text: str) -> str:
    return text[:1].upper() + text[1:]
