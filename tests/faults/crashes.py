"""Crashes of which everything is known beforehand: each notes what its record must say, then dies.

Reads   nothing.
Writes  a file with the expected facts, right before the death.
Never   a class or function that a spawned worker could not import by name.

The code that faults is ours, in a page of its own: so its address, its bytes and its registers are known.
"""

from __future__ import annotations

import ctypes
import functools
import json
import mmap
import os
import platform
import resource
import signal
import struct
import subprocess
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

X86 = platform.machine() == "x86_64"
_CODE = {
    "x86_64": {
        "load": "488b07 c3",  # mov rax,[rdi]; ret
        "store": "488907 c3",  # mov [rdi],rax; ret
        "illegal": "0f0b",  # ud2
        "trap": "cc c3",  # int3; ret
        "divide": "31c9 b801000000 99 f7f9 c3",  # xor ecx,ecx; mov eax,1; cdq; idiv ecx; ret
        "recurse": "4881ec00040000 e8f4ffffff",  # sub rsp,1024; call itself
        "await": "833f00 74fb 488b06 c3",  # cmp dword [rdi],0; je back; mov rax,[rsi]; ret
    },
    "aarch64": {
        "load": "000040f9 c0035fd6",  # ldr x0,[x0]; ret
        "store": "000000f9 c0035fd6",  # str x0,[x0]; ret
        "illegal": "00000000",  # udf
        "trap": "000020d4 c0035fd6",  # brk 0; ret
        "divide": "",
        "recurse": "ff0310d1 fe0300f9 feffff97",  # sub sp,sp,1024; str x30,[sp]; bl itself
        "await": "020040b9 e2ffff34 210040f9 c0035fd6",  # ldr w2,[x0]; cbz w2,back; ldr x1,[x1]; ret
    },
}[platform.machine()]
CODE = {name: bytes.fromhex(code) for name, code in _CODE.items()}
ARGUMENT = "rdi" if X86 else "x0"
WILD = 0x123456789000
NOT_CANONICAL = 0xDEAD << 48
FORBIDDEN_CALL = 162 if X86 else 81  # sync
PEEK_CALL = 310 if X86 else 270  # process_vm_readv

Note = Callable[..., None]


def page(content: bytes = b"", protection: int = mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) -> int:
    """The address of a fresh page; it stays."""
    memory = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(content)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    _kept.append(memory)
    if protection != mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, protection)
    return address


_kept: list[mmap.mmap] = []


def run(address: int, argument: int = 0) -> None:
    ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(address)(argument)


def touch(note: Note, what: str, argument: int, **expected: Any) -> None:
    """Load from or store to an address, by an instruction that is known."""
    code = page(CODE[what])
    note(ip=code, bytes=CODE[what], argument=argument, access="write" if what == "store" else "read", **expected)
    run(code, argument)


# ---------------------------------------------------------------- deaths


def read_null(note: Note) -> None:
    note(signal.SIGSEGV, "SEGV_MAPERR", address=0, access="read", library="libc")
    ctypes.string_at(0)


def read_wild(note: Note) -> None:
    touch(note, "load", WILD, signal=signal.SIGSEGV, code="SEGV_MAPERR", address=WILD)


def write_wild(note: Note) -> None:
    touch(note, "store", WILD, signal=signal.SIGSEGV, code="SEGV_MAPERR", address=WILD)


def write_read_only(note: Note) -> None:
    at = page(protection=mmap.PROT_READ)
    touch(note, "store", at, signal=signal.SIGSEGV, code="SEGV_ACCERR", address=at)


def read_not_canonical(note: Note) -> None:
    """The CPU does not tell the address, and the kernel says 0: that must not look like a null pointer."""
    code = page(CODE["load"])
    note(signal.SIGSEGV, "SI_KERNEL", ip=code, bytes=CODE["load"], argument=NOT_CANONICAL)
    run(code, NOT_CANONICAL)


def call_nothing(note: Note) -> None:
    note(signal.SIGSEGV, "SEGV_MAPERR", address=WILD, access="execute", ip=WILD, bytes=b"", exact=True)
    run(WILD)


def execute_illegal(note: Note) -> None:
    code = page(CODE["illegal"])
    note(signal.SIGILL, "ILL_ILLOPN" if X86 else "ILL_ILLOPC", address=code, ip=code, bytes=CODE["illegal"])
    run(code)


