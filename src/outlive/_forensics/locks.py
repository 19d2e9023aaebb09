"""Names the lock that a forked worker waits for: by its address, in the memory of the process that forked it.

Reads   this process's own objects, for a short time; the worker's memory.
Writes  nothing.
Never   user code: attributes are read from where they lie, no property or `__getattr__` runs.

A fork has everything at the same address. Where the kernel says that a worker sleeps on a word of memory, and that
word belongs to a lock which this process knows, the lock has a name; and if it is held here, where nobody ever took
it, then it was held when the fork was made.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import struct
import sys
import threading
import time
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from outlive._forensics.kin import Kin
from outlive._system import threads

_SEARCH_S = 0.1  # of the processor's time: in the job, in the user's modules, and in all others
_PATIENCE_S = 0.3  # on a machine that is busy, for each of these
_MOST_OBJECTS = 200_000
_MOST_ITEMS = 2_000
_POINTER_AT = object.__basicsize__  # of PyThread_type_lock, in both kinds of lock
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
# By type() everywhere: isinstance() asks an object for its __class__, which may be code of its own.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range, types.CodeType})
_LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "outlive", "scipy", "pandas", "sympy"})
_LOCK_WORDS = {_LOCK: "a threading.Lock", _RLOCK: "a threading.RLock"}


@dataclass(frozen=True)
class Known:
    """A lock that this process knows as well."""

    path: str  # «dataset.lock», «mymodule.LOCK»
    kind: str
    held: bool  # here: so it was when the worker was forked
    shared: bool = False  # with other processes

    @property
    def words(self) -> str:
        return f"{self.path} ({self.kind})"


def find(address: int, job: Any) -> Known | None:
    """The lock whose word of memory this is."""
    if not _layout_is_known():
        return None
    for path, found in walk(job):
        kind = type(found)
        if kind in _LOCK_WORDS:
            if _word_of(found) == address:
                return Known(tidy(path), _LOCK_WORDS[kind], repr(found).startswith("<locked"))
        elif kind.__name__ == "SemLock" and kind.__module__ == "_multiprocessing" and found.handle == address:
            path = path.removesuffix("._semlock")
            return Known(tidy(path), "a lock of multiprocessing's", found._is_zero(), shared=True)
    return None


def tidy(path: str) -> str:
    """As a user would write it: the job is ours, the dataset in it theirs."""
    return path.removeprefix("job.").removeprefix("settings.")


def owner_is_gone(pid: int, address: int) -> int | None:
    """The thread that a native mutex says it is held by, if this process has no such thread."""
    data = threads.memory_of(pid, address, 12)
    if len(data) < 12:
        return None
    lock, _, owner = struct.unpack("=IIi", data)  # as glibc's pthread_mutex_t begins
    living = {thread.number for thread in threads.threads_of(pid)}
    if lock not in (1, 2) or not 1 < owner < 1 << 22 or owner in living:
        return None
    return int(owner)


# ---------------------------------------------------------------- locks that processes share

_SEM_LOCK = struct.Struct("=QQii")  # in memory: handle, the thread that took it last, how often it was taken, how often
_SEM_LOCK_AT = object.__basicsize__  # it may be
_mutexes: dict[int, Any] = {}  # by address; None: there is no such lock in the job


def is_abandoned(pid: int, address: int, kin: Kin) -> bool:
    """Whether a lock of multiprocessing's will never be released: it is held, and by no living process.

    Only for its Lock and RLock: others may release a semaphore, and who took it says nothing. How often a process has
    taken a lock stands beside it in memory. What cannot be seen may hold it: then the answer is no.
    """
    if address not in _mutexes:
        _mutexes[address] = _mutex_at(address, kin.job())
    mutex = _mutexes[address]
    if mutex is None or not mutex._is_zero():
        return False
    living = set(threads.all_processes())
    family = living & {os.getpid(), pid, *kin.relatives()}
    if any(_times_taken(member, mutex) != 0 for member in family):
        return False
    return not any(threads.maps_same(member, pid, address) for member in living - family)


def _mutex_at(address: int, job: Any) -> Any:
    """The semaphore of a Lock or RLock; None where it is another's, or not in reach."""
    for _, found in walk(job):
        kind = type(found)
        if kind.__module__ == "multiprocessing.synchronize" and kind.__name__ in ("Lock", "RLock"):
            semaphore = object.__getattribute__(found, "__dict__").get("_semlock")
            if type(semaphore).__name__ == "SemLock" and semaphore.handle == address:
                return semaphore
    return None


def _times_taken(pid: int, mutex: Any) -> int | None:
    """How often a process holds a lock that lies at the same address there; None: unknown."""
    data = threads.memory_of(pid, id(mutex) + _SEM_LOCK_AT, _SEM_LOCK.size)
    if len(data) < _SEM_LOCK.size:
        return None
    handle, _, times, most = _SEM_LOCK.unpack(data)
    return int(times) if (handle, most) == (mutex.handle, mutex.maxvalue) else None


