"""Run a program with faults planted in its loaders, and show what survives.

\b
  outlive chaos --faults segv,oom,hang:2% train.py --lr 0.1
  outlive chaos --faults all --compare torch train.py
  outlive chaos --kill-every 5s -m package.train
  outlive chaos --plan plan.toml --seed 7 -- torchrun train.py

The program runs once without faults, then with them under `outlive run`, and once more on stock torch if
asked; its output is kept to itself. The table says, for each kind of fault, how often it was injected,
noticed (by an incident) and survived (its worker, or another in its place, went on), how many samples were
lost (should have come, and did not), and how long it took to go on. Processes of the program are gone afterwards,
however this ends.

\b
A list of faults:
  segv            at one sample of each loader, chosen by the seed
  segv:5          at five of them
  segv:2%         at two percent of them
  segv:2%:x3      which fires three times at each; without it, once
  segv:2%:always  bad samples: whoever tries them dies
  kill@collate    at another moment: start, fetch, collate or send
  all             the whole catalogue: raise, unpicklable, segv, ill, bus,
                  abort, fpe, stack, kill, oom, exit, close-descriptors,
                  hang, deadlock, spin, stop, slow, leak, leak-descriptors,
                  leave-processes

\b
What is around the program may stand in it, too:
  outage:3s       the source of all samples is gone for 3 s
  network:3s      workers' connections are refused for 3 s
  memory:500MiB   another process holds so much
  cpus:2          two others compute without end
  disk:1MiB       the program's TMPDIR has room for so much; as root
  cpus@5s:2:10s   from 5 s on, for 10 s

OUTLIVE_… variables set the policy as under `outlive run`. Unless they say otherwise, injected exceptions are tried
again, and a sample may take 5 s where the plan has hangs.

Exit status: 0 nothing was lost and the program ended well, 1 something was lost, came twice, or the program failed
under faults, 2 wrong usage, 3 the program fails without any faults, or has no loader with workers, or what the plan has
around it cannot be had here, 130 it was interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import time
from typing import Any

import click

from outlive.adoption import launching
from outlive.testing import chaos
from outlive.testing import plan as plans
from outlive.testing.plan_words import PlanError, seconds
from outlive.testing.surroundings import NotPossibleError

_LOST, _NOTHING_SAID, _INTERRUPTED = 1, 3, 130
_FLAGS = ("--json", "-h", "--help")


class _WithProgram(click.Command):
    """Options up to the program; what follows is the program's own."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own: list[str] = []
        rest = list(args)
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "--"):
            word = rest.pop(0)
            own.append(word)
            if word not in _FLAGS and "=" not in word and rest:
                own.append(rest.pop(0))
        left = super().parse_args(ctx, own)
        ctx.params["words"] = tuple(rest)
        return left


@click.command(cls=_WithProgram, options_metavar="[OPTIONS]")
@click.option("--plan", "file", metavar="FILE", help="A plan, in TOML; see docs/guide/chaos.md.")
@click.option("--faults", metavar="LIST", help="Faults, separated by commas.")
@click.option("--kill-every", metavar="SPAN", help="Kill a worker every 5s, 1m, ….")
@click.option("--seed", type=int, help="Which samples are chosen; the same seed chooses the same.  [default: 0]")
@click.option("--policy", type=click.Choice(plans.POLICIES), help="What is done about bad samples.  [default: skip]")
@click.option("--sample-timeout", metavar="SPAN", help="What a sample may take.")
@click.option("--compare", type=click.Choice(["torch"]), help="Run the same on stock torch beside it.")
@click.option("--limit", metavar="SPAN", help="Kill a run with faults that takes longer.")
@click.option("--keep", metavar="FOLDER", help="Keep output, notes and the journal, in a new folder.")
@click.option("--json", "as_json", is_flag=True, help="The figures as JSON.")
@click.argument("words", nargs=-1, metavar="SCRIPT|-m MODULE|-- COMMAND [ARGUMENT]...")
def command(
    words: tuple[str, ...], compare: str | None, limit: str | None, keep: str | None, as_json: bool, **given: Any
) -> None:
    try:
        plan = _plan(**given)
        launching.command_of(list(words))
        limit_s = None if limit is None else seconds(limit, "--limit")
        if keep is not None and os.path.lexists(keep):
            raise PlanError(f"--keep {keep}: there is something of that name; name a folder that is to be made")
    except (PlanError, launching.UsageError, ValueError) as error:
        raise click.UsageError(str(error)) from None
    begun = time.monotonic()

    def tell(what: str) -> None:
        if not sys.stderr.isatty():  # else there is a bar
            click.echo(f"[{time.monotonic() - begun:5.1f} s] {what} …", err=True)

    try:
        report = chaos.run(words, plan, compare_torch=compare is not None, limit_s=limit_s, keep=keep, tell=tell)
    except chaos.ProgramFailedError as error:
        click.echo(f"outlive chaos: {error}", err=True)
        sys.exit(_NOTHING_SAID)
    except KeyboardInterrupt:
        click.echo("interrupted; the program, and what it had started, is gone", err=True)
        sys.exit(_INTERRUPTED)
    except NotPossibleError as error:
        click.echo(f"outlive chaos: {error}", err=True)
        sys.exit(_NOTHING_SAID)
    except OSError as error:
        raise click.UsageError(f"{error.filename or words[0]}: {error.strerror or error}") from None
    except ValueError as error:  # more memory than there is
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(json.dumps(report.to_dict(), indent=2, default=str))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        click.echo("\n".join(chaos.lines(report, width)))
    sys.exit(_LOST if not report.outcome.is_whole else _NOTHING_SAID if report.undone else 0)


def _plan(
    file: str | None,
    faults: str | None,
    kill_every: str | None,
    seed: int | None,
    policy: str | None,
    sample_timeout: str | None,
) -> plans.Plan:
    said: dict[str, Any] = {
        "seed": seed,
        "policy": policy,
        "sample_timeout": None if sample_timeout is None else seconds(sample_timeout, "--sample-timeout"),
        "kill_every_s": None if kill_every is None else seconds(kill_every, "--kill-every"),
        "faults": None if faults is None else plans.parse_faults(faults),
    }
    given = {name: value for name, value in said.items() if value is not None}
    if file is None:
        return plans.Plan(**given)
    if faults is not None:
        raise PlanError("--plan and --faults both say which faults; choose one")
    return dataclasses.replace(plans.load(file), **given)
