"""Runs a program without faults, then with them, and with stock torch beside it; the survival table comes of that.

Reads   the plan, the program's notes, the journal of the run.
Writes  a temporary folder, which goes when the run is over (one whose run was killed goes with the next run).
Never   the user's own journal; never leaves a process of the program's behind, however this one ends.

    plain run: which samples come    →  the plan chooses among them, by its seed
    run with faults, supervised      →  noted: fired, went on, drawn, received; incidents
    the same faults on stock torch   →  noted likewise
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from outlive._system import processes
from outlive._system.lifeline import Lifeline, hold
from outlive._system.safe_files import check_private
from outlive.adoption import launching
from outlive.incident import Incident
from outlive.testing import around, beside, surroundings, survival
from outlive.testing.around import Timeline
from outlive.testing.injecting import VARIABLE, number_of
from outlive.testing.plan import HANG_TIMEOUT_S, Plan
from outlive.testing.survival import Outcome, Story

STARTUP = str(Path(__file__).with_name("startup"))
_PREFIX = "outlive-chaos-"
_MARK = ".outlive-chaos"  # in every such folder
_LEAST_LIMIT_S = 30.0
_TAIL_LINES = 12


class ProgramFailedError(Exception):
    """The program fails without any faults: nothing can be said about it."""


@dataclass(frozen=True)
class Report:
    """What came of it all."""

    plan: Plan
    command: tuple[str, ...]
    outcome: Outcome
    torch: Outcome | None
    loaders: int
    epochs: int
    left: dict[str, str]  # loaders that no faults were planted in, and why
    timeline: Timeline = ()  # what was around the program, and when
    undone: tuple[str, ...] = ()  # what of it could not be had

    def to_dict(self) -> dict[str, Any]:
        told: dict[str, Any] = {"command": list(self.command), "seed": self.plan.seed, "policy": self.plan.policy}
        told |= {"loaders": self.loaders, "epochs": self.epochs, "left": self.left, "undone": list(self.undone)}
        told["surroundings"] = [
            {"kind": one.kind, "from_s": begins, "for_s": lasts} for one, begins, lasts in self.timeline
        ]
        told |= {"outlive": self.outcome.to_dict()}
        return told | ({"torch": self.torch.to_dict()} if self.torch is not None else {})

    def __str__(self) -> str:
        return "\n".join(lines(self))


@dataclass(frozen=True)
class Run:
    """A run of the program: how it ended, what it noted."""

    status: int | None
    story: Story
    incidents: tuple[Incident, ...]
    cried: str  # the end of its standard error
    undone: tuple[str, ...] = ()


def run(
    command: Sequence[str],
    plan: Plan,
    *,
    compare_torch: bool = False,
    limit_s: float | None = None,
    keep: str | os.PathLike[str] | None = None,
    tell: Callable[[str], object] = lambda text: None,
    progress: bool | None = None,
) -> Report:
    """Run a program under a plan. `command` is what `outlive run` takes: a script and its arguments, or «-m», or «--».

    `limit_s`: a run with faults that takes longer is killed; the one on stock torch is given three times as long as
    that under outlive took, if nothing is said. `keep`: a new folder for what the runs printed, their notes and the
    journal of the one with faults. `tell` is told what begins. `progress`: a bar on standard error; None: where that is
    a terminal.
    """
    arguments = launching.command_of(list(command))
    with_bar = progress if progress is not None else sys.stderr is not None and sys.stderr.isatty()

    def begin(what: str, total: int | None = None) -> beside.Shown | None:
        tell(what)
        return beside.Shown(what.rpartition(", ")[2], total) if with_bar else None

    for one in plan.around:
        if one.kind == "memory":
            surroundings.wanted_memory(one.size)
        elif one.kind == "disk":
            surroundings.check_mounting()
    with _folder(keep) as folder:
        shown = begin("without faults")
        plain = _run(arguments, folder / "plain", plan, None, (), shown, supervised=True, limit_s=None)
        if plain.status != 0:
            raise ProgramFailedError(
                f"the program fails without any faults ({status_words(plain.status)}): nothing can be said about it\n"
                f"{plain.cried}"
            )
        if not plain.story.epochs:
            why = "; ".join(f"loader {name}: {why}" for name, why in plain.story.left.items())
            raise ProgramFailedError(
                "the program has iterated over no DataLoader with workers: there is nothing to inject faults into"
                + (f" ({why})" if why else "")
            )
        targets = _targets(plan, plain.story)
        timeline = around.timeline(plan.around, plan.seed, plain.story.seconds)
        shown = begin("with faults", plain.story.received)
        begun = time.monotonic()
        ours = _run(arguments, folder / "faults", plan, targets, timeline, shown, supervised=True, limit_s=limit_s)
        took_s = time.monotonic() - begun
        excused = _excused(plan, targets)
        repeats = plan.policy == "replace"
        error = _last_line(ours, limit_s)
        outcome = survival.judge(
            ours.story, plain.story, ours.incidents, excused, ours.status, may_repeat=repeats, error=error
        )
        other = None
        if compare_torch:
            shown = begin("with faults, on stock torch", plain.story.received)
            limit = limit_s or max(_LEAST_LIMIT_S, 3 * took_s)
            theirs = _run(arguments, folder / "torch", plan, targets, timeline, shown, supervised=False, limit_s=limit)
            other = survival.judge(
                theirs.story, plain.story, None, excused, theirs.status, error=_last_line(theirs, limit)
            )
    loaders = {loader for loader, _ in plain.story.epochs}
    epochs, left = len(plain.story.epochs), plain.story.left
    return Report(plan, tuple(command), outcome, other, len(loaders), epochs, left, timeline, ours.undone)


# ---------------------------------------------------------------- the plan, on these samples


def _targets(plan: Plan, plain: Story) -> dict[str, list[tuple[int, Any]]]:
    """For each loader: which of the planned faults at which samples (or at which worker, when it starts)."""
    rng = random.Random(plan.seed)
    found: dict[str, list[tuple[int, Any]]] = {}
    for loader in sorted({loader for loader, _ in plain.epochs}):
        keys = {key for (name, _), epoch in plain.epochs.items() if name == loader for key in epoch.got}
        workers = sorted({worker for name, worker, _, _ in plain.went_on if name == loader})
        samples = sorted(keys, key=lambda key: (str(type(key)), key))
        free = list(samples)
        for place, planned in enumerate(plan.faults):
            if planned.loaders and number_of(loader) not in planned.loaders:
                continue
            if planned.moment == "start":
                chosen = planned.choose(workers, rng)
            else:  # one fault at a sample, as long as there are samples
                chosen = planned.choose(samples if planned.samples or not free else free, rng)
                free = [key for key in free if key not in set(chosen)]
            found.setdefault(loader, []).extend((place, key) for key in chosen)
    return found


def _excused(plan: Plan, targets: dict[str, list[tuple[int, Any]]]) -> set[tuple[str, Any]]:
    """Samples that are bad for good: nobody can deliver them."""
    return {
        (loader, key)
        for loader, planted in targets.items()
        for place, key in planted
        if plan.faults[place].times is None
    }


# ---------------------------------------------------------------- a run


def _run(
    command: list[str],
    folder: Path,
    plan: Plan,
    targets: dict[str, list[tuple[int, Any]]] | None,
    timeline: Timeline,
    shown: beside.Shown | None,
    *,
    supervised: bool,
    limit_s: float | None,
) -> Run:
    """`targets`: None for a run that nothing disturbs."""
    folder.mkdir()
    notes = folder / "notes.jsonl"
    notes.touch()
    orders = {
        "notes": str(notes),
        "marks": str(folder / "marks"),
        "planned": [planned.table for planned in plan.faults] if targets else [],
        "targets": targets or {},
        **_failing(timeline, folder),
    }
    (folder / "orders.json").write_text(json.dumps(orders))
    environment = _environment(plan, folder, supervised)
    mounts, made = _on_full_disk(timeline, folder, environment)
    command = [*mounts, *command]
    processes.adopt_orphans()
    lifeline = Lifeline()
    end = lifeline.end()
    try:
        with open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
            process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                pass_fds=(end,),
                # Before it is the program: there is no moment in which it would outlive us.
                preexec_fn=functools.partial(hold, end),
            )
        kill_every_s = plan.kill_every_s if targets is not None else None
        with (
            beside.killing(kill_every_s, notes, plan.seed),
            beside.happening(timeline, folder, notes) as undone,
        ):
            try:
                status = beside.wait(process, limit_s, notes, shown)
            finally:
                _end(process)
    finally:
        os.close(end)
        lifeline.cut()
        for where in made:
            with contextlib.suppress(OSError):  # somebody has put something there, who was not on that disk
                where.rmdir()
    story = survival.read(beside.read(notes))
    return Run(status, story, _incidents(folder) if supervised else (), _tail(folder / "err"), tuple(undone))


def _failing(timeline: Timeline, folder: Path) -> dict[str, Any]:
    """What the program is told of sources and networks that fail while marks say so."""
    told: dict[str, Any] = {"outages": [], "networks": []}
    for place, (one, _, _) in enumerate(timeline):
        marks = str(beside.marks_of(folder, place))
        if one.kind == "outage":
            told["outages"].append({"marks": marks, "error": one.error, "loaders": one.loaders})
        elif one.kind == "network":
            told["networks"].append({"marks": marks, "delay": one.delay_s})
    return told


def _on_full_disk(timeline: Timeline, folder: Path, environment: dict[str, str]) -> tuple[list[str], list[Path]]:
    """Words before the command, by which a folder of it has little room; folders that were made for it."""
    words: list[str] = []
    made: list[Path] = []
    for place, (one, _, _) in enumerate(timeline):
        if one.kind == "disk":
            where = Path(one.folder).absolute() if one.folder else folder / f"disk-{place}"
            if not where.is_dir():
                where.mkdir()
                made.append(where)
            words += surroundings.on_full_disk(one.size, where)
            if not one.folder:
                environment["TMPDIR"] = str(where)
    return words, made


def _environment(plan: Plan, folder: Path, supervised: bool) -> dict[str, str]:
    environment = dict(os.environ)
    for name in ("OUTLIVE", "OUTLIVE_RUN", "OUTLIVE_JOURNAL"):
        environment.pop(name, None)
    environment[VARIABLE] = str(folder / "orders.json")
    if supervised:
        settings = {"OUTLIVE_HOME": str(folder / "journal"), "OUTLIVE_FAULTS": plan.policy}
        settings.setdefault("OUTLIVE_RETRIES", environment.get("OUTLIVE_RETRIES", str(plan.retries)))
        names = [*environment.get("OUTLIVE_RETRY_ON", "").split(","), *plan.errors]
        settings["OUTLIVE_RETRY_ON"] = ",".join(dict.fromkeys(name.strip() for name in names if name.strip()))
        timeout = plan.sample_timeout or (HANG_TIMEOUT_S if plan.has_hangs else None)
        if timeout is not None and (plan.sample_timeout or "OUTLIVE_SAMPLE_TIMEOUT" not in environment):
            settings["OUTLIVE_SAMPLE_TIMEOUT"] = str(timeout)
        launching.prepare(environment, settings)
    else:
        environment["OUTLIVE"] = "0"
    others = environment.get("PYTHONPATH", "")
    environment["PYTHONPATH"] = os.pathsep.join([STARTUP, *([others] if others else [])])
    return environment


def _end(process: subprocess.Popen[bytes]) -> None:
    """Whatever is left of a run: its group, and what it started in sessions of its own, which comes to us."""
    for _ in range(3):
        left = psutil.Process().children(recursive=True)
        own = [one for one in left if one.pid == process.pid or _is_of_run(one)]
        for one in own:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        psutil.wait_procs([one for one in own if one.pid != process.pid], timeout=3)
        if not own:
            break


def _is_of_run(process: psutil.Process) -> bool:
    try:
        return VARIABLE in process.environ()
    except psutil.Error:
        return False


def _incidents(folder: Path) -> tuple[Incident, ...]:
    from outlive._forensics import journal

    if not (folder / "journal").is_dir():
        return ()
    before = os.environ.get("OUTLIVE_HOME")
    os.environ["OUTLIVE_HOME"] = str(folder / "journal")
    try:
        return tuple(entry.incident for entry in journal.find())
    finally:
        if before is None:
            del os.environ["OUTLIVE_HOME"]
        else:
            os.environ["OUTLIVE_HOME"] = before


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_TAIL_LINES:])


def _last_line(ended: Run, limit_s: float | None) -> str:
    if ended.status == 0:
        return ""
    if ended.status is None:
        return f"it had not ended after {limit_s or 0:.0f} s, and was killed"
    said = [line for line in ended.cried.splitlines() if line and not line.startswith((" ", "\t"))]
    return ended.story.errors[-1].splitlines()[0] if ended.story.errors else (said[-1] if said else "")


# ---------------------------------------------------------------- around it


@contextlib.contextmanager
def _folder(keep: str | os.PathLike[str] | None) -> Iterator[Path]:
    """A folder for a run's notes; those of runs that were killed go now."""
    if keep is not None:
        kept = Path(keep).absolute()
        kept.mkdir(parents=True)
        yield kept
        return
    # A container may share the folder with others, and has pids of its own.
    prefix = f"{_PREFIX}{os.stat('/proc/self/ns/pid').st_ino}-"
    for stale in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
        pid = stale.name.removeprefix(prefix).partition("-")[0]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)) and _is_of_chaos(stale):
            shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-"))
    (folder / _MARK).touch()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _is_of_chaos(folder: Path) -> bool:
    """Whether a run of this user's made it: others may give their folders such a name."""
    try:
        check_private(folder)
    except OSError:
        return False
    return (folder / _MARK).is_file()


