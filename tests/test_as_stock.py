"""What a worker or the caller gets has the strides, flags and aliasing that torch and the standard library give it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing import resource_sharer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import outlive
import warm_server
from loader_comparison import OURS
from transport.batch_values import ReadySamples, as_is
from travelling_objects import describe, objects

PROGRAM = Path(__file__).parent / "pool" / "programs" / "as_stock.py"


@pytest.mark.parametrize("what", ["arguments", "results"])
def test_what_a_pool_sends_arrives_as_with_the_standard_library(what):
    """One by one, many together, and what a function holds."""
    path = os.pathsep.join(entry for entry in [str(Path(__file__).parent), *sys.path] if entry)
    done = warm_server.run(
        [sys.executable, str(PROGRAM), what],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert (done.returncode, set(done.stdout.splitlines())) == (0, {"{}"}), done.stderr


@pytest.fixture
def _no_thread_of_torchs() -> Iterator[None]:
    """torch sends descriptors through a thread of multiprocessing's, which then stays."""
    yield
    resource_sharer.stop(timeout=5)


@pytest.mark.usefixtures("_no_thread_of_torchs")
def test_what_a_loader_sends_arrives_as_with_torch():
    dataset = ReadySamples(*objects().values())
    options: Any = {"batch_size": None, "collate_fn": as_is, "num_workers": 1}
    theirs = dict(zip(objects(), map(describe, DataLoader(dataset, **options)), strict=True))
    ours = dict(zip(objects(), map(describe, OURS(dataset, **options)), strict=True))

    assert {name: (ours[name], theirs[name]) for name in theirs if ours[name] != theirs[name]} == {}


def test_shared_tensors_keep_their_strides():
    """Those of a tensor with gaps between its elements are those of its clone."""
    for name, value in objects().items():
        if isinstance(value, torch.Tensor) and not value.requires_grad and value.numel() and name != "float8":
            shared = outlive.share(value)
            dense = value if name.startswith(("expanded", "odd")) else value.clone()
            assert (shared.stride(), shared.tolist()) == (dense.stride(), value.tolist()), name
            shared.detach_()
