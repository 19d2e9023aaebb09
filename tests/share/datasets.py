"""Datasets of many texts, for workers under any start method: plain, shared, and such that unpickle by themselves."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from zlib import crc32

from torch.utils.data import Dataset


def texts(count: int) -> list[str]:
    return [f"/data/images/train/class-{number % 1000:04d}/image-{number:08d}.jpeg" for number in range(count)]


def digest(text: str) -> int:
    return crc32(text.encode())


class Texts(Dataset[int]):
    """Each sample is a digest of one text, so that reading it is all that a worker does."""

    def __init__(self, names: Any, kill_at: int = -1, mark: Path | None = None) -> None:
        self.names = names
        self.kill_at = kill_at
        self.mark = mark  # once it is there, nobody is killed any more

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> int:
        if index == self.kill_at and self.mark is not None and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return digest(self.names[index])


class Unpickling(Texts):
    """Has a say in its unpickling: each worker does that for itself, after its fork."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


class Everything(Dataset[Any]):
    """One of each kind, as share() leaves it."""

    def __init__(self, shared: dict[str, Any]) -> None:
        self.shared = shared

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        shared = self.shared
        return {
            "list": shared["list"][index],
            "slice": list(shared["slice"])[index],
            "dict": shared["dict"][f"k{index}"],
            "set": index in shared["set"],
            "str": shared["str"][index],
            "bytes": shared["bytes"][index],
            "array": shared["array"][index].tolist(),
            "tensor": shared["tensor"][index].tolist(),
            "table": [float(value) for value in shared["table"].iloc[index, :1]] + [shared["table"].iloc[index, 1]],
            "arrow": shared["arrow"]["a"][index].as_py(),
            "arrays": shared["arrays"][index].tolist(),
            "kinds": sorted((name, type(value).__name__) for name, value in shared.items()),
        }


def one_of_each() -> dict[str, Any]:
    import numpy
    import pandas
    import pyarrow
    import torch

    count = 1000
    names = texts(count)
    return {
        "list": names,
        "slice": names,
        "dict": {f"k{number}": number for number in range(count)},
        "set": set(range(0, count, 3)),
        "str": "".join(names),
        "bytes": bytes(range(256)) * 10,
        "array": numpy.arange(count * 3.0).reshape(count, 3),
        "tensor": torch.arange(count * 3).reshape(count, 3),
        "table": pandas.DataFrame({"a": range(count), "text": pandas.Series(names, dtype="string[pyarrow]")}),
        "arrow": pyarrow.table({"a": range(count)}),
        "arrays": [numpy.arange(number) for number in range(count)],
    }
