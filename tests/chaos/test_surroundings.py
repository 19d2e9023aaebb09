"""What is wrong around a job: that it is really so, and that it is over when it is to be, however the job ends.

Reads   /proc, a server on loopback, a file system of a megabyte.
Writes  SIGKILL to programs of its own.
Never   more than 64 MiB of anything.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

import warm_server
from deadlines import wait_until
from outlive.testing import NotPossibleError, beside, busy_cpus, file_size_limit, full_disk, memory_pressure

PROGRAMS = Path(__file__).with_name("programs")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def can_mount() -> bool:
    try:
        with full_disk():
            return True
    except NotPossibleError:
        return False


def children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]


def test_memory_and_cpus_are_used_by_others_as_long_as_a_block():
    """A process holds the memory, another computes; both are gone at the end."""
    before = set(children())
    with memory_pressure("48MiB"), busy_cpus(1):
        hogs = set(children()) - before
        assert max(hog.memory_info().rss for hog in hogs) > 48 << 20
        assert len(hogs) == 2
        assert wait_until(lambda: max(sum(hog.cpu_times()[:2]) for hog in hogs) > 0.2, DEADLINE_S)

    assert set(children()) == before
    with pytest.raises(ValueError, match=r"memory_pressure\('100TiB'\) asks for .* are free; ask for at most"):
        memory_pressure("100TiB").__enter__()


def test_a_disk_is_full_after_as_much_as_was_said(can_mount, tmp_path):
    """As the kernel says it; without root that is told, and a limit on files serves."""
    if can_mount:
        with full_disk("1MiB") as folder:
            (folder / "fits").write_bytes(bytes(1 << 19))
            with pytest.raises(OSError, match="No space left") as raised:
                (folder / "does not").write_bytes(bytes(1 << 20))
        assert raised.value.errno == errno.ENOSPC
        assert not folder.exists()
    with file_size_limit("64KiB"), pytest.raises(OSError, match="File too large"):
        (tmp_path / "file").write_bytes(bytes(1 << 20))
    (tmp_path / "file").write_bytes(bytes(1 << 20))


def test_a_run_is_shown_by_the_samples_that_came_and_given_up_in_time(tmp_path, capsys):
    """Of streams a sample is a pair; the last line of a note that is being written counts when it is whole."""
    notes = tmp_path / "notes"
    rows = ['{"what":"begun"}', '{"what":"got","keys":[4,7]}', '{"what":"got","keys":[[0,1],[1,0]]}', '{"what":"gave"}']
    notes.write_text("\n".join([*rows, '{"what":"got","ke']))
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as endless:
        ended = subprocess.Popen(["sh", "-c", "exit 3"])

        status = beside.wait(ended, None, notes, beside.Shown("with faults", 5))
        unended = beside.wait(endless, 0.1, notes, None)

        assert endless.poll() is None
        endless.stdin.close()
    assert (status, unended) == (3, None)
    assert "with faults   80%  4/5" in capsys.readouterr().err


def test_root_is_asked_for_where_a_disk_cannot_be_mounted(monkeypatch, tmp_path):
    """Who may not mount is told what else there is."""
    (tmp_path / "mount").write_text("#!/bin/sh\necho only root can do that >&2\nexit 1\n")
    (tmp_path / "mount").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)

    with pytest.raises(NotPossibleError, match=r"only root can do that; run as root, or use file_size_limit\(\)"):
        full_disk().__enter__()


def test_a_server_refuses_fails_cuts_off_and_hangs_when_it_is_told_to(outlive_server):
    """What a client sees of each; after it, all is well again."""
    server = outlive_server({"/0": b"x" * 5000}, seed=1)

    def get(timeout: float = DEADLINE_S) -> bytes:
        with urllib.request.urlopen(f"{server.url}/0", timeout=timeout) as answer:
            return answer.read()

    with server.refusing(), pytest.raises(urllib.error.URLError, match="refused"):
        get()
    server.fail(1.0)
    with pytest.raises(urllib.error.HTTPError, match="503") as refused:
        get()
    refused.value.close()
    server.fail(0.0, cut=1.0)
    with pytest.raises(Exception, match="2500 bytes read, 2500 more expected"):
        get()
    server.fail(0.0)
    with server.hanging(), pytest.raises(TimeoutError):
        get(timeout=0.2)
    server.slow(delay_s=0.01, bytes_per_s=1e6)

    assert get() == b"x" * 5000
    with pytest.raises(urllib.error.HTTPError, match="404") as missing:
        urllib.request.urlopen(f"{server.url}/1")
    missing.value.close()
    with pytest.raises(ValueError, match=r"between 0\.0 and 1\.0"):
        server.fail(2)


def test_nothing_is_left_of_a_burden_when_its_process_is_killed(can_mount):
    """Hogs, a mount and its folder go with SIGKILL of whoever asked for them."""
    command = [sys.executable, PROGRAMS / "under_pressure.py", *(["disk"] if can_mount else [])]
    with warm_server.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = process.stdout.readline().strip()
        burdens = psutil.Process(process.pid).children(recursive=True)
        assert len(burdens) == (3 if can_mount else 2)
        assert not folder or os.path.ismount(folder)

        process.kill()

        assert wait_until(lambda: not any(_lives(one) for one in burdens), DEADLINE_S)
    assert not folder or wait_until(lambda: not os.path.exists(folder), DEADLINE_S)


def test_a_program_under_chaos_goes_when_the_command_is_killed():
    """And the next run sweeps the folder of the killed one."""
    command = [sys.executable, "-m", "outlive", "chaos", "--faults", "segv", PROGRAMS / "train.py"]
    with warm_server.Popen([*command, "wait"], env=ENVIRONMENT, stderr=subprocess.DEVNULL) as process:
        seen: list[psutil.Process] = []
        assert wait_until(lambda: bool(seen.extend(psutil.Process(process.pid).children()) or seen), DEADLINE_S)
        folders = list(Path(tempfile.gettempdir()).glob(f"outlive-chaos-*-{process.pid}-*"))
        assert len(folders) == 1

        process.send_signal(signal.SIGKILL)

        assert wait_until(lambda: not any(_lives(one) for one in seen), DEADLINE_S)
    warm_server.run([*command, "idle"], env=ENVIRONMENT, capture_output=True, timeout=100)
    assert not folders[0].exists()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
