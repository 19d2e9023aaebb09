"""Workers use as many threads as they are told, whatever library starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

import outlive
from outlive._worker.threads import VARIABLES

METHODS = ("fork", "spawn", "forkserver")


def openblas_threads() -> int | None:
    """What NumPy's OpenBLAS says of itself; None where NumPy has another."""
    import ctypes

    from outlive._worker import threads

    for path in threads.loaded_libraries():
        library: Any = ctypes.CDLL(path)
        for name in ("scipy_openblas_get_num_threads64_", "openblas_get_num_threads"):
            if hasattr(library, name):
                return int(getattr(library, name)())
    return None


class ThreadSettings(Dataset[Any]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        import numpy  # noqa: F401

        return torch.get_num_threads(), openblas_threads(), [os.environ.get(name) for name in VARIABLES]


def told_by(method: str, **more: Any) -> Any:
    loader = outlive.DataLoader(
        ThreadSettings(), batch_size=None, num_workers=1, multiprocessing_context=method, collate_fn=lambda_free, **more
    )
    return next(iter(loader))


def lambda_free(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 3])
def test_every_library_gets_the_given_number_of_threads(method, count):
    """Those that are loaded, and those that will be."""
    by_torch, by_openblas, by_environment = told_by(method, worker_threads=count)

    assert by_torch == count
    assert by_openblas in (count, None)
    assert by_environment == [str(count)] * len(VARIABLES)


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_has_one_thread(method):
    """Also where the trainer had many, and where the worker multiplies matrices."""
    loader = outlive.DataLoader(Multiplying(), batch_size=None, num_workers=1, multiprocessing_context=method)

    assert list(loader) == [1, 1]


class Multiplying(Dataset[int]):
    def __init__(self) -> None:
        self.matrix = np.ones((300, 300)) @ np.ones((300, 300))

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        self.matrix @ self.matrix
        torch.ones(300, 300) @ torch.ones(300, 300)
        return len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("method", METHODS)
def test_one_is_the_default(method):
    """As torch has it for itself."""
    by_torch, by_openblas, _ = told_by(method)

    assert (by_torch, by_openblas or 1) == (1, 1)


def test_none_leaves_everything_as_it_is():
    """For those who set it themselves."""
    before = [os.environ.get(name) for name in VARIABLES]

    _, by_openblas, by_environment = told_by("fork", worker_threads=None)

    assert by_environment == before
    assert by_openblas == openblas_threads()


def test_the_trainer_keeps_its_threads():
    """Only workers are limited."""
    before = torch.get_num_threads(), openblas_threads(), dict(os.environ)

    told_by("fork", worker_threads=1)

    assert (torch.get_num_threads(), openblas_threads(), dict(os.environ)) == before


@pytest.mark.parametrize("value", [0, -1, 1.5, "2", True])
def test_what_is_no_number_of_threads_is_refused(value):
    """At once, by name."""
    with pytest.raises((TypeError, ValueError), match="worker_threads must be"):
        outlive.DataLoader(ThreadSettings(), worker_threads=value)


OPENCV = """
import cv2, numpy, torch, outlive
image = numpy.zeros((2000, 2000, 3), numpy.uint8)
class Blurred(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return cv2.GaussianBlur(image, (21, 21), 5)[0, 0, 0] + index
cv2.setNumThreads(4)
Blurred()[0]  # its pool has threads from now on
loader = outlive.DataLoader(Blurred(), num_workers=2, multiprocessing_context="fork")
print([int(index) for index in loader])
"""


def test_workers_start_when_opencv_has_worked_before_the_fork():
    """They do not wait for threads of its pool, which no fork has."""
    pytest.importorskip("cv2")

    ended = subprocess.run([sys.executable, "-c", OPENCV], capture_output=True, text=True, timeout=60)

    assert ended.stdout == "[0, 1, 2, 3]\n", ended.stderr[-2000:]
