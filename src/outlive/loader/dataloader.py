"""The DataLoader: torch's, with workers that may die.

Reads   its arguments.
Writes  nothing by itself; its iterators do.
Never   means anything else by an argument than torch does.
"""

from __future__ import annotations

import inspect
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import Dataset, Sampler

from outlive._fleet import load
from outlive._forensics.ledger import COUNTS, Incidents, Ledger, Quarantine
from outlive._metrics.metering import Meter
from outlive._system import cpus
from outlive.engines.workers import still_there
from outlive.errors import PositionError
from outlive.incident import Incident
from outlive.limits import budget_of, limits_of
from outlive.loader import pacing, quarantine_file
from outlive.loader.inline import InlineIterator
from outlive.loader.iterator import SupervisedIterator
from outlive.loader.jobs import JobSettings
from outlive.loader.position_file import PositionFile
from outlive.loader.resuming import Bookmark
from outlive.loader.samples import MapJob
from outlive.loader.single import SingleIterator
from outlive.loader.streams import StreamJob
from outlive.settings import (
    FaultPolicy,
    FaultRule,
    check_callable,
    check_count,
    check_listeners,
    check_number,
    check_threads,
    check_timeout,
    fault_policy,
)
from outlive.statistics import Statistics

if TYPE_CHECKING:
    from typing_extensions import Self

T_co = TypeVar("T_co", covariant=True)

_TORCH_TAKES = frozenset(inspect.signature(torch.utils.data.DataLoader.__init__).parameters)


