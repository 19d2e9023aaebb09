"""What a worker of the doctor's does: fetch samples and say what they were like.

Reads   the dataset that this process holds.
Writes  nothing but what it returns: digests and sizes, never the samples.
Never   runs in the process that asks: a sample may kill.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
import os
import pickle
import random
import struct
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outlive import places
from outlive._capture import vitals

SEED, OTHER_SEED = 20_201, 20_202
_THREADS = 4
_THREADED_S = 0.3  # so long they go on: on a busy machine threads take turns of some milliseconds
_SWITCH_S = 1e-5
_DEEP = 40
_LENGTHS = struct.Struct("=q")


@dataclass(frozen=True)
class Look:
    """At one sample: fetched twice after the same seed, and once after another."""

    index: Any
    digests: tuple[str, ...] = ()
    seconds: float = 0.0  # of the first fetch
    cpu_s: float = 0.0
    bytes: int = 0
    leaves: int = 0  # tensors and arrays in it
    comparable: bool = True
    error: str = ""  # what it raised, and where
    own_bytes: int = 0  # memory of this worker by then
    starved_s: float = 0.0  # of the first fetch, waiting for a CPU

    @property
    def is_steady(self) -> bool:
        return len(set(self.digests)) == 1

    @property
    def is_seeded(self) -> bool:
        """Whether the same seed gives the same sample."""
        return len(set(self.digests[:2])) == 1


@dataclass
class _Held:
    dataset: Any = None
    collate: Any = None
    sampler: Any = None
    in_batches: bool = False


_held = _Held()


def hold(dataset: Any, collate: Any, sampler: Any = None, in_batches: bool = False) -> None:
    """Each worker's first task. `in_batches`: the sampler draws whole batches."""
    _held.dataset, _held.collate, _held.sampler, _held.in_batches = dataset, collate, sampler, in_batches


