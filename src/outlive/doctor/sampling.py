"""Fetches samples as workers would, and says which of them kill, and which are not the same when fetched again.

Reads   samples, in processes of a pool: twice and again in each, the same order in another one, and from threads.
Writes  nothing.
Never   a sample in this process: one that kills must not kill the doctor.

    same seed, same process    same seed, another process, same order
    ──────────────────────     ──────────────────────────────────────
    the same                   the same                             steady
    the same                   another                              depends on the process
    another                    as there: the same steps again       hidden state: what was fetched before counts
    another                    another                              randomness that nobody seeds
"""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any

from outlive._forensics import unpicklable
from outlive.doctor import fetching
from outlive.doctor.fetching import Look
from outlive.doctor.findings import Finding, Rank
from outlive.doctor.plan import Plan
from outlive.pool.executor import Pool
from outlive.pool.failing import PoolBrokenError, TaskCrashedError, TaskTimeoutError
from outlive.quantities import in_words

log = logging.getLogger("outlive")

_PATIENCE_SHARE = 1 / 3  # of all the time, for one sample: what takes longer is called hung
_LEAST_PATIENCE_S = 2.0
_ONCE_SHARE = 1 / 4  # of the patience: what takes longer is not fetched again
_START_S = 60.0  # for a process: the imports of somebody's modules may take that long
_IN_THREADS = 8  # samples
_QUICK_S = 0.1
_COLLATED = 8
_LENGTH = "len(dataset)"
_SKIP = 'from outlive import DataLoader; DataLoader(…, faults="skip")'
_UNEVEN = 20
_UNEVEN_S = 1.0
_OWN_SAMPLERS = ("SequentialSampler", "RandomSampler", "BatchSampler", "_InfiniteConstantSampler")

Progress = Callable[[str, float], None]


@dataclass
class Sampled:
    """What was seen."""

    total: int | None = None  # samples in the dataset
    looks: list[Look] = field(default_factory=list)
    again: list[Look] = field(default_factory=list)  # the same, in another process
    killed: list[tuple[Any, str]] = field(default_factory=list)  # index, and how it killed its worker
    hung: list[tuple[Any, str]] = field(default_factory=list)
    in_threads: str = ""  # what was wrong when several threads fetched
    died_in_threads: bool = False
    not_started: str = ""  # why no worker did anything
    nothing: str = ""  # why there is no sample to fetch
    own_bytes: int = 0  # memory of a worker, the most
    batch_bytes: int | None = None  # of a whole batch, by what collating a few gave
    batch_leaves: int = 0
    unseen: list[str] = field(default_factory=list)
    undisturbed: int = 1 << 62  # so many of the looks were taken before the first death

    @property
    def good(self) -> list[Look]:
        return [look for look in self.looks if not look.error]

    def spread(self, of: Callable[[Look], float]) -> tuple[float, float, float]:
        """Median, 99th percentile, most."""
        values = sorted(of(look) for look in self.good)
        if not values:
            return 0.0, 0.0, 0.0
        return statistics.median(values), values[min(len(values) - 1, int(len(values) * 0.99))], values[-1]

    @property
    def cpu_share(self) -> float:
        """Of the time that samples take, how much they compute."""
        seconds = sum(look.seconds - look.starved_s for look in self.good)
        return min(1.0, sum(look.cpu_s for look in self.good) / seconds) if seconds > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        names = ("p50", "p99", "max")
        return {
            "total": self.total,
            "fetched": len(self.looks),
            "seconds": dict(zip(names, self.spread(lambda look: look.seconds))),
            "bytes": dict(zip(names, self.spread(lambda look: float(look.bytes)))),
            "cpu_share": self.cpu_share,
            "worker_bytes": self.own_bytes,
            "batch_bytes": self.batch_bytes,
        }


