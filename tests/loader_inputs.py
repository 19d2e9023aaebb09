"""Datasets, samplers and collate functions that loaders are compared on. Under spawn, workers import them from here.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, Sampler, get_worker_info

# ---------------------------------------------------------------- kills


class Kills:
    """Kills its worker whenever a named moment comes for the nth time; counts in files, which outlive workers.

    A moment that kills comes again when the work is redone: {"a": {1, 3}} kills at «a» in two epochs.
    """

    def __init__(self, folder: Path | None, when: dict[Any, set[int]]) -> None:
        self.folder = folder
        self.when = when

    def at(self, moment: Any) -> None:
        if self.folder is None or moment not in self.when:
            return
        with open(self.folder / f"moment-{moment}", "ab") as file:
            file.write(b".")
            file.flush()
            times = file.tell()
        if times in self.when[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def total(self) -> int:
        return sum(map(len, self.when.values()))


class NoKills(Kills):
    def __init__(self) -> None:
        super().__init__(None, {})


# ---------------------------------------------------------------- map-style datasets


def draws(odd: int) -> dict[str, Any]:
    """Random numbers of all three generators; how many varies, so that left-over gaussians do too."""
    return {
        "torch": torch.randn(3),
        "torch_many": torch.rand(17 + odd % 5).sum(),
        "random": random.random(),
        "gauss": max(random.gauss(0, 1) for _ in range(1 + odd % 2)),
        "numpy": np.random.randn(1 + 2 * (odd % 3))[0],
        "numpy_whole": int(np.random.randint(0, 1 << 30)),
    }


class Noisy(Dataset):
    """Each sample depends on its index and on what was drawn before it in this worker."""

    def __init__(self, size: int = 23, kills: Kills | None = None) -> None:
        self.size = size
        self.kills = kills or NoKills()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = draws(index)
        self.kills.at(index)
        return {"index": index, **first, "after": torch.randint(0, 1000, ())}


class NoisyMany(Noisy):
    """The same through __getitems__."""

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]


class EchoesIndex(Dataset):
    """Answers with what it was asked: the very index, its type and its repr."""

    def __init__(self, size: int = 12) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> tuple[Any, str, str]:
        return index, type(index).__name__, repr(index)


class EchoesIndices(EchoesIndex):
    def __getitems__(self, indices: Any) -> list[Any]:
        return [(type(indices).__name__, self[i]) for i in indices]


class ReadySamples(Dataset):
    """Made of ready samples."""

    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


class ShowsMark(Dataset):
    """worker_init_fn writes into it; its samples show what was written."""

    def __init__(self) -> None:
        self.mark: Any = "untouched"

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        info = get_worker_info()
        who = (-1, -1, -1) if info is None else (info.id, info.num_workers, info.seed)
        return index, self.mark, who, torch.get_num_threads() if info else 0, draws(index)


def mark_by_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert info.id == worker
    info.dataset.mark = (worker, random.random(), float(np.random.randn()), torch.rand(2).tolist())


class Fails(Dataset):
    """Some samples raise, after drawing random numbers."""

    def __init__(self, errors: dict[int, Any], size: int = 14, kills: Kills | None = None) -> None:
        self.errors = errors
        self.size = size
        self.kills = kills or NoKills()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        first = draws(index)
        self.kills.at(index)
        if index in self.errors:
            raise self.errors[index]()
        return {"index": index, **first}


class FailsMany(Fails):
    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        return [self[i] for i in indices]


class OddError(Exception):
    """Takes two arguments, neither of them the text."""

    def __init__(self, code: int, place: str) -> None:
        super().__init__(f"code {code} at {place}")


class MessageError(Exception):
    """Takes its text by keyword, as torch allows for."""

    message = "none yet"

    def __init__(self, message: str = "") -> None:
        super().__init__(message)
        self.message = message


class MuteError(Exception):
    """Its text is empty."""


def odd_error() -> Exception:
    return OddError(17, "the edge")


def message_error() -> Exception:
    return MessageError("said by keyword")


def key_error() -> Exception:
    return KeyError("a\nkey")


def unicode_error() -> Exception:
    try:
        b"\xff\xfe".decode("utf-8")
    except UnicodeDecodeError as error:
        return error
    raise AssertionError


def stop_iteration() -> Exception:
    return StopIteration("no more")


def assertion_error() -> Exception:
    return AssertionError("1 is not 2")


def chained_error() -> Exception:
    error = ValueError("the second")
    error.__cause__ = OSError(2, "the first")
    return error


def mute_error() -> Exception:
    return MuteError()


# ---------------------------------------------------------------- iterable datasets


def shard(sizes: tuple[int, ...]) -> tuple[int, int]:
    """This worker's first number and how many it has; in the trainer's own process, all of them."""
    info = get_worker_info()
    if info is None:
        return 0, sum(sizes)
    return 100 * info.id, sizes[info.id % len(sizes)]


class Stream(IterableDataset):
    """Sharded by worker id, shards of different length, written as a class."""

    def __init__(self, *sizes: int, kills: Kills | None = None) -> None:
        self.sizes = sizes
        self.kills = kills or NoKills()

    def __iter__(self) -> Iterator[Any]:
        return StreamIterator(self.kills, *shard(self.sizes))


class StreamIterator:
    def __init__(self, kills: Kills, first: int, size: int) -> None:
        self.kills = kills
        self.at = first
        self.end = first + size
        self.begun = torch.rand(()).item()  # iter() itself draws, too

    def __iter__(self) -> StreamIterator:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.at >= self.end:
            raise StopIteration
        first = draws(self.at)
        self.kills.at(self.at)
        self.at += 1
        return {"index": self.at - 1, "begun": self.begun, **first}


class GeneratorStream(Stream):
    """The same, written as a generator."""

    def __iter__(self) -> Iterator[Any]:
        first, size = shard(self.sizes)
        begun = torch.rand(()).item()
        for i in range(first, first + size):
            drawn = draws(i)
            self.kills.at(i)
            yield {"index": i, "begun": begun, **drawn}


class ShuffledStream(Stream):
    """A shuffle buffer that picks with the worker's own generators: what comes next depends on all that was drawn."""

    def __iter__(self) -> Iterator[Any]:
        first, size = shard(self.sizes)
        buffer: list[int] = []
        for i in range(first, first + size):
            if len(buffer) < 5:
                buffer.append(i)
                continue
            pick = random.randrange(len(buffer))
            self.kills.at(i)
            yield {"index": buffer[pick], "noise": torch.randn(2), "numpy": float(np.random.randn())}
            buffer[pick] = i
        while buffer:
            yield {"index": buffer.pop(int(torch.randint(len(buffer), ()))), "noise": torch.randn(2), "numpy": 0.0}