# ---------------------------------------------------------------- words


def status_words(status: int | None) -> str:
    if status is None:
        return "it did not end"
    if status < 0:
        try:
            return f"it died of {signal.Signals(-status).name}"
        except ValueError:
            return f"it died of signal {-status}"
    return f"exit status {status}"


def lines(report: Report, width: int | None = None) -> list[str]:
    """The report for a terminal, in so many columns: where two tables have no room beside each other, one follows the
    other.
    """
    outcome, plan = report.outcome, report.plan
    loaders = f"{report.loaders} loader{'' if report.loaders == 1 else 's'}"
    epochs = f"{report.epochs} epoch{'' if report.epochs == 1 else 's'}"
    named = next((word for word in report.command if word not in ("--", "-m")), "")
    out = [
        f"{named}: {outcome.expected:,} samples in {epochs} of {loaders}; seed {plan.seed}, policy {plan.policy}",
        "",
    ]
    table = survival.table(outcome, report.torch)
    if report.torch is not None and width is not None and max(map(len, table)) > width:
        table = [*survival.table(outcome), "", "on stock torch:", "", *survival.table(report.torch)]
    out += [*table, ""]
    out += _result("outlive", outcome)
    if report.torch is not None:
        out += _result("torch", report.torch)
    out += [f"left alone  loader {name}: {why}" for name, why in report.left.items()]
    if report.timeline:
        out.append(f"around      {', '.join(itertools.starmap(around.words, report.timeline))}")
    out += [f"not done    {what}" for what in report.undone]
    return out


def _some(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:12])) + (", …" if len(names) > 12 else "")


def _result(name: str, outcome: Outcome) -> list[str]:
    plain = outcome.plain_rate
    share = f", {outcome.rate / plain:.0%} of the {plain:,.0f} without" if plain else ""
    out = [f"{name:<10}  {outcome.received:,} samples received, {outcome.lost:,} lost; {status_words(outcome.status)}"]
    if outcome.status == 0:
        out.append(f"{'':<10}  {outcome.rate:,.0f} samples/s with faults{share}")
    if outcome.error:
        out.append(f"{'':<10}  {outcome.error}")
    if outcome.twice:
        out.append(f"{'':<10}  {outcome.twice:,} samples came more than once")
    if outcome.lost_samples:
        out.append(f"{'':<10}  lost: {_some(outcome.lost_samples)}")
    if outcome.bad_anyway:
        out.append(f"{'':<10}  bad without faults, too: {_some(outcome.bad_anyway)} (outlive check finds such samples)")
    if outcome.injected == 0:
        out.append(f"{'':<10}  no fault has fired: too few samples, or the program ended before one was due")
    return out
