"""Show everything that is known of one incident.

ID is an incident's id or its beginning; by default it is «last», the newest.

\b
  outlive report                    the newest, in the terminal
  outlive report 7f3a               this one
  outlive report 7f3a --html        as a page: outlive-7f3a12cd.html
  outlive report 7f3a --html a.html as a page in this file (- for stdout)
  outlive report 7f3a --json        for programs
  outlive report 7f3a --json --share
                                    to send to others, as in a bug report:
                                    without arguments of commands, tasks and
                                    calls, registers, memory, standard error

Exit status: 0 found, 1 nothing found, 2 wrong usage.
"""

from __future__ import annotations

import json
import re
import time
from importlib import metadata
from pathlib import Path

import click

from outlive._forensics import page, report, words
from outlive._forensics.journal import Entry, UnreadableError
from outlive._system import safe_files
from outlive.cli import asking

_BY_ID = "\0"
_ID = re.compile("[0-9a-f]{2,8}")


@click.command()
@click.argument("id", default="last")
@click.option("--html", is_flag=False, flag_value=_BY_ID, metavar="[FILE]", help="Write one self-contained page.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
@click.option("--share", is_flag=True, help="Leave out what may be private.")
def command(id: str, html: str | None, as_json: bool, share: bool) -> None:
    if html is not None and as_json:
        raise click.UsageError("--html and --json are two answers; choose one")
    if html is not None and id == "last" and _ID.fullmatch(html):
        id, html = html, _BY_ID  # `--html 7f3a`: nobody means a file of that name
    entry = asking.one(id)
    try:
        if share:
            entry = report.shareable(entry)
        if as_json:
            click.echo(json.dumps(entry.to_dict(), indent=2))
        elif html is not None:
            _write_page(entry, f"outlive-{entry.id}.html" if html == _BY_ID else html)
        else:
            click.echo("\n".join(lines(entry, time.time())))
    except UnreadableError as error:
        raise click.ClickException(str(error)) from None


def lines(entry: Entry, now: float) -> list[str]:
    """The report for a terminal."""
    with entry.shown() as incident:
        name = entry.verdict or entry.kind
        out = [words.tame(f"{entry.id}  {name}"), f"{words.local(entry.time)}, {words.ago(entry.time, now)}", ""]
        out += words.rows([("", report.headline(incident))], width=words.WIDTH + 12)
        out[3:] = [line.strip() for line in out[3:]]
        out += ["", *words.rows(list(report.summary(incident).rows))]
        for section in report.sections(incident, entry.job):
            out += ["", section.title, "─" * len(section.title), *words.rows(list(section.rows))]
            if section.text:
                out += [""] if section.rows else []
                out += [f"  {line}".rstrip() for line in words.tame(section.text).split("\n")]
    return out


def _write_page(entry: Entry, file: str) -> None:
    with entry.shown() as incident:
        text = page.of_incident(incident, entry.job, now=time.time(), version=metadata.version("outlive"))
    if file == "-":
        click.echo(text, nl=False)
        return
    try:
        safe_files.write(Path(file), text.encode("utf-8"))
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written: {error.strerror or error}") from None
    click.echo(file)