class StatefulStream(Stream):
    """Offers state_dict and load_state_dict, counts how often it had to make a sample, and draws to choose.

    What a sample is depends on what was drawn since the start: a replacement that restores the place, but not the
    random state of that place, is found out. A state that takes long to make is made seldom.
    """

    def __init__(self, *sizes: int, kills: Kills | None = None, folder: Path | None = None, costs_s: float = 0) -> None:
        super().__init__(*sizes, kills=kills)
        self.folder = folder
        self.costs_s = costs_s
        self.state: dict[str, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        first, size = shard(self.sizes)
        # As in torchdata: a loaded state holds for the next iterator only.
        state, self.state = self.state, {}
        self.place = int(state.get("place", 0))
        self.walk = float(state.get("walk", 0.0))
        while self.place < size:
            number = first + self.place
            self.walk += random.random()
            self.kills.at(number)
            self._count()
            self.place += 1
            yield {"index": number, "walk": self.walk, **draws(number)}

    def _count(self) -> None:
        if self.folder is not None:
            with open(self.folder / "made", "ab") as file:
                file.write(b".")

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.costs_s)
        return {"place": self.place, "walk": self.walk}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


class StatefulIteratorStream(Stream):
    """Its iterator, not the dataset, has the state."""

    def __iter__(self) -> Iterator[Any]:
        return StatefulIterator(self.kills, *shard(self.sizes))


class StatefulIterator(StreamIterator):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "begun": self.begun}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.begun = state["at"], state["begun"]


class FailingStream(Stream):
    """Raises at some places and goes on after them."""

    def __init__(self, *sizes: int, errors: dict[int, Any], kills: Kills | None = None) -> None:
        super().__init__(*sizes, kills=kills)
        self.errors = errors

    def __iter__(self) -> Iterator[Any]:
        return FailingIterator(self.kills, self.errors, *shard(self.sizes))


class FailingIterator(StreamIterator):
    def __init__(self, kills: Kills, errors: dict[int, Any], first: int, size: int) -> None:
        super().__init__(kills, first, size)
        self.errors = errors

    def __next__(self) -> dict[str, Any]:
        sample = super().__next__()
        if sample["index"] in self.errors:
            raise self.errors[sample["index"]]()
        return sample


class FailingGenerator(FailingStream):
    """A generator ends with its first error."""

    def __iter__(self) -> Iterator[Any]:
        yield from FailingIterator(self.kills, self.errors, *shard(self.sizes))


class SizedStream(Stream):
    """Has a length, and may lie about it."""

    def __init__(self, *sizes: int, says: int) -> None:
        super().__init__(*sizes)
        self.says = says

    def __len__(self) -> int:
        return self.says


# ---------------------------------------------------------------- samplers


class Reversed(Sampler):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size - 1, -1, -1))

    def __len__(self) -> int:
        return self.size


