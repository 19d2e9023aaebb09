"""What is wrong around a job: memory and CPUs that others use, disks that are full.

Reads   how much memory there is.
Writes  processes, a mount, a limit; all of them gone when the block is left, or when its process is killed.
Never   more than it was asked for; never something that only a clean end would take away.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from outlive._system.lifeline import Lifeline
from outlive.quantities import in_words, parse_bytes, parse_bytes_or_share
from outlive.settings import check_number

_LEAST_LEFT = 256 << 20
_READY_S = 60.0

# Each also looks for whoever asked: he may have been killed before the lifeline was bound to it.
_HOLDS_MEMORY = """
import os, sys, time
parent = os.getppid()
held = bytearray(int(sys.argv[1]))
held[::4096] = b"x" * len(held[::4096])
print("ready", flush=True)
while os.getppid() == parent:
    time.sleep(1)
"""
_SPINS = """
import os
parent = os.getppid()
print("ready", flush=True)
while os.getppid() == parent:
    for _ in range(1000000):
        pass
"""
# Mounts, says so, waits for the end of its input, which comes with the end of whoever asked, and unmounts.
_MOUNTS = """
import os, subprocess, sys
folder, size = sys.argv[1:]
done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "outlive-full-disk", folder],
                      stderr=subprocess.PIPE, text=True)
print(done.stderr.strip().replace(chr(10), " ") if done.returncode else "ready", flush=True)
sys.stdin.read()
if not done.returncode:
    subprocess.run(["umount", "-l", folder])
os.rmdir(folder)
"""


class NotPossibleError(OSError):
    """This machine, or this user, cannot have that."""


@contextlib.contextmanager
def memory_pressure(size: str | int) -> Iterator[None]:
    """Another process holds so much memory: «2GiB», or «50%» of what is free now."""
    with _hog(_HOLDS_MEMORY, str(wanted_memory(size))):
        yield


def wanted_memory(size: str | int) -> int:
    """How many bytes that is; an error where there are not so many."""
    free = psutil.virtual_memory().available
    wanted = parse_bytes_or_share("size", size, free)
    if wanted > free - _LEAST_LEFT:
        raise ValueError(
            f"memory_pressure({size!r}) asks for {in_words(wanted)}, and {in_words(free)} are free; "
            f"ask for at most {in_words(max(0, free - _LEAST_LEFT))}, or the kernel may kill anybody"
        )
    return wanted


@contextlib.contextmanager
def busy_cpus(count: int | None = None) -> Iterator[None]:
    """So many processes compute without end, one for each CPU unless told."""
    if count is not None:
        check_number("count", count, least=1, whole=True)
    with contextlib.ExitStack() as stack:
        for _ in range(count or os.cpu_count() or 1):
            stack.enter_context(_hog(_SPINS))
        yield


@contextlib.contextmanager
def _hog(program: str, *arguments: str) -> Iterator[None]:
    lifeline = Lifeline()
    end = lifeline.end()
    try:
        process = subprocess.Popen(
            [sys.executable, "-S", "-E", "-c", program, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            pass_fds=(end,),
            text=True,
        )
    except BaseException:
        lifeline.cut()
        raise
    finally:
        os.close(end)
    lifeline.bind(process.pid)
    assert process.stdout is not None
    try:
        if process.stdout.readline() != "ready\n":
            raise NotPossibleError(f"a process that was to be a burden ended with status {process.wait(_READY_S)}")
        yield
    finally:
        lifeline.cut()
        process.kill()
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def full_disk(size: str | int = "1MiB") -> Iterator[Path]:
    """A folder on a file system of its own that has room for so much and no more. Needs root, to mount it.

    Where that is not possible, `file_size_limit` is the next best.
    """
    room = parse_bytes("size", size)
    folder = tempfile.mkdtemp(prefix="outlive-full-disk-")
    guardian = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", _MOUNTS, folder, str(room)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert guardian.stdin is not None
    assert guardian.stdout is not None
    try:
        said = guardian.stdout.readline().strip()
        if said != "ready":
            raise NotPossibleError(
                f"a full disk needs a file system of its own, and this user may not mount one: {said or 'no answer'}; "
                "run as root, or use file_size_limit()"
            )
        yield Path(folder)
    finally:
        guardian.stdin.close()
        guardian.stdout.close()
        guardian.wait()


# A mount that only this command and what it starts can see: it goes with the last of them, however that ends.
_MOUNTS_AND_BECOMES = (
    'folder="$1"; size="$2"; shift 2; mount -t tmpfs -o "size=$size" outlive-full-disk "$folder" && exec "$@"'
)


def on_full_disk(size: str | int, folder: Path) -> list[str]:
    """Words to be put before a command, for which this folder then is a file system with so much room. Needs root."""
    own = ["unshare", "--mount", "--propagation", "private", "sh", "-c", _MOUNTS_AND_BECOMES, "sh"]
    return [*own, str(folder), str(parse_bytes("size", size))]


def check_mounting() -> None:
    """An error where `on_full_disk` is not possible."""
    with tempfile.TemporaryDirectory(prefix="outlive-full-disk-") as folder:
        try:
            tried = subprocess.run([*on_full_disk("64KiB", Path(folder)), "true"], capture_output=True, text=True)
        except FileNotFoundError:
            why = "there is no command unshare"
        else:
            why = tried.stderr.strip().replace("\n", " ") if tried.returncode else ""
    if why:
        raise NotPossibleError(f"a full disk needs a mount of its own, and this user may make none: {why}; run as root")


@contextlib.contextmanager
def file_size_limit(size: str | int) -> Iterator[None]:
    """Writes beyond this size of a file fail (EFBIG), in this process and in those that it starts in the block."""
    import resource

    limit = parse_bytes("size", size)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