def execute_illegal_at_the_end_of_memory(note: Note) -> None:
    """Nothing is mapped after it: the record has what there is."""
    pages = mmap.mmap(-1, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    _kept.append(pages)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    size = len(CODE["illegal"])
    code = start + mmap.PAGESIZE - size
    ctypes.memmove(code, CODE["illegal"], size)
    ctypes.CDLL(None).munmap(ctypes.c_void_p(start + mmap.PAGESIZE), mmap.PAGESIZE)
    note(signal.SIGILL, "ILL_ILLOPN" if X86 else "ILL_ILLOPC", ip=code, bytes=CODE["illegal"], exact=True, address=code)
    run(code)


def read_truncated_file(note: Note) -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        view = mmap.mmap(file.fileno(), mmap.PAGESIZE)
        file.truncate(0)
    _kept.append(view)
    at = ctypes.addressof(ctypes.c_char.from_buffer(view))
    touch(note, "load", at, signal=signal.SIGBUS, code="BUS_ADRERR", address=at)


def divide_by_zero(note: Note) -> None:
    code = page(CODE["divide"])
    note(signal.SIGFPE, "FPE_INTDIV", address=code + 8, ip=code + 8, bytes=CODE["divide"][8:])
    run(code)


def hit_trap(note: Note) -> None:
    """On x86-64 the pointer is past the instruction."""
    code = page(bytes(16) + CODE["trap"]) + 16
    if X86:
        note(signal.SIGTRAP, "SI_KERNEL", ip=code + 1, bytes=CODE["trap"][1:], before=bytes(15) + CODE["trap"][:1])
    else:
        note(signal.SIGTRAP, "TRAP_BRKPT", ip=code, bytes=CODE["trap"], address=code)
    run(code)


def call_abort(note: Note) -> None:
    note(signal.SIGABRT, "SI_TKILL", sender=os.getpid(), library="libc")
    ctypes.CDLL(None).abort()


def overflow_stack(note: Note) -> None:
    # The main thread's stack grows up to the limit of this moment: an unlimited one would take all memory first.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (8 << 20, hard))
    code = page(CODE["recurse"])
    note(signal.SIGSEGV, "SEGV_MAPERR", access="write", overflow=True, near=code)
    run(code)


def call_forbidden(note: Note) -> None:
    forbid(FORBIDDEN_CALL)
    note(signal.SIGSYS, "SYS_SECCOMP", system_call=FORBIDDEN_CALL, library="libc", any_address=True)
    ctypes.CDLL(None).sync()


def be_killed(note: Note) -> None:
    """Somebody's `kill -SEGV`."""
    killer = subprocess.Popen(["sh", "-c", "read go; kill -SEGV $PPID; sleep 60"], stdin=subprocess.PIPE)
    note(signal.SIGSEGV, "SI_USER", sender=killer.pid)
    assert killer.stdin is not None
    killer.stdin.write(b"go\n")
    killer.stdin.flush()
    killer.wait()


def crash_in_thread(note: Note) -> None:
    code = page(CODE["load"])

    def in_thread() -> None:
        expected = {"ip": code, "bytes": CODE["load"], "argument": WILD, "access": "read", "address": WILD}
        note(signal.SIGSEGV, "SEGV_MAPERR", thread=threading.get_native_id(), **expected)
        run(code, WILD)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()


def forbid(number: int, errno: int | None = None, kill: bool = False) -> None:
    """Have a system call raise SIGSYS, or fail, or end the process, for the rest of this process's life."""
    action = 0x00030000 if errno is None else 0x00050000 | errno  # SECCOMP_RET_TRAP, SECCOMP_RET_ERRNO
    action = 0x80000000 if kill else action  # SECCOMP_RET_KILL_PROCESS
    steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, action), (0x06, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    if libc.prctl(22, 2, ctypes.byref(described), 0, 0) != 0:  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
        raise OSError(ctypes.get_errno(), "no seccomp filters here")


CRASHES = {
    crash.__name__: crash
    for crash in (
        *(read_null, read_wild, write_wild, write_read_only, call_nothing, execute_illegal),
        *(execute_illegal_at_the_end_of_memory, read_truncated_file, hit_trap, call_abort, overflow_stack),
        *(call_forbidden, be_killed, crash_in_thread),
        *((read_not_canonical, divide_by_zero) if X86 else ()),
    )
}


# ---------------------------------------------------------------- what the record must say


@dataclass(frozen=True)
class Crasher:
    """Dies in one of these ways, and leaves a note of it."""

    name: str
    notes: str

    @property
    def path(self) -> Path:
        return Path(self.notes) / f"{self.name}.json"

    def __call__(self) -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a process with torch in it makes a gigabyte of core
        CRASHES[self.name](functools.partial(_note, self.path))

    def expected(self) -> dict[str, Any]:
        expected: dict[str, Any] = json.loads(self.path.read_text())
        return {name: bytes.fromhex(v) if name in ("bytes", "before") else v for name, v in expected.items()}


def _note(path: Path, signal: int, code: str, **expected: Any) -> None:
    facts = {"signal": int(signal), "code": code, "pid": os.getpid(), "thread": threading.get_native_id(), **expected}
    path.write_text(json.dumps(facts, default=bytes.hex))


def assert_record_says(crash: Any, expected: dict[str, Any]) -> None:
    """That the record has exactly the facts that were noted."""
    assert (crash.signal, crash.code_name) == (expected["signal"], expected["code"])
    assert (crash.pid, crash.thread) == (expected["pid"], expected["thread"])
    assert crash.is_sent == ("sender" in expected)
    assert crash.sender_pid == expected.get("sender")
    assert crash.sender_uid == (os.getuid() if "sender" in expected else None)
    assert crash.system_call == expected.get("system_call")
    assert crash.access == expected.get("access")
    if expected.get("overflow"):
        assert abs(crash.address - crash.stack_pointer) <= 1 << 16
        assert expected["near"] <= crash.instruction_pointer < expected["near"] + mmap.PAGESIZE
        assert crash.stack_address >= crash.stack_pointer
    elif not expected.get("any_address"):
        assert crash.address == expected.get("address")
    if "ip" in expected:
        assert crash.instruction_pointer == expected["ip"]
        got = crash.instruction if expected.get("exact") else crash.instruction[: len(expected["bytes"])]
        assert got == expected["bytes"]
        assert expected.get("exact") or len(crash.instruction) == 64
    if "before" in expected:
        assert crash.before == expected["before"]
    if "argument" in expected:
        assert crash.registers[ARGUMENT] == expected["argument"]
    if "library" in expected:
        region = crash.region_of(crash.instruction_pointer)
        assert region is not None
        assert region.executable
        assert expected["library"] in region.path
    assert crash.architecture == platform.machine()
    assert crash.registers["rip" if X86 else "pc"] == crash.instruction_pointer
    assert crash.registers["rsp" if X86 else "sp"] == crash.stack_pointer
    assert len(crash.stack) == 4096
    assert crash.possible_return_addresses
    assert all(crash.region_of(address).executable for address in crash.possible_return_addresses)
