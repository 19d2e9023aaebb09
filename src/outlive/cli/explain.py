"""Explain a verdict: what one sees, why it happens, what to do.

\b
  outlive explain                   all verdicts
  outlive explain null-pointer      one of them

Exit status: 0 found, 1 it has no page, 2 there is no such verdict.
"""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import click

from outlive._forensics import words
from outlive.cli import asking
from outlive.verdicts import PAGES, Name

_PACKAGE = Path(__file__).parents[1]
# In a wheel the build has put them there; in a checkout they lie where people read them.
PAGE_FOLDERS = (_PACKAGE / "explanations", _PACKAGE.parents[1] / PAGES)


@click.command()
@click.argument("verdict", default="")
def command(verdict: str) -> None:
    if not verdict:
        for name in Name:
            click.echo(f"  {name.value:<24} {words.cut(_sentence(name), words.WIDTH - 27)}".rstrip())
        click.echo("\noutlive explain VERDICT   what one sees, why it happens, what to do")
        return
    try:
        name = Name(verdict)
    except ValueError:
        near = difflib.get_close_matches(verdict, [n.value for n in Name], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; `outlive explain` lists them"
        raise click.UsageError(f"{verdict} is no verdict{hint}") from None
    text = page_of(name)
    if text is None:
        click.echo(f"{name} has no page in this installation", err=True)
        raise SystemExit(asking.NOTHING_FOUND)
    _show(text)


def page_of(name: Name) -> str | None:
    """The page as it was written."""
    for folder in PAGE_FOLDERS:
        try:
            return (folder / f"{name.value}.md").read_text(encoding="utf-8")
        except OSError:
            continue
    return None


def _sentence(name: Name) -> str:
    """The first sentence of its page."""
    paragraphs = (page_of(name) or "").split("\n\n")
    text = next((p for p in paragraphs if p.strip() and not p.lstrip().startswith(("#", "```", "|", "<"))), "")
    return " ".join(text.split()).partition(". ")[0].rstrip(".")


def _show(text: str) -> None:
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.markdown import Markdown
        except ImportError:
            pass  # plain text is as complete
        else:
            console = Console()
            console.print(Markdown(text), width=min(console.width, 100))
            return
    click.echo(words.reflowed(text))