def sample(plan: Plan, count: int, seconds: float, progress: Progress, method: str) -> Sampled:
    """Fetch up to `count` samples in about so many seconds."""
    seen = Sampled()
    deadline = time.monotonic() + seconds
    patience_s = max(_LEAST_PATIENCE_S, seconds * _PATIENCE_SHARE)
    with _quiet():
        try:
            with _Fetcher(plan, method, deadline, patience_s) as fetcher:
                _look(fetcher, plan, count, seen, progress)
                if not plan.streams:
                    _batch(fetcher, plan, seen)
            if seen.good:
                with _Fetcher(plan, method, deadline, patience_s) as fetcher:
                    _look_again(fetcher, plan, seen, progress)
                    _from_threads(fetcher, plan, seen)
        except _NotStarted as error:
            seen.not_started = str(error)
        except _Late:
            seen.unseen.append(f"samples: the time was up after {len(seen.looks)}")
    return seen


class _NotStarted(Exception):
    """No process of the pool does anything."""


class _Late(Exception):
    """The time is over."""


class _Died(Exception):
    def __init__(self, words: str, hung: bool) -> None:
        super().__init__(words)
        self.hung = hung


def _own_sampler(plan: Plan) -> tuple[Any, bool]:
    """One of the user's, who alone knows what indices are like, and whether it draws whole batches."""
    found = (getattr(plan.loader, "batch_sampler", None), True), (getattr(plan.loader, "sampler", None), False)
    for sampler, in_batches in found:
        known = sampler is None or type(sampler).__name__ in _OWN_SAMPLERS
        if not known and not plan.streams and not unpicklable.find(sampler):  # it never travels, except here
            return sampler, in_batches
    return None, False


class _Fetcher:
    """One process that fetches, or another in its place; one thing after the other, so that they can be repeated."""

    def __init__(self, plan: Plan, method: str, deadline: float, patience_s: float) -> None:
        sampler, in_batches = _own_sampler(plan)
        collate = getattr(plan.loader, "collate_fn", None)
        self._deadline = deadline
        self.patience_s = patience_s
        self._pool = Pool(
            1,
            method,
            fetching.hold,
            (plan.dataset, collate, sampler, in_batches),
            retries=0,
            task_timeout=patience_s,
        )

    def __enter__(self) -> _Fetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        if time.monotonic() > self._deadline:
            raise _Late
        future: Future[Any] = self._pool.submit(function, *arguments)
        try:
            return future.result(self.patience_s + _START_S)
        except PoolBrokenError as error:
            raise _NotStarted(_first_line(error)) from None
        except (TaskTimeoutError, TaskCrashedError) as error:
            hung = isinstance(error, TaskTimeoutError)
            more = f", after {self.patience_s:.3g} s" if hung else ""
            raise _Died(_cause(error) + more, hung) from None
        except FutureTimeoutError:
            raise _NotStarted(f"a process that was started does nothing for {_START_S:.0f} s") from None


def _look(fetcher: _Fetcher, plan: Plan, count: int, seen: Sampled, progress: Progress) -> None:
    if plan.streams:
        try:
            seen.looks = fetcher(fetching.look_at_stream, count)
        except _Died as died:
            (seen.hung if died.hung else seen.killed).append(("of the stream", str(died)))
        else:
            seen.nothing = "" if seen.looks else f"the stream of {plan.name} ends before its first sample"
        seen.own_bytes = max((look.own_bytes for look in seen.looks), default=0)
        return
    try:
        seen.total, chosen = fetcher(fetching.indices, count)
    except _Died as died:
        (seen.hung if died.hung else seen.killed).append((_LENGTH, str(died)))
        return
    except (_Late, _NotStarted):
        raise
    except Exception as error:  # no __len__, or a sampler that raises
        seen.unseen.append(f"samples: how many there are is not known ({fetching.told(error)})")
        chosen = [0]
    if not chosen:
        known = "has no sample (its len() is 0)" if seen.total == 0 else "has samples, but its sampler draws none"
        seen.nothing = f"{plan.name} {known}"
    for at, index in enumerate(chosen):
        progress("samples", at / max(1, len(chosen)) / 2)
        try:
            seen.looks.append(fetcher(fetching.look_at, index, fetcher.patience_s * _ONCE_SHARE))
        except _Died as died:
            seen.undisturbed = min(seen.undisturbed, len(seen.looks))
            (seen.hung if died.hung else seen.killed).append((index, str(died)))
        except _Late:
            seen.unseen.append(f"samples: the time was up after {at} of {len(chosen)}")
            break
    seen.own_bytes = max((look.own_bytes for look in seen.looks), default=0)