@functools.cache
def _layout_is_known() -> bool:
    """Whether a lock of this Python is a semaphore where we look for it (from 3.14 on it is something else)."""
    if sys.version_info >= (3, 14) or sys.implementation.name != "cpython":
        return False
    lock = threading.Lock()
    free = _value(_word_of(lock))
    with lock:
        held = _value(_word_of(lock))
    return (free, held) == (1, 0)


def _word_of(lock: Any) -> int:
    return ctypes.c_size_t.from_address(id(lock) + _POINTER_AT).value


def _value(address: int) -> int:
    data = threads.memory_of(os.getpid(), address, 4)
    return int.from_bytes(data, sys.byteorder) if len(data) == 4 else -1


# ---------------------------------------------------------------- all that is here


def walk(job: Any, *, modules: bool = True, libraries: bool = True) -> Iterator[tuple[str, Any]]:
    """Everything in reach, what is near first: the job, then what the user's modules hold, then all others."""
    seen: dict[int, Any] = {}
    loaded = [(name, module) for name, module in list(sys.modules.items()) if type(module) is types.ModuleType]
    yield from _walk_from([("job", job)], seen)
    if modules:
        yield from _walk_from([(name, vars(module)) for name, module in loaded if not _is_library(module)], seen)
    if libraries:
        yield from _walk_from([(name, vars(module)) for name, module in loaded if _is_library(module)], seen)


def _is_library(module: types.ModuleType) -> bool:
    held = vars(module)
    return _is_of_library(str(held.get("__name__"))) or "site-packages" in str(held.get("__file__"))


def _is_of_library(module_name: str) -> bool:
    return module_name.partition(".")[0] in _LIBRARIES


def _walk_from(roots: list[tuple[str, Any]], seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    spent, deadline = time.thread_time() + _SEARCH_S, time.monotonic() + _PATIENCE_S
    waiting = collections.deque(roots)
    steps = 0
    while waiting and len(seen) < _MOST_OBJECTS:
        steps += 1
        if steps % 256 == 0 and (time.thread_time() > spent or time.monotonic() > deadline):
            return
        path, found = waiting.popleft()
        if id(found) in seen:
            continue
        seen[id(found)] = found
        yield path, found
        waiting.extend(part for part in _parts(path, found) if type(part[1]) not in _ATOMS)


def _parts(path: str, found: Any) -> Iterator[tuple[str, Any]]:
    kind = type(found)
    if kind is dict:
        for key, value in _first(found.items()):
            named = isinstance(key, str) and key.isidentifier()
            yield (f"{path}.{key}" if named and _is_namespace(path) else f"{path}[{_short(key)}]"), value
    elif kind in (list, tuple, collections.deque):
        for at, value in enumerate(_first(found)):
            yield f"{path}[{at}]", value
    elif kind in (set, frozenset):
        for value in _first(found):
            yield f"{path}[…]", value
    elif kind is functools.partial:
        yield f"{path}.func", found.func
        yield f"{path}.args", found.args
        yield f"{path}.keywords", found.keywords
    elif kind is types.MethodType:
        yield f"{path}.__self__", found.__self__
    elif kind is types.FunctionType:
        for name, cell in zip(found.__code__.co_freevars, found.__closure__ or ()):
            try:
                yield f"{path}.<{name}>", cell.cell_contents
            except ValueError:
                continue  # an empty cell
    elif issubclass(kind, type):
        if not _is_of_library(str(found.__module__)):
            for name, value in _first(type.__dict__["__dict__"].__get__(found).items()):
                yield f"{path}.{name}", value
    elif kind is not types.ModuleType:
        yield from attributes(path, found)
        yield path, kind  # what its class holds has the same name


def attributes(path: str, found: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, by name, without running any code of its own."""
    try:
        held = object.__getattribute__(found, "__dict__")
    except AttributeError:
        held = {}
    for name, value in _first(held.items() if type(held) is dict else ()):
        yield f"{path}.{name}", value
    for owner in type(found).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member = owner.__dict__.get(name)
            if type(member) is types.MemberDescriptorType:
                try:
                    yield f"{path}.{name}", member.__get__(found, type(found))
                except AttributeError:
                    continue  # a slot that was never filled


def _is_namespace(path: str) -> bool:
    return path in sys.modules


def _first(items: Any) -> Iterator[Any]:
    try:
        for count, item in enumerate(items):
            if count >= _MOST_ITEMS:
                return
            yield item
    except RuntimeError:  # changed meanwhile
        return


def _short(key: Any) -> str:
    return repr(key)[:40] if isinstance(key, (str, int, bytes, bool, float)) else f"<{type(key).__name__}>"
