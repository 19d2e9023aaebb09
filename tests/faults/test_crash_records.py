"""Crash records of real deaths in real workers: what the incident says is what the kernel said.

Each start method has one loader with every crash in it, for starts are dear; each crash is a test of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.utils.data import Dataset

import outlive
from faults.crashes import CRASHES, Crasher, assert_record_says
from outlive import FaultPolicy, Incident
from outlive._capture import crash

needs_recorder = pytest.mark.skipif(not crash.AVAILABLE, reason="the recorder was not built: no C compiler")

METHODS = ("fork", "spawn")
WORKERS = 2
MANY = 200
WARM = 50


class Crashing(Dataset[int]):
    """Healthy samples, and between them one for each crash."""

    def __init__(self, names: list[str], notes: Path) -> None:
        self.crashers = [Crasher(name, str(notes)) for name in names]

    def __len__(self) -> int:
        return 2 * len(self.crashers)

    def __getitem__(self, index: int) -> int:
        if index % 2:
            self.crashers[index // 2]()
        return index


def loader_of(
    names: list[str], notes: Path, method: str, workers: int = WORKERS, **more: Any
) -> outlive.DataLoader[Any]:
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None, max_restarts=10 * MANY)
    dataset = Crashing(names, notes)
    return outlive.DataLoader(
        dataset, batch_size=2, num_workers=workers, multiprocessing_context=method, faults=policy, **more
    )


@pytest.fixture(scope="module", params=METHODS)
def died(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every crash, once: its incident, and what was noted before it."""
    notes = tmp_path_factory.mktemp(request.param)
    loader = loader_of(list(CRASHES), notes, request.param)
    delivered = [int(index) for batch in loader for index in batch]
    assert delivered == list(range(0, 2 * len(CRASHES), 2))
    return {
        name: (loader.quarantine[2 * place + 1], Crasher(name, str(notes)).expected())
        for place, name in enumerate(CRASHES)
    }


@needs_recorder
@pytest.mark.parametrize("name", CRASHES)
def test_the_record_has_the_facts_of_the_crash(died: dict[str, Any], name: str) -> None:
    """Signal, code, address, sender, thread, registers, instruction: all as it was."""
    incident, expected = died[name]

    assert incident.crash is not None
    assert_record_says(incident.crash, expected)


@pytest.mark.parametrize("name", CRASHES)
def test_the_worker_dies_of_its_signal_and_leaves_its_python_stack(died: dict[str, Any], name: str) -> None:
    """With the recorder or without: it shows nowhere else."""
    incident, expected = died[name]

    assert incident.exit.signal == expected["signal"]
    assert incident.pid == expected["pid"]
    assert name in incident.stack or "in_thread" in incident.stack


@needs_recorder
def test_an_incident_with_a_record_is_plain_data(died: dict[str, Any]) -> None:
    """What a program or a log can take."""
    incident, expected = died["read_wild"]

    told = incident.to_dict()["crash"]

    assert (told["signal"], told["code"], told["access"]) == ("SIGSEGV", "SEGV_MAPERR", "read")
    assert told["address"] == hex(expected["address"])
    assert told["instruction"].startswith(expected["bytes"].hex())
    assert any(region["permissions"] == "rwxs" for region in told["regions"])


@pytest.mark.parametrize("method", METHODS)
def test_there_is_no_record_when_no_such_signal_came(method: str) -> None:
    """SIGKILL cannot be caught, and an exit is none."""
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None)
    loader = outlive.DataLoader(Ending(), batch_size=1, num_workers=1, multiprocessing_context=method, faults=policy)

    list(loader)

    assert [incident.crash for incident in loader.incidents] == [None, None]
    assert [incident.to_dict()["crash"] for incident in loader.incidents] == [None, None]


