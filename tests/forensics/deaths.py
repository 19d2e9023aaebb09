"""Deaths by bad memory and by abort(), and the verdict that each must get.

Reads   libraries that `natives` built.
Writes  small files in a folder of the test's.
Never   a class or function that a spawned worker could not import by name.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import outlive
from outlive import FaultPolicy, Incident
from outlive.verdicts import Confidence, Name

X86 = platform.machine() == "x86_64"
PAGE = mmap.PAGESIZE
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
NEW_MOUNTS, TMPFS_BYTES = 0x00020000, 64 << 10
PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE | MS_REC


@dataclass(frozen=True)
class Death:
    """A way to die, and what must be said of it."""

    act: Callable[[Path], None]
    name: Name
    words: tuple[str, ...] = ()  # in the cause
    confidence: Confidence | None = Confidence.CERTAIN  # None: depends on what is installed, or on where memory lies
    facts: tuple[str, ...] = ()


DEATHS: dict[str, Death] = {}


def dies(
    name: Name,
    *words: str,
    confidence: Confidence | None = Confidence.CERTAIN,
    facts: tuple[str, ...] = (),
    only: bool = True,
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Enter a death in the table."""

    def enter(act: Callable[[Path], None]) -> Callable[[Path], None]:
        if only:
            DEATHS[act.__name__] = Death(act, name, words, confidence, facts)
        return act

    return enter


def faulty(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(folder / "libfaulty.so"))


def throwing(folder: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(folder / "libthrowing.so"))


