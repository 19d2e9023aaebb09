"""`outlive.check`: fetch every sample of a dataset once, in parallel, and survive all of them.

Reads   the dataset, through a loader of ours whose workers send counts instead of batches.
Writes  the state of a check that is under way, the quarantine file, a progress bar.
Never   is ended by a sample: deaths and hangs, any number of them, are what it looks for.

    plan ─► portions ─► CheckLoader ─► workers fetch, time, weigh ─► summaries ─► Progress ─► CheckReport
                ▲ as many as take 0.1 s                                  └─ every 2 s ─► state file
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from outlive._forensics import heralds
from outlive._forensics.ledger import Quarantine, StreamIndex
from outlive._system import cpus
from outlive.checking import jobs, plan, state
from outlive.checking.jobs import CheckJob, CheckStreamJob, Floors
from outlive.checking.plan import Choice, Pace, Portions
from outlive.checking.report import CheckReport, Figures, Outstanding
from outlive.checking.spread import Spread
from outlive.checking.state import Progress, StateFile
from outlive.errors import PositionError, TooManyFaultsError, WorkerStartError
from outlive.incident import Incident, IncidentKind, Stage
from outlive.loader import fingerprint, quarantine_file
from outlive.loader.dataloader import DataLoader
from outlive.loader.iterator import SupervisedIterator
from outlive.loader.jobs import JobSettings
from outlive.loader.quarantine_file import BadSample
from outlive.plain import plain
from outlive.pool import bars
from outlive.quantities import parse_bytes
from outlive.settings import FaultPolicy, check_number

SLOW_FLOOR_S = 0.1  # scheduling alone may take nearly as long
HUGE_FLOOR_BYTES = 1 << 20
_UNLIMITED = 1 << 40
_PATIENCE_S = 30.0
_PASSES = 3
_LONGEST_CAUSE = 500
_LOOK_S = 0.1


class Iterated(torch.utils.data.IterableDataset[Any]):
    """Something that can be iterated over, and is no dataset of torch's."""

    def __init__(self, iterable: Any) -> None:
        self.iterable = iterable

    def __iter__(self) -> Iterator[Any]:
        return iter(self.iterable)


class Noted(Quarantine):
    """A quarantine that lists what is put into it."""

    def __init__(self, news: list[tuple[Any, Incident]]) -> None:
        super().__init__()
        self._news = news

    def put(self, index: Any, incident: Incident) -> None:
        super().put(index, incident)
        self._news.append((index, incident))


class Ticking(SupervisedIterator):
    """While it waits for a sample that takes long, others look after the bar and the state on disk."""

    def __init__(self, loader: CheckLoader) -> None:
        self._tick = loader.tick
        super().__init__(loader)

    def _wait(self) -> None:
        self._runner.wait(_LOOK_S)
        self._tick()


class CheckLoader(DataLoader[Any]):
    """A loader whose workers send what they found instead of what they fetched."""

    def __init__(
        self, dataset: Any, source: plan.Source, choice: Choice, tick: Callable[[], None], **options: Any
    ) -> None:
        self._source, self._choice, self.tick = source, choice, tick
        super().__init__(dataset, batch_size=1, **options)
        self.news: list[tuple[Any, Incident]] = []
        self._ledger.quarantine = Noted(self.news)

    def _get_iterator(self) -> Any:
        iterator = Ticking(self)
        self._latest = weakref.ref(iterator)
        return iterator

    @property
    def _index_sampler(self) -> Any:
        return self._source

    def _make_job(self, settings: JobSettings, stream: bool) -> Any:
        if stream:
            return CheckStreamJob(settings, self._choice.shard, self._choice.shards)
        return CheckJob(settings)


class Unretried:
    """What a bar asks of a pool."""

    retries = 0


