"""Who ended it: real signals, exits and limits in real workers, and the verdict on each.

Each start method has one loader with every end in it, for starts are dear; each end is a test of its own.
The machine's own OOM killer cannot be provoked without harm to everything else that runs: it is in the table of
test_kill_rules.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset

import outlive
from forensics.worker_exits import DEADLINE_S, ENDS, ExitingDataset, SignalSender, await_signal
from outlive import FaultPolicy
from outlive._capture import crash
from outlive.verdicts import Confidence, Name

METHODS = ("fork", "spawn")
US = f"process {os.getpid()} ("

# name → verdict, confidence, words of the cause
EXPECTED: dict[str, tuple[Name, Confidence, tuple[str, ...]]] = {
    "SIGKILL": (Name.KILLED, Confidence.LIKELY, ("SIGKILL that some process sent", "not by the kernel")),
    "SIGTERM": (Name.KILLED, Confidence.CERTAIN, ("SIGTERM", US)),
    "SIGINT": (Name.KILLED, Confidence.CERTAIN, ("SIGINT", US)),
    "SIGHUP": (Name.KILLED, Confidence.CERTAIN, ("SIGHUP", US)),
    "SIGUSR1": (Name.KILLED, Confidence.CERTAIN, ("SIGUSR1", US)),
    "SIGSEGV": (Name.KILLED, Confidence.CERTAIN, ("SIGSEGV", US)),
    "SIGXCPU": (Name.KILLED, Confidence.CERTAIN, ("SIGXCPU", US)),
    "terminated_by_child": (Name.KILLED, Confidence.CERTAIN, ("SIGTERM", "sh -c", "the-killer")),
    "kill_itself": (Name.KILLED, Confidence.LIKELY, ("SIGKILL that some process sent",)),
    "terminate_itself": (Name.KILLED, Confidence.CERTAIN, ("sent SIGTERM to itself",)),
    "call_sys_exit": (Name.EXITED, Confidence.CERTAIN, ("sys.exit(3)", "worker_exits.py:", "call_sys_exit")),
    "call_sys_exit_with_text": (Name.EXITED, Confidence.CERTAIN, ("sys.exit(1)", "call_sys_exit_with_text")),
    "call_os_exit": (Name.EXITED, Confidence.LIKELY, ("os._exit(4)",)),
    "call_os_exit_with_success": (Name.EXITED, Confidence.LIKELY, ("os._exit(0)",)),
    "call_os_exit_in_thread": (Name.EXITED, Confidence.LIKELY, ("os._exit(5)",)),
    "raise_keyboard_interrupt": (Name.EXCEPTION, Confidence.CERTAIN, ("KeyboardInterrupt", "raise_keyboard_interrupt")),
    "use_up_processor_time": (Name.RESOURCE_LIMIT, Confidence.CERTAIN, ("RLIMIT_CPU of ",)),
    "use_up_processor_time_for_good": (Name.RESOURCE_LIMIT, Confidence.LIKELY, ("RLIMIT_CPU of ",)),
    "write_too_large_a_file": (Name.RESOURCE_LIMIT, Confidence.CERTAIN, ("RLIMIT_FSIZE of 64 KiB",)),
}
NEED_RECORDER = {
    "SIGTERM",
    "SIGINT",
    "SIGHUP",
    "SIGUSR1",
    "SIGSEGV",
    "SIGXCPU",
    "terminated_by_child",
    "terminate_itself",
}


@pytest.fixture(scope="module", params=METHODS)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Every end, once: its incident."""
    folder = tmp_path_factory.mktemp(request.param)
    hangups = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores them, and workers would inherit that
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        ExitingDataset(list(ENDS), folder),
        batch_size=2,
        num_workers=2,
        multiprocessing_context=request.param,
        faults=FaultPolicy(on_error="skip", retries=0, max_bad=None, max_restarts=200),
    )
    with SignalSender(folder):
        delivered = [int(index) for batch in loader for index in batch]
    signal.signal(signal.SIGHUP, hangups)
    assert delivered == list(range(0, 2 * len(ENDS), 2))
    return {name: loader.quarantine[2 * place + 1] for place, name in enumerate(ENDS)}


