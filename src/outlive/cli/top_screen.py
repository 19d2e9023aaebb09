"""What `outlive top` shows, as lines of text: for a terminal of any size, and for --once.

Reads   what it is handed: jobs, their snapshots and events.
Writes  nothing.
Never   the terminal, the clock; lets a control character of user code through.
"""

from __future__ import annotations

import textwrap
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outlive._forensics import words

SORTS = ("slot", "seconds", "memory", "restarts", "cpu")
_BARS = " ▁▂▃▄▅▆▇█"
_MOST_INCIDENTS = 200
HEAD, BAD, DIM, CHOSEN, PLAIN = "head", "bad", "dim", "chosen", ""
_HINT = "q quit  p pause  s sort  ↑↓ choose  enter open  d stacks  r recycle"


@dataclass
class Seen:
    """What is known of a job, over the looks at it."""

    job: Any
    snapshot: dict[str, Any] = field(default_factory=dict)
    incidents: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_MOST_INCIDENTS))
    memory: dict[int, deque[int]] = field(default_factory=dict)  # by slot
    after: int = 0
    rate: float | None = None  # batches, or tasks, per second
    wait: float | None = None  # share of the time, lately
    _ticks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=2))
    _looks: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=6))

    def look(self) -> None:
        snapshot = self.job.snapshot()
        if not snapshot:
            return
        self.snapshot = snapshot
        while True:
            events, self.after = self.job.events(self.after)
            self.incidents.extend(event for event in events if event["kind"] == "incident")
            self._ticks.extend(event for event in events if event["kind"] == "tick")
            if not events:
                break
        self._looks.append(snapshot)
        points = self._looks if len(self._looks) > 1 else self._ticks
        if len(points) > 1 and points[-1]["time"] > points[0]["time"]:
            first, last = points[0], points[-1]
            passed = last["time"] - first["time"]
            self.rate = (last["delivered"] - first["delivered"]) / passed
            waited = last["wait_seconds"] - first["wait_seconds"]
            worked = last["trainer_seconds"] - first["trainer_seconds"]
            self.wait = waited / (waited + worked) if waited + worked > 0 else None
        for slot in snapshot["slots"]:
            used = slot["memory"]["private"]
            if used is not None:
                self.memory.setdefault(slot["slot"], deque(maxlen=8)).append(used)


@dataclass(frozen=True)
class Line:
    text: str
    style: str = PLAIN
    choice: tuple[str, Any] | None = None  # what it stands for: ("slot", (job, number)) or ("incident", id)


@dataclass
class View:
    """What the user has chosen to see."""

    seen: Sequence[Seen] = ()
    unreadable: int = 0  # jobs beside them
    sort: str = "slot"
    paused: bool = False
    chosen: tuple[str, Any] | None = None
    message: str = ""
    page: list[str] | None = None  # a text that was opened, instead of the jobs
    page_at: int = 0
    clock: str = ""


