"""What a loader is going to do: how many processes, how they start, what they have under way.

Reads   a DataLoader's settings, ours or torch's; a dataset alone is taken as one would load it by default.
Writes  nothing.
Never   iterates, and imports no torch: whoever has a loader has it.
"""

from __future__ import annotations

import math
import multiprocessing
import sys
from dataclasses import dataclass
from typing import Any

from outlive.doctor import walking

DEFAULT_PREFETCH = 2
_FACTOR_OF_TORCH = 2


@dataclass(frozen=True)
class Plan:
    dataset: Any = None
    name: str = "dataset"  # how its attributes are told: «dataset.paths»
    loader: Any = None  # None: only a dataset is known, or nothing
    is_ours: bool = True
    workers: int = 0
    prefetch: int = DEFAULT_PREFETCH
    batch_size: int | None = 1  # None: samples are batches
    start_method: str = "fork"
    threads: int | None = 1  # that libraries may use in a worker; None: as they like
    pinned: bool = False
    shares_dataset: bool = False
    on_error: str = "raise"
    streams: bool = False  # the dataset is iterated, not indexed
    target: str = ""  # as it was named on the command line

    @property
    def assumed(self) -> bool:
        """Whether these are our words, not a loader's."""
        return self.loader is None

    @property
    def forks(self) -> bool:
        return self.workers > 0 and self.start_method == "fork"

    @property
    def batches_under_way(self) -> int:
        """At most: prefetched by all workers, and the one in the trainer's hands."""
        return self.workers * self.prefetch + 1 if self.workers else 1

    @property
    def words(self) -> str:
        whose = "outlive.DataLoader" if self.is_ours else "torch.utils.data.DataLoader"
        if not self.workers:
            return f"{whose}, no workers: samples are fetched in the trainer itself"
        batches = "samples as they are" if self.batch_size is None else f"batches of {self.batch_size}"
        plural = "" if self.workers == 1 else "s"
        text = f"{whose}, {self.workers} worker{plural} by {self.start_method}, prefetch {self.prefetch}, {batches}"
        return f"{text} (assumed)" if self.assumed else text


def plan_of(
    target: Any,
    *,
    usable_cpus: float,
    workers: int | None = None,
    batch_size: int | None = None,
    start_method: str | None = None,
    name: str = "",
) -> Plan:
    """Of a loader, a dataset, or None; what is given by name counts more than what the loader says."""
    if target is None:
        return Plan(start_method=start_method or _default_method(), workers=workers or 0)
    if is_loader(target):
        plan = _of_loader(target)
    else:
        assumed = max(1, math.floor(usable_cpus))
        plan = Plan(target, workers=assumed, start_method=_default_method(), streams=_streams(target))
    told = {"workers": workers, "batch_size": batch_size, "start_method": start_method, "target": name}
    return Plan(**{**vars(plan), **{name: value for name, value in told.items() if value is not None}})


def is_loader(target: Any) -> bool:
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and issubclass(type(target), torch_data.DataLoader)


def _of_loader(loader: Any) -> Plan:
    ours = any(kind.__module__.partition(".")[0] == "outlive" for kind in type(loader).__mro__)
    workers = int(loader.num_workers)
    context = getattr(loader, "multiprocessing_context", None)
    method = context.get_start_method(allow_none=True) if context is not None else None
    sampler = getattr(loader, "batch_sampler", None)
    batch_size = loader.batch_size if loader.batch_size is not None else getattr(sampler, "batch_size", None)
    if not isinstance(batch_size, int):
        batch_size = None if sampler is None else 1
    return Plan(
        loader.dataset,
        loader=loader,
        is_ours=ours,
        workers=workers,
        prefetch=int(getattr(loader, "prefetch_factor", None) or _FACTOR_OF_TORCH),
        batch_size=batch_size,
        start_method=method or _default_method(),
        threads=getattr(loader, "worker_threads", 1) if ours else 1,
        pinned=bool(getattr(loader, "pin_memory", False)),
        shares_dataset=bool(getattr(loader, "share_dataset", False)),
        on_error=str(getattr(getattr(loader, "_policy", None), "on_error", "raise")),
        streams=_streams(loader.dataset),
    )


def _default_method() -> str:
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _streams(dataset: Any) -> bool:
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and issubclass(type(dataset), torch_data.IterableDataset):
        return True
    return not walking.has_method(dataset, "__getitem__")
