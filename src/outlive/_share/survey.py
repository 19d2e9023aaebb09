"""Finds what is large in an object, and makes a copy of the object with other things in its place.

Reads   attributes, and the elements of small containers; sizes.
Writes  copies: of whatever leads to something that is replaced, and of nothing else.
Never   the object it was given, nor its class's `__copy__`, `__getstate__` or `__init__`.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from outlive._share import buffers
from outlive._share.readonly import Shared

FEW = 64  # a container of no more elements is looked into
_SAMPLE = 256
_MOST_NODES = 20_000
_DEPTH = 3
_PLAIN = (list, tuple, dict, set, frozenset, str, bytes)
_CLOSED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)


def is_container(obj: Any) -> bool:
    """Whether this can be moved as a whole."""
    return type(obj) in _PLAIN or buffers.is_array(obj) or buffers.is_tensor(obj) or buffers.is_table(obj)


def estimate_bytes(obj: Any, depth: int = 4) -> int:
    """About how large something is, from a sample of its elements where there are many."""
    kind = type(obj)
    if isinstance(obj, Shared):
        return 0
    if buffers.is_array(obj) or buffers.is_tensor(obj):
        return int(obj.nbytes)
    if buffers.is_table(obj):
        return _table_bytes(obj)
    size = sys.getsizeof(obj, 64)
    if kind not in _PLAIN or kind in (str, bytes) or not depth or not obj:
        return size
    if kind in (list, tuple):
        sample = obj[:: -(-len(obj) // _SAMPLE)]
    else:
        sample = list(itertools.islice(obj.items() if kind is dict else obj, _SAMPLE))
    return size + sum(estimate_bytes(item, depth - 1) for item in sample) * len(obj) // len(sample)


def _table_bytes(obj: Any) -> int:
    known = getattr(obj, "nbytes", None)
    if isinstance(known, int):
        return known
    if hasattr(obj, "memory_usage"):
        usage = obj.memory_usage()
        return int(usage.sum() if hasattr(usage, "sum") else usage)
    return int(getattr(getattr(obj, "data", None), "nbytes", 0))


def leads_to_large(obj: Any, min_bytes: int) -> bool:
    """Whether this is a handful of things some of which are large: these are to be moved, one by one."""
    return type(obj) in (list, tuple, dict) and _leads_to_large(obj, min_bytes, _DEPTH)


def _leads_to_large(obj: Any, min_bytes: int, depth: int) -> bool:
    return any(
        isinstance(child, Shared)
        or (is_container(child) and estimate_bytes(child) >= min_bytes)
        or (depth > 0 and _leads_to_large(child, min_bytes, depth - 1))
        for _, child in _children(obj)
    )


# ---------------------------------------------------------------- looking around


@dataclass
class Found:
    """Everything that was reached: objects in order, how each was reached, and from where."""

    root: Any
    nodes: dict[int, Any] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    parents: dict[int, list[int]] = field(default_factory=dict)


def look_around(root: Any, name: str, is_goal: Callable[[Any], bool]) -> tuple[Found, list[Any]]:
    """Walk from `root`, breadth first; what `is_goal` says yes to is not looked into."""
    found = Found(root, {id(root): root}, {id(root): name})
    goals = []
    waiting = deque([root])
    while waiting:
        obj = waiting.popleft()
        if is_goal(obj):
            goals.append(obj)
            continue
        for step, child in _children(obj):
            found.parents.setdefault(id(child), []).append(id(obj))
            if id(child) not in found.nodes and len(found.nodes) < _MOST_NODES:
                found.nodes[id(child)] = child
                found.paths[id(child)] = found.paths[id(obj)] + step
                waiting.append(child)
    return found, goals


def _children(obj: Any) -> Iterator[tuple[str, Any]]:
    kind = type(obj)
    if kind in (list, tuple) or _is_named_tuple(obj):
        if len(obj) <= FEW:
            yield from ((f"[{position}]", item) for position, item in enumerate(obj))
    elif kind is dict:
        if len(obj) <= FEW:
            yield from ((f"[{key!r}]", item) for key, item in obj.items())
    elif kind is types.MethodType:
        yield ".__self__", obj.__self__
    else:
        yield from ((f".{name}", value) for name, value in (_attributes(obj) or {}).items())


def _is_named_tuple(obj: Any) -> bool:
    return isinstance(obj, tuple) and hasattr(type(obj), "_make") and hasattr(type(obj), "_fields")


def has_attributes(obj: Any) -> bool:
    """Whether this is an object that can be looked into."""
    return _is_named_tuple(obj) or _attributes(obj) is not None


def _attributes(obj: Any) -> dict[str, Any] | None:
    """What an object of a Python class has, in its `__dict__` and its slots; None if it is no such object."""
    kind = type(obj)
    if isinstance(obj, (*_CLOSED, Shared, BaseException)) or kind in _PLAIN or buffers.is_table(obj):
        return None
    if not kind.__flags__ & 1 << 9:  # Py_TPFLAGS_HEAPTYPE: made by a `class` statement
        return None
    slots = {
        name: getattr(obj, name)
        for owner in kind.__mro__
        for name, member in vars(owner).items()
        if isinstance(member, types.MemberDescriptorType) and hasattr(obj, name)
    }
    own = getattr(obj, "__dict__", None)
    if not isinstance(own, dict):
        return slots or None
    return {**own, **slots}


# ---------------------------------------------------------------- copying


def with_replaced(found: Found, replaced: dict[int, Any]) -> Any:
    """The root, with these in place of those; whatever does not lead to one of them stays the very same object."""
    touched = set(replaced)
    waiting = list(touched)
    while waiting:
        for parent in found.parents.get(waiting.pop(), ()):
            if parent not in touched:
                touched.add(parent)
                waiting.append(parent)
    made = dict(replaced)

    def copy(obj: Any) -> Any:
        if id(obj) not in touched:
            return obj
        if id(obj) not in made:
            _copy(obj, copy, made)
        return made[id(obj)]

    return copy(found.root)


def _copy(obj: Any, copy: Callable[[Any], Any], made: dict[int, Any]) -> None:
    kind = type(obj)
    if kind is list:
        new: Any = []
        made[id(obj)] = new  # before its elements: one of them may lead back to it
        new.extend(map(copy, obj))
    elif kind is dict:
        new = made[id(obj)] = {}
        new.update((key, copy(item)) for key, item in obj.items())
    elif kind is tuple:
        made[id(obj)] = tuple(map(copy, obj))
    elif isinstance(obj, tuple):
        made[id(obj)] = kind._make(map(copy, obj))
    elif kind is types.MethodType:
        made[id(obj)] = types.MethodType(obj.__func__, copy(obj.__self__))
    else:
        _copy_object(obj, copy, made)


def _copy_object(obj: Any, copy: Callable[[Any], Any], made: dict[int, Any]) -> None:
    try:
        new = object.__new__(type(obj))
    except TypeError:  # its memory is laid out by C: then what is in it stays where it is
        made[id(obj)] = obj
        return
    made[id(obj)] = new
    own = getattr(obj, "__dict__", {})
    for name, value in (_attributes(obj) or {}).items():
        if name in own:
            new.__dict__[name] = copy(value)
        else:
            object.__setattr__(new, name, copy(value))
