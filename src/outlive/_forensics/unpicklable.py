"""Finds which parts of an object cannot be pickled, by the way that pickle itself goes.

Reads   the object: what its `__reduce_ex__` answers, as pickle would ask it.
Writes  nothing.
Never   code of the user's that pickle would not run; never for longer than a second.

What is near comes first: an attribute of the dataset is told before an element deep inside of it.
"""

from __future__ import annotations

import collections
import copyreg
import functools
import importlib
import io
import itertools
import sys
import time
import types
from collections.abc import Callable, Iterator
from multiprocessing import context, reduction
from typing import Any

from outlive._forensics.locks import tidy
from outlive.evidence import Unpicklable

_SEARCH_S = 1.0
_MOST_OBJECTS = 100_000
_MOST_ITEMS = 2_000  # of one container: the others are of the same kind, nearly always
_MOST_FOUND = 5
_PROTOCOL = 4
# By type() everywhere: isinstance() asks an object for its __class__, which may be code of its own.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(Ellipsis)})
# What travels by itself, and is large: nobody looks into it.
_WHOLE = {("torch", "Tensor"), ("torch.nn.parameter", "Parameter"), ("numpy", "ndarray")}


def find(job: Any, name: str = "job", *, by_value: bool = False) -> tuple[Unpicklable, ...]:
    """Up to five of them; none where all of it can be pickled, or the time is over. `by_value`: lambdas, and what the
    main module defines, travel by value, with everything that they refer to."""
    deadline = time.monotonic() + _SEARCH_S
    found: list[Unpicklable] = []
    waiting: collections.deque[tuple[str, Any]] = collections.deque([(name, job)])
    seen: dict[int, Any] = {}  # holds them: what __reduce_ex__ made must not give its address away
    with _Spawning():
        reducers = reduction.ForkingPickler(io.BytesIO()).dispatch_table
        while waiting and len(found) < _MOST_FOUND and len(seen) < _MOST_OBJECTS:
            if time.monotonic() > deadline:
                break
            path, part = waiting.popleft()
            if type(part) in _ATOMS or id(part) in seen:
                continue
            seen[id(part)] = part
            try:
                carried = _carried(path, part) if by_value else None
                waiting.extend(_parts(path, part, reducers) if carried is None else carried)
            except Exception as error:
                found.append(Unpicklable(tidy(path), type_name(part), _reason(part, error)))
    return tuple(found)


class _Spawning:
    """As while a process is started: locks and queues of multiprocessing's can be pickled then, and only then."""

    def __enter__(self) -> None:
        self._before = context.get_spawning_popen()
        context.set_spawning_popen(self)  # type: ignore[arg-type]

    def __exit__(self, *_: object) -> None:
        context.set_spawning_popen(self._before)

    def duplicate_for_child(self, fd: int) -> int:
        return fd


class _NotFound(Exception):
    """Something that pickle writes as a name cannot be found by it."""


def type_name(part: Any) -> str:
    kind = type(part)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _reason(part: Any, error: Exception) -> str:
    if isinstance(error, _NotFound):
        return str(error)
    text = str(error)
    return text.splitlines()[0] if text else type(error).__name__


def _parts(path: str, part: Any, reducers: Any) -> Iterator[tuple[str, Any]]:
    """What pickle goes on with; raises what makes it stop."""
    kind = type(part)
    if kind is dict:
        return itertools.chain.from_iterable(
            (((f"{path}, a key", key), (f"{path}[{_short(key)}]", value)) for key, value in _first(part.items()))
        )
    if kind in (list, tuple):
        return ((f"{path}[{at}]", item) for at, item in enumerate(_first(part)))
    if kind in (set, frozenset):
        return ((f"{path}, an element", item) for item in _first(part))
    if (kind.__module__, kind.__name__) in _WHOLE and not _holds_objects(part):
        return iter(())
    reducer: Callable[[Any], Any] | None = reducers.get(kind)
    if reducer is None and (issubclass(kind, type) or kind is types.FunctionType):
        _find_by_name(part, getattr(part, "__qualname__", part.__name__))
        return iter(())
    reduced = reducer(part) if reducer is not None else part.__reduce_ex__(_PROTOCOL)
    if isinstance(reduced, str):
        _find_by_name(part, reduced)
        return iter(())
    return _reduced(path, part, reduced)


