"""Watch every loader and pool of yours on this machine, live.

\b
  outlive top             jobs that run now, without being started with them
  outlive top --once      the same, printed once
  outlive top --json      the same as JSON, for programs

\b
Per worker: what it does, the sample in hand and for how long, its memory
against the limit, restarts. Below: the last incidents.

\b
  p pause the view         s sort by slot, time, memory, restarts, cpu
  ↑ ↓ (or k j) choose      enter  open an incident, or a worker's stacks
  d stacks of a worker     r recycle it after its batch (asks first)
  q quit

Exit status: 0, or with --once and --json 1 where nothing runs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

import click

from outlive._forensics import journal, words
from outlive._metrics import viewing
from outlive.cli import report, top_screen
from outlive.cli.top_screen import Line, Seen, View

_STYLES = {"head": "\x1b[1m", "bad": "\x1b[31m", "dim": "\x1b[2m", "chosen": "\x1b[7m"}
_KEYS = {
    b"\x1b[A": "up",
    b"\x1bOA": "up",
    b"\x1b[B": "down",
    b"\x1bOB": "down",
    b"\x1b[5~": "page up",
    b"\x1b[6~": "page down",
    b"\x1b": "escape",
    b"\r": "enter",
    b"\n": "enter",
    b"\x03": "q",
    b"k": "up",
    b"j": "down",
    b" ": "p",
}
_LAST_EVENTS = 100
_REST_OF_KEY_S = 0.05  # a key that is more than one byte may come in two parts


@click.command()
@click.option("--once", is_flag=True, help="Print what there is now, and leave.")
@click.option("--json", "as_json", is_flag=True, help="Everything that is known now, as JSON.")
@click.option("--interval", type=click.FloatRange(0.1, 60.0), default=1.0, show_default=True, help="Seconds.")
@click.option("--ended", is_flag=True, help="Also jobs that ended not long ago.")
def command(once: bool, as_json: bool, interval: float, ended: bool) -> None:
    if as_json:
        _print_json(ended)
    elif once or not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_once(ended)
    else:
        viewing.stand_back()
        Top(interval, ended).run()


def _found(ended: bool) -> viewing.Jobs:
    found = viewing.jobs()
    found[:] = [job for job in found if ended or job.alive]
    return found


def _print_json(ended: bool) -> None:
    found = _found(ended)
    told = [
        {
            **{
                name: getattr(job, name)
                for name in ("key", "pid", "command", "folder", "rank", "world_size", "run", "kind")
            },
            **{"name": job.name, "began": job.began, "alive": job.alive, "limits": job.limits},
            "snapshot": job.snapshot(),
            "events": _last_events(job),
            "unreadable": job.unreadable,
        }
        for job in found
    ]
    click.echo(json.dumps({"time": time.time(), "jobs": told, "unreadable": found.unreadable}, indent=2))
    raise SystemExit(0 if found else 1)


def _last_events(job: viewing.Job) -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = []
    after = 0
    while True:
        events, after = job.events(after)
        kept = [*kept, *events][-_LAST_EVENTS:]
        if not events:
            return kept


def _print_once(ended: bool) -> None:
    found = _found(ended)
    seen = [Seen(job) for job in found]
    for each in seen:
        each.look()
    width = shutil.get_terminal_size((80, 24)).columns
    for line in top_screen.body_of(View(seen, found.unreadable), width):
        click.echo(line.text[:width].rstrip())
    raise SystemExit(0 if seen else 1)


class Top:
    """The live view."""

    def __init__(self, interval: float, ended: bool) -> None:
        self._interval = interval
        self._ended = ended
        self._known: dict[str, Seen] = {}
        self._view = View()
        self._asked: tuple[str, int] | None = None  # whom to recycle, once that is confirmed

    def run(self) -> None:
        with _raw_terminal() as wait_keys:
            while True:
                if not self._view.paused:
                    self._look()
                self._draw()
                for key in wait_keys(self._interval):
                    if key == "q" and self._view.page is None:
                        return
                    self._press(key)

    def _look(self) -> None:
        found = _found(self._ended)
        self._known = {job.key: self._known.get(job.key) or Seen(job) for job in found}
        for seen in self._known.values():
            seen.look()
        self._view.seen, self._view.unreadable = list(self._known.values()), found.unreadable
        self._view.clock = time.strftime("%H:%M:%S")

    def _draw(self) -> None:
        size = os.get_terminal_size(sys.stdout.fileno())
        lines = top_screen.screen(self._view, size.columns, size.lines)
        drawn = "\r\n".join(f"\x1b[0m{_STYLES.get(line.style, '')}{line.text}\x1b[0m\x1b[K" for line in lines)
        encoding = sys.stdout.encoding or "utf-8"
        # One write, and nothing cleared before it: no flicker over a slow line.
        sys.stdout.buffer.write(f"\x1b[H{drawn}\x1b[J".encode(encoding, "replace"))
        sys.stdout.buffer.flush()

    # ------------------------------------------------------------ keys

    def _press(self, key: str) -> None:
        view = self._view
        asked, self._asked = self._asked, None
        view.message = ""
        if view.page is not None:
            self._turn_page(key)
        elif asked is not None and key == "y":
            view.message = (
                self._known[asked[0]].job.ask("recycle", asked[1]) if asked[0] in self._known else "it is gone"
            )
        elif key in ("up", "down"):
            self._choose(1 if key == "down" else -1)
        elif key == "p":
            view.paused = not view.paused
        elif key == "s":
            sorts = top_screen.SORTS
            view.sort = sorts[(sorts.index(view.sort) + 1) % len(sorts)]
        elif key in ("enter", "d", "r"):
            self._act(key)

    def _choose(self, step: int) -> None:
        choices = [line.choice for line in self._body() if line.choice is not None]
        if not choices:
            return
        view = self._view
        if view.chosen not in choices:
            view.chosen = choices[0]
            return
        view.chosen = choices[min(len(choices) - 1, max(0, choices.index(view.chosen) + step))]

    def _body(self) -> list[Line]:
        return top_screen.body_of(self._view, 80)

    def _act(self, key: str) -> None:
        view = self._view
        if view.chosen is None:
            view.message = "choose a worker or an incident first, with the arrow keys"
            return
        what, which = view.chosen
        if what == "incident":
            if key == "enter":
                self._open(_incident_lines(which, self._known))
            else:
                view.message = "that is an incident: choose a worker for this"
            return
        key_of_job, slot = which
        if key == "r":
            self._asked = (key_of_job, slot)
            view.message = f"recycle worker {slot} after its batch? y to do it, any other key not to"
        elif key_of_job in self._known:
            self._open(words.tame(self._known[key_of_job].job.ask("stacks", slot)).split("\n"))

    def _open(self, lines: list[str]) -> None:
        self._view.page, self._view.page_at = [line.expandtabs() for line in lines], 0

    def _turn_page(self, key: str) -> None:
        view = self._view
        assert view.page is not None
        if key in ("escape", "q", "enter"):
            view.page = None
            return
        step = {"up": -1, "down": 1, "page up": -20, "page down": 20}.get(key, 0)
        view.page_at = min(max(0, len(view.page) - 1), max(0, view.page_at + step))


def _incident_lines(id: str, known: dict[str, Seen]) -> list[str]:
    """The journal's report of it; what the event says where there is no journal."""
    with contextlib.suppress(Exception):  # no journal, a newer one, one that cannot be read
        entries = journal.find(id_prefix=id, limit=1)
        if entries:
            return report.lines(entries[0], time.time())
    for seen in known.values():
        for event in seen.incidents:
            if event["id"] == id:
                rows = [(name, str(value)) for name, value in event.items() if value not in ("", [], None)]
                return [*words.rows(rows), "", f"(not in the journal in {journal.home()})"]
    return [f"nothing is known of {id}"]