def check(
    dataset: Any,
    *,
    workers: int | None = None,
    sample: str | float | int | None = None,
    shard: str | tuple[int, int] | None = None,
    seed: int = 0,
    output: str | os.PathLike[str] | None = None,
    state_file: str | os.PathLike[str] | None = None,
    resume: bool = False,
    slow: float | None = None,
    huge: str | int | None = None,
    retries: int = 1,
    sample_timeout: float | str | None = "auto",
    memory_limit: str | int | None = None,
    start_method: str | None = None,
    worker_init_fn: Callable[[int], None] | None = None,
    describe: Callable[[Any], str] | None = None,
    patience: float = _PATIENCE_S,
    progress: bool | None = None,
    name: str = "",
) -> CheckReport:
    """Fetch every sample of a dataset once, in worker processes, whatever samples do to them.

    dataset      map-style or iterable; or a DataLoader, whose dataset, workers and worker_init_fn are taken
    workers      so many; None: one per CPU that this process may use
    sample       a share of the samples ("5%", 0.05) or a number of them, evenly spread, by chance
    shard        "2/8": the second of eight parts of the dataset, for eight machines
    seed         of that chance
    output       a file for `DataLoader(quarantine=…)`
    state_file   where it notes how far it is; None: nowhere, or with resume=True in outlive's own folder
    resume       True: go on from there if it was interrupted
    slow, huge   seconds and size from which on a sample is named; None: what is far from the others
    retries      a sample is bad when it has cost so many workers and one more
    sample_timeout  seconds that a sample may take, as `FaultPolicy` has it
    memory_limit    of a worker, as `DataLoader` has it
    start_method    of workers: "fork", "spawn" or "forkserver"; None: as multiprocessing has it
    describe     a function index → text for the report
    patience     seconds to wait for a source that fails for all samples alike; then SourceUnavailableError
    progress     a bar on standard error; None: where that is a terminal
    """
    checked = _Check(name, dataset, workers, plan.choice_of(sample, shard, seed), worker_init_fn, start_method)
    if slow is not None:
        check_number("slow", slow, least=0)
    floors = Floors(
        round((SLOW_FLOOR_S if slow is None else slow) * 1e9),
        HUGE_FLOOR_BYTES if huge is None else parse_bytes("huge", huge),
    )
    checked.floors, checked.fixed = floors, (slow is not None, huge is not None)
    policy = FaultPolicy(
        on_error="skip",
        retries=retries,
        sample_timeout=sample_timeout,  # type: ignore[arg-type]  # checked there
        max_restarts=_UNLIMITED,
        max_bad=None,
        breaker_patience=patience,
    )
    checked.options.update(faults=policy, memory_limit=memory_limit, describe=describe)
    path = Path(state_file) if state_file is not None else None
    if path is None and resume:
        path = state.default_path(checked.fingerprint, checked.choice)
    if path is not None:
        checked.file = StateFile(path, checked.fingerprint, checked.choice)
        if resume:
            checked.progress = checked.file.read() or checked.progress
        else:
            checked.file.refuse_other_file()
    if output is not None and not Path(output).absolute().parent.is_dir():
        raise FileNotFoundError(f"output={os.fspath(output)!r}: there is no folder {Path(output).absolute().parent}")
    shown = progress if progress is not None else _is_terminal()
    bar = bars.Bar("check", checked.total, Unretried(), bars.screen_of(sys.stderr)) if shown else None
    report = checked.run(bar)
    if output is not None:
        report.write_quarantine(output)
    return report


def _is_terminal() -> bool:
    try:
        return bool(sys.stderr.isatty())
    except Exception:  # closed, or none at all
        return False


