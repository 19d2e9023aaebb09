"""Workers that cannot be killed: they wait in the kernel for a drive that does not answer."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from torch.utils.data import Dataset

import outlive
from deadlines import wait_until
from faults import silent_fuse
from outlive import FaultPolicy, Incident, IncidentKind
from outlive._capture import stacks
from outlive.verdicts import Name

SIZE, BEFORE, BAD = 12, 3, 5
POLICY = {"on_error": "skip", "hang_floor_s": 0.2, "hang_wait_s": 2.0, "hang_busy_s": 60.0}


@contextmanager
def silent_drive(folder: Path) -> Iterator[Path]:
    """A mounted drive with one file, which nobody answers reads of; gone at the end, and all who wait for it."""
    if os.geteuid() or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("mounting a FUSE file system takes root and /dev/fuse")
    server = subprocess.Popen(
        [sys.executable, silent_fuse.__file__, folder, "nas:/export"],
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        if server.stdout.readline() != "mounted\n":
            pytest.skip("FUSE file systems cannot be mounted here")
        try:
            yield folder / "a.bin"
        finally:
            server.terminate()


class OnDrive(Dataset[int]):
    """One sample lies on the drive; its worker wrote its stacks at one before it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> int:
        if index == BEFORE:
            os.kill(os.getpid(), stacks.STACK_SIGNAL)
        if index == BAD:
            read_file(self.path)
        return index


def read_file(path: Path) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read(1)


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_the_epoch_goes_on_without_a_worker_that_cannot_be_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slot is given away, its sample is dealt with, and what is left of it is named."""
    stuck_at_incident: list[int] = []

    def note(incident: Incident) -> None:
        if incident.kind is IncidentKind.HANG:
            stuck_at_incident.append(len(loader.statistics().stuck))

    with silent_drive(tmp_path) as path, caplog.at_level(logging.WARNING, logger="outlive"):
        loader = outlive.DataLoader(
            OnDrive(path), batch_size=None, num_workers=2, faults=FaultPolicy(**POLICY), on_incident=note
        )

        delivered = list(loader)

        assert delivered == [index for index in range(SIZE) if index != BAD]
        incident = loader.quarantine[BAD]
        assert incident.kind is IncidentKind.HANG
        assert incident.verdict is not None
        assert incident.verdict.name is Name.WAITING_FOR_IO
        assert "nas:/export" in incident.verdict.cause
        assert any(fact.startswith("SIGKILL has not ended it") for fact in incident.verdict.facts)
        # None of it answered, and what it wrote long before is not where it hung.
        assert {told.stack for told in loader.incidents if told.kind is IncidentKind.HANG} == {""}
        assert stuck_at_incident == [1, 2]
        stuck = loader.statistics().stuck
        assert [(worker.slot, worker.place) for worker in stuck] == [(1, "nas:/export")] * 2
        assert not any(is_gone(worker.pid) for worker in stuck)
        assert "2 workers are still stuck in the kernel on nas:/export" in caplog.text
        assert re.search(r"it waits for .*a.bin \(on fuse nas:/export\)", caplog.text)

    assert wait_until(lambda: all(is_gone(worker.pid) for worker in stuck))
    assert loader.statistics().stuck == ()


@pytest.mark.full
def test_the_portable_layer_goes_on_as_well(tmp_path: Path) -> None:
    """And the program ends, with that process still there."""
    program = tmp_path / "program.py"
    program.write_text(
        "import pathlib, sys\n"
        "import outlive\n"
        "from faults.test_stuck import POLICY, OnDrive\n"
        "if __name__ == '__main__':\n"
        "    loader = outlive.DataLoader(OnDrive(pathlib.Path(sys.argv[1])), batch_size=None, num_workers=2,\n"
        "        multiprocessing_context='spawn', faults=outlive.FaultPolicy(**POLICY, retries=0))\n"
        "    told = list(loader), [worker.place for worker in loader.statistics().stuck]\n"
        "    pathlib.Path(sys.argv[2]).write_text(repr(told))\n"
    )
    drive = tmp_path / "drive"
    drive.mkdir()
    with silent_drive(drive) as path:
        subprocess.run(  # no pipe: what is stuck would keep it open
            [sys.executable, program, path, tmp_path / "told"],
            env={**os.environ, "OUTLIVE_SYSTEM": "portable", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            timeout=100,
            check=True,
        )

    expected = [index for index in range(SIZE) if index != BAD]
    assert (tmp_path / "told").read_text() == f"({expected}, ['nas:/export'])"
