"""Who called whom in another process: against what that process says of itself."""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deadlines import wait_until
from outlive._system import threads, unwinding

COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C compiler"),
    pytest.mark.skipif(not Path("/proc/self/syscall").exists(), reason="the kernel does not tell where calls stand"),
]
DEPTH = 5
SOURCE = """
#include <execinfo.h>
#include <semaphore.h>
#include <unistd.h>
static void *frames[64];
static sem_t never;
int descend(int depth, int fd) {
    if (depth) return descend(depth - 1, fd) + 1;
    int count = backtrace(frames, 64);
    if (write(fd, frames, count * sizeof *frames) < 0) return 0;
    sem_wait(&never);
    return 1;
}
void litter(void *address) { void *volatile room[2048]; for (int i = 0; i < 2048; i++) room[i] = address; }
int descend_over_litter(int depth, int fd, void *address) { litter(address); return descend(depth, fd) + 1; }
"""
OPTIONS = {
    "by the stack pointer": ("-O2", "-fno-optimize-sibling-calls"),
    "by a frame pointer": ("-O0", "-fno-omit-frame-pointer"),
    "without tables": ("-O0", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables"),
}


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("unwinding")
    source = folder / "deep.c"
    source.write_text(SOURCE)
    made = {}
    for number, (name, options) in enumerate(OPTIONS.items()):
        made[name] = str(folder / f"libdeep{number}.so")
        subprocess.run([str(COMPILER), "-shared", "-fPIC", *options, "-o", made[name], source], check=True)
    return made


@contextmanager
def standing(library: str, function: str = "descend", litter: int = 0) -> Iterator[tuple[threads.Thread, list[int]]]:
    """A fork that stands in a system call, and the return addresses that it found on its own stack."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            getattr(ctypes.CDLL(library), function)(DEPTH, writing, ctypes.c_void_p(litter))
        finally:
            os._exit(1)
    try:
        told = [word for (word,) in struct.iter_unpack("=Q", os.read(reading, 64 * 8))]
        assert wait_until(lambda: threads.threads_of(pid)[0].system_call == "futex")
        yield threads.threads_of(pid)[0], told
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("name", ["by the stack pointer", "by a frame pointer"])
def test_a_stack_is_unwound_to_its_end(libraries: dict[str, str], name: str) -> None:
    """As the process itself sees it, from its C library up to where it began."""
    with standing(libraries[name]) as (thread, told):
        maps = threads.Maps(thread.number)
        ((address, registers),) = threads.sample_registers(thread.number, 1, 0.0)
        walked = unwinding.walk(thread.number, address, registers, maps)
        places = [maps.place(each).partition("+")[0] for each in walked.addresses]
        inside = places.index(os.path.basename(libraries[name]))

    assert len(told) > DEPTH + 2
    assert set(places[:inside]) == {"libc.so.6"}
    assert set(places[inside : inside + DEPTH + 1]) == {os.path.basename(libraries[name])}
    # Both stand in the same function, each in another call of it.
    theirs = walked.addresses[inside + 1 :]
    shared = min(len(told) - 1, len(theirs))
    assert theirs[:shared] == tuple(told[1 : 1 + shared])
    assert shared > DEPTH + 3


def test_it_ends_at_a_register_whose_value_is_unknown(libraries: dict[str, str]) -> None:
    """The stack pointer is enough where frames are found by it, or where the C library has saved the other one."""
    for name in ("by the stack pointer", "by a frame pointer"):
        with standing(libraries[name]) as (thread, told):
            maps = threads.Maps(thread.number)
            start = unwinding.at_stack(thread.stack_pointer)
            far = unwinding.walk(thread.number, thread.instruction_pointer, start, maps)
            near = unwinding.walk(thread.number, told[0], start, maps)

        assert set(told[1 : 1 + DEPTH]) <= set(far.addresses)

    assert near == unwinding.Walk((told[0],), thread.stack_pointer)


def test_a_function_that_returned_long_ago_is_not_a_caller(libraries: dict[str, str]) -> None:
    """The C library's frames have gaps, in which old words stand."""
    library = libraries["by the stack pointer"]
    python = (ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value or 0) + 4
    with standing(library, "descend_over_litter", python) as (thread, _):
        maps = threads.Maps(thread.number)
        words = struct.unpack("=64Q", threads.memory_of(thread.number, thread.stack_pointer, 512))
        found = unwinding.places(
            thread.number, thread.instruction_pointer, unwinding.at_stack(thread.stack_pointer), maps, ("libc.so",)
        )
        named = [place for word in words if (place := maps.place(word)) and not place.startswith("libc.so")]

    assert words.count(python) > 0
    assert named[0].startswith(("python", "libpython"))  # what the words alone would say
    assert {place.partition("+")[0] for place in found[: DEPTH + 1]} == {os.path.basename(library)}


def test_without_tables_only_what_follows_a_call_is_taken_for_a_caller(libraries: dict[str, str]) -> None:
    """Not every word that lies in code; old return addresses are, for nobody can tell."""
    library = libraries["without tables"]
    python = (ctypes.cast(ctypes.pythonapi.PyObject_Call, ctypes.c_void_p).value or 0) + 4
    with standing(library, "descend_over_litter", python) as (thread, _):
        maps = threads.Maps(thread.number)
        start = unwinding.at_stack(thread.stack_pointer)
        walked = unwinding.walk(thread.number, thread.instruction_pointer, start, maps)
        words = struct.unpack("=128Q", threads.memory_of(thread.number, walked.stack_pointer, 1024))
        found = unwinding.places(
            thread.number, thread.instruction_pointer, start, maps, ("libc.so", os.path.basename(library))
        )
        litter = maps.place(python)

    assert maps.place(walked.addresses[-1]).partition("+")[0] == os.path.basename(library)
    assert not walked.is_whole
    assert python in words
    assert litter not in found
    assert found[0].startswith(("libffi", "_ctypes"))  # by which Python calls C


@pytest.mark.parametrize("seed", range(20))
def test_memory_that_is_torn_ends_the_walk(
    libraries: dict[str, str], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It raises nothing, whatever it reads: the zygote looks after others, too."""
    rng = random.Random(seed)

    def torn(pid: int, address: int, size: int) -> bytes:
        data = threads.memory_of(pid, address, size)
        if rng.random() > 0.03:  # there are dozens of reads to a frame
            return data
        return rng.choice((data[: rng.randrange(size)], rng.randbytes(size), b"\xff" * size, bytes(size)))

    with standing(libraries["by the stack pointer"]) as (thread, _):
        maps = threads.Maps(thread.number)
        start = unwinding.at_stack(thread.stack_pointer)
        monkeypatch.setattr(unwinding, "memory_of", torn)
        lengths = {
            len(unwinding.walk(thread.number, thread.instruction_pointer, start, maps).addresses) for _ in range(300)
        }

    assert len(lengths) > 1


def test_a_process_that_is_gone_has_no_callers() -> None:
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    maps = threads.Maps(pid)

    assert unwinding.places(pid, 4096, unwinding.at_stack(4096), maps, ()) == []
    assert unwinding.walk(pid, 4096, {}, maps) == unwinding.Walk((4096,), 0)
