"""What a load test found: a table, JSON, and the settings that it speaks for.

Reads   trials.
Writes  nothing.
Never   recommends what was not tried.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from outlive.measuring.trial import IN_VAIN, NO_BATCHES, PARTS, Trial
from outlive.quantities import in_words

_NEARLY = 0.95  # of the most: what is faster by less is not worth a worker
_MUCH = 0.3  # of the time: somebody waits for somebody
_WIDTH = 80
_HARDLY = 0.05  # of the consumer's time: waits that nobody minds


@dataclass(frozen=True)
class BenchReport:
    """What `outlive.bench` found; `recommended` is the trial whose settings it speaks for."""

    loader: str
    trials: tuple[Trial, ...]
    yours: tuple[int, int | None]  # workers and prefetch factor as the loader has them
    step_s: float = 0.0
    seconds: float = 0.0
    cpus: float = 0.0
    advice: str = ""

    @property
    def recommended(self) -> Trial | None:
        return recommended(self.trials, self.step_s)

    def to_dict(self) -> dict[str, Any]:
        chosen = self.recommended
        told = asdict(self)
        told["yours"] = {"num_workers": self.yours[0], "prefetch_factor": self.yours[1]}
        told["recommended"] = (
            None if chosen is None else {"num_workers": chosen.workers, "prefetch_factor": chosen.prefetch}
        )
        return told

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return "\n".join(lines(self))

    def __repr__(self) -> str:
        return f"<BenchReport of {self.loader}: {_settings(self.recommended)}>"


def recommended(trials: Sequence[Trial], step_s: float = 0.0) -> Trial | None:
    """The fewest workers, then the least prefetching, that are nearly as fast as the fastest; with a step to feed,
    those whose consumer hardly waits."""
    measured = [trial for trial in trials if trial.is_sure] or [trial for trial in trials if trial.is_measured]
    if not measured:
        return None
    enough = [trial for trial in measured if trial.waiting <= _HARDLY] if step_s else []
    if not enough:
        most = max(trial.batches_per_s for trial in measured)
        enough = [trial for trial in measured if trial.batches_per_s >= _NEARLY * most]
    return min(enough, key=lambda trial: (trial.workers, trial.prefetch or 0))


def lines(report: BenchReport) -> list[str]:
    """The report for a terminal."""
    step = f", {report.step_s * 1e3:g} ms of a step after each batch" if report.step_s else ""
    out = [
        f"{report.loader}: {_count(len(report.trials), 'trial')} in {report.seconds:.0f} s,"
        f" {_count(report.cpus, 'CPU')}{step}",
        "",
        "                             first     time of workers, %        waits   memory",
        "  workers prefetch batches/s batch  fetch collate transport idle     %      PSS",
    ]
    out += [_row(trial, _is_yours(trial, report)) for trial in report.trials]
    out += ["  * yours"] if any(_is_yours(trial, report) for trial in report.trials) else []
    problems = [trial.problem for trial in report.trials]
    if set(problems) == {NO_BATCHES}:
        return [*out, "", f"  nothing was measured: {NO_BATCHES}"]
    for trial in report.trials:
        if trial.problem:
            text = f"{_named(trial)}: {' '.join(trial.problem.split())}"
            out += textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="    ")
    chosen = report.recommended
    if chosen is None:
        why = "no trial had a batch in time: give it more --seconds"
        return [*out, "", f"  {why if set(problems) <= {'', IN_VAIN} else 'nothing was measured'}"]
    out += ["", f"  recommended   {_settings(chosen)}   {_speaking_for(chosen)}"]
    yours = next((trial for trial in report.trials if _is_yours(trial, report)), None)
    if yours is not None and yours is not chosen and yours.is_measured:
        out.append(f"  yours         {_settings(yours)}   {_speaking_for(yours)}")
    if chosen.shares:
        out += _labelled("its workers", _of_workers(chosen))
    if report.advice:
        out += _labelled("advice", report.advice)
    return out


def _labelled(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {label:<13} ", subsequent_indent=" " * 16)


def _of_workers(trial: Trial) -> str:
    """What they do with their time, and what that means."""
    idle = trial.shares["idle"]
    if idle > _MUCH and trial.waiting > _MUCH:
        return (
            f"are idle {idle:.0%} of their time though the consumer waits: some batches take far longer, and "
            "those after them may not pass. A larger prefetch_factor, in_order=False, or find the slow samples: "
            "outlive check"
        )
    if idle > 0.5:
        return f"are idle {idle:.0%} of their time: the consumer is the slower"
    part = max(("fetch", "collate", "transport"), key=lambda name: trial.shares[name])
    return f"spend most of their time in {part}: {trial.shares[part]:.0%}"


def _is_yours(trial: Trial, report: BenchReport) -> bool:
    return (trial.workers, trial.prefetch) == report.yours


def _row(trial: Trial, is_yours: bool) -> str:
    """In 80 columns."""
    prefetch = "-" if trial.prefetch is None else str(trial.prefetch)
    head = f"{'*' if is_yours else ' '} {trial.workers:>7} {prefetch:>8}"
    if not trial.is_measured:
        return head + "         -"
    first = _first(trial.first_batch_s) if trial.first_batch_s is not None else "-"
    shares = "".join(
        f"{trial.shares[part] * 100:{width}.0f}" if trial.shares else "-".rjust(width)
        for part, width in zip(PARTS, (6, 8, 10, 5), strict=True)
    )
    memory = in_words(trial.memory_bytes) if trial.memory_bytes is not None else "-"
    return f"{head} {_rate(trial.batches_per_s):>9} {first:>6}{shares}{trial.waiting * 100:6.0f} {memory:>8}"


def _first(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.0f} s"


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}{'' if number == 1 else 's'}"


def _rate(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def _named(trial: Trial) -> str:
    return f"{trial.workers} worker{'' if trial.workers == 1 else 's'}"


def _settings(trial: Trial | None) -> str:
    if trial is None:
        return "nothing was measured"
    if trial.prefetch is None:
        return f"num_workers={trial.workers}"
    return f"num_workers={trial.workers}, prefetch_factor={trial.prefetch}"


def _speaking_for(trial: Trial) -> str:
    memory = f", {in_words(trial.memory_bytes)}" if trial.memory_bytes is not None else ""
    return f"{_rate(trial.batches_per_s)} batches/s{memory}"
