"""Compare outlive with stock torch on random cases: `python tests/torture.py [--seconds 120] [--seed 1] [--case 17]`.

Reads:   what both loaders deliver, bit for bit, from the same random case.
Writes:  a line for each defect, with the command that repeats it. The exit status is 1 where there was one.
Never:   allows a difference, a stalled case, a sample in the quarantine that is not bad, or a process left behind.

A case is drawn from `(seed, number)` alone: a dataset, the options of a loader, and what happens to the job: workers
that are killed, stopped or raise at chosen samples, bad samples, workers killed from outside, loops that are left,
interrupts, resumed checkpoints, batches that are kept, changed or sent on. Stock torch runs the same case without the
faults, and is the oracle. Each case runs in a fork of this process, so nothing of one reaches the next.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import faulthandler
import io
import json
import logging
import os
import pickle
import random
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate, get_worker_info

import outlive
from deadlines import wait_until
from loader_comparison import differences
from outlive import FaultPolicy

CASE_S = 100.0
LEFT_BEHIND_S = 5.0
STAGES = ("fetch", "collate", "send")
WAYS = ("SIGKILL", "SIGSEGV", "SIGABRT", "exit", "stop", "raise")
KINDS = ("numbers", "dict", "image", "numpy", "mixed")
STOPPED_S = 1.5


@dataclass(frozen=True)
class Fault:
    """What happens once, when a sample is first in hand at a stage."""

    key: int
    stage: str
    way: str


@dataclass(frozen=True)
class Case:
    """All that is random about a case. `numbers of batches` count from the beginning of their epoch."""

    seed: int
    number: int
    style: str = "map"
    kind: str = "numbers"
    noisy: bool = True
    size: int = 20
    epochs: int = 1
    faults: tuple[Fault, ...] = ()
    bad: tuple[int, ...] = ()
    recycle_after: int | None = None
    killed_from_outside: tuple[tuple[int, int], ...] = ()  # (epoch, batch)
    left: tuple[tuple[int, int], ...] = ()  # the loop is left after that batch
    resumed: tuple[tuple[int, int, str], ...] = ()  # (epoch, batch, how the state travels)
    interrupted: tuple[tuple[int, int], ...] = ()
    use: str = "drop"  # what the trainer does with a batch
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return self.style.endswith("stream")


def draw_case(seed: int, number: int) -> Case:
    """A case, from its number alone."""
    chance = random.Random(f"torture {seed} {number}")
    style = chance.choice(["map", "map", "map", "many", "stream", "stateful stream"])
    streams = style.endswith("stream")
    workers = chance.choice([0, 1, 1, 2, 2, 2, 3, 4])
    size = chance.choice([0, 1, 7, 16, 23, 40])
    options: dict[str, Any] = {"num_workers": workers, "batch_size": chance.choice([1, 2, 3, 4, 7])}
    if not streams:
        options["shuffle"] = size > 0 and chance.random() < 0.6
        if chance.random() < 0.1:
            options["batch_size"] = None
    if options["batch_size"] is not None:
        options["drop_last"] = chance.random() < 0.2
    if workers:
        options["prefetch_factor"] = chance.choice([1, 2, 2, 3])
        options["persistent_workers"] = chance.random() < 0.4
        options["multiprocessing_context"] = chance.choice(["fork"] * 8 + ["forkserver", "spawn"])
    epochs = chance.choice([1, 1, 2, 3])
    batches = max(1, -(-size // (options["batch_size"] or 1)))

    def moments(share: float) -> tuple[tuple[int, int], ...]:
        return tuple(
            (epoch, chance.randrange(1, batches + 1)) for epoch in range(epochs) if size and chance.random() < share
        )

    faults: tuple[Fault, ...] = ()
    bad: tuple[int, ...] = ()
    noisy = True
    if workers and size:
        keys = chance.sample(range(size), min(size, chance.choice([0, 1, 1, 2, 3, 5])))
        if not streams and options["batch_size"] and chance.random() < 0.25:
            bad, noisy = tuple(keys[:3]), False
        else:
            # A stage is one of samples where a sample can be told from its batch.
            stages = ("fetch",) if options["batch_size"] is None else STAGES
            faults = tuple(Fault(key, chance.choice(stages), chance.choice(WAYS)) for key in keys)
    left = moments(0.2)
    # A stream's batches under way are drawn or not as workers come along: leaving it early has no oracle that persists.
    if streams and options.get("persistent_workers"):
        left = ()
    resumed = tuple((epoch, batch, chance.choice(["json", "torch", "pickle"])) for epoch, batch in moments(0.3))
    return Case(
        seed=seed,
        number=number,
        style=style,
        kind=chance.choice(KINDS),
        noisy=noisy,
        size=size,
        epochs=epochs,
        faults=faults,
        bad=bad,
        recycle_after=chance.choice([None, None, None, 1, 3]) if workers else None,
        killed_from_outside=moments(0.2) if workers else (),
        left=() if resumed else left,
        resumed=resumed,
        interrupted=moments(0.15) if not resumed and not left else (),
        use=chance.choice(["drop", "keep", "keep", "change", "send on"]),
        options=options,
    )


# ---------------------------------------------------------------- datasets


class Mischief:
    """The faults of a case, each of which happens once: a file says that it has."""

    def __init__(self, case: Case, folder: str) -> None:
        self._faults = {(fault.key, fault.stage): fault.way for fault in case.faults}
        self._bad = frozenset(case.bad)
        self._folder = folder

    def at(self, key: int, stage: str) -> None:
        if stage == "fetch" and key in self._bad:
            if key % 2:
                raise ValueError(f"sample {key} is bad")
            os.kill(os.getpid(), signal.SIGKILL)
        way = self._faults.get((key, stage))
        if way is None or get_worker_info() is None:
            return
        try:
            os.close(os.open(f"{self._folder}/{key}-{stage}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if way == "raise":
            raise OSError(f"transient, at {stage} of {key}")
        if way == "exit":
            os._exit(3)
        os.kill(os.getpid(), signal.SIGSTOP if way == "stop" else getattr(signal, way))


class SendsOnce:
    """Pickles as an int, and has its fault while it does."""

    def __init__(self, key: int, mischief: Mischief) -> None:
        self._key, self._mischief = key, mischief

    def __reduce__(self) -> tuple[Any, ...]:
        self._mischief.at(self._key, "send")
        return int, (self._key,)


def sample_of(case: Case, key: int) -> Any:
    """A sample that depends on its key and, where the case is noisy, on the generators of the worker."""
    noise = [float(torch.rand(())), random.random(), float(np.random.rand())] if case.noisy else [0.25, 0.5, 0.75]
    if case.kind == "numbers":
        return torch.tensor([key, *noise], dtype=torch.float64)
    if case.kind == "dict":
        return {"key": key, "noise": noise[1], "parts": [torch.full((3,), noise[0]), f"text {key}"]}
    if case.kind == "image":
        return torch.full((3, 48, 48), noise[0]) + key, key
    if case.kind == "numpy":
        return np.array([key, *noise]), np.int64(key)
    return torch.full((100, 100), noise[0]), {"key": key, "array": np.full(5, noise[2])}, key % 3 == 0


class MapSamples(Dataset[Any]):
    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.mischief = case, Mischief(case, folder)

    def __len__(self) -> int:
        return self.case.size

    def __getitem__(self, index: int) -> Any:
        sample = sample_of(self.case, index)
        self.mischief.at(index, "fetch")
        return index, sample


class ManySamples(MapSamples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class StreamedSamples(IterableDataset[Any]):
    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.mischief = case, Mischief(case, folder)

    def _keys(self) -> range:
        info = get_worker_info()
        return range(self.case.size)[info.id :: info.num_workers] if info is not None else range(self.case.size)

    def __iter__(self) -> Iterator[Any]:
        for key in self._keys():
            sample = sample_of(self.case, key)
            self.mischief.at(key, "fetch")
            yield key, sample


class StatefulStreamedSamples(StreamedSamples):
    """Keeps its place, and begins again when it was at its end."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        keys = self._keys()
        while self.at < len(keys):
            key = keys[self.at]
            sample = sample_of(self.case, key)
            self.mischief.at(key, "fetch")
            self.at += 1
            yield key, sample
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Collate:
    """`default_collate`, with the keys beside it and the faults of its stage."""

    def __init__(self, case: Case, mischief: Mischief, leave_out: bool = False) -> None:
        self.case, self.mischief, self.leave_out = case, mischief, leave_out

    def __call__(self, samples: list[Any]) -> Any:
        if self.leave_out:  # the oracle's way to skip
            samples = [sample for sample in samples if sample[0] not in self.case.bad]
        keys = [key for key, _ in samples]
        for key in keys:
            self.mischief.at(key, "collate")
        tensors = default_collate([sample for _, sample in samples]) if samples else None
        return ([SendsOnce(key, self.mischief) for key in keys] if get_worker_info() else keys), tensors