def anonymous(pages: int, protection: int = mmap.PROT_READ | mmap.PROT_WRITE) -> int:
    address = LIBC.mmap(None, pages * PAGE, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert isinstance(address, int)
    return address


def file_of(folder: Path, name: str, size: int) -> Path:
    path = folder / f"{name}-{os.getpid()}.bin"
    path.write_bytes(bytes(size))
    return path


def mapped(path: Path, protection: int = mmap.PROT_READ) -> int:
    """The address of a shared map of the whole file, which stays."""
    fd = os.open(path, os.O_RDWR)
    address = LIBC.mmap(None, os.fstat(fd).st_size, protection, mmap.MAP_SHARED, fd, 0)
    os.close(fd)
    assert isinstance(address, int)
    return address


# ---------------------------------------------------------------- null and wild


@dies(Name.NULL_POINTER, "read of address 0x0", "libc", facts=("the stack leads to ctypes",))
def read_null_by_ctypes(folder: Path) -> None:
    ctypes.string_at(0)


@dies(Name.NULL_POINTER, "read of address 0x0", "libfaulty.so")
def read_null(folder: Path) -> None:
    faulty(folder).read_at(None)


@dies(Name.NULL_POINTER, "write of address 0x0", "libfaulty.so")
def write_null(folder: Path) -> None:
    faulty(folder).write_at(None)


@dies(Name.NULL_POINTER, "read of address 0x18", "libfaulty.so", "offset 24")
def read_null_field(folder: Path) -> None:
    faulty(folder).width_of(None)


@dies(Name.NULL_POINTER, "write of address 0x18", "libfaulty.so", "offset 24")
def write_null_field(folder: Path) -> None:
    faulty(folder).set_width(None)


@dies(Name.NULL_POINTER, "0xfffffffffffffff8", "8 bytes before")
def read_before_null(folder: Path) -> None:
    faulty(folder).element(None, ctypes.c_long(-1))


@dies(Name.WILD_POINTER, "read of address 0x123456789000", "libfaulty.so", "nothing is mapped there")
def read_wild(folder: Path) -> None:
    faulty(folder).read_at(ctypes.c_void_p(0x123456789000))


@dies(Name.WILD_POINTER, "write of address 0x123456789000", "libfaulty.so")
def write_wild(folder: Path) -> None:
    faulty(folder).write_at(ctypes.c_void_p(0x123456789000))


@dies(Name.WILD_POINTER, "address 0xffff900000000000", "kernel", only=X86)
def read_kernels(folder: Path) -> None:
    faulty(folder).read_at(ctypes.c_void_p(0xFFFF900000000000))


@dies(Name.WILD_POINTER, "0xdead000000000000", "can be none", confidence=None, only=X86)
def read_not_canonical(folder: Path) -> None:
    faulty(folder).read_at(ctypes.c_void_p(0xDEAD << 48))


@dies(Name.WILD_POINTER, "'IHDRsize'", "libfaulty.so", confidence=None, only=X86)
def read_through_text(folder: Path) -> None:
    faulty(folder).read_at(ctypes.c_void_p(int.from_bytes(b"IHDRsize", "little")))


@dies(Name.WILD_POINTER, "32 bits", confidence=Confidence.LIKELY)
def read_lower_half(folder: Path) -> None:
    faulty(folder).low_half(ctypes.c_void_p(anonymous(1)))


@dies(Name.WILD_POINTER, "read in ", "libfaulty.so", " of address", "reserved")
def read_reserved(folder: Path) -> None:
    faulty(folder).read_at(ctypes.c_void_p(anonymous(1, 0)))


@dies(Name.WILD_POINTER, "misaligned", "libfaulty.so", only=X86)
def read_misaligned(folder: Path) -> None:
    """With the CPU's alignment check on, as some sanitizers have it."""
    faulty(folder).read_misaligned(ctypes.c_void_p(anonymous(1)))


@dies(Name.WILD_POINTER, "libfaulty.so", "aligned", confidence=None, only=X86)
def read_vector(folder: Path) -> None:
    faulty(folder).read_vector(ctypes.c_void_p(anonymous(1) + 8))


@dies(Name.WILD_POINTER, "read of address", facts=("not the main one",))
def read_in_thread(folder: Path) -> None:
    thread = threading.Thread(target=faulty(folder).read_at, args=(ctypes.c_void_p(0x123456789000),))
    thread.start()
    thread.join()


# ---------------------------------------------------------------- stacks


def limit_stack() -> None:
    """The main thread's stack grows up to the limit of this moment: an unlimited one would take all memory first."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, hard))


@dies(Name.STACK_OVERFLOW, "the main thread", "MiB", "libfaulty.so", facts=("calls itself",))
def overflow_stack(folder: Path) -> None:
    limit_stack()
    faulty(folder).recurse(0)


@dies(Name.STACK_OVERFLOW, "the main thread", "one frame in ", "libfaulty.so", " takes 6", " MiB more than there is")
def overflow_stack_by_one_frame(folder: Path) -> None:
    limit_stack()
    faulty(folder).one_large_frame()


@dies(Name.STACK_OVERFLOW, "the main thread", only=sys.version_info < (3, 12))  # later ones raise RecursionError
def overflow_stack_by_python(folder: Path) -> None:
    limit_stack()
    sys.setrecursionlimit(1 << 30)

    def again(_: int) -> list[object]:
        return list(map(again, [0]))

    again(0)


@dies(Name.STACK_OVERFLOW, "thread", "8.0 MiB", "libfaulty.so")
def overflow_stack_of_thread(folder: Path) -> None:
    limit_stack()
    before = threading.stack_size(8 << 20)
    thread = threading.Thread(target=faulty(folder).recurse, args=(0,))
    thread.start()
    threading.stack_size(before)
    thread.join()


@dies(Name.STACK_OVERFLOW, "native code started", confidence=Confidence.LIKELY)
def overflow_stack_of_native_thread(folder: Path) -> None:
    limit_stack()
    faulty(folder).recurse_in_native_thread()


# ---------------------------------------------------------------- forbidden, or gone


@dies(Name.READ_ONLY_WRITE, "write in ", "libfaulty.so", " to address", "in the read-only map of", "read_only-")
def write_read_only(folder: Path) -> None:
    faulty(folder).write_at(ctypes.c_void_p(mapped(file_of(folder, "read_only", 3 * PAGE)) + PAGE))


@dies(Name.READ_ONLY_WRITE, "in the read-only map of", "memmap-")
def write_memmap(folder: Path) -> None:
    array = np.memmap(file_of(folder, "memmap", PAGE), dtype=np.uint8, mode="r")
    ctypes.memset(array.ctypes.data, 1, 8)


@dies(Name.READ_ONLY_WRITE, "among the constants of libfaulty.so")
def write_constant(folder: Path) -> None:
    faulty(folder).change_constant()


@dies(Name.READ_ONLY_WRITE, "made read-only")
def write_protected(folder: Path) -> None:
    faulty(folder).write_at(ctypes.c_void_p(anonymous(1, mmap.PROT_READ)))


@dies(Name.USE_AFTER_UNMAP, "given back", confidence=None)
def read_unmapped(folder: Path) -> None:
    library = faulty(folder)  # loaded first: loading it maps memory, perhaps right there
    address = anonymous(64)
    LIBC.munmap(address, 64 * PAGE)
    library.read_at(ctypes.c_void_p(address + 5 * PAGE + 40))


@dies(Name.USE_AFTER_UNMAP, "given back", confidence=Confidence.LIKELY, facts=("belongs to one file",))
def read_unmapped_part_of_file(folder: Path) -> None:
    library = faulty(folder)
    address = mapped(file_of(folder, "parts", 9 * PAGE))
    LIBC.munmap(address + 3 * PAGE, 3 * PAGE)
    library.read_at(ctypes.c_void_p(address + 4 * PAGE))


@dies(Name.USE_AFTER_UNMAP, "given back", "libfaulty.so", confidence=None)
def use_large_block_after_free(folder: Path) -> None:
    """Large blocks of malloc are maps of their own: so are tensors and arrays."""
    faulty(folder).use_large_after_free()


@dies(Name.WILD_POINTER, "out of range", confidence=Confidence.LIKELY, facts=("-68719476736, 8",), only=X86)
def read_far_past_array(folder: Path) -> None:
    library = faulty(folder)
    array = (ctypes.c_long * 8)()
    library.element(array, ctypes.c_long(-1 << 36))


@dies(Name.WILD_POINTER, "an index is out of range", confidence=Confidence.LIKELY, only=X86)
def read_outside_of_all_memory(folder: Path) -> None:
    library = faulty(folder)
    array = (ctypes.c_long * 8)()
    library.element(array, ctypes.c_long(1 << 40))


# ---------------------------------------------------------------- bus errors


@dies(Name.TRUNCATED_FILE, "byte 8292", "only 100 bytes", "truncated-", "libfaulty.so")
def read_truncated_file(folder: Path) -> None:
    path = file_of(folder, "truncated", 4 * PAGE)
    address = mapped(path)
    os.truncate(path, 100)
    faulty(folder).read_at(ctypes.c_void_p(address + 8292))


@dies(Name.TRUNCATED_FILE, "shrunk-", "only 0 bytes")
def read_truncated_memmap(folder: Path) -> None:
    path = file_of(folder, "shrunk", 4 * PAGE)
    array = np.memmap(path, dtype=np.uint8, mode="r")
    os.truncate(path, 0)
    array.sum()


@dies(Name.TRUNCATED_FILE, "unnamed-", "past the end", confidence=Confidence.LIKELY)
def read_truncated_file_without_name(folder: Path) -> None:
    path = file_of(folder, "unnamed", 4 * PAGE)
    address = mapped(path)
    os.truncate(path, 0)
    path.unlink()
    faulty(folder).read_at(ctypes.c_void_p(address))


@dies(Name.TRUNCATED_FILE, "memfd:short", confidence=Confidence.LIKELY)
def read_short_memory_file(folder: Path) -> None:
    fd = os.memfd_create("short")
    address = LIBC.mmap(None, PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    faulty(folder).read_at(ctypes.c_void_p(address))


def small_shared_memory() -> None:
    """A /dev/shm of our own with 64 KiB, for this process only."""
    for result in (
        LIBC.unshare(NEW_MOUNTS),
        LIBC.mount(b"none", b"/", None, ctypes.c_ulong(PRIVATE), None),
        LIBC.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), b"size=%d" % TMPFS_BYTES),
    ):
        if result != 0:
            raise OSError(ctypes.get_errno(), "no mounts of one's own here")


def can_mount() -> bool:
    pid = os.fork()
    if pid == 0:
        try:
            small_shared_memory()
        except OSError:
            os._exit(1)
        os._exit(0)
    return os.waitpid(pid, 0)[1] == 0


def fill_shared_memory(folder: Path, unlink: bool) -> None:
    small_shared_memory()
    path = Path("/dev/shm/batch")
    path.touch()
    os.truncate(path, 1 << 20)
    address = mapped(path, mmap.PROT_READ | mmap.PROT_WRITE)
    if unlink:
        path.unlink()
    ctypes.memset(address, 1, 1 << 20)


@dies(Name.SHARED_MEMORY_FULL, "/dev/shm is full", "0 bytes left of 64.0 KiB", "write in libc")
def fill_small_shared_memory(folder: Path) -> None:
    fill_shared_memory(folder, unlink=False)


@dies(Name.SHARED_MEMORY_FULL, "/dev/shm is full", "0 bytes left of 64.0 KiB", "/dev/shm/batch")
def fill_small_shared_memory_without_name(folder: Path) -> None:
    """As torch does: the segment has no name from its first moment, and is gone with its worker."""
    fill_shared_memory(folder, unlink=True)


MOUNTING = ("fill_small_shared_memory", "fill_small_shared_memory_without_name")
FAULTS = dict(DEATHS)


# ---------------------------------------------------------------- aborts


@dies(Name.HEAP_CORRUPTION, "double free", "freed twice")
def free_twice(folder: Path) -> None:
    faulty(folder).free_twice()


@dies(Name.HEAP_CORRUPTION, "double free", "freed twice", facts=("the C library said",))
def free_twice_unheard(folder: Path) -> None:
    """Standard error is closed: the C library's own copy of its message is in the record."""
    os.close(2)
    faulty(folder).free_twice()


@dies(Name.HEAP_CORRUPTION, "invalid pointer")
def free_stranger(folder: Path) -> None:
    faulty(folder).free_stranger(ctypes.c_void_p(anonymous(2) + PAGE + 16))


@dies(Name.HEAP_CORRUPTION, "the heap is corrupt", "written past its end")
def write_past_block(folder: Path) -> None:
    faulty(folder).write_past_block()


@dies(Name.HEAP_CORRUPTION, "stack smashing detected", "on the stack")
def smash_stack(folder: Path) -> None:
    faulty(folder).smash_stack(64)


@dies(Name.ABORTED, "assertion", 'answer == 42 && "the answer"', "faulty.c:", "expect_answer")
def fail_assertion(folder: Path) -> None:
    faulty(folder).expect_answer(41)


@dies(Name.ABORTED, "assertion", "answer == 42", "faulty.c:")
def fail_assertion_unheard(folder: Path) -> None:
    os.close(2)
    faulty(folder).expect_answer(41)


@dies(Name.ABORTED, "uncaught C++ exception std::runtime_error: tile 7 has no pixels")
def throw_error(folder: Path) -> None:
    throwing(folder).throw_error()


@dies(Name.ABORTED, "uncaught C++ exception Odd")
def throw_odd(folder: Path) -> None:
    throwing(folder).throw_odd()


@dies(Name.ABORTED, "terminate called without an active exception")
def terminate_plainly(folder: Path) -> None:
    throwing(folder).terminate_plainly()


@dies(Name.ABORTED, "terminate called without an active exception")
def lose_thread(folder: Path) -> None:
    throwing(folder).lose_thread()


@dies(Name.ABORTED, "abort() was called", facts=("libfaulty.so",))
def give_up(folder: Path) -> None:
    faulty(folder).give_up()


@dies(Name.ABORTED, "abort() was called, without a word")
def abort_from_python(folder: Path) -> None:
    os.abort()


@dies(Name.ABORTED, "abort() was called; it last wrote «tile 9 is odd»")
def abort_after_words(folder: Path) -> None:
    os.write(2, b"tile 9 is odd\n")
    os.abort()


@dies(Name.ABORTED, "the worker sent SIGABRT to itself")
def send_abort_to_itself(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGABRT)


@dies(Name.ABORTED, "Python itself gave up", "the pool is empty")
def fail_in_python(folder: Path) -> None:
    ctypes.pythonapi.Py_FatalError(b"the pool is empty")


@dies(Name.ABORTED, "Rust panic at src/decode.rs:12:5: index out of bounds")
def panic_in_rust(folder: Path) -> None:
    """What a Rust library that is built with panic=abort writes; no compiler of it is needed to say so."""
    os.write(2, b"\nthread '<unnamed>' panicked at src/decode.rs:12:5:\nindex out of bounds: the len is 3\nnote: run\n")
    LIBC.abort()


@dies(Name.ABORTED, "a library's own check failed", "Check failed: size > 0")
def fail_check(folder: Path) -> None:
    """What glog writes."""
    os.write(
        2, b"F1115 15:42:37.123456  4711 reader.cc:88] Check failed: size > 0 (0 vs. 0)\n*** Check failure stack\n"
    )
    LIBC.abort()


ABORTS = {name: death for name, death in DEATHS.items() if name not in FAULTS}


# ---------------------------------------------------------------- in workers


class Dying:
    """Healthy samples, and between them one for each death."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names = names
        self.folder = folder

    def __len__(self) -> int:
        return 2 * len(self.names)

    def __getitem__(self, index: int) -> int:
        if index % 2:
            _, hard = resource.getrlimit(resource.RLIMIT_CORE)
            resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a process with torch in it makes a gigabyte of core
            DEATHS[self.names[index // 2]].act(self.folder)
        return index


def let_die(names: list[str], folder: Path, method: str) -> dict[str, Incident]:
    """Every death once, in workers of one loader; each sample's incident, after all others were delivered."""
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None, max_restarts=10 * len(names))
    dataset: Any = Dying(names, folder)
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        dataset, batch_size=2, num_workers=2, multiprocessing_context=method, faults=policy
    )
    delivered = [int(index) for batch in loader for index in batch]
    assert delivered == list(range(0, 2 * len(names), 2))
    return {name: loader.quarantine[2 * place + 1] for place, name in enumerate(names)}


def assert_judged(name: str, incident: Incident, index: int) -> None:
    """That the verdict is the one in the table, about the right sample."""
    death, verdict = DEATHS[name], incident.verdict
    assert verdict is not None
    shown = f"{verdict.cause} | {verdict.facts}"
    assert verdict.name is death.name, shown
    assert incident.indices == (index,)
    assert [word for word in death.words if word not in verdict.cause] == [], shown
    assert [fact for fact in death.facts if fact not in " | ".join(verdict.facts)] == [], shown
    if death.confidence is not None:
        assert verdict.confidence is death.confidence, shown
    assert verdict.remedies
    assert verdict.facts
