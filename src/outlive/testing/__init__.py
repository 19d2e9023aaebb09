"""Faults for your own tests: datasets that kill, hang and leak on purpose, sources that fail, a leak check.

The names load late: pytest imports this package in everybody's test run, by way of the plugin.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; `typing` itself takes longer to import than all of this
if TYPE_CHECKING:
    from typing import Any

_IN = {
    "outlive.testing.faulty": ("Faulty",),
    "outlive.testing.faults": (
        *("Abort", "BusError", "CloseDescriptors", "Deadlock", "DivideByZero", "Exit", "Fault", "Hang"),
        *("IllegalInstruction", "InjectedError", "Kill", "Leak", "LeakDescriptors", "LeaveProcesses", "OutOfMemory"),
        *("Raise", "Segfault", "Slow", "Spin", "StackOverflow", "Stop", "Unpicklable"),
    ),
    "outlive.testing.modifiers": ("At", "Once", "Outage", "Sometimes", "Times"),
    "outlive.testing.network": ("Server", "serving"),
    "outlive.testing.surroundings": (
        *("NotPossibleError", "busy_cpus", "file_size_limit", "full_disk", "memory_pressure"),
    ),
    "outlive.testing.plan": ("Plan", "Planned", "parse_faults"),
    "outlive.testing.plan_words": ("PlanError",),
    "outlive.testing.around": ("Surrounding",),
    "outlive.testing.chaos": ("ProgramFailedError",),
}
_HOMES = {name: home for home, names in _IN.items() for name in names}

__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'outlive.testing' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