def _batch(fetcher: _Fetcher, plan: Plan, seen: Sampled) -> None:
    """How large a batch is: collating may pad."""
    good = [look.index for look in sorted(seen.good, key=lambda look: look.seconds)][:_COLLATED]
    size = plan.batch_size
    if not good:
        return
    leaves = max(look.leaves for look in seen.good)
    mean = statistics.fmean(look.bytes for look in seen.good)
    seen.batch_bytes, seen.batch_leaves = round(mean * (size or 1)), leaves
    if plan.loader is None or size is None:
        return
    few = (good * (size // len(good) + 1))[: min(size, _COLLATED)]
    with contextlib.suppress(_Died, _Late, Exception):  # the estimate from samples stays
        total, leaves, own = fetcher(fetching.collated, few)
        if total:
            seen.batch_bytes, seen.batch_leaves = round(total / len(few) * size), leaves
            seen.own_bytes = max(seen.own_bytes, own)


def _look_again(fetcher: _Fetcher, plan: Plan, seen: Sampled, progress: Progress) -> None:
    bad = {repr(index) for index, _ in [*seen.killed, *seen.hung]}
    with contextlib.suppress(_Late, _Died):
        if plan.streams:
            seen.again = fetcher(fetching.look_at_stream, len(seen.looks))
            return
        for at, look in enumerate(seen.looks):
            progress("samples, in another process", 0.5 + at / len(seen.looks) / 2)
            if repr(look.index) not in bad:
                seen.again.append(fetcher(fetching.look_at, look.index, fetcher.patience_s * _ONCE_SHARE))


def _from_threads(fetcher: _Fetcher, plan: Plan, seen: Sampled) -> None:
    # Those of this very process: others may have differed.
    steady = [look for look in seen.again if not look.error and look.comparable and look.is_steady]
    quick = [look for look in steady if look.seconds < _QUICK_S][:_IN_THREADS]
    if steady and not quick:
        seen.unseen.append("samples: they take too long to be fetched from several threads")
    if plan.streams or not quick:
        return
    try:
        seen.in_threads = fetcher(fetching.look_from_threads, {look.index: look.digests[0] for look in quick})
    except _Died as died:
        seen.in_threads, seen.died_in_threads = str(died), True
    except (_Late, TypeError):  # an index that is no key of a dict
        seen.unseen.append("samples: they were not fetched from several threads")


# ---------------------------------------------------------------- saying


def findings(plan: Plan, seen: Sampled, generators: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    """`generators`: random ones that the dataset holds, by path."""
    if seen.not_started:
        yield Finding(
            "workers-do-not-start",
            Rank.WILL_KILL,
            f"no worker can be started with this dataset: {seen.not_started}",
            (),
            (f"python -c 'import pickle; pickle.dumps({plan.name})'", 'multiprocessing_context="fork"'),
        )
    if seen.nothing:
        yield Finding(
            "no-samples",
            Rank.CHANGES_DATA,
            f"{seen.nothing}: an epoch is over at once, or raises",
            ("the usual reason is a folder or a pattern that matches no file here",),
            ('raise ValueError(f"no files in {folder}") where the dataset looks for them',),
        )
    yield from _of_deaths(plan, seen)
    yield from _of_errors(plan, seen)
    yield from _of_sameness(plan, seen, generators)
    yield from _of_threads(plan, seen)
    yield from _of_slow_ones(plan, seen)


def _of_deaths(plan: Plan, seen: Sampled) -> Iterator[Finding]:
    all_of_them = f"outlive check {plan.target or 'module:dataset'} (finds all such samples)"
    safe = (_SKIP if plan.workers else _SKIP.replace("…", "…, num_workers=1"), all_of_them)
    for name, verb, found in (("sample-kills", "kills", seen.killed), ("sample-hangs", "hangs", seen.hung)):
        if not found:
            continue
        index, how = found[0]
        rest = f" (and {len(found) - 1} more of {len(seen.looks) + len(found)})" if len(found) > 1 else ""
        if index == _LENGTH:
            yield _deadly_length(verb, how)
            continue
        what = "a sample of the stream" if plan.streams else f"sample {index!r}"
        who = "the worker that fetches it" if plan.workers else "the trainer itself"
        is_left_out = plan.is_ours and plan.workers > 0 and plan.on_error in ("skip", "replace")
        yield Finding(
            name,
            Rank.CHANGES_DATA if is_left_out else Rank.WILL_KILL,
            f"{what}{rest} {verb} {who}" + (", and is left out" if is_left_out else ""),
            (how, *(f"sample {other!r}: {why}" for other, why in found[1:4])),
            ("outlive report", all_of_them) if is_left_out else safe,
        )


def _deadly_length(verb: str, how: str) -> Finding:
    return Finding(
        "length-kills",
        Rank.WILL_KILL,
        f"{_LENGTH} {verb}, and every loader asks for it in the trainer itself",
        (how,),
        ("count once, where the dataset is made, and let __len__ return that number",),
    )


def _of_errors(plan: Plan, seen: Sampled) -> Iterator[Finding]:
    bad = [look for look in seen.looks if look.error]
    if not bad:
        return
    rest = f" (and {len(bad) - 1} more of {len(seen.looks)})" if len(bad) > 1 else ""
    all_of_them = f"outlive check {plan.target or 'module:dataset'} (finds all such samples)"
    is_left_out = plan.is_ours and plan.on_error in ("skip", "replace")
    yield Finding(
        "sample-raises",
        Rank.CHANGES_DATA if is_left_out else Rank.WILL_KILL,
        f"sample {bad[0].index!r}{rest} raises {bad[0].error}" + (", and is left out" if is_left_out else ""),
        tuple(f"sample {look.index!r}: {look.error}" for look in bad[1:4]),
        (all_of_them,)
        if is_left_out
        else ('from outlive import DataLoader; DataLoader(…, faults="skip")', all_of_them),
    )


def _of_sameness(plan: Plan, seen: Sampled, generators: Sequence[tuple[str, str]]) -> Iterator[Finding]:
    again = {repr(look.index): look for look in seen.again if not look.error}
    once = sum(1 for look in seen.good if look.comparable and len(look.digests) == 1)
    if once:
        seen.unseen.append(f"samples: {once} of {len(seen.good)} take too long to be fetched again")
    pairs = [
        (look, other)
        for look in seen.good
        if look.comparable and (other := again.get(repr(look.index))) is not None and other.comparable
    ]
    incomparable = sum(1 for look in seen.good if not look.comparable)
    if incomparable:
        seen.unseen.append(f"samples: {incomparable} of {len(seen.good)} hold objects that cannot be compared")
    moody = [(look, other) for look, other in pairs if not look.is_seeded]
    apart = [look for look, other in pairs if look.is_seeded and other.is_seeded and look.digests != other.digests]
    if moody:
        # After a death the next process begins anew, and what it fetched before is not what the other had.
        alike = [pair for pair in moody if pair[0] in seen.looks[: seen.undisturbed]] or moody
        if all(look.digests == other.digests for look, other in alike):
            yield _hidden_state(plan, moody[0][0], len(moody), len(pairs), generators)
        else:
            yield Finding(
                "unseeded-randomness",
                Rank.CHANGES_DATA,
                f"sample {moody[0][0].index!r} is another one each time, whatever the seed ({len(moody)} of"
                f" {len(pairs)} are)",
                ("no run can be repeated, and a batch that is done again after a crash is another one",),
                ("draw from torch, random or numpy.random, which are seeded in every worker",),
            )
    if apart:
        yield Finding(
            "differs-between-processes",
            Rank.CHANGES_DATA,
            f"sample {apart[0].index!r} is the same each time in one process, and another in the next"
            f" ({len(apart)} of {len(pairs)} are)",
            ("it depends on the process: its pid, hash() of a text, addresses, the order of a set",),
            ("PYTHONHASHSEED=0", "sorted(…) where a set is gone through"),
        )


def _hidden_state(plan: Plan, look: Look, count: int, of: int, generators: Sequence[tuple[str, str]]) -> Finding:
    facts = ["what a sample is depends on what the same process fetched before it"]
    remedies = [f"keep nothing in {plan.name} that __getitem__ changes"]
    if generators:
        path, kind = generators[0]
        facts = [f"{path} ({kind}) is copied with the dataset: all workers draw the same numbers from it"]
        remedies = ["draw from torch, random or numpy.random, which are seeded in every worker"]
        if "numpy" in kind:
            remedies.insert(0, f"{path} = numpy.random.default_rng(torch.initial_seed()), in worker_init_fn")
    return Finding(
        "hidden-state",
        Rank.CHANGES_DATA,
        f"sample {look.index!r} is another one when it is fetched again ({count} of {of} are)",
        tuple(facts),
        tuple(remedies),
    )


def _of_threads(plan: Plan, seen: Sampled) -> Iterator[Finding]:
    if seen.in_threads:
        yield Finding(
            "thread-unsafe",
            Rank.MAY_KILL if seen.died_in_threads else Rank.CHANGES_DATA,
            f"samples must not be fetched from several threads at once: {seen.in_threads}",
            ("torch's and outlive's loaders fetch in processes, one thread in each",),
            (f"num_workers={max(1, plan.workers)}, no ThreadPoolExecutor",),
        )


def _taken_s(look: Look) -> float:
    """Without what it waited for a CPU: that is the machine's."""
    return max(0.0, look.seconds - look.starved_s)


def _of_slow_ones(plan: Plan, seen: Sampled) -> Iterator[Finding]:
    if len(seen.good) < 4:
        return
    median, _, most = seen.spread(_taken_s)
    slowest = max(seen.good, key=_taken_s)
    if most < _UNEVEN_S or most < _UNEVEN * median:
        return
    batch_s = median * (plan.batch_size or 1) / max(1, plan.workers)
    ahead = min(16, max(4, round(most / max(batch_s, 1e-3) / max(1, plan.workers))))
    yield Finding(
        "uneven-samples",
        Rank.SLOWS_DOWN,
        f"sample {slowest.index!r} took {_time(most)}, the median is {_time(median)}",
        ("batches come in order: all wait for the slowest",),
        (f"prefetch_factor={ahead}", "in_order=False"),
    )


# ---------------------------------------------------------------- words


def _cause(error: TaskCrashedError | TaskTimeoutError) -> str:
    verdict = error.incident.verdict if error.incident is not None else None
    return verdict.cause if verdict is not None else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The log would tell every death that the findings tell."""
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)


def rows(seen: Sampled) -> list[tuple[str, str]]:
    """For people."""
    fetched = len(seen.looks) + len(seen.killed) + len(seen.hung)
    if not fetched:
        return []
    total = f" of {seen.total}" if seen.total is not None else ""
    lines = [f"{fetched}{total} fetched, and again, and in another process"]
    if seen.good:
        median, late, most = map(_time, seen.spread(lambda look: look.seconds))
        lines.append(f"time  {median}, p99 {late}, max {most}, {seen.cpu_share:.0%} computing")
        median, late, most = map(in_words, seen.spread(lambda look: float(look.bytes)))
        lines.append(f"size  {median}, p99 {late}, max {most}")
    return [("samples" if not at else "", line) for at, line in enumerate(lines)]


def _time(seconds: float) -> str:
    for unit, least in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= least:
            return f"{seconds / least:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"
