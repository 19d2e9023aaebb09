"""One examination: all that the doctor looks at, in order, and what it found.

Reads   machine, processes, loader, dataset, samples; compiled code, where that part is installed.
Writes  nothing; calls `progress` with what it is at.
Never   ends with an exception for what it looked at: a part that cannot be examined is named, and the rest goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from outlive.doctor import (
    arithmetic,
    dataset,
    fetching,
    machine,
    native,
    plan,
    printing,
    sampling,
    starting,
    walking,
)
from outlive.doctor.findings import Finding, Rank, ranked
from outlive.doctor.machine import Machine
from outlive.doctor.native import machines
from outlive.doctor.plan import Plan
from outlive.doctor.sampling import Sampled
from outlive.quantities import in_words
from outlive.settings import check_number

_METHODS = ("fork", "spawn", "forkserver")
_KILLS = (Rank.WILL_KILL, Rank.MAY_KILL)

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Examination:
    """What was found, the worst first, and what it was found in."""

    findings: tuple[Finding, ...] = ()
    machine: Machine = field(default_factory=Machine)
    plan: Plan = field(default_factory=Plan)
    samples: Sampled | None = None  # None: none were fetched
    dataset_bytes: int | None = None
    pickle_bytes: int | None = None
    notes: tuple[str, ...] = ()  # what is no finding, and good to know
    unseen: tuple[str, ...] = ()  # what was not looked at, and why
    seconds: float = 0.0
    compiled: str = ""  # which compiled code was looked at; "": none

    @property
    def kills(self) -> bool:
        """Whether there is anything that will or may kill."""
        return any(finding.rank in _KILLS for finding in self.findings)

    def named(self, name: str) -> Finding | None:
        """The finding of that name."""
        return next((finding for finding in self.findings if finding.name == name), None)

    def rows(self) -> list[tuple[str, str]]:
        """What was looked at, in a few lines."""
        told = self.machine.rows()
        if self.compiled:
            told.append(("code", self.compiled))
        if self.plan.dataset is None:
            return told
        told.append(("loader", self.plan.words))
        size = f", {in_words(self.dataset_bytes)}" if self.dataset_bytes is not None else ""
        if self.pickle_bytes is not None and self.plan.start_method != "fork":
            size += f", {in_words(self.pickle_bytes)} as a pickle"
        told.append(("dataset", f"{walking.type_name(self.plan.dataset)}{size}"))
        if self.samples is not None:
            told += sampling.rows(self.samples)
            needs = arithmetic.needs_of(self.plan, self.samples)
            if needs is not None:
                told.append(("memory", needs.words(self.machine.left_bytes)))
        return told

    def __str__(self) -> str:
        return "\n".join(printing.lines(self.rows(), self.findings, self.notes, self.unseen))

    def to_dict(self) -> dict[str, Any]:
        return {
            "findings": [finding.to_dict() for finding in self.findings],
            "kills": self.kills,
            "machine": self.machine.to_dict(),
            "loader": _plan_as_dict(self.plan) if self.plan.dataset is not None else None,
            "dataset": {
                "type": walking.type_name(self.plan.dataset),
                "bytes": self.dataset_bytes,
                "pickle_bytes": self.pickle_bytes,
            }
            if self.plan.dataset is not None
            else None,
            "samples": self.samples.to_dict() if self.samples is not None else None,
            "compiled": self.compiled,
            "notes": list(self.notes),
            "not_looked_at": list(self.unseen),
            "seconds": round(self.seconds, 3),
        }


def examine(
    loader_or_dataset: Any = None,
    *,
    workers: int | None = None,
    batch_size: int | None = None,
    start_method: str | None = None,
    samples: int = 32,
    time_limit: float = 30.0,
    cpus: Sequence[str] = (),
    compiled: bool = True,
    progress: Progress | None = None,
    name: str = "",
    root: str = "/",
) -> Examination:
    """What will kill workers, may kill them, changes samples or slows down: on this machine, with this loader.

    loader_or_dataset  a DataLoader, ours or torch's, or a dataset; None: only the machine is looked at
    workers, batch_size, start_method  instead of the loader's own; for a dataset alone: the CPUs there are, 1, and
                       what Python has as default
    samples      so many are fetched, each several times; 0: none
    time_limit   about so many seconds are taken for samples
    cpus         other CPUs on which the compiled code is to run: "x86-64-v2", "znver2", …
    compiled     False: compiled libraries are not examined
    progress     called with what is being done and the share that is done of it
    name         what the loader is called on the command line, for remedies: "train.py:loader"
    root         where /proc, /sys and /dev are, for tests
    """
    _check(workers, batch_size, start_method, samples, time_limit)
    machines.machines(cpus)  # a name that nobody knows is an error, not something that was not looked at
    at_work = _Work(progress or (lambda what, share: None))
    begun = time.monotonic()
    # Before we start anything ourselves.
    running = at_work.one("processes and threads", starting.running, starting.Running())
    seen_machine = at_work.one("the machine", lambda: machine.look(root), Machine())
    planned = at_work.one(
        "the loader",
        lambda: plan.plan_of(
            loader_or_dataset,
            usable_cpus=seen_machine.cpus,
            workers=workers,
            batch_size=batch_size,
            start_method=start_method,
            name=name,
        ),
        Plan(loader_or_dataset),
    )
    at_work.all("the machine", lambda: machine.findings(seen_machine, planned))
    at_work.all("processes and threads", lambda: starting.findings(planned, seen_machine, running))
    sampled: Sampled | None = None
    found, pickled = dataset.Seen(), dataset.Pickled()
    if planned.dataset is not None:
        found = at_work.one("the dataset", lambda: dataset.look(planned), found)
        pickled = at_work.one("its pickle", lambda: dataset.pickle_of(planned, found), pickled)
        at_work.unseen += [*found.unseen, *([pickled.unseen] if pickled.unseen else [])]
        at_work.all("the dataset", lambda: dataset.findings(planned, seen_machine, found, pickled, running))
        if samples:
            method = "fork" if pickled.problems or not planned.workers else planned.start_method
            sampled = at_work.one(
                "samples",
                lambda: sampling.sample(planned, samples, time_limit, at_work.progress, method),
                Sampled(),
            )
            at_work.all("samples", lambda: sampling.findings(planned, sampled or Sampled(), found.generators))
            at_work.unseen += sampled.unseen
        at_work.all("the arithmetic", lambda: arithmetic.findings(planned, seen_machine, sampled or Sampled()))
        if arithmetic.needs_of(planned, sampled or Sampled()) is not None:
            # How much /dev/shm has to hold is known: whether it is small in general says nothing more.
            at_work.findings = [finding for finding in at_work.findings if finding.name != "small-shm"]
    code = at_work.one("compiled code", lambda: _compiled(cpus, at_work), "") if compiled else ""
    notes = []
    if pickled.problems and planned.start_method == "fork":
        first = pickled.problems[0]
        notes.append(f"under spawn or forkserver it would not pickle: {first.path} ({first.type_name})")
    return Examination(
        tuple(ranked(at_work.findings)),
        seen_machine,
        planned,
        sampled,
        found.bytes if planned.dataset is not None else None,
        pickled.bytes,
        tuple(notes),
        tuple(dict.fromkeys(at_work.unseen)),
        time.monotonic() - begun,
        code,
    )


class _Work:
    """Takes the parts of an examination one by one; one that fails is named, and the others go on."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.findings: list[Finding] = []
        self.unseen: list[str] = []

    def one(self, what: str, look: Callable[[], Any], otherwise: Any) -> Any:
        self.progress(what, 0.0)
        try:
            return look()
        except Exception as error:  # whatever somebody's objects do: the rest is of use without this part
            self._failed(what, error)
            return otherwise

    def all(self, what: str, find: Callable[[], Iterable[Finding]]) -> None:
        self.progress(what, 0.0)
        try:
            for finding in find():
                self.findings.append(finding)
        except Exception as error:  # as above
            self._failed(what, error)

    def _failed(self, what: str, error: Exception) -> None:
        self.unseen.append(f"{what}: {fetching.told(error)}")


