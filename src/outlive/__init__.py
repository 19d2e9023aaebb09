"""outlive: a data loader, a process pool and a launcher whose processes may die without ending the job.

The public names load late: `import outlive` imports neither torch nor anything that needs it.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as type checkers read it; `typing` itself would cost every Python under `outlive run` 8 ms

__version__ = "0.1.0"

_HOMES = {
    "DataLoader": "outlive.loader.dataloader",
    "FaultPolicy": "outlive.settings",
    "Adoption": "outlive.adoption.installing",
    "install": "outlive.adoption.installing",
    "installed": "outlive.adoption.installing",
    "uninstall": "outlive.adoption.installing",
    "Pool": "outlive.pool.executor",
    "PoolBrokenError": "outlive.pool.failing",
    "TaskCrashedError": "outlive.pool.failing",
    "TaskTimeoutError": "outlive.pool.failing",
    "RankExitedError": "outlive.launch.raising",
    "RankHungError": "outlive.launch.raising",
    "RankRaisedError": "outlive.launch.raising",
    "RankStartError": "outlive.launch.raising",
    "SpawnContext": "outlive.launch.group",
    "SpawnError": "outlive.launch.raising",
    "spawn": "outlive.launch.spawning",
    "SharedDict": "outlive._share.mappings",
    "SharedList": "outlive._share.sequences",
    "SharedPart": "outlive._share.sharing",
    "share": "outlive._share.sharing",
    "shared_parts": "outlive._share.sharing",
    "Incident": "outlive.incident",
    "IncidentKind": "outlive.incident",
    "Statistics": "outlive.statistics",
    "CheckReport": "outlive.checking.report",
    "check": "outlive.checking.check",
    "BenchReport": "outlive.measuring.report",
    "bench": "outlive.measuring.bench",
    "Webhook": "outlive._forensics.alerts",
    "PrometheusCollector": "outlive._metrics.prometheus",
    "logged": "outlive._metrics.scalars",
    "scalars": "outlive._metrics.scalars",
    "observe": "outlive._metrics.telemetry",
    "traced": "outlive._metrics.telemetry",
    "OutliveError": "outlive.errors",
    "SourceUnavailableError": "outlive.errors",
    "ForkedLoaderError": "outlive.errors",
    "QuarantineFileError": "outlive.errors",
    "PositionError": "outlive.errors",
    "RankFailedError": "outlive.errors",
    "TooManyFaultsError": "outlive.errors",
    "WorkerCrashedError": "outlive.errors",
    "WorkerHungError": "outlive.errors",
    "WorkerStartError": "outlive.errors",
}
_FOLDERS = ("doctor", "graph", "testing")  # public names of their own

__all__ = [
    "Adoption",
    "BenchReport",
    "CheckReport",
    "DataLoader",
    "FaultPolicy",
    "ForkedLoaderError",
    "OutliveError",
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

    from outlive import doctor, graph, testing
    from outlive._forensics.alerts import Webhook
    from outlive._metrics.prometheus import PrometheusCollector
    from outlive._metrics.scalars import logged, scalars
    from outlive._metrics.telemetry import observe, traced
    from outlive._share.mappings import SharedDict
    from outlive._share.sequences import SharedList
    from outlive._share.sharing import SharedPart, share, shared_parts
    from outlive.adoption.installing import Adoption, install, installed, uninstall
    from outlive.checking.check import check
    from outlive.checking.report import CheckReport
    from outlive.errors import (
        ForkedLoaderError,
        OutliveError,
        PositionError,
        QuarantineFileError,
        RankFailedError,
        SourceUnavailableError,
        TooManyFaultsError,
        WorkerCrashedError,
        WorkerHungError,
        WorkerStartError,
    )
    from outlive.incident import Incident, IncidentKind
    from outlive.launch.group import SpawnContext
    from outlive.launch.raising import RankExitedError, RankHungError, RankRaisedError, RankStartError, SpawnError
    from outlive.launch.spawning import spawn
    from outlive.loader.dataloader import DataLoader
    from outlive.measuring.bench import bench
    from outlive.measuring.report import BenchReport
    from outlive.pool.executor import Pool
    from outlive.pool.failing import PoolBrokenError, TaskCrashedError, TaskTimeoutError
    from outlive.settings import FaultPolicy
    from outlive.statistics import Statistics


def __getattr__(name: str) -> Any:
    if name in _FOLDERS:
        import importlib

        return importlib.import_module(f"outlive.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'outlive' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(_HOMES) | set(_FOLDERS))