DATASETS: dict[str, Callable[[Case, str], Any]] = {
    "map": MapSamples,
    "many": ManySamples,
    "stream": StreamedSamples,
    "stateful stream": StatefulStreamedSamples,
}


# ---------------------------------------------------------------- a run


def make_loader(case: Case, folder: str, ours: bool) -> Any:
    told = case if ours else Case(**{**vars(case), "faults": (), "bad": ()})
    dataset = DATASETS[case.style](told, folder)
    options = dict(case.options)
    if options["batch_size"] is not None:
        options["collate_fn"] = Collate(case if case.bad else told, dataset.mischief, leave_out=not ours)
    if not ours:
        if options["num_workers"]:
            options["multiprocessing_context"] = "fork"
        return DataLoader(dataset, **options)
    policy = FaultPolicy(
        on_error="skip" if case.bad else "raise",
        retries=1 if case.bad else 12,
        retry_on=() if case.bad else (OSError,),
        backoff_s=0.0,
        max_restarts=10_000,
        max_bad=None,
        sample_timeout=STOPPED_S if any(fault.way == "stop" for fault in case.faults) else "auto",
    )
    more = {"recycle_after": case.recycle_after} if case.recycle_after else {}
    return outlive.DataLoader(dataset, faults=policy, **more, **options)