class _Check:
    def __init__(
        self, name: str, dataset: Any, workers: int | None, choice: Choice, init: Any, start_method: str | None
    ) -> None:
        if isinstance(dataset, torch.utils.data.DataLoader):
            workers = workers or int(dataset.num_workers) or None
            init = init or dataset.worker_init_fn
            start_method = start_method or dataset.multiprocessing_context
            dataset = dataset.dataset
        if workers is not None:
            check_number("workers", workers, least=1, whole=True)
        self.workers: int = workers or max(1, math.floor(cpus.usable_cpus()))
        self.name = name or type(dataset).__qualname__
        self.choice = choice
        self.fingerprint = fingerprint.of(dataset)
        self.stream = self.fingerprint.kind == "iterable"
        self.ids = None if self.stream else quarantine_file.sample_ids(dataset)
        self.dataset = self._checked(dataset)
        self.indices = () if self.stream else choice.indices(self.fingerprint.length or 0)
        self.total = None if self.stream else len(self.indices)
        self.options: dict[str, Any] = {
            "num_workers": self.workers,
            "worker_init_fn": init,
            "multiprocessing_context": start_method,
            "in_order": self.stream,  # a stream's position is told by what came in order
        }
        self.floors = Floors(0, 0)
        self.fixed = (False, False)
        self.file: StateFile | None = None
        self.progress = Progress()
        self._loader: CheckLoader | None = None
        self._looked_at = 0  # incidents of its
        self._bar: bars.Bar | None = None
        self._begun = 0.0

    def _checked(self, dataset: Any) -> Any:
        if not self.stream:
            if self.fingerprint.length is None:
                raise TypeError(f"{self.name} has no len(): which indices there are, only its sampler knows")
            return dataset
        if self.choice.share is not None or self.choice.number is not None:
            raise ValueError("sample= needs a map-style dataset: of a stream each sample must be taken to pass it")
        if isinstance(dataset, torch.utils.data.IterableDataset):
            return dataset
        if iter(dataset) is dataset:
            raise TypeError(
                f"{self.name} is an iterator, and can be gone through once only; "
                "give what makes it: an IterableDataset, or another object with __iter__"
            )
        return Iterated(dataset)

    # ------------------------------------------------------------ the passes

    def run(self, bar: bars.Bar | None) -> CheckReport:
        self._begun = time.monotonic() - self.progress.seconds
        self._bar = bar
        turns = self._turns()
        with heralds.hushed():  # incidents are what we look for; the report has them
            for _ in bar.around(turns) if bar is not None else turns:
                pass
        self._note_time()
        if self.file is not None:
            self.file.remove()
        return self.report()

    def _note_time(self) -> None:
        self.progress.seconds = time.monotonic() - self._begun

    def _tick(self) -> None:
        """Between two portions, and while one is waited for."""
        progress, bar = self.progress, self._bar
        if bar is not None:
            bar.done, bar.failed = progress.checked + len(progress.bad), len(progress.bad)
            bar.tick()
        if self.file is not None and self.file.is_due:
            self._save()

    def _turns(self) -> Iterator[None]:
        """One per portion that came."""
        try:
            for _ in range(_PASSES):
                # What a batch had in it that failed as a whole is tried once more, in other company.
                if not self.stream and not self.progress.done.gaps(len(self.indices)):
                    break
                for _ in self._pass():
                    self._tick()
                    yield
                if self.stream:
                    break
        except BaseException:
            if self.file is not None:
                with contextlib.suppress(OSError):  # what ended the check is worth more than why its state is old
                    self._save()
            raise
        left = 0 if self.stream else len(self.indices) - self.progress.done.number
        if left:
            self.progress.unreached.append(f"{left:,} samples failed together with others, and not alone")

    def _save(self) -> None:
        assert self.file is not None
        self._note_time()
        self._collect()
        if self.stream and self._loader is not None:
            self.progress.position = self._loader.state_dict()
        self.file.write(self.progress)

    def _pass(self) -> Iterator[None]:
        progress, pace = self.progress, Pace(self.workers)
        self._source = plan.Endless(pace) if self.stream else Portions(self.indices, progress.done, pace)
        loader = self._loader = CheckLoader(
            self.dataset,
            self._source,
            self.choice,
            self._tick,
            collate_fn=jobs.Fold(self.floors),
            **self.options,
        )
        self._looked_at = 0
        if progress.position is not None:
            try:
                loader.load_state_dict(progress.position)
            except PositionError as error:
                raise PositionError(f"this check cannot go on: {error}") from None
        batches = iter(loader)
        try:
            while True:
                try:
                    summary = next(batches)
                except StopIteration:
                    break
                except Exception as error:
                    self._failed(error)
                    yield
                    continue
                pace.took(summary.number, summary.total_ns / 1e9)
                progress.checked += summary.number
                progress.nanoseconds.add(summary.nanoseconds)
                progress.bytes.add(summary.bytes)
                if isinstance(self._source, Portions):
                    progress.done.add(*self._source.around(summary.first))
                if len(loader._ledger.incidents) != self._looked_at:
                    self._collect()
                yield
        finally:
            self._collect()
            if hasattr(batches, "_shutdown_workers"):
                batches._shutdown_workers()

    # ------------------------------------------------------------ what is bad

    def _failed(self, error: Exception) -> None:
        """A batch was raised: what is to blame is bad, and of a stream the rest may be out of reach."""
        incident: Incident | None = getattr(error, "incident", None)
        if isinstance(error, (TooManyFaultsError, WorkerStartError)) or incident is None:
            raise error
        if incident.kind is IncidentKind.START:
            raise error
        for index in incident.indices:
            self._note_bad(index, incident)
        if self.stream:
            self.progress.unreached.append(self._out_of_reach(incident))

    def _out_of_reach(self, incident: Incident) -> str:
        stream = f"worker {self._worker(incident.slot)}'s stream"
        if incident.stuck and incident.indices:
            at = self._key(incident.indices[0]).ordinal
            first = at - max(0, incident.in_hand.position)  # of the portion: what was good in it did not arrive
            return (
                f"{stream} from its sample {first} on: sample {at} ends the worker, and the iterator cannot step over "
                "it (a method skip(n) would let it)"
            )
        return f"the rest of {stream}: {incident.cause}"

    def _collect(self) -> None:
        """Take over what the loader has put in quarantine."""
        loader = self._loader
        if loader is None:
            return
        incidents = loader._ledger.incidents
        while loader.news:
            self._note_bad(*loader.news.pop())
        for incident in incidents[self._looked_at :]:
            deadly = incident.kind in (IncidentKind.CRASH, IncidentKind.HANG)
            if deadly and len(incident.indices) == 1 and incident.in_hand.stage is Stage.FETCHING:
                self.progress.shaky.setdefault(self._key(incident.indices[0]), self._bad(incident, incident.indices[0]))
        self._looked_at = len(incidents)
        for key in self.progress.bad:
            self.progress.shaky.pop(key, None)

    def _note_bad(self, index: Any, incident: Incident) -> None:
        key = self._key(index)
        if key not in self.progress.bad:  # else an earlier run of this check has told of it
            self.progress.bad[key] = self._bad(incident, index)
        if isinstance(self._source, Portions):
            place = self._source.place(index)
            self.progress.done.add(place, place + 1)

    def _worker(self, slot: int) -> int:
        return slot + self.choice.shard * self.workers

    def _key(self, index: Any) -> Any:
        return StreamIndex(self._worker(index.worker), index.ordinal) if isinstance(index, StreamIndex) else index

    def _bad(self, incident: Incident, index: Any) -> BadSample:
        key = self._key(index)
        worker = key.worker if isinstance(key, StreamIndex) else None
        verdict = incident.verdict
        cause = verdict.cause if verdict is not None else incident.cause
        at = incident.indices.index(index) if index in incident.indices else 0
        named: Any = None
        if self.ids is not None:
            with contextlib.suppress(Exception):  # a bad sample may have no name either
                named = plain(self.ids(index))
        failure = incident.failure
        return BadSample(
            index=key.ordinal if isinstance(key, StreamIndex) else plain(index),
            kind=incident.kind.value,
            verdict=verdict.name.value if verdict is not None else "",
            cause=cause[:_LONGEST_CAUSE],
            worker=worker,
            id=named if isinstance(named, (int, str)) else None,
            described=incident.described[at] if at < len(incident.described) else "",
            stage=incident.in_hand.stage.name.lower(),
            signal=incident.exit.signal_name if incident.exit is not None else None,
            code=incident.exit.code if incident.exit is not None else None,
            exception=failure.type_name if failure is not None else None,
            message=failure.message[:_LONGEST_CAUSE] if failure is not None else None,
            incident=incident.id,
            when=incident.when,
        )

    # ------------------------------------------------------------ the report

    def report(self) -> CheckReport:
        progress = self.progress
        seconds, slow = _figures(progress.nanoseconds, self.floors.nanoseconds, self.fixed[0], 1e9)
        sizes, huge = _figures(progress.bytes, self.floors.bytes, self.fixed[1], 1)
        return CheckReport(
            dataset=self.name,
            checked=progress.checked + len(progress.bad),
            total=self.total,
            bad=tuple(sorted(progress.bad.values(), key=_order)),
            seconds=seconds,
            bytes=sizes,
            slow=slow,
            huge=huge,
            shaky=tuple(sorted(progress.shaky.values(), key=_order)),
            unreached=tuple(progress.unreached),
            elapsed_s=progress.seconds,
            workers=self.workers,
            choice=self.choice.words,
            fingerprint=self.fingerprint,
            stream_workers=self.workers * self.choice.shards if self.stream else None,
        )


def _order(sample: BadSample) -> Any:
    return (sample.worker or 0, isinstance(sample.index, str), sample.index)


def _figures(spread: Spread, floor: int, fixed: bool, unit: float) -> tuple[Figures, tuple[Outstanding, ...]]:
    if not spread.number:
        return Figures(), ()
    threshold = floor if fixed else spread.threshold(floor)
    figures = Figures(
        spread.quantile(0.5) / unit,
        spread.quantile(0.99) / unit,
        spread.largest.value / unit,
        spread.largest.index,
        threshold / unit,
        spread.number_beyond(threshold),
    )
    return figures, tuple(Outstanding(o.index, o.value / unit) for o in spread.beyond(threshold))
