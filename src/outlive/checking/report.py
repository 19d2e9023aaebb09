"""What a check found: for people, for programs, and as a quarantine file.

Reads   what was counted.
Writes  the quarantine file, when asked to.
Never   a value of a sample.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outlive._forensics import words
from outlive.loader.fingerprint import Fingerprint
from outlive.loader.quarantine_file import BadSample, QuarantineFile
from outlive.quantities import in_words

_MOST_ROWS = 20
_WIDTH = 120
_BESIDE = 100  # columns; with fewer the cause of a bad sample has a line of its own


@dataclass(frozen=True)
class Figures:
    """Of the good samples: seconds to fetch one, or bytes of one."""

    p50: float = 0.0
    p99: float = 0.0
    max: float = 0.0
    max_index: Any = None
    threshold: float = 0.0  # from where on one is told apart
    beyond: int = 0  # so many are


@dataclass(frozen=True)
class Outstanding:
    """A sample that is far slower or larger than others."""

    index: Any
    value: float


@dataclass(frozen=True)
class CheckReport:
    """What `outlive.check` found. `good` says it in a word.

    An index is what the dataset is asked with; of an iterable dataset a pair: the worker, and the how manyth sample of
    those that it took.
    """

    dataset: str
    checked: int  # samples that were tried, good or bad
    total: int | None  # that were to be tried; None: nobody knows, of a stream
    bad: tuple[BadSample, ...]
    seconds: Figures
    bytes: Figures
    slow: tuple[Outstanding, ...]
    huge: tuple[Outstanding, ...]
    shaky: tuple[BadSample, ...]  # cost a worker once, and were fetched the next time
    unreached: tuple[str, ...]  # what could not be checked, and why
    elapsed_s: float
    workers: int
    choice: str  # «5 %, shard 1 of 4»; empty: everything
    fingerprint: Fingerprint
    stream_workers: int | None = None

    @property
    def good(self) -> bool:
        return not self.bad and not self.unreached

    @property
    def is_empty(self) -> bool:
        """Whether the dataset has no samples at all; a shard of it may have none."""
        return not self.checked and not self.fingerprint.length and not self.choice

    @property
    def complete(self) -> bool:
        """Whether every sample that was to be tried was."""
        return not self.unreached and (self.total is None or self.checked == self.total)

    def write_quarantine(self, path: str | os.PathLike[str]) -> None:
        """For `DataLoader(quarantine=path)`."""
        QuarantineFile(
            self.fingerprint,
            self.bad,
            self.stream_workers,
            self.checked,
            self.total,
            made=max((sample.when for sample in self.bad), default=0.0) or time.time(),
        ).write(path)

    def to_dict(self) -> dict[str, Any]:
        told = asdict(self)
        told["fingerprint"] = self.fingerprint.digest
        return {"good": self.good, "complete": self.complete, **told}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def __repr__(self) -> str:
        return f"<CheckReport of {self.dataset}: {_headline(self)}>"


def duration(seconds: float) -> str:
    """«340 ns», «12 µs», «3.1 ms», «2.4 s»."""
    for factor, unit in ((1e9, "ns"), (1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds:.3g} s" if seconds < 999.5 else f"{seconds:,.0f} s"


def named(index: Any) -> str:
    if isinstance(index, (tuple, list)) and len(index) == 2:
        return f"{index[1]} of worker {index[0]}"
    return str(index)


def lines(report: CheckReport, width: int | None = None) -> list[str]:
    """The report for a terminal, in so many columns; None: where nobody knows how many there are."""
    width = width or _WIDTH
    rate = report.checked / report.elapsed_s if report.elapsed_s else 0.0
    plural = "" if report.workers == 1 else "s"
    out = [f"{report.dataset}: {_headline(report)}"]
    part = f" ({report.choice})" if report.choice else ""
    of = "" if report.total is None or report.total == report.checked else f" of {report.total:,}"
    out += [
        "",
        f"  checked   {report.checked:,}{of} samples{part} in {report.elapsed_s:,.1f} s,"
        f" {rate:,.0f}/s with {report.workers} worker{plural}",
    ]
    for name, figures, form in (("time", report.seconds, duration), ("size", report.bytes, in_words)):
        if figures.max_index is not None:
            out.append(
                f"  {name:<9} p50 {form(figures.p50)}, p99 {form(figures.p99)}, "
                f"max {form(figures.max)} (sample {named(figures.max_index)})"
            )
    if report.bad:
        beside = "cause" if width >= _BESIDE else ""
        out += ["", f"  {'bad':<22} {'verdict':<20} {'report':<9} {beside}".rstrip()]
        out += [line for sample in report.bad[:_MOST_ROWS] for line in _bad_row(sample, width)]
        out += _rest(len(report.bad))
    for title, kept, figures, form in (
        ("slow", report.slow, report.seconds, duration),
        ("huge", report.huge, report.bytes, in_words),
    ):
        if kept:
            out += ["", f"  {title:<22} more than {form(figures.threshold)}"]
            out += [_row(named(each.index), form(each.value)) for each in kept[:_MOST_ROWS]]
            out += _rest(figures.beyond)
    if report.shaky:
        out += ["", f"  {'shaky':<22} cost a worker once, and was fetched the next time"]
        out += [line for sample in report.shaky[:_MOST_ROWS] for line in _bad_row(sample, width)]
        out += _rest(len(report.shaky))
    if report.unreached:
        out += ["", "  not checked", *(f"    {words.cut(text, width - 4)}" for text in report.unreached)]
    return out


def _headline(report: CheckReport) -> str:
    if report.good:
        return "all samples are good" if report.checked else "it has no samples"
    said = [f"{len(report.bad):,} bad sample{'' if len(report.bad) == 1 else 's'}"] if report.bad else []
    return ", ".join(said + (["part of it could not be checked"] if report.unreached else []))


def _row(name: str, second: str) -> str:
    return f"    {words.cut(name, 40):<20} {words.cut(second, 20):<20}".rstrip()


def _bad_row(sample: BadSample, width: int) -> list[str]:
    head = f"{_row(sample.name, sample.verdict or sample.kind):<45} {sample.incident:<8} "
    if width < _BESIDE:
        return [head.rstrip(), f"      {words.cut(sample.cause, width - 6)}"]
    return [f"{head} {words.cut(sample.cause, max(30, width - len(head) - 1))}"]


def _rest(number: int) -> Sequence[str]:
    return [f"    … and {number - _MOST_ROWS:,} more"] if number > _MOST_ROWS else []
