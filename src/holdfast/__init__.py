"""holdfast: a data loader, a process pool and a launcher whose processes may die without ending the job.

The public names load late: `import holdfast` imports neither torch nor anything that needs it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; `typing` itself would cost every Python under `holdfast run` 8 ms

__version__ = "0.1.0"

_HOMES = {
    "DataLoader": "holdfast.loader.dataloader",
    "FaultPolicy": "holdfast.settings",
    "Adoption": "holdfast.adoption.installing",
    "install": "holdfast.adoption.installing",
    "installed": "holdfast.adoption.installing",
    "uninstall": "holdfast.adoption.installing",
    "Pool": "holdfast.pool.executor",
    "PoolBrokenError": "holdfast.pool.failing",
    "TaskCrashedError": "holdfast.pool.failing",
    "TaskTimeoutError": "holdfast.pool.failing",
    "RankExitedError": "holdfast.launch.raising",
    "RankHungError": "holdfast.launch.raising",
    "RankRaisedError": "holdfast.launch.raising",
    "RankStartError": "holdfast.launch.raising",
    "SpawnContext": "holdfast.launch.group",
    "SpawnError": "holdfast.launch.raising",
    "spawn": "holdfast.launch.spawning",
    "SharedDict": "holdfast._share.mappings",
    "SharedList": "holdfast._share.sequences",
    "SharedPart": "holdfast._share.sharing",
    "share": "holdfast._share.sharing",
    "shared_parts": "holdfast._share.sharing",
    "Incident": "holdfast.incident",
    "IncidentKind": "holdfast.incident",
    "Statistics": "holdfast.statistics",
    "CheckReport": "holdfast.checking.report",
    "check": "holdfast.checking.check",
    "BenchReport": "holdfast.measuring.report",
    "bench": "holdfast.measuring.bench",
    "Webhook": "holdfast._forensics.alerts",
    "PrometheusCollector": "holdfast._metrics.prometheus",
    "logged": "holdfast._metrics.scalars",
    "scalars": "holdfast._metrics.scalars",
    "observe": "holdfast._metrics.telemetry",
    "traced": "holdfast._metrics.telemetry",
    "HoldfastError": "holdfast.errors",
    "SourceUnavailableError": "holdfast.errors",
    "ForkedLoaderError": "holdfast.errors",
    "QuarantineFileError": "holdfast.errors",
    "PositionError": "holdfast.errors",
    "RankFailedError": "holdfast.errors",
    "TooManyFaultsError": "holdfast.errors",
    "WorkerCrashedError": "holdfast.errors",
    "WorkerHungError": "holdfast.errors",
    "WorkerStartError": "holdfast.errors",
}
_FOLDERS = ("doctor", "graph", "testing")  # public names of their own

__all__ = [
    "Adoption",
    "BenchReport",
    "CheckReport",
    "DataLoader",
    "FaultPolicy",
    "ForkedLoaderError",
    "HoldfastError",
    "Incident",
    "IncidentKind",
    "Pool",
    "PoolBrokenError",
    "PrometheusCollector",
    "QuarantineFileError",
    "RankExitedError",
    "RankFailedError",
    "RankHungError",
    "RankRaisedError",
    "RankStartError",
    "SharedDict",
    "SharedList",
    "SharedPart",
    "SourceUnavailableError",
    "SpawnContext",
    "SpawnError",
    "Statistics",
    "TaskCrashedError",
    "TaskTimeoutError",
    "PositionError",
    "TooManyFaultsError",
    "Webhook",
    "WorkerCrashedError",
    "WorkerHungError",
    "WorkerStartError",
    "bench",
    "check",
    "doctor",
    "graph",
    "install",
    "installed",
    "logged",
    "observe",
    "scalars",
    "share",
    "shared_parts",
    "spawn",
    "testing",
    "traced",
    "uninstall",
]

if TYPE_CHECKING:
    from typing import Any

    from holdfast import doctor, graph, testing
    from holdfast._forensics.alerts import Webhook
    from holdfast._metrics.prometheus import PrometheusCollector
    from holdfast._metrics.scalars import logged, scalars
    from holdfast._metrics.telemetry import observe, traced
    from holdfast._share.mappings import SharedDict
    from holdfast._share.sequences import SharedList
    from holdfast._share.sharing import SharedPart, share, shared_parts
    from holdfast.adoption.installing import Adoption, install, installed, uninstall
    from holdfast.checking.check import check
    from holdfast.checking.report import CheckReport
    from holdfast.errors import (
        ForkedLoaderError,
        HoldfastError,
        PositionError,
        QuarantineFileError,
        RankFailedError,
        SourceUnavailableError,
        TooManyFaultsError,
        WorkerCrashedError,
        WorkerHungError,
        WorkerStartError,
    )
    from holdfast.incident import Incident, IncidentKind
    from holdfast.launch.group import SpawnContext
    from holdfast.launch.raising import RankExitedError, RankHungError, RankRaisedError, RankStartError, SpawnError
    from holdfast.launch.spawning import spawn
    from holdfast.loader.dataloader import DataLoader
    from holdfast.measuring.bench import bench
    from holdfast.measuring.report import BenchReport
    from holdfast.pool.executor import Pool
    from holdfast.pool.failing import PoolBrokenError, TaskCrashedError, TaskTimeoutError
    from holdfast.settings import FaultPolicy
    from holdfast.statistics import Statistics


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        import importlib

        return importlib.import_module(f"holdfast.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES) | set(_FOLDERS))