def expected_of(case: Case, folder: str) -> list[list[Any]]:
    """What stock torch delivers, epoch by epoch."""
    seed_all(case)
    loader = make_loader(case, folder, ours=False)
    epochs = []
    for epoch in range(case.epochs):
        stop = next((batch for at, batch in case.left if at == epoch), None)
        delivered: list[Any] = []
        iterator = iter(loader)
        for batch in iterator:
            if case.bad and batch[0] == []:
                continue  # all its samples are bad: skipped
            delivered.append(copy.deepcopy(batch))
            if len(delivered) == stop:
                break
        epochs.append(delivered)
        if not case.options.get("persistent_workers") and hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()  # left to the collector, torch waits five seconds for each worker
        del iterator
    if loader._iterator is not None:
        loader._iterator._shutdown_workers()
    return epochs


def seed_all(case: Case) -> None:
    torch.manual_seed(case.number)
    random.seed(case.number)
    np.random.seed(case.number)


class Trainer:
    """Goes through the epochs of a case as a training program does, and notes what it got."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case, self.folder = case, folder
        self.epochs: list[list[Any]] = []
        self.kept: list[tuple[Any, Any, str]] = []
        self.pool: outlive.Pool | None = None
        self.loaders: list[Any] = []
        self.given_up = False  # an interrupt came in between, and the iterator says that it cannot go on

    def run(self) -> None:
        case = self.case
        seed_all(case)
        loader = self._fresh()
        for epoch in range(case.epochs):
            self.epochs.append([])
            loader = self._epoch(epoch, loader)
            if self.given_up:
                break
        loader.close()
        for used in self.loaders:
            condemned = set(used.quarantine)
            if not condemned <= set(case.bad):
                raise AssertionError(f"quarantined {sorted(condemned)}, bad are {sorted(case.bad)}")
        for batch, copied, at in self.kept:
            found = differences(batch, copied, f"kept {at}")
            if found:
                raise AssertionError("; ".join(found[:3]))
        if self.pool is not None:
            self.pool.shutdown()

    def _fresh(self) -> Any:
        self.loaders.append(make_loader(self.case, self.folder, ours=True))
        return self.loaders[-1]

    def _epoch(self, epoch: int, loader: Any) -> Any:
        case, got = self.case, self.epochs[-1]
        iterator = iter(loader)
        while True:
            at = (epoch, len(got))
            if at in case.killed_from_outside:
                self._kill_a_worker(loader)
            if at in case.interrupted:
                signal.setitimer(signal.ITIMER_REAL, random.Random(str(at)).uniform(1e-4, 5e-3))
            try:
                batch = next(iterator)
            except StopIteration:
                signal.setitimer(signal.ITIMER_REAL, 0)
                return loader
            except KeyboardInterrupt:
                continue  # the iterator goes on, or says that it cannot
            except outlive.OutliveError as error:
                if at in case.interrupted and "interrupted" in str(error):
                    self.given_up = True
                    return loader
                raise
            finally:
                with contextlib.suppress(KeyboardInterrupt):
                    signal.setitimer(signal.ITIMER_REAL, 0)
            self._use(batch, at)
            if (epoch, len(got)) in case.left:
                return loader
            for resumed_epoch, resumed_batch, how in case.resumed:
                if (resumed_epoch, resumed_batch) == (epoch, len(got)):
                    loader, iterator = self._resume(loader, how)

    def _use(self, batch: Any, at: tuple[int, int]) -> None:
        self.epochs[-1].append(copy.deepcopy(batch))
        if self.case.use == "keep":
            self.kept.append((batch, self.epochs[-1][-1], str(at)))
        elif self.case.use == "change":
            for tensor in tensors_of(batch):
                tensor.zero_()
        elif self.case.use == "send on":
            if self.pool is None:
                self.pool = outlive.Pool(1)
            back = self.pool.submit(copy.deepcopy, batch).result()
            found = differences(back, self.epochs[-1][-1], f"sent on {at}")
            if found:
                raise AssertionError("; ".join(found[:3]))

    def _resume(self, loader: Any, how: str) -> tuple[Any, Any]:
        state = loader.state_dict()
        generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
        loader.close()
        if how == "json":
            state = json.loads(json.dumps(state))
        elif how == "torch":
            file = io.BytesIO()
            torch.save(state, file)
            file.seek(0)
            state = torch.load(file, weights_only=True)
        else:
            state = pickle.loads(pickle.dumps(state))
        loader = self._fresh()
        random.random(), torch.rand(1), np.random.rand()
        torch.set_rng_state(generators[0])
        random.setstate(generators[1])
        np.random.set_state(generators[2])
        loader.load_state_dict(state)
        return loader, iter(loader)

    def _kill_a_worker(self, loader: Any) -> None:
        pids = [slot.pid for slot in loader.statistics().slots if slot.pid is not None]
        if pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(random.Random(self.case.number).choice(pids), signal.SIGKILL)


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def run_case(case: Case) -> list[str]:
    """What is wrong with this case; nothing: []."""
    with tempfile.TemporaryDirectory() as folder:
        expected = expected_of(case, folder)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        trainer = Trainer(case, folder)
        trainer.run()
        if trainer.given_up:
            expected = expected[: len(trainer.epochs)]
            expected[-1] = expected[-1][: len(trainer.epochs[-1])]
        found = differences(trainer.epochs, expected, "epochs")
        del trainer
    if not wait_until(lambda: not children(), LEFT_BEHIND_S):
        found.append(f"left behind: {children()}")
    return found[:5]


def children() -> list[str]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            command = " ".join(process.cmdline())
            ours = "resource_tracker" not in command and "forkserver" not in command
            if process.status() != psutil.STATUS_ZOMBIE and ours:
                found.append(f"{process.pid} {process.status()} {command[:80]}")
    return found


# ---------------------------------------------------------------- many cases


def in_a_fork(case: Case) -> tuple[int, int]:
    """Start a case; its pid, and the descriptor on which it says what is wrong."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, reading
    status = 1
    try:
        os.close(reading)
        os.setsid()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        try:
            found = run_case(case)
        except BaseException:
            found = [traceback.format_exc()]
        os.write(writing, "\n".join(found).encode()[:60_000])
        status = 0
    finally:
        os._exit(status)


