"""Verdicts on real hangs in real workers: what the worker waited for, or where it ran.

Each start method has one loader with every hang in it, for starts are dear; each hang is a test of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import outlive
from forensics.hangs import COMPILER, GLOBAL, HANGS, Hanging, HangInputs, compile_debugger, compile_library
from outlive import FaultPolicy, Incident, IncidentKind
from outlive.verdicts import Confidence, Name

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no C compiler to build a native loop with")

TIMEOUT_S = 2.0  # a debugger, a program must be up by then, on a busy machine too

# Each hang: its verdict, and words that its cause must have.
EXPECTED: dict[str, tuple[Name, tuple[str, ...]]] = {
    "spin_on_one_line": (Name.SPINNING_IN_PYTHON, ("hangs.py", "spin_on_one_line")),
    "spin_over_many": (Name.SPINNING_IN_PYTHON, ("hangs.py", "spin_over_many")),
    "match_for_ever": (Name.SPINNING_IN_NATIVE_CODE, ("a regular expression", "match_for_ever")),
    "spin_with_the_gil": (Name.SPINNING_IN_NATIVE_CODE, ("libspinner.so", "spin_with_the_gil")),
    "spin_without_the_gil": (Name.SPINNING_IN_NATIVE_CODE, ("libspinner.so", "spin_without_the_gil")),
    "sleep_for_ever": (Name.SLEEPING, ("sleep_for_ever",)),
    "read_empty_pipe": (Name.WAITING_FOR_IO, ("a pipe", "read_empty_pipe")),
    "open_fifo": (Name.WAITING_FOR_IO, ("/a.fifo to be opened", "open_fifo")),
    "read_fifo": (Name.WAITING_FOR_IO, ("/b.fifo", "read_fifo")),
    "receive_from_silence": (Name.WAITING_FOR_IO, ("tcp 127.0.0.1:", "receive_from_silence")),
    "receive_with_timeout": (Name.WAITING_FOR_IO, ("tcp 127.0.0.1:", "receive_with_timeout")),
    "lock_file": (Name.WAITING_FOR_IO, ("the lock on", "/a.lock", f"process {os.getpid()}", "has locked")),
    "lock_twice": (Name.WAITING_FOR_LOCK, ("a lock", "lock_twice")),
    "get_from_queue": (Name.WAITING_FOR_LOCK, ("an item that nobody puts into a queue", "get_from_queue")),
    "wait_for_event": (Name.WAITING_FOR_LOCK, ("an event", "wait_for_event")),
    "stop_self": (Name.STOPPED, ("SIGSTOP",)),
    "be_debugged": (Name.STOPPED, ("/debugger), which debugs it",)),
    "wait_for_program": (Name.WAITING_FOR_IO, ("(sleep 100000) to end", "wait_for_program")),
    "read_from_program": (Name.WAITING_FOR_IO, ("a pipe to or from process", "(sleep 100000)", "read_from_program")),
}


def loader_of(dataset: Hanging, method: str, **more: Any) -> outlive.DataLoader[Any]:
    policy = FaultPolicy(
        on_error="skip", retries=0, max_bad=None, max_restarts=1000, sample_timeout=TIMEOUT_S, hang_floor_s=20
    )
    return outlive.DataLoader(
        dataset, **{"batch_size": 2, "num_workers": 2, "multiprocessing_context": method, "faults": policy, **more}
    )


@contextmanager
def inputs_in(folder: Path) -> Iterator[HangInputs]:
    """A listener that never answers, two FIFOs that nobody opens, a file that is locked, a native library."""
    fifos = [str(folder / "a.fifo"), str(folder / "b.fifo")]
    for fifo in fifos:
        os.mkfifo(fifo)
    with socket.create_server(("127.0.0.1", 0)) as listener, open(folder / "a.lock", "w") as locked:
        fcntl.flock(locked, fcntl.LOCK_EX)
        library = compile_library(folder) if COMPILER else ""
        debugger = compile_debugger(folder) if COMPILER else ""
        yield HangInputs(listener.getsockname()[1], *fifos, str(folder / "a.lock"), library, debugger)


@pytest.fixture(scope="module", params=("fork", "spawn"))
def hung(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Incident]:
    """Every hang, once: its incident."""
    with inputs_in(tmp_path_factory.mktemp(request.param)) as inputs:
        loader = loader_of(Hanging(list(HANGS), inputs), request.param, num_workers=3)
        delivered = [int(index) for batch in loader for index in batch]
    assert delivered == list(range(0, 2 * len(HANGS), 2))
    return {name: loader.quarantine[2 * place + 1] for place, name in enumerate(HANGS)}


@pytest.mark.parametrize("name", HANGS)
def test_the_verdict_names_what_the_worker_waited_for_or_where_it_ran(hung: dict[str, Incident], name: str) -> None:
    """The right verdict, of the right sample, in words that somebody can act on."""
    incident = hung[name]
    verdict = incident.verdict
    expected, words = EXPECTED[name]

    assert verdict is not None
    assert verdict.name is expected, (verdict, incident.evidence.seen)
    assert [word for word in words if word not in verdict.cause] == []
    assert verdict.remedies
    assert incident.kind is IncidentKind.HANG
    assert incident.indices == (2 * list(HANGS).index(name) + 1,)
    assert incident.in_hand.seconds >= TIMEOUT_S


@pytest.mark.parametrize("name", sorted(set(HANGS) - {"stop_self", "be_debugged"}))
def test_the_python_stack_is_there_unless_the_worker_is_stopped(hung: dict[str, Incident], name: str) -> None:
    """A worker in native code or in the kernel answers, too."""
    incident = hung[name]

    assert incident.evidence.seen is not None
    assert incident.evidence.seen.stack_answered
    assert name in incident.stack


@pytest.mark.parametrize("name", ["lock_twice", "sleep_for_ever", "spin_on_one_line"])
def test_a_stack_that_did_not_change_is_told_once(hung: dict[str, Incident], name: str) -> None:
    """However often it was looked at."""
    assert hung[name].stack.count(f"in {name}\n") == 1


def test_looking_takes_little_time(hung: dict[str, Incident]) -> None:
    """Other workers are not watched meanwhile."""
    watched = [incident.evidence.seen.watched_s for incident in hung.values() if incident.evidence.seen]

    assert len(watched) == len(HANGS)
    assert sorted(watched)[len(watched) // 2] < 0.3


# ---------------------------------------------------------------- locks that a fork inherits


@contextmanager
def held_by_a_thread(acquire: Any, release: Any) -> Iterator[None]:
    """A thread of the trainer's holds a lock for as long as this lasts."""
    held, enough = threading.Event(), threading.Event()

    def hold() -> None:
        acquire()
        held.set()
        enough.wait()
        release()

    thread = threading.Thread(target=hold, name="holder-of-locks")
    thread.start()
    held.wait()
    try:
        yield
    finally:
        enough.set()
        thread.join()