class FreshGenerator:
    """An iterable that is no Sampler and has no length; each epoch a new generator, which draws in the trainer."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        for _ in range(self.size):
            yield random.randrange(self.size)


class Batches:
    """A batch sampler that is a plain iterable of ready batches."""

    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


# ---------------------------------------------------------------- values


Point = namedtuple("Point", "x y")


@dataclass
class Record:
    name: str
    numbers: list[int]
    tensor: torch.Tensor


class Labelled(torch.Tensor):
    """A subclass of Tensor."""


class KillsWhenPickled:
    """Kills its worker while it is being sent."""

    def __init__(self, kills: Kills, index: int) -> None:
        self.kills = kills
        self.index = index

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KillsWhenPickled) and self.index == other.index

    def __hash__(self) -> int:
        return self.index

    def __reduce__(self) -> Any:
        self.kills.at(("sent", self.index))
        return KillsWhenPickled, (NoKills(), self.index)


class KillsWhenSent(Noisy):
    """Each sample brings something whose pickling may kill."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), KillsWhenPickled(self.kills, index)


def values() -> dict[str, Any]:
    """One of everything that a collate function may return. Left out: what torch's own loader gets wrong.

    (A conjugated tensor arrives unconjugated from torch, a quantized one without its quantizer.)
    """
    chance = np.random.default_rng(5)
    floats = torch.from_numpy(chance.standard_normal((3, 4)))
    array = chance.standard_normal((3, 4))
    frozen = array.copy()
    frozen.flags.writeable = False
    return {
        "a python int": 7,
        "a huge int": 1 << 100,
        "a float": -0.0,
        "not a number": float("nan"),
        "a complex": 1 - 2j,
        "a bool": True,
        "None": None,
        "a string": "grüße",
        "bytes": b"\0\xff",
        "many bytes": bytes(range(256)) * 300,
        "a bytearray": bytearray(b"abc"),
        "a range": range(3, 9, 2),
        "an empty list": [],
        "nested containers": {"a": [1, (2.5, "x", {"b": None})], 3: ({4}, frozenset({5}))},
        "a namedtuple": Point(floats[0], Point(1, "y")),
        "a dataclass": Record("r", [1, 2], floats[1]),
        "a class": Record,
        "tensors of different sizes": [torch.full((n, 3), float(n)) for n in range(4)],
        "a scalar tensor": torch.tensor(3.5),
        "an empty tensor": torch.zeros(0, 4),
        "an empty tensor with a storage": torch.zeros(8)[3:3],
        "a bool tensor": torch.tensor([True, False, True]),
        "a bfloat16 tensor": floats.bfloat16(),
        "a float16 tensor": floats.half(),
        "a float8 tensor": floats.to(torch.float8_e4m3fn),
        "a uint16 tensor": torch.tensor([1, 65535], dtype=torch.uint16),
        "a complex tensor": torch.complex(floats, floats),
        "a tensor of nans": torch.tensor([float("nan"), -0.0, float("inf")]),
        "a sparse tensor": torch.eye(3).to_sparse(),
        "an uncoalesced sparse tensor": torch.sparse_coo_tensor(
            [[0, 0], [1, 1]], [1.0, 2.0], (2, 2), check_invariants=True
        ),
        "a transposed tensor": floats.T,
        "a strided tensor": floats[:, ::2],
        "an expanded tensor": torch.tensor([2.0]).expand(50, 2),
        "a small view of a large tensor": torch.arange(50_000.0)[700:705],
        "a channels-last tensor": torch.arange(48.0).reshape(1, 3, 4, 4).to(memory_format=torch.channels_last),
        "a tensor that requires grad": torch.ones(2, requires_grad=True),
        "a parameter": torch.nn.Parameter(torch.ones(2)),
        "a tensor of a subclass": torch.ones(2).as_subclass(Labelled),
        "a tensor over 64 KiB": torch.arange(20_000.0),
        "a tensor over 1 MiB": torch.arange(300_000.0),
        "tensors large and small": [torch.arange(40_000.0), torch.tensor(1), torch.arange(70_000)],
        "a storage": torch.arange(5.0).untyped_storage(),
        "an array": array,
        "an array over 1 MiB": np.arange(200_000),
        "a scalar array": np.array(2.5),
        "a numpy scalar": np.float32(1.5),
        "an empty array": np.zeros((0, 3)),
        "a Fortran array": np.asfortranarray(array),
        "a strided array": array[:, ::2],
        "a reversed array": array[::-1],
        "a read-only array": frozen,
        "an array over bytes": np.frombuffer(b"12345678", np.uint8),
        "a big-endian array": np.arange(3, dtype=">i4"),
        "an array of objects": np.array([1, "a", None], dtype=object),
        "a structured array": np.zeros(3, dtype=[("a", "i4"), ("b", "f8")]),
        "an array of dates": np.array(["2020-01-01"], dtype="datetime64[D]"),
        "an array of strings": np.array(["a", "bb"]),
        "a broadcast array": np.broadcast_to(np.arange(3), (4, 3)),
    }


