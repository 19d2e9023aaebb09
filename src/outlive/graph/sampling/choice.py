"""Whether samplers run in C or with NumPy: OUTLIVE_SAMPLER says "c" or "numpy"; else C, where it is built.

Reads   OUTLIVE_SAMPLER, when a neighbourhood is sampled.
Writes  nothing.
Never   changes a result: both find the same, bit for bit.
"""

from __future__ import annotations

import os

from outlive.graph.sampling import compiled

VARIABLE = "OUTLIVE_SAMPLER"


def use_c() -> bool:
    """Whether C serves."""
    chosen = os.environ.get(VARIABLE, "")
    if chosen == "numpy":
        return False
    if chosen == "c" and not compiled.AVAILABLE:
        raise RuntimeError(
            f"{VARIABLE}=c, but outlive was installed without its C sampler (there was no C compiler); "
            f"install one and reinstall outlive, or unset {VARIABLE} to sample with NumPy"
        )
    if chosen not in ("", "c"):
        raise ValueError(f'{VARIABLE} must be "c" or "numpy", got {chosen!r} (unset: C where it is built)')
    return compiled.AVAILABLE
