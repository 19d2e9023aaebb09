"""The leak check itself: what it must report, and what it must let pass.

Reads   what `outlive.testing.leaks` answers in this process, and what a small pytest run under it prints.
Writes  real leaks, which each test takes back.
Never   a mock.
"""

import mmap
import multiprocessing
import os
import select
import shutil
import socket
import subprocess
import sys
import threading
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from types import SimpleNamespace

import pytest

from outlive._forensics import courier
from outlive.testing import leaks as leak_check

TESTS = Path(__file__).parent
AT_ONCE_S = 0.1


@pytest.fixture
def before():
    return leak_check.take_snapshot()


def _sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)


def _end(popen):
    popen.stdin.close()
    popen.wait()


def _detached_epoll():
    with select.epoll() as epoll:
        return [os.dup(epoll.fileno())]


def test_a_running_subprocess_is_reported_with_its_command_line(before):
    """Promise 6: no process outlives the job."""
    popen = _sleeper()

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)
    _end(popen)

    assert [process.pid for process in leaks.processes] == [popen.pid]


def test_the_report_names_command_line_thread_and_descriptor(before):
    """Whoever reads the failure knows what to look for."""
    popen = _sleeper()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="forgotten", daemon=True)
    thread.start()
    number = os.memfd_create("forgotten-cell")

    report = leak_check.wait_for_leaks(before, AT_ONCE_S).describe()
    os.close(number)
    release.set()
    thread.join()
    _end(popen)

    assert "sys.stdin.read()" in report
    assert "thread      'forgotten' (daemon)" in report
    assert f"descriptor  {number} → /memfd:forgotten-cell (deleted)" in report


def test_an_orphan_is_reported_when_its_parent_has_died(before):
    """A worker that outlives its zygote is the leak that matters most."""
    program = (
        "import subprocess, sys\n"
        "orphan = subprocess.Popen([sys.executable, '-c', 'input()'], stdin=0, stdout=subprocess.DEVNULL)\n"
        "print(orphan.pid)"
    )
    read_end, write_end = os.pipe()
    done = subprocess.run([sys.executable, "-c", program], stdin=read_end, stdout=subprocess.PIPE, check=True)
    os.close(read_end)

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)
    leaks.kill_processes()
    os.close(write_end)

    assert [process.pid for process in leaks.processes] == [int(done.stdout)]


@pytest.mark.parametrize("kind", ["memfd", "socket", "pidfd", "eventfd", "epoll", "pipe"])
def test_an_open_descriptor_is_reported(before, kind):
    """Promise 6: no descriptor outlives the job."""
    makers = {
        "memfd": lambda: [os.memfd_create("cell")],
        "socket": lambda: [socket.socket().detach()],
        "pidfd": lambda: [os.pidfd_open(os.getpid())],
        "eventfd": lambda: [os.eventfd(0)],
        "epoll": _detached_epoll,
        "pipe": os.pipe,
    }
    opened = makers[kind]()

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)
    for number in opened:
        os.close(number)

    assert [item.number for item in leaks.descriptors] == sorted(opened)


def test_a_mapped_cell_is_reported_when_only_its_mapping_lives(before):
    """mmap keeps a descriptor of its own: a lease that never ends is seen even after the cell's is closed."""
    number = os.memfd_create("cell")
    os.ftruncate(number, 4096)
    mapping = mmap.mmap(number, 4096)
    os.close(number)

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)
    mapping.close()

    assert [item.target for item in leaks.descriptors] == ["/memfd:cell (deleted)"]


def test_named_shared_memory_is_reported(before):
    """Nothing stays in /dev/shm."""
    segment = shared_memory.SharedMemory(create=True, size=4096)

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)
    segment.close()
    segment.unlink()

    assert leaks.shm_entries == [segment.name]


def test_memory_of_our_own_that_a_stranger_made_is_let_pass(tmp_path, monkeypatch):
    """Its name has the pid; of a process that is gone it is a leak of somebody's, and told."""
    monkeypatch.setattr(leak_check, "_SHM", tmp_path)  # in /dev/shm itself, the test beside this one would be blamed
    before = leak_check.take_snapshot()
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = {f"outlive-{pid}-1x": pid for pid in (os.getppid(), os.getpid(), gone.pid)}
    for name in names:
        (tmp_path / name).touch()

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)

    assert leaks.shm_entries == sorted(name for name, pid in names.items() if pid != os.getppid())


def test_shared_memory_of_a_stranger_is_let_pass(before):
    """Two xdist workers share /dev/shm: each answers for its own."""
    segment = shared_memory.SharedMemory(create=True, size=4096)
    # To its child this process is the stranger: a family is a process and its descendants.
    question = f"leak_check.held_by_strangers(frozenset({{{segment.name!r}, 'psm_of_nobody'}}))"
    answer = subprocess.run(
        [sys.executable, "-c", f"from outlive.testing import leaks as leak_check; print({question})"],
        cwd=TESTS,
        stdout=subprocess.PIPE,
        text=True,
    )
    segment.close()
    segment.unlink()

    assert answer.stdout.strip() == str({segment.name})


