"""List incidents, newest first.

\b
  outlive incidents                       the last 20
  outlive incidents --since 2h            of the last two hours
  outlive incidents --verdict oom-killer  of one cause
  outlive incidents --job train.py        of a command, folder, pid or host
  outlive incidents --sample 18204        of one sample
  outlive incidents --json                a line of JSON each, for programs

Exit status: 0 found, 1 nothing found, 2 wrong usage.
"""

from __future__ import annotations

import json
import textwrap
import time

import click

from outlive._forensics import journal, words
from outlive.cli import asking
from outlive.verdicts import Name


@click.command()
@click.option("--verdict", type=click.Choice([n.value for n in Name]), metavar="NAME", help="Only of this verdict.")
@click.option("--since", type=asking.Span(), help="Only of the last 90s, 30m, 2h, 7d …")
@click.option("--job", default="", help="Only of this job: part of its command or folder, its pid, its host.")
@click.option(
    "--sample", default="", help="Only of this sample or task: its index or number, or part of its description."
)
@click.option("--limit", type=click.IntRange(min=1), default=20, show_default=True, help="At most so many.")
@click.option("--json", "as_json", is_flag=True, help="Everything, a line of JSON per incident.")
def command(verdict: str | None, since: float | None, job: str, sample: str, limit: int, as_json: bool) -> None:
    found = asking.asked(
        journal.find, limit=limit + 1, verdict=verdict or "", since=since, job=job.strip(), sample=sample.strip()
    )
    asking.complain(found.problems)
    if not found:
        asking.nothing("no incidents" if not (verdict or since or job or sample) else "no such incidents")
    if as_json:
        for entry in found[:limit]:
            try:
                click.echo(json.dumps(entry.to_dict()))
            except journal.UnreadableError as error:
                asking.complain([str(error)])
        return
    now = time.time()
    last_job = None
    for entry in found[:limit]:
        if entry.job != last_job:
            place = f" ({words.cut(entry.job.place, words.WIDTH // 2)})"
            command = words.cut(entry.job.command or "python", words.WIDTH - len(place))
            click.echo(("\n" if last_job else "") + command + place)
            last_job = entry.job
        named = f"{words.cut(entry.id, 8):<8}  {words.cut(entry.verdict or entry.kind, 24):<24}"
        click.echo(f"  {named} {words.ago(entry.time, now):>15}")
        told = textwrap.wrap(words.tame(entry.sentence), words.WIDTH - 4, max_lines=3, placeholder=" …")
        click.echo("\n".join(f"    {line}" for line in told))
    more = "   --limit shows more" if len(found) > limit else ""
    click.echo(f"\noutlive report ID   everything about one of them{more}")