def judge(case: Case, pid: int, reading: int) -> str:
    """Wait for a case to end; what is wrong with it."""
    ended = wait_until(lambda: bool(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)), CASE_S)
    if not ended:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)  # for the stacks to be written
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with os.fdopen(reading, "rb") as file:
        found = file.read().decode()
    if not ended:
        return f"stalled for {CASE_S:g} s"
    return found or ("" if status == 0 else f"ended with status {status}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1_000_000))
    parser.add_argument("--case", type=int, help="only this one, and say what it is")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("outlive").setLevel(logging.DEBUG if given.case is not None else logging.CRITICAL)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="torture-") as home:
        os.environ["OUTLIVE_HOME"] = home
        os.environ["OUTLIVE_RUNTIME"] = str(Path(home, "runtime"))
        if given.case is not None:
            case = draw_case(given.seed, given.case)
            print(json.dumps(asdict(case), indent=1), flush=True)
            problem = judge(case, *in_a_fork(case))
            print(problem or "no defect")
            return bool(problem)
        return many(given.seed, given.seconds, given.jobs)


def many(seed: int, seconds: float, jobs: int) -> int:
    begun = time.monotonic()
    numbers = iter(range(sys.maxsize))
    running: list[tuple[Case, int, int, float]] = []
    cases = defects = 0
    # Not started any more near the end, but each one that was begun is judged.
    while running or time.monotonic() - begun < seconds:
        while len(running) < jobs and time.monotonic() - begun < seconds:
            case = draw_case(seed, next(numbers))
            running.append((case, *in_a_fork(case), time.monotonic()))
        case, pid, reading, _ = running.pop(0)
        problem = judge(case, pid, reading)
        cases += 1
        if problem:
            defects += 1
            print(f"defect: python tests/torture.py --seed {seed} --case {case.number}\n{problem}", flush=True)
        if cases % 100 == 0:
            print(f"{cases} cases, {defects} defects, {time.monotonic() - begun:.0f} s", flush=True)
    print(f"seed {seed}: {cases} cases in {time.monotonic() - begun:.0f} s, {defects} defects")
    return bool(defects)


if __name__ == "__main__":
    sys.exit(main())