def indices(count: int) -> tuple[int | None, list[Any]]:
    """How many samples there are, if anybody knows, and up to `count` of their indices, spread over all."""
    if _held.sampler is not None:
        drawn = itertools.chain.from_iterable(_held.sampler) if _held.in_batches else _held.sampler
        return _length(), list(itertools.islice(drawn, count))
    if type(_held.dataset) is dict:
        return len(_held.dataset), list(itertools.islice(_held.dataset, count))
    total = len(_held.dataset)
    if total <= count:
        return total, list(range(total))
    return total, sorted({at * (total - 1) // (count - 1) if count > 1 else 0 for at in range(count)})


def _length() -> int | None:
    try:
        return len(_held.dataset)
    except Exception:  # it has none: its sampler knows
        return None


def look_at(index: Any, patience_s: float = math.inf) -> Look:
    """Fetch it three times; once, if it takes longer than that."""
    return _looked(index, lambda: _held.dataset[index], patience_s)


def look_at_stream(count: int) -> list[Look]:
    """The first samples of a stream, which is begun anew for each of three passes."""
    passes: list[list[Look]] = []
    try:
        for seed in (SEED, SEED, OTHER_SEED):
            seed_all(seed)
            stream = iter(_held.dataset)
            passes.append([])
            for at in range(count):
                clock = _Clock()
                try:
                    sample = next(stream)
                except StopIteration:
                    break
                passes[-1].append(_told(at, sample, clock))
    except Exception as error:
        return [Look(len(passes[-1]) if passes else 0, error=told(error))]
    longest = max(len(one) for one in passes)
    return [_joined([one[at] for one in passes if at < len(one)], len(passes)) for at in range(longest)]


def _joined(looks: Sequence[Look], passes: int) -> Look:
    first = looks[0]
    digests = tuple(look.digests[0] for look in looks) + ("",) * (passes - len(looks))
    return Look(**{**vars(first), "digests": digests, "own_bytes": looks[-1].own_bytes})


def _looked(index: Any, fetch: Any, patience_s: float) -> Look:
    digests = []
    first: Look | None = None
    for seed in (SEED, SEED, OTHER_SEED):
        seed_all(seed)
        clock = _Clock()
        try:
            sample = fetch()
        except Exception as error:
            return Look(index, error=told(error))
        look = _told(index, sample, clock)
        first = first or look
        digests.append(look.digests[0])
        if not look.comparable or look.seconds > patience_s:
            break
    assert first is not None
    return Look(**{**vars(first), "digests": tuple(digests), "own_bytes": vitals.own_bytes("self") or 0})


def _told(index: Any, sample: Any, clock: _Clock) -> Look:
    seconds, cpu_s, starved_s = clock.passed()
    seen = Digest()
    seen.add(sample)
    return Look(index, (seen.text,), seconds, cpu_s, seen.bytes, seen.leaves, seen.comparable, starved_s=starved_s)


class _Clock:
    """Time, time on a CPU, and time that was spent waiting for one, which is the machine's fault."""

    def __init__(self) -> None:
        self._begun = self._now()

    def passed(self) -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(self._now(), self._begun))

    @staticmethod
    def _now() -> tuple[float, float, float]:
        try:
            with open("/proc/thread-self/schedstat", "rb") as file:
                starved = int(file.read().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):  # a kernel that does not count it
            starved = 0.0
        return time.perf_counter(), time.process_time(), starved


def look_from_threads(expected: dict[Any, str]) -> str:
    """Fetch these samples from several threads at once: how one of them differs from its digest; "" if none does."""
    complaints: list[str] = []
    gate = threading.Barrier(_THREADS)
    before = sys.getswitchinterval()

    def fetch(number: int) -> None:
        order = list(expected)
        order = order[number % len(order) :] + order[: number % len(order)]
        gate.wait()
        until = time.monotonic() + _THREADED_S
        for index in itertools.cycle(order):
            if complaints or (time.monotonic() > until and index == order[0]):
                return
            try:
                sample = _held.dataset[index]
            except Exception as error:
                complaints.append(f"sample {index!r} raised {told(error)}")
                return
            seen = Digest()
            seen.add(sample)
            if seen.text != expected[index]:
                complaints.append(f"sample {index!r} was another one")
                return

    sys.setswitchinterval(_SWITCH_S)
    try:
        threads = [threading.Thread(target=fetch, args=(number,)) for number in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    return complaints[0] if complaints else ""


def collated(chosen: Sequence[Any]) -> tuple[int, int, int]:
    """Bytes and tensors of a batch of these samples, and this worker's memory once it is made."""
    seed_all(SEED)
    if _held.dataset is None or _held.collate is None:
        return 0, 0, 0
    samples: Iterable[Any] = (_held.dataset[index] for index in chosen)
    seen = Digest(sizes_only=True)
    seen.add(_held.collate(list(samples)))
    return seen.bytes, seen.leaves, vitals.own_bytes("self") or 0


def seed_all(seed: int) -> None:
    """The generators that loaders seed in a worker."""
    random.seed(seed)
    for name, function in (("numpy.random", "seed"), ("torch", "manual_seed")):
        module = sys.modules.get(name)
        if module is not None:
            getattr(module, function)(seed)


def told(error: BaseException) -> str:
    """In a line, with the innermost place that is not ours."""
    try:
        text = str(error).strip().splitlines()
    except Exception:  # a user's __str__ may itself fail
        text = []
    said = f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
    where, traceback = "", error.__traceback__
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if os.path.dirname(file) != os.path.dirname(__file__) and "site-packages" not in file:
            where = f" ({places.file_name(file)}:{traceback.tb_lineno})"
        traceback = traceback.tb_next
    return said + where


# ---------------------------------------------------------------- one sample as bytes


class Digest:
    """Of anything that a dataset returns: the same for equal values, however they are shared or made."""

    def __init__(self, *, sizes_only: bool = False) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._sizes_only = sizes_only
        self._open: set[int] = set()  # what is being gone through: a cycle comes back to one of these
        self.bytes = self.leaves = 0
        self.comparable = True

    @property
    def text(self) -> str:
        return self._hash.hexdigest()

    def add(self, value: Any, depth: int = 0) -> None:
        kind = type(value)
        self._mark(kind.__qualname__.encode())
        if kind in (int, float, complex, bool, type(None), str):
            self._plain(repr(value).encode(), sys.getsizeof(value))
        elif kind in (bytes, bytearray, memoryview):
            self._plain(value, len(value))
        elif id(value) in self._open or depth > _DEEP:
            self._mark(b"again")
        else:
            self._open.add(id(value))
            try:
                self._compound(value, kind, depth)
            except Exception:  # an object that does not say what it is: then nobody can compare it
                self.comparable = False
            self._open.discard(id(value))

    def _compound(self, value: Any, kind: type, depth: int) -> None:
        package = kind.__module__.partition(".")[0]
        if kind in (list, tuple) or issubclass(kind, tuple):
            self._mark(_LENGTHS.pack(len(value)))
            for item in value:
                self.add(item, depth + 1)
        elif issubclass(kind, dict):
            self._mark(_LENGTHS.pack(len(value)))
            for key, item in value.items():
                self.add(key, depth + 1)
                self.add(item, depth + 1)
        elif issubclass(kind, (set, frozenset)):
            self._mark(b"".join(sorted(self._apart(item, depth) for item in value)))
        elif package == "torch" and hasattr(value, "data_ptr"):
            self._tensor(value)
        elif package == "numpy":
            self._array(value, depth)
        elif package == "PIL" and hasattr(value, "tobytes"):
            data = value.tobytes()
            self._mark(f"{value.mode} {value.size}".encode())
            self._plain(data, len(data))
            self.leaves += 1
        else:
            self._object(value, depth)

    def _apart(self, item: Any, depth: int) -> bytes:
        other = Digest(sizes_only=self._sizes_only)
        other.add(item, depth + 1)
        self.bytes += other.bytes
        self.comparable = self.comparable and other.comparable
        return other.text.encode()

    def _tensor(self, value: Any) -> None:
        self._mark(f"{value.dtype} {tuple(value.shape)}".encode())
        self.leaves += 1
        if self._sizes_only:
            self.bytes += int(value.nbytes)
            return
        torch = sys.modules["torch"]
        flat = value.detach().cpu().contiguous().reshape(-1)
        data = flat.view(torch.uint8).numpy() if flat.numel() else b""
        self._plain(data, int(value.nbytes))

    def _array(self, value: Any, depth: int) -> None:
        numpy = sys.modules["numpy"]
        array = numpy.asarray(value)
        self._mark(f"{array.dtype} {array.shape}".encode())
        self.leaves += int(array.ndim > 0)
        if array.dtype.hasobject:
            for item in array.ravel().tolist():
                self.add(item, depth + 1)
        else:
            self._plain(b"" if self._sizes_only else numpy.ascontiguousarray(array).tobytes(), int(array.nbytes))

    def _object(self, value: Any, depth: int) -> None:
        try:
            held = object.__getattribute__(value, "__dict__")
        except AttributeError:
            held = None
        slots = any("__slots__" in vars(owner) for owner in type(value).__mro__)
        if type(held) is dict and held and not slots:
            for name, item in held.items():
                self.add(name, depth + 1)
                self.add(item, depth + 1)
            return
        data = _pickled(value)
        self._plain(data, len(data))

    def _plain(self, data: Any, size: int) -> None:
        self.bytes += size
        self._mark(_LENGTHS.pack(size))
        self._mark(data)

    def _mark(self, data: Any) -> None:
        if not self._sizes_only:
            self._hash.update(data)


def _pickled(value: Any) -> bytes:
    """Without pickle's memory of what it has seen: whether two equal texts are one object is no part of a value."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=4)
    pickler.fast = True
    pickler.dump(value)
    return file.getvalue()
