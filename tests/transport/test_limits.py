"""The loader works where torch's own dies: with little of /dev/shm, and few descriptors."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from loader_comparison import OURS
from transport import batch_values
from transport.process_inspection import run_program

# In a mount namespace of its own: the rest of the machine keeps its /dev/shm.
LITTLE_ROOM = ("unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"', "sh")


@functools.cache
def _why_not() -> str:
    try:
        tried = subprocess.run([*LITTLE_ROOM, "true"], capture_output=True, text=True, timeout=20)
    except OSError as error:
        return str(error)
    return "" if tried.returncode == 0 else tried.stderr.strip() or f"exit code {tried.returncode}"


@pytest.fixture
def _little_room() -> None:
    if reason := _why_not():
        pytest.skip(f"a /dev/shm of 64 KiB needs the right to mount: {reason}")


@pytest.mark.usefixtures("_little_room")
def test_batches_of_a_megabyte_travel_when_dev_shm_has_64_kib():
    """Of every type that default_collate stacks."""
    done = run_program("little_room.py", "outlive", before=LITTLE_ROOM)

    assert (done.returncode, done.stdout) == (0, "12 batches\n"), done.stderr


@pytest.mark.usefixtures("_little_room")
def test_results_of_a_megabyte_travel_when_dev_shm_has_64_kib():
    """Those of a pool, and what it shares with its workers."""
    done = run_program("little_room.py", "pool", before=LITTLE_ROOM)

    assert (done.returncode, done.stdout) == (0, "12 results\n12 results\n"), done.stderr


@pytest.mark.usefixtures("_little_room")
def test_torchs_own_loader_dies_of_a_bus_error_when_dev_shm_has_64_kib():
    """So the test above tests something."""
    done = run_program("little_room.py", "stock", before=LITTLE_ROOM)

    assert done.returncode != 0
    assert "Bus error" in done.stderr or "shared memory" in done.stderr or "No space left" in done.stderr


def test_batches_of_a_thousand_tensors_travel_with_64_descriptors():
    """None per tensor, none per batch."""
    done = run_program("few_descriptors.py")

    assert (done.returncode, done.stdout) == (0, "4 batches\n"), done.stderr


def _shared_memory_of_this(_: object = None) -> set[str]:
    """What this process has mapped of /dev/shm, unlinked or not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/" in line}


class Reporting:
    """Collates, and says what that put into the worker's map of /dev/shm, and who the worker and its parent are."""

    def __call__(self, samples: list[object]) -> tuple[object, set[str], set[int]]:
        before = _shared_memory_of_this()
        batch = torch.utils.data.default_collate(samples)
        return batch, _shared_memory_of_this() - before, {os.getpid(), os.getppid()}


NAMES = [("torch_", "_"), ("outlive-", "-")]  # around the pid of whoever makes one in /dev/shm: torch, and we

SAMPLES = {
    "a tensor": torch.ones(30_000),
    "a float8 tensor": torch.ones(30_000).to(torch.float8_e5m2),
    "a uint16 tensor": torch.ones(30_000, dtype=torch.uint16),
    "a complex32 tensor": torch.ones(30_000, dtype=torch.complex32),
    "a subclass": torch.ones(30_000).as_subclass(batch_values.Image),
    "a parameter": torch.nn.Parameter(torch.ones(30_000), requires_grad=False),
    "an array": np.ones(30_000),
    "a dict": {"a": torch.ones(30_000), "b": 3},
}


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("what", SAMPLES)
def test_collating_puts_nothing_into_dev_shm(what):
    """Neither in the worker nor here, by name or without."""
    loader = OURS(batch_values.ReadySamples(*[SAMPLES[what]] * 8), batch_size=4, num_workers=1, collate_fn=Reporting())
    here = _shared_memory_of_this()
    names = set(os.listdir("/dev/shm"))

    found = [(put, pids) for _, put, pids in loader]
    made = set(os.listdir("/dev/shm")) - names
    ours = tuple(f"{who}{pid}{end}" for pid in {os.getpid()}.union(*(p for _, p in found)) for who, end in NAMES)

    assert [put for put, _ in found] == [set(), set()]
    assert _shared_memory_of_this() <= here
    assert not {name for name in made if name.startswith(ours)}


@pytest.mark.parametrize(("what", "incidents"), [("cells", 0), ("messages", 0), ("deaths", 2)])
def test_no_sample_is_blamed_when_the_trainer_has_no_address_space(what, incidents):
    """One error names the limit; when there is room again, the same workers' batches all come, also those of workers
    that were killed meanwhile."""
    done = run_program("little_address_space.py", what)

    first, _, message = done.stdout.partition("\n")
    assert (done.returncode, first) == (0, f"300 batches, {incidents} incidents, 0 left out"), done.stderr
    assert "ulimit -v" in message
    assert "are kept" in message