_NOT_LOOKED_AT = "not looked at: "


def _compiled(cpus: Sequence[str], at_work: _Work) -> str:
    """Of compiled code: findings, what was not looked at, and in a line what was."""
    seen = native.survey(cpus, lambda done, of: at_work.progress("compiled code", done / max(1, of)))
    at_work.findings += seen.findings
    told = [fact for fact in seen.facts if not fact.startswith(_NOT_LOOKED_AT)]
    at_work.unseen += [fact.removeprefix(_NOT_LOOKED_AT) for fact in seen.facts if fact.startswith(_NOT_LOOKED_AT)]
    against = f", for this CPU and {', '.join(cpus)}" if cpus else ", for this CPU"
    return ", ".join(told) + against


def _check(workers: Any, batch_size: Any, start_method: Any, samples: Any, time_limit: Any) -> None:
    if workers is not None:
        check_number("workers", workers, least=0, whole=True)
    if batch_size is not None:
        check_number("batch_size", batch_size, least=1, whole=True)
    if start_method is not None and start_method not in _METHODS:
        raise ValueError(f"start_method must be one of {', '.join(_METHODS)}, got {start_method!r}")
    check_number("samples", samples, least=0, whole=True)
    check_number("time_limit", time_limit, least=0)


def _plan_as_dict(planned: Plan) -> dict[str, Any]:
    return {name: value for name, value in vars(planned).items() if name not in ("dataset", "loader", "name")} | {
        "assumed": planned.assumed
    }
