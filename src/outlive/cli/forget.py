"""Delete incidents from the journal.

\b
  outlive forget 7f3a 81bc          these
  outlive forget --before 30d       what is older than thirty days
  outlive forget --all              everything; asks before

Exit status: 0 deleted, 1 nothing found, 2 wrong usage.
"""

from __future__ import annotations

import click

from outlive._forensics import journal
from outlive.cli import asking


@click.command()
@click.argument("ids", metavar="[ID]...", nargs=-1)
@click.option("--before", type=asking.Span(), help="What is older than 12h, 30d, 8w …")
@click.option("--all", "everything", is_flag=True, help="Everything.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def command(ids: tuple[str, ...], before: float | None, everything: bool, yes: bool) -> None:
    if bool(ids) + (before is not None) + everything != 1:
        raise click.UsageError("say what to forget: one or more ids, or --before 30d, or --all")
    if everything and not yes:
        count = len(asking.asked(journal.find))
        if not count:
            asking.nothing("no incidents")
        click.confirm(f"Delete all {count} incidents in {journal.home()}?", abort=True)
    if ids:
        # All are looked up before the first is deleted: a wrong one deletes nothing.
        chosen = {asking.one(id).id for id in ids}
        deleted = sum(asking.asked(journal.forget, id_prefix=id) for id in chosen)
    else:
        deleted = asking.asked(journal.forget, before=before)
    if not deleted:
        asking.nothing("no such incidents")
    click.echo(f"{deleted} incident{'' if deleted == 1 else 's'} deleted")
