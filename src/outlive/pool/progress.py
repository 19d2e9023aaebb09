"""What a progress bar says: counts and times in, a line or a piece of HTML out.

Reads   counts, and the time it is handed.
Writes  nothing; answers with text.
Never   a stream, the clock, a terminal: `bars.py` has those.

    parse  62% ━━━━━━━━━━━━╸━━━━━━━  6,231/10,000 · 12 failed · 3 retried · 2,104/s · 2 s left
    parse  6,231 done · 12 failed · 2,104/s · 3 s                           where nobody knows how many there are
"""

from __future__ import annotations

import html
import unicodedata
from collections import deque
from dataclasses import dataclass

_WINDOW_S = 15.0  # the rate is that of so long ago till now: a slow beginning is forgotten
_LEAST_S = 0.5  # over a shorter time a rate says nothing
_MOST_BAR = 40
_LEAST_BAR = 5
_LONGEST_LABEL = 30


@dataclass(frozen=True)
class Seen:
    """How far a `map` is, at one moment."""

    done: int  # tasks that have ended, well or not
    failed: int = 0
    retried: int = 0
    total: int | None = None  # None: the iterable has no length
    elapsed_s: float = 0.0
    rate: float | None = None  # tasks per second, lately; None: too early to say
    ended: str = ""  # how: «in», «stopped after», «interrupted after», …; empty while it runs

    @property
    def share(self) -> float | None:
        """Of all tasks; None where their number is not known, or an iterable has given more than its length says."""
        if self.total is None or self.done > self.total:
            return None
        return self.done / self.total if self.total else 1.0

    @property
    def left_s(self) -> float | None:
        if self.ended or self.share is None or self.total is None or not self.rate:
            return None
        return (self.total - self.done) / self.rate


class Pace:
    """Tasks per second over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def note(self, now: float, done: int) -> None:
        if not done:
            return  # workers are starting: that is not how fast they are
        self._marks.append((now, done))
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW_S:
            self._marks.popleft()

    def rate(self, elapsed_s: float) -> float | None:
        if not self._marks:
            return None
        (then, before), (now, done) = self._marks[0], self._marks[-1]
        if now - then >= _LEAST_S and done > before:
            return (done - before) / (now - then)
        return done / elapsed_s if elapsed_s >= _LEAST_S else None


# ---------------------------------------------------------------- words


def duration(seconds: float) -> str:
    """«0.4 s», «41 s», «3 min 20 s», «2 h 5 min», «3 d 4 h»."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return _pair(whole, 60, "min", 1, "s")
    if whole < 86400:
        return _pair(whole, 3600, "h", 60, "min")
    return _pair(whole, 86400, "d", 3600, "h")


def _pair(whole: int, large: int, large_name: str, small: int, small_name: str) -> str:
    rest = whole % large // small
    return f"{whole // large} {large_name}" + (f" {rest} {small_name}" if rest else "")


def speed(rate: float) -> str:
    """«2,104/s», «3.2/s», «14/min», «3/h»."""
    for factor, unit in ((1.0, "s"), (60.0, "min"), (3600.0, "h")):
        each = rate * factor
        if each >= 1 or unit == "h":
            return f"{each:,.0f}/{unit}" if each >= 9.95 else f"{each:.1f}/{unit}"
    raise AssertionError("there is no unit above the last")


def counts(seen: Seen) -> str:
    return f"{seen.done:,} done" if seen.share is None else f"{seen.done:,}/{seen.total:,}"


def facts(seen: Seen) -> list[tuple[int, str]]:
    """Each with its weight: where there is no room, the lightest goes first."""
    told = [(9, counts(seen))]
    if seen.failed:
        told.append((8, f"{seen.failed:,} failed"))
    if seen.retried:
        told.append((3, f"{seen.retried:,} retried"))
    if seen.rate is not None:
        told.append((5, speed(seen.rate)))
    if seen.ended:
        told.append((7, f"{seen.ended} {duration(seen.elapsed_s)}"))
    elif seen.left_s is not None:
        told.append((6, f"{duration(seen.left_s)} left"))
    else:
        told.append((4, duration(seen.elapsed_s)))
    return told


# ---------------------------------------------------------------- a line


def line(seen: Seen, label: str = "", width: int = 1 << 16, *, bar: bool = True, simple: bool = False) -> str:
    """One line of at most `width` columns: the whole of it, or what is most worth knowing. `simple`: ASCII only."""
    label = cut(label, _LONGEST_LABEL)
    told = facts(seen)
    percent = "" if seen.share is None else f"{int(seen.share * 100):>3}%"
    between = " | " if simple else " · "
    while True:
        parts = [label, percent, between.join(text for _, text in told)]
        free = width - columns("  ".join(part for part in parts if part))
        if free >= 0:
            break
        lightest = min(told)
        if lightest[0] > 4 and label:
            label = ""
        elif len(told) > 1:
            told.remove(lightest)
        else:
            return _plain(cut(told[0][1], width), simple)
    length = min(free - 2, _MOST_BAR)
    if bar and seen.share is not None and length >= _LEAST_BAR:
        parts.insert(2, _bar(seen.share, length, simple))
    return _plain("  ".join(part for part in parts if part), simple)


def _bar(share: float, length: int, simple: bool) -> str:
    halves = int(share * 2 * length)
    full, half = divmod(halves, 2)
    if simple:
        return "#" * full + "-" * (length - full)
    return ("━" * full + ("╸" if half else "")).ljust(length, "┄")


def _plain(text: str, simple: bool) -> str:
    return text.encode("ascii", "replace").decode("ascii") if simple else text


def cut(label: str, most: int) -> str:
    """A label that leaves the terminal as it is: no control characters, no more than so many columns."""
    kept = "".join(c for c in str(label) if c.isprintable())
    if columns(kept) <= most:
        return kept
    while kept and columns(kept) > most - 1:
        kept = kept[:-1]
    return kept + "…" if most > 0 else ""


def columns(text: str) -> int:
    """That a terminal needs: two for wide characters, none for accents."""
    if text.isascii():
        return len(text)
    return sum(0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF") for c in text)


# ---------------------------------------------------------------- notebooks


def markup(seen: Seen, label: str = "") -> str:
    """The same for a notebook. `<progress>` is what untrusted notebooks show, too: it needs no script and no style."""
    value = "" if seen.share is None else f' value="{seen.done}" max="{max(1, seen.total or 0)}"'
    if seen.share is None and seen.ended:
        value = ' value="1" max="1"'  # without a value it would move for ever
    if seen.total == 0:
        value = ' value="1" max="1"'
    name = f"<b>{html.escape(cut(label, _LONGEST_LABEL))}</b> " if label else ""
    percent = "" if seen.share is None else f"{int(seen.share * 100)}% "
    told = html.escape(" · ".join(text for _, text in facts(seen)))
    return f"<div>{name}<progress{value}></progress> {percent}{told}</div>"
