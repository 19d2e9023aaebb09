"""Handwritten digits as image files, and a dataset that reads them. Five of the files are bad.

Reads:   scikit-learn's digits: 1,797 real scans of 8 × 8 pixels, which ship inside the package.
Writes:  one PNG file per digit into a folder.
Never:   uses the network.

The faults are real: the corrupt file is truncated, the segmentation fault reads address 0, the kill is a SIGKILL.
"""

from __future__ import annotations

import ctypes
import enum
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from PIL import Image

TRAIN = 1500
TEST = 297
Sample = tuple[torch.Tensor, int, int]


class Fault(enum.Enum):
    """What a planted sample does to the worker that fetches it."""

    CORRUPT = "corrupt file"
    SEGFAULT = "segfault"
    KILLED = "out of memory"
    HANG = "hang"
    EXIT = "os._exit"

    def strike(self) -> None:
        if self is Fault.SEGFAULT:
            ctypes.string_at(0)  # what a bug in a native decoder does
        elif self is Fault.KILLED:
            os.kill(os.getpid(), signal.SIGKILL)  # what the kernel's OOM killer does
        elif self is Fault.HANG:
            while True:
                time.sleep(3600)  # what a dead network file system does
        elif self is Fault.EXIT:
            os._exit(3)  # what some native libraries do on an internal error
        # CORRUPT does nothing here: the decoder fails on the truncated file.


PLANTED: Mapping[int, Fault] = {
    101: Fault.CORRUPT,
    404: Fault.SEGFAULT,
    777: Fault.KILLED,
    1024: Fault.HANG,
    1234: Fault.EXIT,
}


def write_images(folder: Path) -> None:
    """Write one PNG file per digit. The corrupt one is truncated, as after a full disk or a broken download."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder / name_of(number, int(label))
        Image.fromarray((pixels * 255 / 16).astype(np.uint8)).save(path)
        if PLANTED.get(number) is Fault.CORRUPT:
            content = path.read_bytes()
            path.write_bytes(content[: len(content) // 2])


def name_of(number: int, label: int) -> str:
    return f"digit-{number:04d}-is-{label}.png"


class Digits(torch.utils.data.Dataset[Sample]):
    """Image files of digits as (pixels, label, sample number). For training the pixels are shifted at random."""

    def __init__(self, folder: Path, numbers: range, *, planted: Mapping[int, Fault], augment: bool) -> None:
        self.files = sorted(folder.glob("digit-*.png"))[numbers.start : numbers.stop]
        self.planted = planted
        self.augment = augment

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Sample:
        if index in self.planted:
            self.planted[index].strike()
        path = self.files[index]
        with Image.open(path) as image:
            pixels = torch.from_numpy(np.asarray(image, np.float32) / 255.0)[None]
        if self.augment:
            down, right = torch.randint(-1, 2, (2,)).tolist()
            pixels = torch.roll(pixels, (down, right), (1, 2))
        return pixels, int(path.stem.rpartition("-")[2]), index
