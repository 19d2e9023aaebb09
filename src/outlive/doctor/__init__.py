"""What will kill workers on this machine with this loader, before it does: `outlive doctor`.

    from outlive import doctor

    print(doctor.examine(loader))

The names load late: `import outlive.doctor` costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False

_HOMES = {
    "Examination": "outlive.doctor.examination",
    "Finding": "outlive.doctor.findings",
    "Rank": "outlive.doctor.findings",
    "examine": "outlive.doctor.examination",
}

__all__ = ["Examination", "Finding", "Rank", "examine"]

if TYPE_CHECKING:
    from typing import Any

    from outlive.doctor.examination import Examination, examine
    from outlive.doctor.findings import Finding, Rank


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'outlive.doctor' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES))
