"""Asserts that torch's loader and ours do the same.

Reads   what both loaders deliver for the same arguments and the same seed, on `loader_inputs`.
Writes  nothing.
Never   a tolerance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loader_comparison import OURS, TORCH, Run, differences, run

Arguments = Callable[[], dict[str, Any]]


def assert_same(arguments: Arguments, **how: Any) -> tuple[Run, Run]:
    ours = run(OURS, arguments, **how)
    theirs = run(TORCH, arguments, **how)

    assert differences(ours, theirs) == []
    return ours, theirs