STACKABLE = (
    "a python int",
    "a float",
    "a bool",
    "a string",
    "bytes",
    "a namedtuple",
    "a scalar tensor",
    "an empty tensor",
    "a bool tensor",
    "a bfloat16 tensor",
    "a float8 tensor",
    "a complex tensor",
    "a tensor of nans",
    "a transposed tensor",
    "a strided tensor",
    "an expanded tensor",
    "a channels-last tensor",
    "a tensor of a subclass",
    "a tensor over 64 KiB",
    "a tensor over 1 MiB",
    "tensors large and small",
    "an array",
    "an array over 1 MiB",
    "a scalar array",
    "a numpy scalar",
    "an empty array",
    "a read-only array",
    # These raise, and must do so in the same words.
    "None",
    "a dataclass",
    "a sparse tensor",
    "a tensor that requires grad",
    "tensors of different sizes",
    "an array of objects",
    "an array of strings",
)


class AllValues(Dataset):
    """All of `values()`, by name."""

    def __init__(self) -> None:
        self.values = values()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, name: str) -> Any:
        return self.values[name]


def generator(seed: int = 3) -> torch.Generator:
    made = torch.Generator()
    made.manual_seed(seed)
    return made


# ---------------------------------------------------------------- collate functions


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def as_is(sample: Any) -> Any:
    return sample


def as_point(samples: list[Any]) -> Point:
    return Point(torch.utils.data.default_collate(samples), len(samples))


class RandomCollate:
    """Draws random numbers after the samples have; may kill its worker at a batch that holds a given index."""

    def __init__(self, kills: Kills | None = None) -> None:
        self.kills = kills or NoKills()

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Any]:
        noise = torch.rand(len(samples)), random.random(), float(np.random.randn())
        for sample in samples:
            self.kills.at(("collate", sample["index"]))
        return {"batch": torch.utils.data.default_collate(samples), "noise": noise}


class KeepsLast:
    """Returns each batch together with the one before it, which it has kept."""

    def __init__(self) -> None:
        self.last: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        batch = torch.utils.data.default_collate(samples)
        last, self.last = self.last, batch
        return batch, last


class Caching(Dataset):
    """Makes each sample with default_collate, once, and keeps it."""

    def __init__(self, floats: int) -> None:
        self.floats = floats
        self.kept: dict[int, torch.Tensor] = {}

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        key = index % 4
        if key not in self.kept:
            self.kept[key] = torch.utils.data.default_collate([torch.arange(self.floats) + 1000.0 * key])
        return self.kept[key]


class FailingCollate:
    """Raises for some batches, after drawing."""

    def __init__(self, *indices: int, kind: type[Exception] = ValueError) -> None:
        self.indices = indices
        self.kind = kind

    def __call__(self, samples: list[dict[str, Any]]) -> Any:
        noise = torch.rand(3)
        if any(int(sample["index"]) in self.indices for sample in samples):
            raise self.kind(f"cannot collate {[int(s['index']) for s in samples]}")
        return noise, torch.utils.data.default_collate(samples)


# ---------------------------------------------------------------- the rest


def with_noise(number: int) -> tuple[int, torch.Tensor, float]:
    return number, torch.randn(2), random.random()


class DeadlyNoise:
    def __init__(self, kills: Kills) -> None:
        self.kills = kills

    def __call__(self, number: int) -> tuple[int, torch.Tensor, float]:
        noise = with_noise(number)
        self.kills.at(number)
        return noise


class NoisyShowsMark(ShowsMark):
    """worker_init_fn writes into it, and it kills."""

    def __init__(self, kills: Kills) -> None:
        super().__init__()
        self.kills = kills

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        sample = super().__getitem__(index)
        self.kills.at(index)
        return sample


def refuse_to_start(worker: int) -> None:
    raise LookupError(f"worker {worker} finds nothing to read")


class FailingSampler:
    """Raises after so many indices."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        yield from range(self.size)
        raise OSError("the list of files has ended early")


class Gated(Dataset):
    """Samples from the third on wait until a file is there."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        give_up_at = time.monotonic() + 60
        while index >= 2 and not self.gate.exists() and time.monotonic() < give_up_at:
            time.sleep(0.005)
        return index, torch.rand(2)


class AllValuesWithErrors(AllValues):
    """Values of every kind by number, and an error after each."""

    def __len__(self) -> int:
        return 2 * len(self.values)

    def __getitem__(self, index: int) -> Any:
        if index % 2:
            raise OddError(index, "the shelf")
        return list(self.values.values())[index // 2]
