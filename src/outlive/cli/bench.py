"""Measure a DataLoader of yours: batches per second, memory, where time goes.

TARGET is a DataLoader or a function that makes one (or a dataset, with --batch-size): module:attribute or
file.py:attribute. One of torch's is measured as it would be as ours.

\b
  outlive bench train.py:loader                     1, 2, 4, … workers
  outlive bench train.py:loader --seconds 120       more time, surer figures
  outlive bench train.py:loader --workers 4,8,16 --prefetch 2,4
  outlive bench train.py:loader --step 50ms         feed a step of 50 ms
  outlive bench train.py:loader --plot bench.svg    and draw it
  outlive bench train.py:loader --json              for programs

Shares of workers' time are read from their black boxes, a few hundred times a second. «transport» is packing and
sending. Memory is PSS, of this process and all workers.

Exit status: 0 measured, 1 nothing could be measured, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from outlive.cli import targets

NOTHING_MEASURED, INTERRUPTED = 1, 130
_MILLISECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*ms")


class Numbers(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in new versions of click only
    """«1,2,4»."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        try:
            return [int(part) for part in value.split(",")]
        except ValueError:
            self.fail(f"{value!r} is no list of numbers; write 1,2,4", param, ctx)


class Span(click.ParamType):  # type: ignore[type-arg,unused-ignore]  # generic in new versions of click only
    """«0.05», «50ms», «2s», «5m»."""

    name = "span"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from outlive._forensics import words

        if isinstance(value, float):
            return value
        found = _MILLISECONDS.fullmatch(value)
        try:
            return float(found[1]) / 1000 if found else float(value)
        except ValueError:
            pass
        try:
            return words.span_s(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


@click.command()
@click.argument("target")
@click.option("--seconds", type=Span(), default=60.0, help="For all trials together (60).")
@click.option("--batches", type=click.IntRange(min=1), help="A trial ends after so many, if that is sooner.")
@click.option("--workers", type=Numbers(), metavar="1,2,4", help="Numbers of workers to try.")
@click.option("--prefetch", type=Numbers(), metavar="2,4", help="Prefetch factors to try.")
@click.option("--step", type=Span(), default=0.0, help="What a training step takes: 50ms.")
@click.option("--batch-size", type=click.IntRange(min=1), help="For a dataset.")
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw it: .svg, .png or .pdf.")
@click.option("--json", "as_json", is_flag=True, help="Everything as JSON.")
def command(target: str, as_json: bool, **options: Any) -> None:
    targets.hush()
    found = targets.load(target)
    if found.loader is None and options["batch_size"] is None:
        raise click.UsageError(f"{target} is a dataset, and a DataLoader is measured: give --batch-size 64, or yours")
    from outlive.measuring import bench as measuring

    try:
        with targets.outputs_aside():
            subject = found.loader if found.loader is not None else found.dataset
            report = measuring.bench(subject, name=target, **options)
    except KeyboardInterrupt:
        targets.leave(INTERRUPTED)
    except (TypeError, ValueError, OSError, ModuleNotFoundError) as error:
        raise click.UsageError(str(error)) from None
    click.echo(report.to_json() if as_json else str(report))
    targets.leave(0 if report.recommended is not None else NOTHING_MEASURED)
