"""Run a program with every DataLoader of it supervised; no line of it changes.

\b
  outlive run train.py --lr 0.1           a script
  outlive run -m package.train            a module
  outlive run -- torchrun --nproc-per-node 2 train.py
  outlive run -- accelerate launch train.py
  outlive run --faults skip train.py      leave bad samples out

The program takes the place of this command: exit status, signals and streams are its own. Python processes that
it starts are reached, too, unless they ignore PYTHONPATH (python -I, -E, -S) or get another environment. At the
end the outermost one sums up on standard error what happened, if anything did.

\b
Options, each also a variable (OUTLIVE_MAX_RESTARTS for --max-restarts):
  --faults raise|skip|replace   what is done about bad samples (raise)
  --on-crash raise|skip|replace the same for those that kill or hang their
                                worker (as --faults)
  --retries N                   tries of a sample beyond the first (1)
  --retry-on OSError,…          exceptions that are tried again
  --memory-limit 4GiB           of a worker
  --memory-budget 24GiB|80%     of all workers of a loader
  --recycle-after 500|1GiB      a fresh worker after so many batches, …
  --worker-threads N            in each worker (1)
  --share-dataset               move large data into shared memory
  --quarantine FILE             by `outlive check`: its samples are not tried
  --journal FOLDER|off          where incidents are kept
  --dash                        show it on a web page (`outlive dash`), too
  … and every other option of FaultPolicy: --sample-timeout, --max-bad, …

OUTLIVE=0 in the environment turns all of it off.

Exit status: that of the program; 2 wrong usage, 126 and 127 the command cannot be run, is not found.
"""

from __future__ import annotations

import click

from outlive.adoption import launching


class _Verbatim(click.Command):
    """Hands all words on as they are: «--» and what follows is the program's."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] in (["-h"], ["--help"]):
            click.echo(self.get_help(ctx))
            ctx.exit()
        ctx.params["words"] = tuple(args)
        return []


@click.command(cls=_Verbatim, options_metavar="[OPTIONS]")
@click.argument("words", nargs=-1, metavar="SCRIPT|-m MODULE|-- COMMAND [ARGUMENT]...")
def command(words: tuple[str, ...]) -> None:
    try:
        launching.run(words)
    except launching.UsageError as error:
        raise click.UsageError(str(error)) from None
