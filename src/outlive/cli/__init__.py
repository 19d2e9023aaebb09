"""The command `outlive`: one file per verb, whose docstring is its help.

Reads   the command line.
Writes  standard output.
Never   imports a verb that was not asked for, or torch.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import click

INTERRUPTED = 130  # as shells have it
# in the order in which one needs them
VERBS = ("doctor", "check", "bench", "chaos", "run", "top", "dash", "incidents", "report", "explain", "forget")


class _Verbs(click.Group):
    """Commands that load when they are asked for: each is `command` in the module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"outlive.cli.{cmd_name}")
        command: click.Command = module.command
        command.help = module.__doc__
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:  # where a verb has nothing of its own to say, such as while torch is imported
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80})
@click.version_option(package_name="outlive", prog_name="outlive")
def main(**_: Any) -> None:
    """Run jobs whose workers may die; see what happened to workers, and why.

    Every incident of a loader is kept in a journal: by default
    ~/.local/state/outlive, or $OUTLIVE_HOME.
    """
