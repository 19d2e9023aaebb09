"""Which engine runs a loader's workers on this machine.

Reads   which system layer serves.
Writes  nothing.
Never   asks for the platform itself.
"""

from __future__ import annotations

from typing import Any

from outlive._system import choice
from outlive.engines.exchange import Exchange
from outlive.engines.watch import WatchSettings


def make_engine(context: Any, job: Any, slots: int, watch: WatchSettings) -> Exchange:
    if choice.PORTABLE:
        from outlive.engines.portable.engine import PortableEngine

        return PortableEngine(context, job, slots, watch)
    from outlive.engines.local.engine import LocalEngine

    return LocalEngine(context, job, slots, watch)
