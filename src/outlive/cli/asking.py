"""What the verbs share: spans of time on the command line, and asking the journal.

Reads   the journal.
Writes  an error message where it cannot be read.
Never   a traceback for what a user can mend.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

import click

from outlive._forensics import journal, words
from outlive._forensics.journal_file import NewerJournalError

NOTHING_FOUND = 1
_LOOKED_THROUGH = 100  # incidents, for one that can be read

T = TypeVar("T")


class Span(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in new versions of click only
    """«2h»: the time that long ago."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        if isinstance(value, float):
            return value
        try:
            return time.time() - words.span_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def asked(question: Callable[..., T], *args: Any, **more: Any) -> T:
    """The journal's answer, or the end of the program with a sentence."""
    try:
        return question(*args, **more)
    except NewerJournalError as error:
        raise click.ClickException(str(error)) from None
    except (sqlite3.Error, OSError) as error:
        advice = "\nIf it is damaged, the next incident sets it aside and begins a new one."
        hint = advice if isinstance(error, sqlite3.Error) else ""
        raise click.ClickException(f"the journal in {journal.home()} cannot be read: {error}{hint}") from None


def one(id_prefix: str) -> journal.Entry:
    """The entry of an id, or of the beginning of one; «last» is the newest that can be read."""
    if id_prefix == "last":
        return _newest()
    found = asked(journal.find, id_prefix=id_prefix)
    complain(found.problems)
    if not found:
        nothing(f"no incident {id_prefix}")
    if len({entry.id for entry in found}) > 1:
        named = ", ".join(sorted({entry.id for entry in found})[:8])
        raise click.UsageError(f"{id_prefix} is the beginning of {len(found)} incidents: {named}")
    return found[0]


def _newest() -> journal.Entry:
    found = asked(journal.find, limit=_LOOKED_THROUGH)
    complain(found.problems)
    for entry in found:
        try:
            entry.incident  # noqa: B018  # whether it can be read
            return entry
        except journal.UnreadableError as error:
            complain([str(error)])
    nothing("no incidents")


def complain(problems: list[str]) -> None:
    """Say what could not be read, beside the answer and not in it."""
    for problem in problems:
        click.echo(f"outlive: {words.tame(problem)}", err=True)


def nothing(what: str) -> NoReturn:
    """Say so, and leave with the status that means it."""
    click.echo(f"{what} in {journal.home()}", err=True)
    raise SystemExit(NOTHING_FOUND)
