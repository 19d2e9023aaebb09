"""A load test as a picture: speed and memory by worker count, and what workers do with their time.

Reads   a report.
Writes  one file, SVG or PNG.
Never   imports matplotlib before it is asked for, nor opens a window.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlive.measuring.trial import PARTS

if TYPE_CHECKING:
    from outlive.measuring.report import BenchReport

_COLOURS = {"fetch": "#0f766e", "collate": "#d9a404", "transport": "#1d4ed8", "idle": "#dfe4ea"}
_KINDS = (".svg", ".png", ".pdf")


def check(path: str | os.PathLike[str]) -> None:
    """Say what is missing before anything is measured."""
    kind = Path(path).suffix.lower()
    if kind not in _KINDS:
        raise ValueError(f"a plot is written as .svg, .png or .pdf, got {os.fspath(path)!r}")
    if not Path(path).absolute().parent.is_dir():
        raise FileNotFoundError(f"there is no folder {Path(path).absolute().parent} for the plot")
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("a plot needs matplotlib: pip install matplotlib (the table needs nothing)")


def draw(report: BenchReport, path: str | os.PathLike[str]) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    measured = [trial for trial in report.trials if trial.is_measured]
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    speed, time = figure.subplots(1, 2)
    _draw_speed(speed, report, measured)
    names = [f"{t.workers}" if t.prefetch is None else f"{t.workers}×{t.prefetch}" for t in measured]
    bottom = [0.0] * len(measured)
    for part in PARTS:
        heights = [100 * trial.shares.get(part, 0.0) for trial in measured]
        time.bar(names, heights, bottom=bottom, label=part, color=_COLOURS[part])
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    time.set_xlabel("workers × prefetch")
    time.set_ylabel("time of workers, %")
    time.legend(fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, metadata={"Date": None} if Path(path).suffix.lower() == ".svg" else None)


def _draw_speed(axes: Any, report: BenchReport, measured: list[Any]) -> None:
    for prefetch in sorted({trial.prefetch or 0 for trial in measured}):
        row = [trial for trial in measured if (trial.prefetch or 0) == prefetch]
        label = f"prefetch {prefetch}" if prefetch else "no workers"
        axes.plot([t.workers for t in row], [t.batches_per_s for t in row], "o-", label=label)
    axes.set_xticks(sorted({trial.workers for trial in measured}))
    axes.set_xlabel("workers")
    axes.set_ylabel("batches/s")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(report.loader, fontsize=9)
    known = sorted({t.workers: t.memory_bytes for t in measured if t.memory_bytes is not None}.items())
    if known:
        memory = axes.twinx()
        memory.plot([w for w, _ in known], [m / 2**20 for _, m in known], "s:", color="#c2571a")
        memory.set_ylabel("memory (PSS), MiB", color="#c2571a")
        memory.set_ylim(bottom=0)
