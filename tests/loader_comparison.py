"""Runs a loader twice, as torch's own and as outlive's, and says where the two differ.

Reads   what the loaders deliver, raise and warn, and the trainer's random generators afterwards.
Writes  nothing.
Never   allows for a difference: two floats are the same when their bits are.
"""

from __future__ import annotations

import dataclasses
import random
import re
import struct
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import outlive

TORCH = torch.utils.data.DataLoader
OURS = outlive.DataLoader

MOST_STEPS = 400  # a loader that never ends must not take the test with it


@dataclass(frozen=True)
class Raised:
    """An exception that next() raised, without what differs between any two runs."""

    kind: type
    text: str
    arguments: tuple[type, ...]


@dataclass
class Run:
    """Everything that a trainer sees of a loader."""

    epochs: list[list[Any]] = field(default_factory=list)
    warned: list[tuple[type, str]] = field(default_factory=list)
    randomness: list[Any] = field(default_factory=list)
    loader: Any = None

    @property
    def delivered(self) -> list[Any]:
        return [step for epoch in self.epochs for step in epoch if not isinstance(step, Raised)]

    @property
    def raised(self) -> list[Raised]:
        return [step for epoch in self.epochs for step in epoch if isinstance(step, Raised)]


def seed_trainer(seed: int = 7) -> None:
    """Seed the three generators, and leave a gaussian in the caches of two."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    random.gauss(0, 1)
    np.random.randn()


def run(
    kind: type,
    arguments: Callable[[], Mapping[str, Any]],
    *,
    epochs: int = 1,
    break_after: int | None = None,
    seed: int = 7,
    **more: Any,
) -> Run:
    """Iterate a fresh loader from fresh arguments; `break_after` so many batches leaves epoch 1."""
    seed_trainer(seed)
    done = Run()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = kind(**arguments(), **more)
        for epoch in range(epochs):
            most = break_after if epoch == 0 and break_after is not None else MOST_STEPS
            done.epochs.append(_steps(iter(loader), most))
    done.warned = [(w.category, without_addresses(str(w.message))) for w in caught if not _of_this_machine(w)]
    done.randomness = [torch.get_rng_state(), random.getstate(), np.random.get_state()]
    if loader.generator is not None:
        done.randomness.append(loader.generator.get_state())
    done.loader = loader
    if kind is TORCH and loader._iterator is not None:
        loader._iterator._shutdown_workers()  # left to the collector, torch waits five seconds for each worker
    return done


def _steps(iterator: Iterator[Any], most: int) -> list[Any]:
    """What next() gives, errors included. Two ends in a row are the end: one may be a sample's StopIteration."""
    steps: list[Any] = []
    while len(steps) < most:
        try:
            steps.append(next(iterator))
        except Exception as error:
            if isinstance(error, StopIteration) and not error.args:
                return steps
            # The one difference on purpose: a sample's StopIteration, which would pass for the epoch's end.
            kind = RuntimeError if isinstance(error, StopIteration) else type(error)
            steps.append(Raised(kind, without_frames(str(error)), tuple(map(type, error.args))))
    return steps


def raised_by(act: Callable[..., Any], *arguments: Any, **named: Any) -> Raised:
    """The exception that `act` raises; none of its traceback is kept, which may hold workers."""
    try:
        act(*arguments, **named)
    except Exception as error:
        return Raised(type(error), without_frames(str(error)), tuple(map(type, error.args)))
    raise AssertionError("nothing was raised")


def _of_this_machine(warning: warnings.WarningMessage) -> bool:
    """What is said once per process, or depends on who runs the tests, and has to do with neither loader."""
    said = str(warning.message)
    return "use of fork() may lead to deadlocks" in said or said.startswith("Sparse invariant checks")


def without_frames(text: str) -> str:
    """A message without the lines of its traceback's frames."""
    return without_addresses("\n".join(line for line in text.splitlines() if not line.startswith("  ")))


def without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x…", text)


# ---------------------------------------------------------------- differences


