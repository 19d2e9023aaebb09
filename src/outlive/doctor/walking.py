"""Goes through what a dataset holds, by path: «dataset.transform.transforms[2].fn».

Reads   attributes from where they lie, elements of containers, what functions close over.
Writes  nothing.
Never   user code (no property, no `__getattr__`, no `__class__` that is one), and never for longer than it is given:
        what was not looked at is said.
"""

from __future__ import annotations

import collections
import functools
import sys
import time
import types
from collections.abc import Iterator
from typing import Any

from outlive._forensics import locks

MOST_OBJECTS = 200_000
_MOST_ITEMS = 2_000  # of one container: the others are of the same kind, nearly always
_LOOK_AT_CLOCK = 256
# By type() everywhere: isinstance() asks an object for its __class__, which may be code of its own.
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, types.CodeType})
_CLOSED = (type, types.ModuleType, types.BuiltinFunctionType, types.FrameType, types.TracebackType)
_WHOLE = frozenset({"numpy", "torch", "pandas", "pyarrow", "scipy", "threading", "_thread", "outlive"})


class Walk:
    """One way through an object, what is near first. `unseen` has what was left out, in words."""

    def __init__(self, root: Any, name: str, seconds: float = 2.0) -> None:
        self._root, self._name = root, name
        self._seconds = seconds
        self.unseen: list[str] = []

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Everything that is no plain value, once, with its path."""
        deadline = time.monotonic() + self._seconds
        waiting: collections.deque[tuple[str, Any]] = collections.deque([(self._name, self._root)])
        seen: dict[int, Any] = {}  # holds them, so that no other gets the address of one that was made on the way
        while waiting:
            if len(seen) >= MOST_OBJECTS or (len(seen) % _LOOK_AT_CLOCK == 255 and time.monotonic() > deadline):
                self.unseen.append(f"{self._name}: {len(seen)} objects of it were looked at, there are more")
                return
            path, found = waiting.popleft()
            if id(found) in seen:
                continue
            seen[id(found)] = found
            yield path, found
            try:
                waiting.extend(part for part in self._parts(path, found) if type(part[1]) not in _ATOMS)
            except Exception as error:  # changed meanwhile, or C code that means something else by an attribute
                self.unseen.append(f"{path}: {type(error).__name__} on looking into it")

    def _parts(self, path: str, found: Any) -> Iterator[tuple[str, Any]]:
        kind = type(found)
        if kind in (dict, collections.OrderedDict, collections.defaultdict):
            yield from ((f"{path}[{_short(key)}]", value) for key, value in self._first(path, found.items(), found))
        elif kind in (list, tuple, collections.deque) or issubclass(kind, tuple):
            yield from ((f"{path}[{at}]", value) for at, value in enumerate(self._first(path, found, found)))
        elif kind in (set, frozenset):
            yield from ((f"{path}[…]", value) for value in self._first(path, found, found))
        elif kind is functools.partial:
            yield from ((f"{path}.func", found.func), (f"{path}.args", found.args))
            yield f"{path}.keywords", found.keywords
        elif kind is types.MethodType:
            yield f"{path}.__self__", found.__self__
        elif kind is types.FunctionType:
            for name, cell in zip(found.__code__.co_freevars, found.__closure__ or ()):
                try:
                    yield f"{path}.<{name}>", cell.cell_contents
                except ValueError:
                    continue  # an empty cell
        elif not issubclass(kind, _CLOSED) and (_is_opened(kind) or is_dataset(kind)):
            yield from locks.attributes(path, found)
            if issubclass(kind, (list, dict)):  # a class of the user's: what it holds is where a list has it
                if issubclass(kind, dict):
                    items = self._first(path, dict.items(found), found)
                    yield from ((f"{path}[{_short(key)}]", value) for key, value in items)
                else:
                    items = self._first(path, list.__iter__(found), found)
                    yield from ((f"{path}[{at}]", value) for at, value in enumerate(items))

    def _first(self, path: str, items: Any, container: Any) -> Iterator[Any]:
        plain = True
        for count, item in enumerate(items):
            if count >= _MOST_ITEMS:
                if not plain:  # two thousand plain values: so are the others
                    self.unseen.append(f"{path}: {_MOST_ITEMS} of {len(container)} elements were looked at")
                return
            value = item[1] if issubclass(type(container), dict) else item
            plain = plain and type(value) in _ATOMS
            yield item


def _is_opened(kind: type) -> bool:
    """Whether objects of this type are looked into: not those of libraries, whose insides say nothing."""
    return kind.__module__.partition(".")[0] not in _WHOLE


def is_dataset(kind: type) -> bool:
    """Torch's own wrappers lead to the user's dataset (Subset, ConcatDataset), loaders to all."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and issubclass(kind, (torch_data.Dataset, torch_data.DataLoader, torch_data.Sampler))


def has_method(obj: Any, name: str) -> bool:
    """Of its class, as Python looks special methods up."""
    return any(name in vars(owner) for owner in type(obj).__mro__)


def type_name(obj: Any) -> str:
    kind = type(obj)
    if kind.__module__ in ("builtins", "__main__"):
        return kind.__qualname__
    package, *inner = str(kind.__module__).split(".")
    return ".".join([package, *(part for part in inner if not part.startswith("_")), kind.__qualname__])


def _short(key: Any) -> str:
    return repr(key)[:40] if type(key) in (str, int, bytes, bool, float) else f"<{type(key).__name__}>"
