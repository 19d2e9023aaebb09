"""Fetch every sample of a dataset once, in parallel, and list the bad ones.

TARGET is a dataset or DataLoader, or a function that makes one: module:attribute or file.py:attribute.

\b
  outlive check data:train                          all samples
  outlive check data.py:train --output bad.json     and write the bad ones
                            for DataLoader(quarantine="bad.json") and
                            outlive run --quarantine bad.json train.py
  outlive check data:train --sample 5%              some, evenly spread
  outlive check data:train --shard 2/8              the second of 8 parts
  outlive check data:train --resume                 go on after a kill
  outlive check data:train --json                   for programs

A sample is bad when it raises, cannot be pickled, or kills or hangs the workers that try it. Slow and huge ones are
listed, too: those ten times beyond what is usual, or from --slow and --huge on. Of an iterable dataset samples are
named by their worker and their place in that worker's stream.

Exit status: 0 all good, 1 bad ones found, 2 wrong usage, 3 it could not be finished, or there are no samples,
130 interrupted.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from outlive.cli import targets

BAD, WRONG_USAGE, UNFINISHED, INTERRUPTED = 1, 2, 3, 130


class Seconds(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in new versions of click only
    """«2.5», «2.5s», «5m»."""

    name = "seconds"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from outlive._forensics import words

        try:
            return float(value)
        except ValueError:
            pass
        try:
            return words.span_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("target")
@click.option("--workers", type=click.IntRange(min=1), help="Worker processes; by default one per CPU.")
@click.option("--sample", metavar="5%|N", help="Only this share, or so many, evenly spread.")
@click.option("--shard", metavar="I/N", help="Only the Ith of N parts: 1/8 … 8/8.")
@click.option("--seed", type=int, default=0, help="Of the choice that --sample makes.")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="Write the quarantine file.")
@click.option("--resume", is_flag=True, help="Go on where a check of the same was interrupted.")
@click.option("--state", type=click.Path(dir_okay=False, path_type=Path), help="Where it notes how far it is.")
@click.option("--slow", type=Seconds(), help="From so many seconds on a sample is slow.")
@click.option("--huge", metavar="SIZE", help="From this size on (50MiB) a sample is huge.")
@click.option("--sample-timeout", type=Seconds(), help="A sample that takes longer hangs.")
@click.option("--memory-limit", metavar="SIZE", help="Of a worker: a sample that takes it there is bad.")
@click.option("--retries", type=click.IntRange(min=0), default=1, help="Deaths that are forgiven a sample (1).")
@click.option("--patience", type=Seconds(), default=30.0, help="Seconds to wait for a source that is gone (30).")
@click.option("--start-method", type=click.Choice(["fork", "spawn", "forkserver"]), help="Of workers.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON.")
def command(target: str, output: Path | None, resume: bool, state: Path | None, as_json: bool, **options: Any) -> None:
    targets.hush()  # incidents are what we look for; the report has them
    found = targets.load(target)
    from outlive.checking import check as checking
    from outlive.checking import report as reporting
    from outlive.checking import state as states
    from outlive.errors import SourceUnavailableError, TooManyFaultsError, WorkerStartError

    options = {name: value for name, value in options.items() if value is not None}
    try:
        with targets.outputs_aside():
            if state is None:
                state = states.path_for(found.dataset, options.get("sample"), options.get("shard"), options["seed"])
            report = checking.check(
                found.loader if found.loader is not None else found.dataset,
                output=output,
                state_file=state,
                resume=resume,
                name=target,
                **options,
            )
    except KeyboardInterrupt:
        click.echo("interrupted; the same command with --resume goes on from here", err=True)
        targets.leave(INTERRUPTED)
    except (TooManyFaultsError, WorkerStartError) as error:
        click.echo(f"{type(error).__name__}: {error}\n", err=True)
        longer = "; --patience waits longer for a source" if isinstance(error, SourceUnavailableError) else ""
        click.echo(
            f"the check could not be finished; the same command with --resume goes on from here{longer}", err=True
        )
        targets.leave(UNFINISHED)
    except Exception as error:
        if hasattr(error, "incident") or not isinstance(error, (TypeError, ValueError, OSError)):
            click.echo(f"{type(error).__name__}: {error}", err=True)  # out of a worker that could not begin
            targets.leave(UNFINISHED)
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(report.to_json())
    else:
        click.echo("\n".join(reporting.lines(report, _width())))
        if output is not None and report.bad:
            named = shlex.quote(str(output))
            click.echo(f'\n  next      DataLoader(..., quarantine="{output}")   never tries them again')
            click.echo(f"            outlive run --quarantine {named} …   nor does a program as it is")
    # A pattern that matches no file is not what anybody wants to be told is good.
    targets.leave(BAD if not report.good else UNFINISHED if report.is_empty else 0)


def _width() -> int | None:
    """Of a terminal; None: it goes into a file."""
    return max(60, shutil.get_terminal_size().columns) if sys.stdout.isatty() else None
