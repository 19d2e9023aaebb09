"""What the dataset is made of that workers stumble over: what cannot travel, what is copied, what must not be shared.

Reads   the dataset, by path; how it pickles, without keeping the pickle.
Writes  nothing.
Never   user code beyond what pickling runs by itself; never for longer than a few seconds.
"""

from __future__ import annotations

import io
import itertools
import pickle
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outlive._forensics import unpicklable
from outlive._share.readonly import Shared
from outlive.doctor import walking
from outlive.doctor.findings import Finding, Rank
from outlive.doctor.machine import Machine, more_memory
from outlive.doctor.plan import Plan
from outlive.doctor.starting import Running
from outlive.evidence import Unpicklable
from outlive.quantities import in_words

_WALK_S = 2.0
_PICKLE_S = 3.0
_PICKLE_BYTES = 4 << 30
_COPIED_FROM = 16 << 20  # of one container
_COUNTED_FROM = 1 << 20
_PICKLED_AT_MOST = 64 << 20  # of Python objects
_MOST_COUNTED = 64
_PAGE = 4096
_HEADER = 128  # of an array, without its numbers
_SAMPLE = 256
_FEW = 64
_SIMPLE_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_LARGE_PICKLE = 256 << 20
_TOLD = 3
# Kinds of things that processes must not share: by the package and the name of a type, of its bases too.
HELD_KINDS = {
    "open-file": {
        *(("_io", "FileIO"), ("_io", "BufferedReader"), ("_io", "TextIOWrapper"), ("_io", "BufferedRandom")),
        *(("zipfile", "ZipFile"), ("tarfile", "TarFile"), ("h5py", "File"), ("netCDF4", "Dataset")),
    },
    "open-socket": {("socket", "socket"), ("ssl", "SSLSocket"), ("http", "HTTPConnection"), ("requests", "Session")},
    "open-database": {
        *(("sqlite3", "Connection"), ("sqlite3", "Cursor"), ("lmdb", "Environment"), ("lmdb", "Transaction")),
        *(("psycopg2", "connection"), ("psycopg", "Connection"), ("pymysql", "Connection"), ("redis", "Redis")),
        *(("duckdb", "DuckDBPyConnection"), ("_duckdb", "DuckDBPyConnection"), ("pymongo", "MongoClient")),
        *(("sqlalchemy", "Engine"), ("sqlalchemy", "Connection")),
    },
    "open-channel": {("grpc", "Channel"), ("pyarrow", "S3FileSystem"), ("pyarrow", "GcsFileSystem")},
}
_SHARED_BY_FORK = {
    "open-file": "its position is one for all workers: they read each other's bytes",
    "open-socket": "its answers go to whichever worker reads first",
    "open-database": "it must not be used in a fork: its locks and its place in the file are those of another process",
    "open-channel": "its threads are not there in a fork",
}
_GENERATORS = frozenset(
    {("numpy", "Generator"), ("numpy", "RandomState"), ("random", "Random"), ("torch", "Generator")}
)
_LOCKS = frozenset({("_thread", "lock"), ("_thread", "RLock"), ("threading", "_RLock")})


@dataclass
class Seen:
    """What one walk through the dataset found."""

    held: dict[str, list[tuple[str, str]]] = field(default_factory=lambda: defaultdict(list))  # kind → path, type
    locks: list[tuple[str, bool]] = field(default_factory=list)  # path, and whether it is held now
    cuda: list[tuple[str, int]] = field(default_factory=list)  # path, bytes
    copied: list[tuple[str, str, int, int]] = field(default_factory=list)  # path, type, elements, bytes
    generators: list[tuple[str, str]] = field(default_factory=list)  # of random numbers: path, type
    bytes: int = 0  # all of it, about
    unseen: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)  # beginnings of paths whose sizes are known


@dataclass(frozen=True)
class Pickled:
    bytes: int | None = None  # None: it cannot be pickled, or it takes too long to know
    problems: tuple[Unpicklable, ...] = ()
    unseen: str = ""


def look(plan: Plan) -> Seen:
    walk = walking.Walk(plan.dataset, plan.name, _WALK_S)
    seen = Seen(unseen=walk.unseen)
    for path, part in walk:
        try:
            _note(seen, path, part)
        except Exception as error:  # an object that does not behave: what it is stays unknown, the rest does not
            seen.unseen.append(f"{path}: {type(error).__name__} on asking what it is")
    return seen