def differences(ours: Any, theirs: Any, at: str = "") -> list[str]:
    """Where two objects differ, in words; [] when they are the same bit for bit."""
    if type(ours) is not type(theirs):
        return [f"{at}: ours is {_kind(ours)}, torch's {_kind(theirs)}"]
    if isinstance(ours, Run):
        return (
            differences(ours.epochs, theirs.epochs, "epochs")
            + differences(ours.warned, theirs.warned, "warnings")
            + differences(ours.randomness, theirs.randomness, "the trainer's generators")
        )
    if isinstance(ours, torch.Tensor):
        return _tensor_differences(ours, theirs, at)
    if isinstance(ours, np.ndarray):
        return _array_differences(ours, theirs, at)
    if isinstance(ours, Mapping):
        found = differences(list(ours), list(theirs), f"{at} keys")
        return found or [d for key in ours for d in differences(ours[key], theirs[key], f"{at}[{key!r}]")]
    if isinstance(ours, Sequence) and not isinstance(ours, (str, bytes, bytearray, range)):
        found = [] if len(ours) == len(theirs) else [f"{at}: ours has {len(ours)} items, torch's {len(theirs)}"]
        return found + [d for i, pair in enumerate(zip(ours, theirs)) for d in differences(*pair, f"{at}[{i}]")]
    if isinstance(ours, torch.UntypedStorage):
        return differences(ours.tolist(), theirs.tolist(), at)
    if dataclasses.is_dataclass(ours) and not isinstance(ours, type):
        return differences(vars(ours), vars(theirs), at)
    if isinstance(ours, float):
        same = struct.pack("<d", ours) == struct.pack("<d", theirs)
    elif isinstance(ours, complex):
        same = struct.pack("<dd", ours.real, ours.imag) == struct.pack("<dd", theirs.real, theirs.imag)
    else:
        same = bool(ours == theirs)
    return [] if same else [f"{at}: ours is {ours!r}, torch's {theirs!r}"]


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__} ({value!r:.300})"


_PROPERTIES = ("dtype", "shape", "layout", "requires_grad", "is_leaf", "is_sparse", "is_quantized", "device")


def _tensor_differences(ours: torch.Tensor, theirs: torch.Tensor, at: str) -> list[str]:
    found = [
        f"{at}.{name}: ours {getattr(ours, name)}, torch's {getattr(theirs, name)}"
        for name in _PROPERTIES
        if getattr(ours, name) != getattr(theirs, name)
    ]
    if found:
        return found
    if ours.layout is torch.sparse_coo:
        if ours.is_coalesced() != theirs.is_coalesced():
            return [f"{at}: ours {'is' if ours.is_coalesced() else 'is not'} coalesced, torch's the other way round"]
        return differences(ours._indices(), theirs._indices(), f"{at}.indices") + differences(
            ours._values(), theirs._values(), f"{at}.values"
        )
    if ours.layout is not torch.strided:
        return differences(ours.to_dense(), theirs.to_dense(), f"{at}.to_dense()")
    if ours.is_quantized:
        found = differences(ours.q_scale(), theirs.q_scale(), f"{at}.q_scale()")
        return found + differences(ours.int_repr(), theirs.int_repr(), f"{at}.int_repr()")
    if _bits(ours) != _bits(theirs):
        return [f"{at}: ours is {ours!r:.300}, torch's {theirs!r:.300}"]
    return []


def _bits(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def _array_differences(ours: Any, theirs: Any, at: str) -> list[str]:
    for name in ("dtype", "shape", "strides"):
        if getattr(ours, name) != getattr(theirs, name):
            return [f"{at}.{name}: ours {getattr(ours, name)}, torch's {getattr(theirs, name)}"]
    if ours.flags.writeable != theirs.flags.writeable:
        return [f"{at}: ours is {'' if ours.flags.writeable else 'not '}writeable, torch's the other way round"]
    if ours.dtype.hasobject:
        return differences(ours.tolist(), theirs.tolist(), at)
    return [] if ours.tobytes() == theirs.tobytes() else [f"{at}: ours is {ours!r:.300}, torch's {theirs!r:.300}"]