def test_a_module_lock_that_was_held_at_the_fork_is_named() -> None:
    """Nobody in the worker can ever release it: the thread that could is the trainer's."""
    loader = loader_of(Hanging(["take_global_lock"], HangInputs(), threading.Lock()), "fork", num_workers=1)

    with held_by_a_thread(GLOBAL.acquire, GLOBAL.release):
        ended = hung_for_good(loader)

    assert_inherited(loader, "forensics.hangs.GLOBAL (a threading.Lock)", ended)


@pytest.mark.parametrize(("make", "kind"), [(threading.Lock, "Lock"), (threading.RLock, "RLock")])
def test_a_lock_of_the_dataset_that_was_held_at_the_fork_is_named(make: Any, kind: str) -> None:
    """By the attribute that the user knows it by."""
    lock = make()
    loader = loader_of(Hanging(["take_own_lock"], HangInputs(), lock), "fork", num_workers=1)

    with held_by_a_thread(lock.acquire, lock.release):
        ended = hung_for_good(loader)

    assert_inherited(loader, f"dataset.lock (a threading.{kind})", ended)


def test_a_lock_of_the_datasets_class_that_was_held_at_the_fork_is_named() -> None:
    """All datasets of that class share it."""
    loader = loader_of(LocksShared(["-"], HangInputs(), threading.Lock()), "fork", num_workers=1)

    with held_by_a_thread(LocksShared.shared.acquire, LocksShared.shared.release):
        ended = hung_for_good(loader)

    assert_inherited(loader, "dataset.shared (a threading.Lock)", ended)