def _carried(path: str, part: Any) -> Iterator[tuple[str, Any]] | None:
    """What a function or class takes along when it travels by value; None for what travels as ever."""
    kind = type(part)
    if kind is types.ModuleType:
        return iter(())
    if kind is not types.FunctionType and not issubclass(kind, type):
        return None
    in_main = part.__module__ == "__main__"
    if not in_main and "<" not in part.__qualname__:
        return None
    if kind is not types.FunctionType:
        return ((f"{path}.{name}", value) for name, value in vars(part).items() if type(value) is types.FunctionType)
    cells = zip(part.__code__.co_freevars, part.__closure__ or ())
    closed = [(f"{path}.<{name}>", cell.cell_contents) for name, cell in cells]
    held = part.__globals__
    named = [(f"{part.__module__}.{name}", held[name]) for name in part.__code__.co_names if name in held]
    return iter(closed + named)


def _holds_objects(part: Any) -> bool:
    return bool(getattr(getattr(part, "dtype", None), "hasobject", False))


def _reduced(path: str, part: Any, reduced: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(reduced, tuple) or not 2 <= len(reduced) <= 6:
        raise TypeError("its __reduce__ returns no tuple of two to six")
    padded: list[Any] = [*reduced, None, None, None, None]
    function, arguments, state, items, pairs = padded[:5]
    if type(part) is functools.partial:
        yield from ((f"{path}.func", part.func), (f"{path}.args", part.args), (f"{path}.keywords", part.keywords))
        return
    yield f"{path}, what makes it", function
    names = {id(value): name for name, value in _attributes(part)}
    made_by_class = function in (copyreg.__newobj__, copyreg.__newobj_ex__)  # type: ignore[attr-defined]
    for at, value in enumerate(arguments or ()):
        if not (made_by_class and at == 0):
            yield _named(path, names, value, f", argument {at} of its __reduce__"), value
    parts: tuple[Any, ...] = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    for state_part in parts:
        if type(state_part) is dict:
            for name, value in _first(state_part.items()):
                yield f"{path}.{name}" if isinstance(name, str) else f"{path}, its state[{_short(name)}]", value
        elif state_part is not None:
            yield _named(path, names, state_part, ", its state"), state_part
    for at, item in enumerate(_first(items or ())):
        yield f"{path}[{at}]", item
    for key, value in _first(pairs or ()):
        yield f"{path}, a key", key
        yield f"{path}[{_short(key)}]", value


def _attributes(part: Any) -> list[tuple[str, Any]]:
    if type(part) is types.MethodType:
        return [("__self__", part.__self__)]
    try:
        held = object.__getattribute__(part, "__dict__")
    except AttributeError:
        return []
    return list(_first(held.items())) if type(held) is dict else []


def _named(path: str, names: dict[int, str], value: Any, otherwise: str) -> str:
    name = names.get(id(value)) if type(value) not in _ATOMS else None
    return f"{path}.{name}" if name else f"{path}{otherwise}"


def _find_by_name(part: Any, name: str) -> None:
    """As pickle checks that a function or class can be found again by its name."""
    module_name = getattr(part, "__module__", None)
    if "<lambda>" in name:
        raise _NotFound("a lambda has no name by which a worker could find it")
    if "<locals>" in name:
        raise _NotFound(f"{name} is defined inside of a function, where a worker cannot find it")
    if module_name is None:
        return  # pickle looks through all modules then
    try:
        found: Any = sys.modules.get(module_name) or importlib.import_module(module_name)
        for step in name.split("."):
            found = getattr(found, step)
    except (ImportError, AttributeError) as error:
        raise _NotFound(f"{module_name}.{name} cannot be found by its name: {error}") from None
    if found is not part:
        raise _NotFound(f"{module_name}.{name} is by now something else: it was decorated, or defined again")


def _first(items: Any) -> Iterator[Any]:
    return itertools.islice(iter(items), _MOST_ITEMS)


def _short(key: Any) -> str:
    return repr(key)[:40] if isinstance(key, (str, int, bytes, bool, float)) else f"<{type(key).__name__}>"
