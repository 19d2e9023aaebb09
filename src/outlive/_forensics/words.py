"""Times, sizes and texts as people read them in a terminal.

Reads   nothing but what it is handed.
Writes  nothing.
Never   lets a control character through: an exception's message must not steer somebody's terminal.
"""

from __future__ import annotations

import datetime
import re
import textwrap

from outlive.printable import printable

WIDTH = 80
_SPANS = (
    ("year", 365 * 86400),
    ("month", 30 * 86400),
    ("week", 7 * 86400),
    ("day", 86400),
    ("hour", 3600),
    ("minute", 60),
)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([smhdw])\s*")


def ago(then: float, now: float) -> str:
    """«2 hours ago»."""
    passed = now - then
    if passed < 0:
        return "just now" if passed > -5 else "in the future"
    for name, seconds in _SPANS:
        if passed >= seconds:
            count = int(passed // seconds)
            return f"{count} {name}{'' if count == 1 else 's'} ago"
    return "just now" if passed < 5 else f"{int(passed)} seconds ago"


def local(then: float) -> str:
    """«Sun 15 Nov 2026 14:02:11», where the reader is."""
    try:
        return datetime.datetime.fromtimestamp(then).strftime("%a %d %b %Y %H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return f"{then} s after 1970"


def span_s(text: str) -> float:
    """«90s», «30m», «2h», «30d», «1w»; several may follow each other."""
    parts = _SPAN.findall(text)
    if not parts or _SPAN.sub("", text):
        raise ValueError(f"{text!r} is no span of time; write 90s, 30m, 2h, 30d or 1w")
    return sum(float(number) * _UNITS[unit] for number, unit in parts)


def size(count: float) -> str:
    """«1.4 GiB»."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def tame(text: object) -> str:
    """Only what a terminal prints, on as many lines; the rest as a program would write it down."""
    return printable(text, keep="\n\t")


def cut(text: object, width: int) -> str:
    """On one line, in so many columns."""
    line = " ".join(tame(text).split())
    return line if len(line) <= width else line[: max(0, width - 1)] + "…"


def rows(pairs: list[tuple[str, str]], *, width: int = WIDTH) -> list[str]:
    """Names on the left, texts on the right, wrapped."""
    lines = []
    for name, text in pairs:
        name = cut(name, width)  # which may come from a journal of somebody else's
        for part in tame(text).split("\n"):
            wrapped = textwrap.wrap(part, width - 12, break_on_hyphens=False) or [""]
            for line in wrapped:
                lines.append(f"  {name:<9} {line}".rstrip())
                name = ""
    return lines


def reflowed(markdown: str, *, width: int = WIDTH) -> str:
    """Paragraphs and lists of a Markdown text for a terminal; code and tables as they stand."""
    out: list[str] = []
    held: list[str] = []
    fenced = False

    def let_go() -> None:
        if held:
            first = held[0]
            mark = re.match(r"\s*(?:[-*]|\d+\.)\s+", first)
            indent = " " * len(mark[0]) if mark else ""
            text = " ".join([first.rstrip(), *(line.strip() for line in held[1:])])
            out.extend(
                textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False, break_long_words=False)
            )
            held.clear()

    for line in markdown.splitlines():
        fence = line.lstrip().startswith("```")
        if fence or fenced:
            let_go()
            fenced = fenced != fence
            if not fence:
                out.append(f"    {line}".rstrip())
        elif not line.strip() or line.startswith(("#", "|", ">", "    ")):
            let_go()
            out.append(line)
        else:
            if re.match(r"\s*(?:[-*]|\d+\.)\s+", line):
                let_go()
            held.append(line)
    let_go()
    return tame("\n".join(out).strip("\n"))