def screen(view: View, width: int, height: int) -> list[Line]:
    """As many lines as the terminal has."""
    height = max(4, height)
    if view.page is not None:
        rows = view.page[view.page_at : view.page_at + height - 2]
        lines = [Line("outlive top", HEAD), *(Line(row) for row in rows)]
        lines += [Line("")] * (height - 1 - len(lines))
        more = f"{view.page_at + len(rows)} of {len(view.page)} lines"
        return _cut([*lines, Line(f"esc back  ↑↓ scroll   {more}", DIM)], width)
    body = body_of(view, width)
    at = next((n for n, line in enumerate(body) if line.choice == view.chosen and view.chosen is not None), 0)
    room = height - 2
    first = 0 if len(body) <= room else min(max(0, at - room // 2), len(body) - room)
    shown = body[first : first + room]
    shown = [
        Line(line.text, CHOSEN, line.choice) if line.choice and line.choice == view.chosen else line for line in shown
    ]
    slots = [slot for seen in view.seen for slot in seen.snapshot.get("slots", ())]
    workers = sum(slot["pid"] is not None and slot["state"] != "here" for slot in slots)
    state = "  PAUSED" if view.paused else ""
    title = f"outlive top  {_counted(len(view.seen), 'job')}, {_counted(workers, 'worker')}  by {view.sort}{state}"
    head = Line(title + view.clock.rjust(max(1, width - len(title))), HEAD)
    shown += [Line("")] * (room - len(shown))
    return _cut([head, *shown, Line(view.message or _HINT, BAD if view.message else DIM)], width)


def body_of(view: View, width: int) -> list[Line]:
    """Everything there is to see, however long."""
    if not view.seen:
        nobody = "no loader or pool of yours is running on this machine"
        return [Line(""), Line(nobody), Line("(OUTLIVE_BOARD=0 hides them)", DIM), *_unreadable(view)]
    lines: list[Line] = []
    for seen in view.seen:
        lines += _job(seen, view.sort, width)
    lines += _unreadable(view)
    incidents = sorted(
        ((event, seen) for seen in view.seen for event in seen.incidents), key=lambda pair: -pair[0]["time"]
    )
    if incidents:
        lines += [Line(""), Line("incidents, newest first", HEAD)]
    for event, seen in incidents:
        # The sample before the sentence, of which 80 columns show the beginning.
        told = f"{event['id']} {_samples(event)}{event['verdict'] or event['incident']}: {event['sentence']}"
        age = seen.snapshot.get("time", event["time"]) - event["time"]
        lines.append(Line(f"  {_span(max(0.0, age)):>5} ago  {one_line(told)}", BAD, ("incident", event["id"])))
    return lines


def _unreadable(view: View) -> list[Line]:
    if not view.unreadable:
        return []
    return [Line(f"{_counted(view.unreadable, 'job')} cannot be read: damaged, or by a newer outlive", DIM)]


def _job(seen: Seen, sort: str, width: int) -> list[Line]:
    job, s = seen.job, seen.snapshot
    rank = f"  rank {job.rank}/{job.world_size}" if job.rank is not None else ""
    over = "" if s.get("alive") else "  (ended)"
    program, _, rest = job.command.partition(" ")
    command = f"{program.rpartition('/')[2]} {rest}".strip() or "python"
    name = one_line(f"{job.kind} {job.name}{rank}  pid {job.pid}{over}  {command}")
    lines = [Line(name, HEAD)]
    if not s:
        return [*lines, Line("  nothing can be read of it", DIM)]
    unit = "tasks" if job.kind == "pool" else "batches"
    figures = [f"epoch {s['epoch']}"] if job.kind == "loader" else []
    figures.append(f"{s['delivered']} {unit}")
    if seen.rate is not None:
        figures.append(f"{seen.rate:.1f}/s")
    if seen.wait is not None and job.kind != "pool":
        figures.append(f"trainer waits {seen.wait:.0%}")
    figures.append("no workers, the trainer loads" if s.get("here") else _counted(s["workers"], "worker"))
    for name, one in (("restarts", "restart"), ("retries", "retry"), ("quarantined", ""), ("recycled", "")):
        if s[name]:
            figures.append(f"{s[name]} {one if one and s[name] == 1 else name}")
    if s["cells"]["bytes"]:
        figures.append(f"cells {words.size(s['cells']['bytes'])}")
    lines += [Line(f"  {line}") for line in _joined(figures, width - 2)]
    if job.unreadable:
        lines.append(Line(f"  {_counted(job.unreadable, 'event')} cannot be read: damaged, or by a newer outlive", DIM))
    if s["breaker"] != "closed":
        lines.append(Line(f"  source {one_line(s['breaker'])}", BAD))
    if s.get("stuck"):
        lines.append(Line(f"  {one_line(s['stuck'])}", BAD))
    if s["advice"]:
        lines += [Line(f"  → {line}", DIM) for line in _wrapped(one_line(s["advice"]), width - 4)]
    wide = max(8, min(28, width - 69))
    memory = f"{'memory':<{wide + 9}}"
    lines.append(Line(f"  slot state    {'doing':<11} {'sample':>9} {'for':>9}  {memory} {'cpu':>4} {'life':>5}", DIM))
    for slot in sorted(s["slots"], key=lambda slot: _key(slot, sort)):
        lines.append(_slot(seen, slot, wide))
    return lines


def _samples(event: dict[str, Any]) -> str:
    named = [str(sample) for sample in event.get("samples", ())]
    if not named:
        return ""
    return f"sample {named[0]} " if len(named) == 1 else f"samples {', '.join(named[:3])}{', …' * (len(named) > 3)} "


def _key(slot: dict[str, Any], sort: str) -> Any:
    value = {
        "slot": slot["slot"],
        "seconds": -slot["seconds"] if slot["stage"] not in ("idle", "") else 0,
        "memory": -(slot["memory"]["private"] or 0),
        "restarts": -slot["restarts"],
        "cpu": -(slot["cpu"] or 0.0),
    }[sort]
    return value, slot["slot"]


def _slot(seen: Seen, slot: dict[str, Any], wide: int) -> Line:
    sample = slot["sample"] if slot["sample"] is not None else f"b{slot['batch']}" if slot["batch"] >= 0 else ""
    for_s = _span(slot["seconds"]) if slot["pid"] is not None else ""
    if for_s and slot.get("limit") is not None:
        for_s = f"{for_s}/{_span(slot['limit'])}"  # when it is taken for hung
    memory = slot["memory"]
    used, limit = memory["private"], memory["limit"]
    bar = " " * wide
    if used is not None:
        history = seen.memory.get(slot["slot"], ())
        spark = sparkline(list(history), limit)[-8:]
        room = max(0, wide - 8)
        filled = min(room, round(room * used / limit)) if limit else 0
        bar = f"{'█' * filled}{'░' * (room - filled) if limit else ' ' * room}{spark:>8}"
    cpu = f"{slot['cpu']:.0%}" if slot["cpu"] is not None else ""
    here = slot["state"] == "here"
    doing = "training" if here and slot["stage"] == "idle" else slot["stage"].replace("_", " ")
    text = (
        f"  {'-' if here else slot['slot']:>4} {slot['state']:<8} {doing:<11} {sample!s:>9} {for_s:>9}  {bar:<{wide}} "
        f"{words.size(used) if used is not None else '':>8} {cpu:>4} {'' if here else slot['incarnation']:>5}"
    )
    near = bool(limit and used and used > 0.85 * limit)
    return Line(text, BAD if near else PLAIN, ("slot", (seen.job.key, slot["slot"])))


def sparkline(values: list[int], limit: int | None) -> str:
    """Against the limit where there is one, else from the least to the most."""
    if not values:
        return ""
    low, high = (0, limit) if limit else (min(values), max(values))
    span = max(1, high - low)
    return "".join(_BARS[1 + min(7, max(0, 8 * (value - low) // span))] for value in values)


def _span(seconds: float) -> str:
    if seconds < 10:
        return f"{seconds:.1f}s"
    if seconds < 600:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 36000 else f"{seconds / 3600:.0f}h"


def one_line(text: str) -> str:
    return " ".join(words.tame(text).split())


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _joined(parts: list[str], width: int) -> list[str]:
    """Side by side, on as few lines as they fit on."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += f"  {part}"
        else:
            lines.append(part)
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(20, width)) or [""]


def _cut(lines: list[Line], width: int) -> list[Line]:
    return [Line(line.text[:width], line.style, line.choice) for line in lines]