class Ending(Dataset[int]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            os.kill(os.getpid(), 9)
        if index == 2:
            os._exit(5)
        return index


@needs_recorder
@pytest.mark.parametrize("method", METHODS)
def test_a_crash_in_worker_init_fn_is_recorded(tmp_path: Path, method: str) -> None:
    """The recorder is there before any code of the user's, and comes before faulthandler."""
    crasher = Crasher("read_wild", str(tmp_path))
    loader: outlive.DataLoader[int] = outlive.DataLoader(
        range(4), num_workers=1, multiprocessing_context=method, worker_init_fn=Init(crasher)
    )

    with pytest.raises(outlive.WorkerStartError):
        list(loader)

    incident = loader.incidents[-1]
    assert incident.crash is not None
    assert_record_says(incident.crash, crasher.expected())


class Init:
    def __init__(self, crasher: Crasher) -> None:
        self.crasher = crasher

    def __call__(self, slot: int) -> None:
        self.crasher()


@needs_recorder
def test_a_crash_is_recorded_when_worker_init_fn_brought_handlers(tmp_path: Path) -> None:
    """As many programs do that want a stack on standard error."""
    loader = loader_of(["read_wild"], tmp_path, "fork", workers=1, worker_init_fn=take_over)

    list(loader)

    (incident,) = loader.incidents
    assert incident.crash is not None
    assert_record_says(incident.crash, Crasher("read_wild", str(tmp_path)).expected())


def take_over(slot: int) -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)


# ---------------------------------------------------------------- many


@pytest.mark.alone
def test_many_crashes_leave_nothing_in_the_trainer(tmp_path: Path) -> None:
    """Neither memory, nor descriptors, nor maps of the black boxes of the dead."""
    loader = loader_of(["read_wild"] * MANY, tmp_path, "fork")
    seen: list[tuple[int, int, int]] = []
    for batch in loader:
        if int(batch[0]) in (2 * WARM, 2 * (MANY - 4)):
            seen.append(belongings())

    (_, descriptors, memory), (boxes, descriptors_later, memory_later) = seen
    assert len(loader.incidents) == MANY
    assert boxes <= WORKERS
    # How many workers there are just now differs by one, and each has a few.
    assert descriptors_later - descriptors < 20
    # The incidents are kept, about 15 KiB each; a black box that was kept would be ten times that.
    assert memory_later - memory < (MANY - WARM) * 60_000


def belongings() -> tuple[int, int, int]:
    maps = Path("/proc/self/maps").read_text()
    process = psutil.Process()
    return len(re.findall("memfd:outlive-box", maps)), process.num_fds(), process.memory_info().rss


# ---------------------------------------------------------------- without the extension


@pytest.fixture(scope="module")
def package_without_recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an installation without a C compiler has."""
    root = tmp_path_factory.mktemp("installed")
    shutil.copytree(Path(outlive.__file__).parent, root / "outlive", ignore=shutil.ignore_patterns("*.so", "*.[ch]"))
    return root


@pytest.mark.parametrize("method", METHODS)
def test_everything_else_works_when_the_recorder_is_missing(package_without_recorder: Path, method: str) -> None:
    """The death is survived and explained as before; only the record is not there."""
    program = (
        "import sys, outlive; from outlive._capture import crash; from faults import test_crash_records as t\n"
        "if __name__ == '__main__':\n"
        f"    assert outlive.__file__.startswith({str(package_without_recorder)!r}), outlive.__file__\n"
        "    assert not crash.AVAILABLE and not crash.is_installed(); crash.reinstall()\n"
        f"    t.check_without_recorder({method!r}, {str(package_without_recorder)!r})\n"
    )
    path = package_without_recorder / f"program_{method}.py"
    path.write_text(program)
    search = os.pathsep.join([str(package_without_recorder), str(Path(__file__).parents[1])])

    ended = subprocess.run(
        [sys.executable, str(path)], env={**os.environ, "PYTHONPATH": search}, capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr


def check_without_recorder(method: str, notes: str) -> None:
    loader = loader_of(["read_wild", "hit_trap"], Path(notes), method, workers=1)
    delivered = [int(index) for batch in loader for index in batch]
    assert delivered == [0, 2]
    segfault, trap = loader.incidents
    assert_died_unrecorded(segfault, 11, "read_wild")
    assert_died_unrecorded(trap, 5, "hit_trap")


def assert_died_unrecorded(incident: Incident, number: int, function: str) -> None:
    assert incident.exit is not None
    assert incident.exit.signal == number
    assert incident.crash is None
    assert function in incident.stack
