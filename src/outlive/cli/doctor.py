"""Say what will kill workers on this machine, with this loader, before it does.

TARGET is a DataLoader (outlive's or torch's), a dataset, or a function that
returns one: «module:attribute» or «file.py:attribute». Without it only the
machine is looked at.

\b
  outlive doctor                          this machine, this container
  outlive doctor train.py:loader          with this loader
  outlive doctor package.data:dataset --workers 8 --batch-size 64
  outlive doctor train.py:loader --start-method spawn
  outlive doctor --cpu x86-64-v2 --cpu znver2    will it run there, too?
  outlive doctor train.py:loader --json   for programs

Samples are fetched in processes of their own: one that kills does not kill the
doctor. Findings are ranked: will kill, may kill, changes data, slows down; each
comes with what to type.

Exit status: 0 nothing that kills, 1 something will or may kill, 2 wrong usage,
130 interrupted.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import click

from outlive.cli import targets
from outlive.doctor.examination import Examination, examine

KILLS = 1
_QUIET_S = 1.0  # before that nobody wonders
_REDRAW_S = 0.1


@click.command()
@click.argument("target", required=False)
@click.option("--workers", type=click.IntRange(min=0), help="Instead of the loader's num_workers.")
@click.option("--batch-size", type=click.IntRange(min=1), help="Instead of the loader's own.")
@click.option("--start-method", type=click.Choice(["fork", "spawn", "forkserver"]), help="Instead of the loader's own.")
@click.option("--samples", type=click.IntRange(min=0), default=32, show_default=True, help="Fetch so many; 0: none.")
@click.option(
    "--time", "time_limit", type=click.FloatRange(min=0), default=30.0, show_default=True,
    metavar="SECONDS", help="About so long for samples.",
)  # fmt: skip
@click.option("--cpu", "cpus", multiple=True, metavar="NAME", help="Other CPUs that compiled code is to run on.")
@click.option("--compiled/--no-compiled", default=True, show_default=True, help="Examine compiled libraries.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def command(target: str | None, as_json: bool, cpus: tuple[str, ...], **options: Any) -> None:
    subject: Any = None
    if target is not None:
        found = targets.load(target)
        subject = found.loader if found.loader is not None else found.dataset
    screen = _Screen()
    try:
        with targets.outputs_aside():
            told = examine(subject, cpus=cpus, progress=screen.show, name=target or "", **options)
    except ValueError as error:  # a CPU that nobody knows
        raise click.UsageError(str(error)) from None
    finally:
        screen.clear()
    _answer(told, target, as_json)
    targets.leave(KILLS if told.kills else 0)


def _answer(told: Examination, target: str | None, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"target": target, **told.to_dict()}, indent=2))
        return
    click.echo(f"outlive doctor{f' {target}' if target else ''}\n")
    click.echo(str(told))


class _Screen:
    """What the doctor is at, on standard error, where that is a terminal and it takes a while."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._drawn = 0.0
        self._width = 0
        self._shown = sys.stderr.isatty()

    def show(self, what: str, share: float) -> None:
        now = time.monotonic()
        if not self._shown or now - self._begun < _QUIET_S or now - self._drawn < _REDRAW_S:
            return
        text = f"looking at {what} {share:.0%}" if share else f"looking at {what} …"
        text = text[:78]
        self._drawn = now
        sys.stderr.write(f"\r{text:<{self._width}}")
        sys.stderr.flush()
        self._width = len(text)

    def clear(self) -> None:
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