@pytest.mark.parametrize("name", ENDS)
def test_the_verdict_names_the_sender_of_the_signal(ended: dict[str, Any], name: str) -> None:
    """Signal or exit, sender where the kernel tells, limit with its value; the sample in hand is right."""
    if name in NEED_RECORDER and not crash.AVAILABLE:
        pytest.skip("the recorder was not built: no C compiler")
    incident = ended[name]
    verdict, confidence, words = EXPECTED[name]

    assert incident.verdict.name is verdict, incident.verdict
    assert incident.verdict.confidence is confidence, incident.verdict
    assert [word for word in words if word not in incident.verdict.cause] == [], incident.verdict.cause
    assert incident.verdict.remedies
    assert incident.indices == (2 * list(ENDS).index(name) + 1,)


@pytest.mark.parametrize("name", ["SIGKILL", "kill_itself"])
def test_a_sigkill_is_not_called_a_want_of_memory_when_no_counter_moved(ended: dict[str, Any], name: str) -> None:
    """And the facts say that somebody counted."""
    around = ended[name].evidence.surroundings

    assert (around.oom.group_kills, around.oom.log) in ((0, ""), (None, ""))
    assert around.oom.group_kills == 0 or around.oom.machine_kills == 0
    assert "the kernel counted no OOM kill that could be this one" in ended[name].verdict.facts


def test_the_surroundings_of_a_death_are_known(ended: dict[str, Any]) -> None:
    """Memory, shared memory and the limits of the very process that died."""
    around = ended["write_too_large_a_file"].evidence.surroundings

    assert around.limits["fsize"] == 64 << 10
    assert 0 < around.available_bytes < around.total_bytes
    assert 0 <= around.shm_free_bytes <= around.shm_bytes


@pytest.mark.parametrize("name", ["use_up_processor_time", "use_up_processor_time_for_good"])
def test_the_limit_that_is_told_is_the_one_that_was_set(ended: dict[str, Any], name: str) -> None:
    """The kernel raises the soft one by a second when it warns; a worker starts with less than a second used."""
    cause, used_s = ended[name].verdict.cause, ended[name].evidence.worked.cpu_s

    assert f"RLIMIT_CPU of {round(used_s)} s" in cause


def test_every_end_has_its_row() -> None:
    """None is forgotten, none is only in the table."""
    assert set(EXPECTED) == set(ENDS)


# ---------------------------------------------------------------- the zygote


class Waiting(Dataset[int]):
    """Sample 3 waits, the first time, for its zygote to be killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        if index == 3 and not (self.folder / "SIGKILL.sent").exists():
            await_signal(self.folder, "SIGKILL", os.getppid())
        return index


@pytest.mark.parametrize("method", METHODS)
def test_workers_that_go_with_their_zygote_are_told_from_those_that_die_themselves(method: str, tmp_path: Path) -> None:
    """Nobody's sample is to blame, and nothing is missing."""
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        Waiting(tmp_path), num_workers=1, multiprocessing_context=method, faults=FaultPolicy("skip", max_bad=None)
    )
    with SignalSender(tmp_path):
        delivered = [int(index) for index in loader]

    assert delivered == list(range(6))
    assert dict(loader.quarantine) == {}
    assert [incident.verdict.name for incident in loader.incidents] == [Name.ZYGOTE_LOST]
    assert "outlive-zygote" in loader.incidents[0].verdict.cause


# ---------------------------------------------------------------- outlive itself


class WritesToSockets(Dataset[int]):
    """Samples 3 and 7 do to our sockets what they should not."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        sockets = [int(fd.name) for fd in Path("/proc/self/fd").iterdir() if fd.is_socket()]
        if index == 3:
            for fd in sockets:
                os.write(fd, b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" * 3)
        if index == 7:
            for fd in sockets:
                os.close(fd)
            time.sleep(DEADLINE_S)  # it is killed for closing our socket, before that
        return index


@pytest.mark.parametrize("method", METHODS)
def test_a_worker_killed_by_outlive_has_the_reason_in_its_incident(method: str) -> None:
    """Nobody is sent to look for a stranger who kills."""
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None)
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        WritesToSockets(), num_workers=2, multiprocessing_context=method, faults=policy
    )

    assert [int(index) for index in loader] == [0, 1, 2, 4, 5, 6, 8, 9]
    causes = {index: incident.verdict.cause for index, incident in loader.quarantine.items()}
    assert causes[3].startswith("outlive killed it: it wrote to a socket of outlive's")
    assert causes[7].startswith("outlive killed it: it closed its socket to the trainer")
    assert {incident.verdict.name for incident in loader.quarantine.values()} == {Name.KILLED}