def keys_of(pressed: bytes) -> list[str]:
    """What was pressed, by name: over a slow line several keys come at once."""
    found = []
    while pressed:
        known = next((code for code in sorted(_KEYS, key=len, reverse=True) if pressed.startswith(code)), None)
        found.append(_KEYS[known] if known is not None else pressed[:1].decode("ascii", "replace"))
        pressed = pressed[len(known) if known is not None else 1 :]
    return found


@contextlib.contextmanager
def _raw_terminal() -> Iterator[Any]:
    """The whole screen, keys as they come; as it was afterwards, whatever happens."""
    import select
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def wait_keys(seconds: float) -> list[str]:
        ready, _, _ = select.select([fd], [], [], seconds)
        if not ready:
            return []
        pressed = os.read(fd, 256)
        if pressed.endswith((b"\x1b", b"\x1b[", b"\x1bO")) and select.select([fd], [], [], _REST_OF_KEY_S)[0]:
            pressed += os.read(fd, 256)
        return keys_of(pressed) if pressed else ["q", "q"]  # the terminal is gone

    try:
        tty.setcbreak(fd)
        sys.stdout.write("\x1b[?1049h\x1b[?25l\x1b[2J")
        sys.stdout.flush()
        yield wait_keys
    except KeyboardInterrupt:
        pass
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write("\x1b[0m\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
