"""A worker's memory over time, as a picture in SVG.

Reads   memory samples and limits.
Writes  nothing.
Never   refers to anything outside of the picture; its colours are the page's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from outlive._forensics import words
from outlive.evidence import MemorySample
from outlive.tables import escaped

_WIDTH, _HEIGHT = 720, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 16, 18, 40
_MOST_POINTS = 600
_NEAR = 4  # a limit farther away than so many times the peak would flatten the curve


def memory(samples: Sequence[MemorySample], *, peak: int | None = None, limits: Sequence[tuple[str, int]] = ()) -> str:
    """An <svg> element; empty where there is nothing to draw."""
    samples = [s for s in samples if math.isfinite(s.seconds_before)]
    if len(samples) < 2:
        return ""  # one point is a row of the table
    samples = samples[-_MOST_POINTS:]
    highest = max([s.resident_bytes for s in samples] + ([peak] if peak else []))
    near = [(name, count) for name, count in limits if 0 < count <= highest * _NEAR]
    top = max([highest, *(count for _, count in near)]) * 1.08 or 1
    oldest = max(max(s.seconds_before for s in samples), 1e-3)

    def x(seconds_before: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * (1 - seconds_before / oldest)

    def y(count: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - count / top)

    parts = [_grid(top, y), _times(oldest, x)]
    resident = [(x(s.seconds_before), y(s.resident_bytes)) for s in samples]
    floor = _HEIGHT - _BOTTOM
    area = f"{resident[0][0]:.1f},{floor} {_points(resident)} {resident[-1][0]:.1f},{floor}"
    parts.append(f'<polygon class="area" points="{area}"/>')
    parts.append(f'<polyline class="resident" points="{_points(resident)}"/>')
    private = [(x(s.seconds_before), y(s.private_bytes)) for s in samples if s.private_bytes is not None]
    if len(private) > 1:
        parts.append(f'<polyline class="private" points="{_points(private)}"/>')
    for kind, name, count in [("limit", n, c) for n, c in near] + ([("peak", "peak", peak)] if peak else []):
        label = escaped(f"{name} {words.size(count)}")
        parts.append(
            f'<line class="{kind}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y(count):.1f}" y2="{y(count):.1f}"/>'
        )
        parts.append(f'<text class="{kind}" x="{_LEFT + 6}" y="{y(count) - 4:.1f}">{label}</text>')
    end = resident[-1]
    parts.append(f'<circle class="end" cx="{end[0]:.1f}" cy="{end[1]:.1f}" r="3.5"/>')
    said = escaped(f"Resident memory of the worker in the last {oldest:.0f} s; peak {words.size(highest)}")
    body = "".join(parts)
    return f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{said}">{body}</svg>'


def _points(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{px:.1f},{py:.1f}" for px, py in points)


def _grid(top: float, y: object) -> str:
    """Lines at round sizes."""
    assert callable(y)
    step = 2.0 ** math.ceil(math.log2(max(top / 4, 1)))
    lines = []
    for n in range(int(top // step) + 1):
        at = y(n * step)
        lines.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        lines.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{words.size(n * step)}</text>'
        )
    return "".join(lines)


def _times(oldest: float, x: object) -> str:
    assert callable(x)
    base = 10 ** math.floor(math.log10(oldest / 4))
    step = next(base * m for m in (1, 2, 5, 10) if base * m >= oldest / 5)
    marks = []
    for n in range(int(oldest // step) + 1):
        at = x(n * step)
        label = "incident" if n == 0 else f"−{n * step:g} s"
        anchor = "end" if n == 0 else "middle"
        marks.append(
            f'<text class="tick" x="{at:.1f}" y="{_HEIGHT - _BOTTOM + 20}" text-anchor="{anchor}">{label}</text>'
        )
    return "".join(marks)