def findings(plan: Plan, machine: Machine, seen: Seen, pickled: Pickled, running: Running) -> Iterator[Finding]:
    if not plan.workers:
        return
    yield from _of_pickling(plan, machine, pickled)
    yield from _of_copies(plan, machine, seen)
    if plan.forks:
        yield from _of_held(plan, seen)
        yield from _of_locks(plan, seen, running)
    yield from _of_cuda(plan, seen)


# ---------------------------------------------------------------- looking


def _note(seen: Seen, path: str, part: Any) -> None:
    kind = type(part)
    if issubclass(kind, Shared):
        return
    _note_size(seen, path, part)
    names = [(owner.__module__.partition(".")[0], owner.__name__) for owner in kind.__mro__]
    if names[0] in _LOCKS:
        if not _is_inside(seen, path):
            seen.locks.append((path, repr(part).startswith("<locked")))
    elif ("torch", "Tensor") in names:
        if part.is_cuda:
            seen.cuda.append((path, int(part.nbytes)))
    elif not _GENERATORS.isdisjoint(names):
        seen.generators.append((path, walking.type_name(part)))
    else:
        for what, types in HELD_KINDS.items():
            if not types.isdisjoint(names) and not _is_closed(part):
                if not _is_inside(seen, path):
                    seen.held[what].append((path, walking.type_name(part)))
                return


def _is_inside(seen: Seen, path: str) -> bool:
    """Whether it belongs to something that is told already: the file of an archive, the lock of a channel."""
    return any(path.startswith(f"{outer}.") for found in seen.held.values() for outer, _ in found)


def _note_size(seen: Seen, path: str, part: Any) -> None:
    if path.startswith(tuple(seen.counted)):
        return  # with what it is in
    size, copied = _sizes(part)
    seen.bytes += size
    if size >= _COUNTED_FROM and len(seen.counted) < _MOST_COUNTED:
        seen.counted += [f"{path}[", f"{path}."]
    if copied >= _COPIED_FROM:
        seen.copied.append((path, type(part).__name__, len(part), copied))


def _is_closed(part: Any) -> bool:
    for name in ("closed", "_closed"):
        told = getattr(type(part), name, None)
        if told is not None:
            return bool(getattr(part, name))
    fileno = getattr(type(part), "fileno", None)
    return fileno is not None and part.fileno() < 0