def test_a_leak_that_ends_within_the_deadline_passes(before):
    """A process on its way out is no leak."""
    popen = _sleeper()
    threading.Timer(0.1, popen.stdin.close).start()

    leaks = leak_check.wait_for_leaks(before)
    popen.wait()

    assert not leaks


def test_the_deadline_is_in_seconds_in_which_processes_could_run(monkeypatch):
    """Without a CPU, nothing can end. A look that comes late counts as one in time."""
    now, starved = 0.0, 0.0
    monkeypatch.setattr(leak_check, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(leak_check, "_starved_s", lambda pids: dict.fromkeys(map(str, pids), starved))

    def looks(pause_s: float, starved_share: float) -> int:
        """How many there are until the deadline has passed."""
        nonlocal now, starved
        patience = leak_check.Patience(3.0)
        count = 0
        while not patience.is_over([1]):
            now += pause_s
            starved += pause_s * starved_share
            count += 1
        return count

    assert looks(0.02, 0.0) == pytest.approx(150, abs=1)
    assert looks(0.02, 0.5) == pytest.approx(300, abs=1)
    assert looks(0.2, 0.5) == pytest.approx(75, abs=1)  # late looks, and half of that for want of a CPU
    assert looks(1.0, 0.0) == pytest.approx(60, abs=1)  # which is the longest, and 75 looks otherwise
    assert looks(0.02, 1.0) == pytest.approx(3000, abs=1)  # likewise: it never runs


def test_time_without_a_cpu_is_read_from_the_system():
    """Of all threads of a process; of one that is gone there is none."""
    assert str(os.getpid()) in leak_check._starved_s([os.getpid()])
    assert leak_check._starved_s([2**22 + 1]) == {}


def test_a_thread_that_writes_what_was_posted_is_waited_for(before, monkeypatch):
    """However slow the disk is: this one does not answer before it is waited for."""
    answered = threading.Event()
    flush_all = courier.flush_all
    monkeypatch.setattr(courier, "flush_all", lambda deadline_s: answered.set() or flush_all(deadline_s))
    carrier: courier.Courier[int] = courier.Courier("slow-disk", lambda things: answered.wait() and None, capacity=1)
    carrier.post(1)

    assert not leak_check.wait_for_leaks(before)
    assert answered.is_set()


def test_cyclic_garbage_is_collected_before_it_is_blamed(before):
    """An owner in a cycle is not reachable, only not collected yet."""

    class Owner:
        def __init__(self):
            self.itself = self
            self.number = os.memfd_create("cell")

        def __del__(self):
            os.close(self.number)

    Owner()

    assert not leak_check.wait_for_leaks(before, AT_ONCE_S)


def test_the_resource_tracker_and_the_fork_server_are_let_pass(before):
    """They are the standard library's, and live as long as the interpreter."""
    resource_tracker.ensure_running()
    process = multiprocessing.get_context("forkserver").Process(target=os.getpid)
    process.start()
    process.join()
    process.close()

    assert not leak_check.wait_for_leaks(before)


def test_a_child_of_the_fork_server_is_reported(before):
    """It carries the fork server's command line, and leaks like any other."""
    context = multiprocessing.get_context("forkserver")
    release = context.Event()
    process = context.Process(target=release.wait)
    process.start()

    leaks = leak_check.wait_for_leaks(before, AT_ONCE_S)
    release.set()
    process.join()

    assert [leaked.pid for leaked in leaks.processes] == [process.pid]


def test_the_fixture_fails_the_test_that_leaks_and_no_other(tmp_path):
    """End to end: a leak is an error of its test; a failed test fails once; the marker opts out."""
    shutil.copy(TESTS / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = leaks_allowed\naddopts = -p no:cacheprovider -rA\n")
    (tmp_path / "test_victims.py").write_text(
        "import os, pytest\n"
        "from outlive.testing import leaks\n"
        "leaks.DEADLINE_S = 0.5\n"
        "def test_leaking(): os.memfd_create('forgotten')\n"
        "def test_clean(): os.close(os.memfd_create('closed'))\n"
        "def test_failing(): assert not os.memfd_create('held by the traceback')\n"
        "@pytest.mark.leaks_allowed\n"
        "def test_opted_out(): os.memfd_create('on purpose')\n"
    )
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(Path(leak_check.__file__).parents[2])])

    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q"],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )

    assert "1 failed, 3 passed, 1 error" in run.stdout
    assert "ERROR test_victims.py::test_leaking" in run.stdout
    assert "left behind 0.5 s after the test" in run.stdout
    assert "→ /memfd:forgotten (deleted)" in run.stdout
    assert "FAILED test_victims.py::test_failing" in run.stdout