class LocksShared(Hanging):
    shared = threading.Lock()

    def __getitem__(self, index: int) -> int:
        if index % 2:
            with self.shared:
                return index
        return index


def hung_for_good(loader: Any) -> outlive.WorkerHungError:
    """The error of a loader whose dataset has a lock, so that no clean process can have it."""
    with pytest.raises(outlive.WorkerHungError) as caught:
        list(loader)
    return caught.value


def assert_inherited(loader: Any, lock: str, ended: outlive.WorkerHungError) -> None:
    (incident,) = loader.incidents
    verdict = incident.verdict
    assert verdict.name is Name.FORKED_WITH_THREADS, (verdict, incident.evidence.seen)
    assert verdict.confidence is Confidence.CERTAIN
    assert lock in verdict.cause
    assert any("holder-of-locks" in fact for fact in verdict.facts)
    assert 'multiprocessing_context="spawn"' in verdict.remedies[0]
    assert incident.indices == ()  # no sample is blamed
    assert dict(loader.quarantine) == {}
    assert "dataset.lock (_thread." in str(ended)
    assert 'multiprocessing_context="spawn"' in str(ended)
    assert "lazily" in str(ended)


def test_a_lock_of_the_dataset_that_the_worker_took_itself_is_not_called_inherited() -> None:
    """It is named, and the blame is the worker's."""
    lock = threading.Lock()
    loader = loader_of(LocksTwice(lock), "fork", num_workers=1)

    list(loader)

    (incident,) = loader.incidents
    assert incident.verdict.name is Name.WAITING_FOR_LOCK
    assert "dataset.lock (a threading.Lock)" in incident.verdict.cause
    assert incident.evidence.seen.inherited_locks == ()


class LocksTwice(Hanging):
    def __init__(self, lock: Any) -> None:
        super().__init__(["-"], HangInputs(), lock)

    def __getitem__(self, index: int) -> int:
        if index % 2:
            self.lock.acquire()
            self.lock.acquire()
        return index


@needs_compiler
def test_a_native_mutex_that_was_held_at_the_fork_is_found_by_its_owner(tmp_path: Path) -> None:
    """glibc's mutex says which thread holds it, and the worker has no such thread."""
    library = compile_library(tmp_path)
    native = ctypes.CDLL(library)
    dataset = Hanging(["take_native_lock"], HangInputs(library=library), threading.Lock())
    loader = loader_of(dataset, "fork", num_workers=1)

    with held_by_a_thread(native.lock, lambda: None):
        ended = hung_for_good(loader)

    assert_inherited(loader, "a native mutex in libspinner.so", ended)


@pytest.fixture
def openmp(tmp_path: Path) -> str:
    source, library = tmp_path / "together.c", tmp_path / "libtogether.so"
    source.write_text('void together(void) {\n#pragma omp parallel num_threads(3)\n{ __asm__ volatile(""); } }\n')
    built = subprocess.run([str(COMPILER), "-shared", "-fPIC", "-fopenmp", "-o", library, source], capture_output=True)
    if built.returncode:
        pytest.skip("this compiler has no OpenMP")
    return str(library)