def _sizes(part: Any) -> tuple[int, int]:
    """About how large this is, from a sample of its elements, and how much of it reading copies in a fork.

    Python counts references inside of each object: reading one writes to its page, and a page that is written to is
    copied. The numbers of an array, and the pages of a long text after its first, are not.
    """
    kind = type(part)
    package = kind.__module__.partition(".")[0]
    if kind in (list, tuple, dict, set, frozenset):
        size, copied = _of_elements(_sample(part), 3)
        share = len(part) * (2 if kind is dict else 1) / max(1, len(_sample(part)))
        own = sys.getsizeof(part)
        return own + round(size * share), (own + round(copied * share) if len(part) > _FEW else 0)
    if package == "numpy" and kind.__name__ == "ndarray":
        if not part.dtype.hasobject or part.size <= _FEW:
            return int(part.nbytes), 0
        flat = part.ravel()
        size, copied = _of_elements([flat[at] for at in range(0, part.size, -(-part.size // _SAMPLE))], 2)
        share = part.size / len(range(0, part.size, -(-part.size // _SAMPLE)))
        return int(part.nbytes) + round(size * share), round(copied * share)
    if package in ("numpy", "torch", "pyarrow"):
        numbers = getattr(part, "nbytes", 0)
        return (numbers if isinstance(numbers, int) else 64), 0
    if package == "pandas" and hasattr(kind, "memory_usage"):
        usage = part.memory_usage()
        return int(usage.sum() if hasattr(usage, "sum") else usage), 0
    return sys.getsizeof(part, 64), 0


def _sample(part: Any) -> list[Any]:
    if type(part) in (list, tuple):
        return list(part[:: -(-len(part) // _SAMPLE)]) if part else []
    if type(part) is dict:
        return [item for pair in itertools.islice(part.items(), _SAMPLE // 2) for item in pair]
    return list(itertools.islice(part, _SAMPLE))


def _of_elements(items: list[Any], depth: int) -> tuple[int, int]:
    """Bytes of these, with what is in them; and those that reading them copies."""
    size = copied = 0
    for item in items:
        kind = type(item)
        if kind in (bool, type(None)):
            continue
        own = sys.getsizeof(item, 64)
        if kind.__module__.partition(".")[0] in ("numpy", "torch"):
            numbers = getattr(item, "nbytes", 0)
            size, copied = size + _HEADER + (numbers if isinstance(numbers, int) else 0), copied + _HEADER
            continue
        size, copied = size + own, copied + min(own, _PAGE)
        if not depth or kind in (str, bytes, int, float, complex):
            continue
        inner = _sample(item) if kind in (list, tuple, dict, set, frozenset) else _values(item)
        count = len(item) * (2 if kind is dict else 1) if kind in (list, tuple, dict, set, frozenset) else len(inner)
        more, more_copied = _of_elements(inner, depth - 1)
        size += round(more * count / max(1, len(inner)))
        copied += round(more_copied * count / max(1, len(inner)))
    return size, copied


def _values(item: Any) -> list[Any]:
    """What an object of a user's class holds, its `__dict__` included."""
    try:
        held = object.__getattribute__(item, "__dict__")
    except AttributeError:
        return []
    return [*held.values(), ""] if type(held) is dict else []


def pickle_of(plan: Plan, seen: Seen) -> Pickled:
    """How large the dataset is on its way to a spawned process, or what keeps it, or what goes with it, here."""
    problems = unpicklable.find(plan.dataset, plan.name)
    for name in ("collate_fn", "worker_init_fn"):
        problems += unpicklable.find(getattr(plan.loader, name, None), name)
    if problems:
        return Pickled(problems=problems)
    if sum(size for *_, size in seen.copied) > _PICKLED_AT_MOST:
        return Pickled(seen.bytes)  # about: a pickler's memory of so many objects would itself be large
    counted = _Counted(time.monotonic() + _PICKLE_S)
    try:
        with unpicklable._Spawning():
            _Sizing(counted).dump(plan.dataset)
    except _TooMuch:
        return Pickled(unseen=f"how large its pickle is: more than {in_words(counted.bytes)}, or too slow to know")
    except Exception as error:
        text = str(error).splitlines()
        said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
        return Pickled(problems=(Unpicklable(plan.name, walking.type_name(plan.dataset), said),))
    return Pickled(counted.bytes)


class _TooMuch(Exception):
    """Enough is known."""


class _Counted(io.RawIOBase):
    """Takes a pickle and keeps only its size."""

    def __init__(self, deadline: float) -> None:
        self.bytes, self._deadline = 0, deadline

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.add(len(data))
        return len(data)

    def add(self, size: int) -> None:
        self.bytes += size
        if self.bytes > _PICKLE_BYTES or time.monotonic() > self._deadline:
            raise _TooMuch


class _Sizing(pickle.Pickler):
    """Arrays and tensors are counted, not written: multiprocessing would move tensors into shared memory for it."""

    def __init__(self, counted: _Counted) -> None:
        super().__init__(counted, protocol=4)
        self._counted = counted

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        package = kind.__module__.partition(".")[0]
        if (package, kind.__name__) == ("numpy", "ndarray") and not obj.dtype.hasobject:
            self._counted.add(int(obj.nbytes))
            return str, ()
        if package == "torch" and any(owner.__name__ in ("Tensor", "UntypedStorage") for owner in kind.__mro__):
            self._counted.add(int(obj.nbytes() if callable(obj.nbytes) else obj.nbytes))
            return str, ()
        return NotImplemented


# ---------------------------------------------------------------- saying


def _of_pickling(plan: Plan, machine: Machine, pickled: Pickled) -> Iterator[Finding]:
    if plan.start_method == "fork":
        return
    if pickled.problems:
        first = pickled.problems[0]
        facts = [f"{each.path} ({each.type_name}): {each.reason}" for each in pickled.problems]
        yield Finding(
            "unpicklable-dataset",
            Rank.WILL_KILL,
            f"what workers need cannot be sent to them by {plan.start_method}: {first.path} ({first.type_name})",
            tuple(facts),
            (_sendable(first), 'multiprocessing_context="fork"'),
        )
    elif pickled.bytes is not None and pickled.bytes >= _LARGE_PICKLE:
        copies = 1 if plan.is_ours else plan.workers
        needed = pickled.bytes * copies
        left = machine.left_bytes
        deadly = left is not None and needed > left
        yield Finding(
            "large-pickle",
            Rank.MAY_KILL if deadly else Rank.SLOWS_DOWN,
            f"{in_words(pickled.bytes)} of dataset are pickled for {_copies(copies)} at every start of workers",
            (f"{in_words(left)} of memory are left",) if left is not None else (),
            (f"{plan.name} = outlive.share({plan.name})", "persistent_workers=True"),
        )


def _sendable(problem: Unpicklable) -> str:
    if problem.type_name == "function":
        return f"def {problem.path.rpartition('.')[2]}(…) at the top of a module, where workers find it by its name"
    return f"make {problem.path} in worker_init_fn, or when the first sample is fetched; leave it out in __getstate__"


def _copies(count: int) -> str:
    return "one process" if count == 1 else f"{count} workers"


def _of_copies(plan: Plan, machine: Machine, seen: Seen) -> Iterator[Finding]:
    if not seen.copied or plan.shares_dataset:
        return
    outer = [each for each in seen.copied if not any(_is_within(each[0], other[0]) for other in seen.copied)]
    total = sum(size for *_, size in outer)
    needed, left = total * plan.workers, machine.left_bytes
    deadly = left is not None and needed > left
    facts = [f"{path}: a {kind} of {count} elements, {in_words(size)}" for path, kind, count, size in outer[:_TOLD]]
    if plan.is_ours or plan.start_method == "fork":
        facts.append("reading an element changes its count of references, so its page is copied in each worker")
    else:
        facts.append("each worker unpickles a copy of its own")
    yield Finding(
        "copied-on-read",
        Rank.MAY_KILL if deadly else Rank.SLOWS_DOWN,
        f"{in_words(total)} of Python objects become {in_words(needed)} as {plan.workers} workers read them"
        + (f"; {in_words(left)} are left" if deadly and left is not None else ""),
        tuple(facts),
        (*dict.fromkeys(_share(plan.name, path, kind) for path, kind, *_ in outer[:_TOLD]),)
        + ((more_memory(machine, needed + (machine.memory_bytes or 0)),) if deadly else ()),
    )


def _is_within(path: str, outer: str) -> bool:
    return path != outer and path.startswith((f"{outer}.", f"{outer}["))


def _share(name: str, path: str, kind: str) -> str:
    """The line that mends it, where it can be written as one."""
    if path == name or not _SIMPLE_PATH.fullmatch(path):
        return f"{name} = outlive.share({name})"
    return f"{path} = outlive.share({path}.tolist())" if kind == "ndarray" else f"{path} = outlive.share({path})"


def _of_held(plan: Plan, seen: Seen) -> Iterator[Finding]:
    for what, found in seen.held.items():
        if not found:
            continue
        path, kind = found[0]
        more = f", and {len(found) - 1} more" if len(found) > 1 else ""
        yield Finding(
            what,
            Rank.MAY_KILL,
            f"{path} ({kind}) is open, and {plan.workers} forked workers share it{more}",
            (*(f"{path}: {kind}" for path, kind in found[1 : _TOLD + 1]), _SHARED_BY_FORK[what]),
            (f"open {path} in worker_init_fn, or when the first sample is fetched in a process",),
        )


def _of_locks(plan: Plan, seen: Seen, running: Running) -> Iterator[Finding]:
    """A lock that nobody else can hold at the fork is harmless."""
    held = [path for path, is_held in seen.locks if is_held]
    at_risk = held or ([path for path, _ in seen.locks] if running.python else [])
    if not at_risk:
        return
    state = "is held just now" if held else "may be held by another thread when workers are forked"
    yield Finding(
        "lock-in-dataset",
        Rank.WILL_KILL if held else Rank.MAY_KILL,
        f"{at_risk[0]} {state}",
        ("a lock that is held at the fork stays locked in the workers for ever",),
        (f"{at_risk[0]} = None until the first sample is fetched in a process", 'multiprocessing_context="forkserver"'),
    )


def _of_cuda(plan: Plan, seen: Seen) -> Iterator[Finding]:
    if not seen.cuda:
        return
    path, size = seen.cuda[0]
    total = sum(size for _, size in seen.cuda)
    forked = "a forked worker that touches it ends with an error of CUDA's"
    more = f", one of {len(seen.cuda)} with {in_words(total)}" if len(seen.cuda) > 1 else ""
    spawned = f"each of {plan.workers} workers makes a CUDA context of its own, some 500 MiB on the GPU"
    yield Finding(
        "cuda-tensor-held",
        Rank.WILL_KILL if plan.forks else Rank.MAY_KILL,
        f"{path} is a tensor on the GPU ({in_words(size)}{more})",
        (forked if plan.forks else spawned,),
        (f"{path} = {path}.cpu()", "move batches to the GPU in the training loop"),
    )