class DataLoader(torch.utils.data.DataLoader[T_co]):
    """A drop-in for `torch.utils.data.DataLoader` whose worker processes may die in any way.

    Every argument of torch's has torch's meaning; `num_workers` may also be "auto": as many as are of use, found while
    they work (map-style datasets; random numbers are then seeded by batch, so that batches depend on nothing else).
    These are new:

    faults       what is done about samples that raise, or that kill or hang their worker: "raise" (the
             default), "skip", "replace", a callable that is given the `Incident` and returns one of these
             words, or a `FaultPolicy` for the rest (retries, timeouts, limits)
    describe     a function index → text, such as a file name: messages and reports then show it
    on_incident  a callable, or several, that are given each `Incident` as it happens; what they raise is logged
    worker_threads  threads that torch, OpenMP, MKL, OpenBLAS, OpenCV and NumExpr may each use in a worker; None:
                 whatever they like
    memory_limit  private memory of a worker, such as "4GiB": near it the worker is recycled after its batch, at it
                 the sample in hand is treated as at a crash
    memory_budget  memory of all workers together, batches under way included, such as "24GiB" or "80%" of what there
                 is: near it the fleet goes on with fewer workers until there is room again; None: what the container
                 or the machine leaves
    recycle_after  a fresh worker after so many batches (500), samples ("20000 samples") or growth ("1GiB")
    share_dataset  True: what is large in the dataset (lists, dicts, arrays, tables, …) is moved into shared memory, as
             by `outlive.share`, in a copy for the workers; the log says what. Your dataset stays as it is
    journal_position  a file that always has a recent position, for a trainer that is itself killed; `load_position()`
             goes on from it
    journal_every  so many batches are delivered between two positions in that file
    journal_resume  True: the loader begins with the newest position in that file, if there is one
    quarantine   a file by `outlive check`, or several: its samples are not tried, but replaced where `faults` says so
             and else left out; where it is of another dataset, an error says what changed
    snapshot_every_n_steps  as torchdata's loader has it; positions here cost batches nothing, so it changes nothing

    A worker that dies is replaced and its work done again, whatever the policy: batches, their order and their
    random augmentation are those of an undisturbed run.
    """

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[Any] | Iterable[Any] | None = None,
        batch_sampler: Sampler[list[Any]] | Iterable[list[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        faults: FaultRule | FaultPolicy = "raise",
        describe: Callable[[Any], str] | None = None,
        on_incident: Callable[[Incident], object] | Sequence[Callable[[Incident], object]] = (),
        worker_threads: int | None = 1,
        memory_limit: str | int | None = None,
        memory_budget: str | int | None = None,
        recycle_after: str | int | None = None,
        share_dataset: bool = False,
        journal_position: str | os.PathLike[str] | None = None,
        journal_every: int = 100,
        journal_resume: bool = False,
        snapshot_every_n_steps: int | None = None,
        quarantine: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None = None,
    ) -> None:
        self._sizing = pacing.new_sizing() if pacing.is_auto(num_workers) else None
        if self._sizing is not None:
            pacing.check_dataset(isinstance(dataset, torch.utils.data.IterableDataset))
        else:
            check_count("num_workers", num_workers, 'an int or "auto"')
        if prefetch_factor is not None:
            check_count("prefetch_factor", prefetch_factor, "an int")
        check_timeout(timeout)
        number = pacing.Auto(self._sizing.most) if self._sizing is not None else num_workers
        self.faults = faults
        self.memory_limit, self.recycle_after, self.memory_budget = memory_limit, recycle_after, memory_budget
        self._budget = budget_of(memory_budget)
        self._limits = limits_of(memory_limit, recycle_after)
        self.worker_threads = check_threads(worker_threads)
        self.describe = check_callable("describe", describe)
        self._policy = fault_policy(faults)
        self._ledger = Ledger(check_listeners(on_incident))
        self.share_dataset = share_dataset
        self._moved: dict[int, tuple[Any, Any]] = {}  # what is shared of the dataset, from one epoch to the next
        self._latest: weakref.ref[SupervisedIterator] | None = None
        self._meter: Meter | None = None  # once there was a pass
        self.snapshot_every_n_steps = snapshot_every_n_steps
        self._bookmark = Bookmark(self)
        self.journal_position, self.journal_every, self.journal_resume = journal_position, journal_every, journal_resume
        check_number("journal_every", journal_every, least=1, whole=True)
        if snapshot_every_n_steps is not None:
            check_number("snapshot_every_n_steps", snapshot_every_n_steps, least=0, whole=True)
        self.in_order = in_order
        options: dict[str, Any] = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "pin_memory_device": pin_memory_device,
            "in_order": in_order,
        }
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            number,  # type: ignore[arg-type]  # torch says what is wrong with it
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            **{name: value for name, value in options.items() if name in _TORCH_TAKES},
        )
        self._bookmark.know_samplers(self)
        if journal_position is not None:
            self._bookmark.file = PositionFile(journal_position, journal_every)
            if journal_resume:
                self.load_position()
        # Beside the property of that name: libraries that make a loader anew look for its arguments here.
        self.__dict__["quarantine"] = quarantine
        if quarantine is not None:
            quarantine_file.obey(quarantine, self)

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            plain = self._policy.on_error == "raise" and not self._policy.retry_on
            if plain and not self._ledger.quarantine.has_foreseen:
                return SingleIterator(self)
            return InlineIterator(self)
        self.check_worker_number_rationality()
        if self._ledger.throttling is None:
            self._ledger.throttling = cpus.look().throttling
        iterator = SupervisedIterator(self)
        self._latest = weakref.ref(iterator)
        return iterator

    def check_worker_number_rationality(self) -> None:
        if self._sizing is None:  # "auto" begins with few, whatever the number of slots
            super().check_worker_number_rationality()

    def _dataset_for_workers(self) -> Any:
        if not self.share_dataset:
            return self.dataset
        from outlive._share import sharing

        return sharing.dataset_for_workers(self.dataset, self._moved)

    def _make_job(self, settings: JobSettings, stream: bool) -> MapJob | StreamJob:
        """What workers do for this loader; it travels to them."""
        return StreamJob(settings) if stream else MapJob(settings)

    def __iter__(self) -> Any:
        pending = self._bookmark.pending is not None
        if isinstance(self._iterator, SupervisedIterator) and (pending or not self._iterator.usable):
            self._iterator._shutdown_workers()
            self._iterator = None  # given up, shut down by a library, or interrupted in the middle; or to be elsewhere
        return self._bookmark.resume(self, super().__iter__) if pending else super().__iter__()

    def close(self) -> None:
        """End the workers of the current iterator, and wait until they have ended.

        Without this, workers end when their iterator is garbage-collected. Batches stay valid, `state_dict()` stays
        where it is, and `iter(loader)` starts new workers. A closed iterator raises an error if batches were left.
        Calling this twice, or with `num_workers=0`, does nothing. A `with` block calls it at its end:

            with DataLoader(dataset, num_workers=4, persistent_workers=True) as loader:
                train(loader)
        """
        latest = self._latest() if self._latest is not None else None
        for iterator in (self._iterator, latest):
            if isinstance(iterator, SupervisedIterator):
                iterator._shutdown_workers()
        self._iterator = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is: after the last batch that was delivered. Numbers, texts, lists and dictionaries, and
        what samplers and datasets say of themselves; `load_state_dict` of a loader like this one goes on from it.
        """
        return self._bookmark.tell(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Have the next `iter()` go on from there: its batches are those that would have come next, bit for bit."""
        self._bookmark.load(self, state_dict)

    def load_position(self, batches: int | None = None, epoch: int | None = None) -> int | None:
        """Have the next `iter()` go on from a position in `journal_position`: the newest one, or that after so many
        batches (since the loader was first made, over all epochs) whose next batch is in this epoch. Answers with the
        number of batches before it; None: there is no position yet.
        """
        file = self._bookmark.file
        if file is None:
            raise PositionError(
                'there is no file to load a position from; use DataLoader(..., journal_position="path")'
            )
        state = file.load(batches, epoch)
        if state is None:
            return None
        self.load_state_dict(state)
        return int(state["batches"])

    @property
    def incidents(self) -> Sequence[Incident]:
        """Everything that went wrong since the loader was made, in order."""
        return Incidents(self._ledger.incidents)

    @property
    def quarantine(self) -> Quarantine:
        """The samples that were left out or replaced, by index, each with its incident."""
        return self._ledger.quarantine

    def statistics(self) -> Statistics:
        """An immutable snapshot: counts since the loader was made, and the slots as they are now."""
        ledger = self._ledger
        iterator = self._latest() if self._latest is not None else None
        counts = iterator.counts() if iterator is not None else Counter()
        workers = iterator.workers if iterator is not None else 0
        there = cpus.look()
        throttled = cpus.throttled_share(ledger.throttling or (), there.throttling)
        loads = iterator.loads() if iterator is not None else ledger.loads
        waits = self._meter.wait_share if self._meter is not None else None
        figures = load.Figures(workers or self.num_workers, loads, there.usable, there.limit, throttled, waits)
        return Statistics(
            epoch=max(0, ledger.epoch),
            delivered=ledger.delivered,
            errored=ledger.errored,
            emptied=ledger.emptied,
            **{name: getattr(ledger, name) + counts[name] for name in COUNTS},
            quarantined=len(ledger.quarantine),
            incidents=ledger.earlier + len(ledger.incidents),
            cell_bytes=iterator.cell_bytes if iterator is not None else 0,
            workers=workers,
            slots=iterator.slot_statistics() if iterator is not None else (),
            cpus=there.usable,
            throttled=throttled,
            advice=load.advice(figures),
            breaker=ledger.breaker.words(time.monotonic()) if ledger.breaker is not None else "closed",
            stuck=(*still_there(ledger.stuck), *(iterator.stuck if iterator is not None else ())),
            **(self._meter.figures() if self._meter is not None else {}),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_latest": None, "_iterator": None, "_moved": {}, "_meter": None}