@needs_compiler
def test_threads_of_a_pool_that_a_fork_left_behind_are_named(openmp: str) -> None:
    """The trainer used OpenMP before: the worker's copy waits for threads that are not there."""
    ctypes.CDLL(openmp).together()
    loader = loader_of(SharedMutex(["-"], HangInputs(library=openmp), threading.Lock()), "fork", num_workers=1)

    hung_for_good(loader)

    (incident,) = loader.incidents
    assert incident.verdict is not None
    if "libgomp" not in str(incident.evidence.seen):
        pytest.skip("an OpenMP other than GNU's, which may survive a fork")
    assert incident.verdict.name is Name.FORKED_WITH_THREADS
    assert "threads of OpenMP (libgomp" in incident.verdict.cause
    assert incident.indices == ()


@needs_compiler
def test_a_pool_that_was_left_long_ago_is_not_blamed(openmp: str, tmp_path: Path) -> None:
    """Addresses of its code stand on the stack, in the gaps of frames that are in use, as calls leave them behind."""
    loader = loader_of(MisleadingStack([openmp], HangInputs(library=compile_library(tmp_path))), "fork", num_workers=1)

    list(loader)

    (incident,) = loader.incidents
    assert incident.verdict is not None
    assert incident.verdict.name is Name.WAITING_FOR_LOCK
    assert incident.evidence.seen is not None
    assert incident.evidence.seen.places[0].startswith("libspinner.so")
    assert "libgomp" not in str(incident.evidence.seen)


class MisleadingStack(Hanging):
    def __getitem__(self, index: int) -> int:
        if index % 2:
            code = ctypes.cast(ctypes.CDLL(self.names[0]).omp_get_num_threads, ctypes.c_void_p)
            ctypes.CDLL(self.inputs.library).wait_over_litter(code)
        return index


class SharedMutex(Hanging):
    def __getitem__(self, index: int) -> int:
        if index % 2:
            ctypes.CDLL(self.inputs.library).together()
        return index


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_lock_between_processes_is_named_and_not_called_inherited(method: str) -> None:
    """Somebody else may still release it: here the trainer, which does not."""
    lock = multiprocessing.get_context(method).Lock()
    loader = loader_of(Hanging(["take_own_lock"], HangInputs(), lock), method, num_workers=1)

    with lock:
        list(loader)

    (incident,) = loader.incidents
    assert incident.verdict is not None
    assert incident.verdict.name is Name.WAITING_FOR_LOCK
    assert "dataset.lock (a lock of multiprocessing's)" in incident.verdict.cause
    assert incident.indices == (1,)


# ---------------------------------------------------------------- without a zygote


def test_hangs_are_explained_where_nothing_forks(tmp_path: Path) -> None:
    """The portable system layer looks as the zygote does."""
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\n"
        "from forensics.test_hangs import Hanging, HangInputs, loader_of\n"
        "if __name__ == '__main__':\n"
        "    loader = loader_of(Hanging(['lock_twice', 'sleep_for_ever', 'spin_over_many'], HangInputs()), 'spawn')\n"
        "    list(loader)\n"
        "    print(*sorted(f'{i.index}:{i.verdict.name}' for i in loader.incidents))\n"
    )
    ended = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "OUTLIVE_SYSTEM": "portable", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=100,
    )

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split() == ["1:waiting-for-lock", "3:sleeping", "5:spinning-in-python"]


# ---------------------------------------------------------------- before there is a sample


class HangsAtStart:
    def __call__(self, slot: int) -> None:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def test_a_hang_in_worker_init_fn_is_explained() -> None:
    """No sample is in hand, and the advice is about the start."""
    policy = FaultPolicy(retries=0, sample_timeout="auto", hang_floor_s=0.3)
    loader: outlive.DataLoader[int] = outlive.DataLoader(
        range(4), num_workers=1, multiprocessing_context="fork", worker_init_fn=HangsAtStart(), faults=policy
    )

    with pytest.raises(outlive.WorkerStartError) as caught:
        list(loader)

    incident = caught.value.incident
    assert incident is not None
    assert incident.verdict is not None
    assert incident.verdict.name is Name.WAITING_FOR_LOCK
    assert any("hang_floor_s" in remedy for remedy in incident.verdict.remedies)
    assert "waits at test_hangs.py" in str(caught.value)
