"""Draws results/*.json as results/*.svg, without measuring again: `plot.py [JSON …]`.

One workload a line, on a logarithmic axis of ratios to torch. Two loaders make bars; with peers, each loader is a dot.
The same JSON gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from importlib import util
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results")
DRAWN = ("throughput", "peers")

INK, GREY, FAINT, PAPER = "#1f2933", "#6b7785", "#dfe4ea", "#ffffff"
OURS, SLOWER = "#0f766e", "#c2571a"
MARKS = {
    "outlive": ("o", OURS),
    "torchdata stateful": ("s", "#b45309"),
    "torchdata nodes, processes": ("D", "#d9a404"),
    "torchdata nodes, threads": ("d", "#f0c75e"),
    "grain": ("^", "#7c3aed"),
    "spdl processes": ("v", "#1d4ed8"),
    "spdl arena": ("P", "#3b82f6"),
    "spdl threads": ("X", "#93c5fd"),
    "bare": ("o", "#9fb3b0"),
}
STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": FAINT,
    "xtick.color": GREY,
    "svg.fonttype": "path",
    "svg.hashsalt": "outlive",
}


def draw(source: Path) -> str:
    """Draws this file, and says what came of it."""
    if util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (pip install -e '.[bench]' -c constraints.txt)"
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    result = json.loads(source.read_text())
    rows = result["rows"]
    target = source.with_suffix(".svg")
    others = {name for row in rows for name in row["loaders"]} - {"torch", "outlive", "bare"}
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(9.2, (1.9 if others else 1.55) + 0.56 * len(rows)), facecolor=PAPER)
        (_dots if others else _bars)(axes, rows)
        _frame(axes, rows)
        height = figure.get_figheight()
        figure.subplots_adjust(left=0.32, right=0.97, top=1 - 0.72 / height, bottom=(1.14 if others else 0.78) / height)
        _words(figure, result, bool(others))
        figure.savefig(target, metadata={"Date": None, "Creator": None}, facecolor=PAPER)
        pyplot.close(figure)
    return f"drawn to {target.name}"


def _bars(axes: Any, rows: list[dict[str, Any]]) -> None:
    """What outlive reaches, with the spread over the rounds, and the figures beside it."""
    for line, row in enumerate(rows):
        ours, theirs = row["loaders"]["outlive"], row["loaders"]["torch"]
        ratio = ours["ratio"]
        colour = OURS if ratio >= 1 else SLOWER
        axes.barh(line, ratio - 1, left=1, height=0.52, color=colour, zorder=3)
        axes.plot((ours["ratio_least"], ours["ratio_most"]), (line, line), color=INK, alpha=0.55, lw=1.2, zorder=4)
        end = max(ratio, ours["ratio_most"], 1)
        figures = f"{_short(theirs['median'])} → {_short(ours['median'])} {'s' if 'seconds' in row['unit'] else '/s'}"
        paper = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # no grid line through a figure
        words = {"xytext": (7, 0), "textcoords": "offset points", "va": "center", "bbox": paper}
        bold = axes.annotate(f"{ratio:.1f}×", (end, line), weight="bold", color=colour, fontsize=10.5, **words)
        axes.annotate(figures, (1, 0.5), xycoords=bold, color=GREY, fontsize=8.5, **words)


def _dots(axes: Any, rows: list[dict[str, Any]]) -> None:
    for line, row in enumerate(rows):
        ratios = [its["ratio"] for its in row["loaders"].values()]
        axes.plot((min(ratios), max(ratios)), (line, line), color=FAINT, lw=3, zorder=2, solid_capstyle="round")
        for name, its in row["loaders"].items():
            if name in MARKS and name != "bare":
                marker, colour = MARKS[name]
                size = 95 if name == "outlive" else 44
                axes.scatter(its["ratio"], line, s=size, marker=marker, color=colour, edgecolor=PAPER, lw=0.8, zorder=4)
    present = [name for name in MARKS if name != "bare" and any(name in row["loaders"] for row in rows)]
    for name in present:
        axes.scatter([], [], marker=MARKS[name][0], color=MARKS[name][1], label=name, s=60 if name == "outlive" else 36)
    axes.figure.legend(
        loc="lower left", bbox_to_anchor=(0.015, 0.055), ncols=4, frameon=False, fontsize=8.5, handletextpad=0.3
    )


def _frame(axes: Any, rows: list[dict[str, Any]]) -> None:
    """The axis, torch's line, and the workloads' names."""
    spreads = [its[key] for row in rows for its in row["loaders"].values() for key in ("ratio_least", "ratio_most")]
    low, high = min(0.8, min(spreads) * 0.9), max(2.0, max(spreads))
    axes.set_xscale("log")
    axes.set_xlim(low, high * (high / low) ** 0.28)
    ticks = [tick for tick in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000) if low <= tick <= high * 1.3]
    axes.set_xticks(ticks, [f"{tick:g}×" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks([])
    axes.grid(axis="x", color=FAINT, lw=0.8, zorder=0)
    axes.axvline(1, color=INK, lw=1.2, zorder=5)
    axes.annotate("torch", (1, 1), xycoords=("data", "axes fraction"), xytext=(0, 4), textcoords="offset points",
                  ha="center", color=INK, fontsize=8.5)  # fmt: skip
    axes.tick_params(length=0)
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)
    for line, row in enumerate(rows):
        short, _, detail = row["workload"].partition(": ")
        at = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
        axes.annotate(short, (0, line), xytext=(-10, 1.5), va="bottom", weight="bold", **at)
        axes.annotate(detail, (0, line), xytext=(-10, -0.5), va="top", color=GREY, fontsize=7.8, **at)


def _words(figure: Any, result: dict[str, Any], peers: bool) -> None:
    """What one looks at, and what it was measured on."""
    height = figure.get_figheight()
    title = f"{'Loaders' if peers else 'outlive'}: how many times as fast as torch.utils.data.DataLoader"
    figure.text(0.02, 1 - 0.17 / height, title, weight="bold", fontsize=12.5, va="top")
    machine = result["machine"]
    names = ("python", "torch", "numpy", *(("torchdata", "grain", "spdl") if peers else ()))
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in names if name in machine["versions"])
    first = f"Two workers, medians of {result['rounds']} alternating rounds" + ("" if peers else "; lines: all rounds")
    what = f"{first}. {machine['cores']} cores, {machine['cpu']}; {versions}; {machine['date']}"
    figure.text(0.02, 0.12 / height, what, color=GREY, fontsize=7.4, va="bottom")


def _short(value: float) -> str:
    return f"{value:,.0f}".replace(",", "\u202f") if value >= 20 else f"{value:.1f}"


if __name__ == "__main__":
    named = [Path(name) for name in sys.argv[1:]] or [RESULTS / f"{name}.json" for name in DRAWN]
    for path in named:
        print(draw(path) if path.exists() else f"{path.name} is not there: measure first")
