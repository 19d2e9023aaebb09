"""What a dataset is, told so that another run can see whether it is still the same.

Reads   its class's name, its length, its attributes: of large ones some entries, evenly spread.
Writes  nothing.
Never   a sample; a value that differs between two runs of one program: an address, Python's hash, the order of a set.
        torch, where a file is only read: `outlive run` does that before the program begins.

What indices point into (attributes that have as many entries as the dataset has samples: file names, labels, the
`indices` of a Subset) is its *data*: where that differs, index 7 is another sample. All other attributes (a root
folder, a transform, a flag) are *settings*. Only digests are kept: an attribute may be a password.
"""

from __future__ import annotations

import enum
import hashlib
import json
import types
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

_DEPTH = 4  # of objects inside of objects
_SPREAD = 512  # entries that are looked at of a long list, array or table
_MOST_ATTRIBUTES = 500
_SMALL = 16  # a tuple of so few entries may be columns: TensorDataset's `tensors`
_DIGITS = 16
_THEIR_OWN = "_fingerprint"  # Hugging Face's datasets know best what they are


@dataclass(frozen=True)
class Fingerprint:
    name: str  # of the class, without its module: that is `__main__` in a script and something else under `check`
    kind: str  # «map-style» or «iterable»
    length: int | None
    data: dict[str, str] = field(default_factory=dict)  # attribute → digest
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        return _digest(json.dumps([self.name, self.kind, self.length, self.data, self.settings], sort_keys=True))

    def differences(self, before: Fingerprint) -> tuple[list[str], list[str]]:
        """What has changed since, in words: what makes indices mean other samples, and what need not."""
        grave = []
        if before.name != self.name:
            grave.append(f"it was a {before.name}, and is a {self.name}")
        if before.kind != self.kind:
            grave.append(f"it was {before.kind}, and is {self.kind}")
        if before.length != self.length:
            grave.append(f"it had {_count(before.length)}, and has {_count(self.length)}")
        grave += _changed(before.data, self.data)
        return grave, _changed(before.settings, self.settings)


def of(dataset: Any) -> Fingerprint:
    kind = "iterable" if is_stream(dataset) else "map-style"
    length = None if kind == "iterable" else _length(dataset)
    told = Fingerprint(type(dataset).__qualname__, kind, length)
    _note(told, dataset, "", _DEPTH)
    return told


def is_stream(dataset: Any) -> bool:
    """Whether its samples come one after the other: as torch has it, and what has no way to be asked for one."""
    import torch

    return isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(type(dataset), "__getitem__")


def _count(length: int | None) -> str:
    return "no length" if length is None else f"{length:,} samples"


def _changed(before: dict[str, str], now: dict[str, str]) -> list[str]:
    differ = [f"its {name} is not the same" for name in now if name in before and before[name] != now[name]]
    return [
        *differ,
        *(f"its {name} is gone" for name in before if name not in now),
        *(f"its {name} is new" for name in now if name not in before),
    ]


def _note(told: Fingerprint, thing: Any, path: str, depth: int) -> None:
    """Add the attributes of a dataset, and those of datasets inside of it."""
    length = _length(thing)
    attributes = _attributes(thing)
    if attributes is None:
        told.data[path or "content"] = _token(thing, depth)
        return
    for name, value in attributes:
        named = f"{path}.{name}" if path else name
        inner = value if isinstance(value, (list, tuple)) and len(value) <= _SMALL else ()
        if _is_dataset(value) and depth:
            told.data[f"{named} (its class)"] = type(value).__qualname__
            _note(told, value, named, depth - 1)
        elif any(_is_dataset(each) for each in inner) and depth:
            for number, each in enumerate(inner):
                told.data[f"{named}[{number}] (its class)"] = type(each).__qualname__
                _note(told, each, f"{named}[{number}]", depth - 1)
        else:
            part = told.data if name == _THEIR_OWN or _is_data(value, length) else told.settings
            part[named] = _token(value, depth)


def _is_dataset(value: Any) -> bool:
    import torch

    return isinstance(value, torch.utils.data.Dataset) or type(value).__module__.startswith("datasets.arrow_dataset")


def _is_data(value: Any, length: int | None) -> bool:
    """Whether indices point into it."""
    size = _length(value)
    if isinstance(value, (str, bytes)) or size is None:
        return False
    if length is None:
        return size > 1  # of a stream: the files or addresses that it reads
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return size == length or (size <= _SMALL and any(_length(each) == length for each in inner))


def _length(thing: Any) -> int | None:
    try:
        return len(thing)
    except Exception:  # it has none, or one that cannot be asked yet
        return None


def _attributes(thing: Any) -> Iterator[tuple[str, Any]] | None:
    """Of an object; None for what has none, such as a list."""
    try:
        own = vars(thing)
    except TypeError:
        return None
    return iter(sorted(own.items())[:_MOST_ATTRIBUTES])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_DIGITS]


def _token(value: Any, depth: int) -> str:
    return _digest(_told(value, depth))


def _told(value: Any, depth: int) -> str:
    """A value as a text which is the same in every run, for values that are."""
    kind = type(value).__qualname__
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return f"{kind} {value!r}" if not isinstance(value, enum.Enum) else f"{kind} {value.name}"
    if isinstance(value, enum.Enum):
        return f"{kind} {value.name}"
    if isinstance(value, PurePath):
        return f"path {value}"
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"{kind} {value.__qualname__}"
    if depth == 0:
        return kind
    try:
        return f"{kind} {_inside(value, depth - 1)}"
    except Exception:  # an object that does not let itself be looked at: its class is what is known
        return kind


def _inside(value: Any, depth: int) -> str:
    import numpy as np
    import torch

    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape} {_of_array(value, depth)}"
    if isinstance(value, torch.Tensor):
        flat = value.detach().reshape(-1)
        some = flat[:: max(1, len(flat) // _SPREAD)].cpu().contiguous().view(torch.uint8)
        return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(some.numpy().tobytes()).hexdigest()}"
    if isinstance(value, np.generic):
        return repr(value.item())
    if isinstance(value, Mapping):
        items = [f"{_told(key, depth)}: {_told(each, depth)}" for key, each in _spread(list(value.items()))]
        return f"{len(value)} {items}"
    if isinstance(value, Set):
        return f"{len(value)} {sorted(_told(each, depth) for each in value)}"
    if isinstance(value, Sequence):
        return f"{len(value)} {[_told(each, depth) for each in _spread(value)]}"
    if hasattr(value, "iloc") and hasattr(value, "columns"):
        rows = list(_spread(range(len(value))))
        return f"{value.shape} {list(map(str, value.columns))} {value.iloc[rows].to_csv()}"
    attributes = _attributes(value)
    return "" if attributes is None else str([f"{name} {_told(each, depth)}" for name, each in attributes])


def _of_array(array: Any, depth: int) -> str:
    import numpy as np

    flat = array.reshape(-1)
    some = flat[:: max(1, len(flat) // _SPREAD)]
    if array.dtype.hasobject:
        return str([_told(each, depth) for each in some.tolist()])
    return hashlib.sha256(np.ascontiguousarray(some).tobytes()).hexdigest()


def _spread(entries: Sequence[Any]) -> Iterator[Any]:
    """All of a few, of many the first, the last and some between."""
    step = max(1, len(entries) // _SPREAD)
    for at in range(0, len(entries), step):
        yield entries[at]
    if len(entries) > 1 and (len(entries) - 1) % step:
        yield entries[-1]
