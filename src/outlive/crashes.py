"""What the fatal-signal handler saw: plain data about one crash, and what its numbers mean by themselves.

Reads   nothing.
Writes  nothing.
Never   a guess at the cause: that is the verdict's.
"""

from __future__ import annotations

import signal as _signal
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from outlive.private import PRIVATE

SI_KERNEL = 0x80
SIGABRT, SIGBUS, SIGSEGV = int(_signal.SIGABRT), int(_signal.SIGBUS), int(_signal.SIGSEGV)
_PAGE_FAULT = 14  # x86-64's trap number
_DELETED = " (deleted)"
HEAP = "[heap]"
_ARENA = 64 << 20  # glibc's HEAP_MAX_SIZE: each further arena of malloc begins at a multiple of it
_NO_FILES = ("/dev/zero", "/dev/shm/", "/memfd:", "/SYSV", "/anon_hugepage")  # how maps show shared memory
_SENT = {0: "SI_USER", -1: "SI_QUEUE", -2: "SI_TIMER", -3: "SI_MESGQ", -4: "SI_ASYNCIO", -5: "SI_SIGIO", -6: "SI_TKILL"}
_CODES: Mapping[int, tuple[str, ...]] = {  # from 1 on
    int(_signal.SIGSEGV): (
        *("SEGV_MAPERR", "SEGV_ACCERR", "SEGV_BNDERR", "SEGV_PKUERR", "SEGV_ACCADI"),
        *("SEGV_ADIDERR", "SEGV_ADIPERR", "SEGV_MTEAERR", "SEGV_MTESERR", "SEGV_CPERR"),
    ),
    int(_signal.SIGBUS): ("BUS_ADRALN", "BUS_ADRERR", "BUS_OBJERR", "BUS_MCEERR_AR", "BUS_MCEERR_AO"),
    int(_signal.SIGILL): (
        *("ILL_ILLOPC", "ILL_ILLOPN", "ILL_ILLADR", "ILL_ILLTRP", "ILL_PRVOPC"),
        *("ILL_PRVREG", "ILL_COPROC", "ILL_BADSTK", "ILL_BADIADDR"),
    ),
    int(_signal.SIGFPE): (
        *("FPE_INTDIV", "FPE_INTOVF", "FPE_FLTDIV", "FPE_FLTOVF", "FPE_FLTUND"),
        *("FPE_FLTRES", "FPE_FLTINV", "FPE_FLTSUB"),
    ),
    int(_signal.SIGTRAP): ("TRAP_BRKPT", "TRAP_TRACE", "TRAP_BRANCH", "TRAP_HWBKPT", "TRAP_UNK", "TRAP_PERF"),
    int(_signal.SIGSYS): ("SYS_SECCOMP", "SYS_USER_DISPATCH"),
}


@dataclass(frozen=True)
class Region:
    """A line of /proc/self/maps."""

    start: int
    end: int
    permissions: str
    offset: int
    path: str

    @property
    def executable(self) -> bool:
        return "x" in self.permissions

    @property
    def file(self) -> str:
        """The path of the file that it shows; empty for memory without one, shared memory included."""
        path = self.path.removesuffix(_DELETED)
        return "" if not path.startswith("/") or path.startswith(_NO_FILES) else path

    @property
    def deleted(self) -> bool:
        """Whether its file has no name any more, or another file has it."""
        return self.path.endswith(_DELETED)

    @property
    def special(self) -> str:
        """«[heap]», «[stack]», «[vdso]»; empty for all others. What malloc keeps for a thread is heap, too."""
        if not self.path and self.permissions == "rw-p" and self.start % _ARENA == 0:
            return HEAP
        return self.path if self.path.startswith("[") else ""


@dataclass(frozen=True)
class CrashRecord:
    """One fatal signal, as the kernel told it to the process that died of it."""

    signal: int
    code: int
    pid: int
    thread: int  # the kernel's number; the main thread's is the pid
    thread_name: str = ""
    time_ns: int = 0  # CLOCK_MONOTONIC
    error: int = 0
    address: int | None = None  # None: the signal has none, or the kernel does not know it
    sender_pid: int | None = None  # None: no process sent it
    sender_uid: int | None = None
    system_call: int | None = None  # of SIGSYS
    architecture: str = ""  # as platform.machine() says; empty: one whose registers we do not know
    trap: int | None = None  # the CPU's number of the trap, x86-64 only
    fault_error: int | None = None  # x86-64: error code of the page fault; aarch64: ESR
    registers: Mapping[str, int] = field(default_factory=dict, hash=False, metadata=PRIVATE)
    instruction_pointer: int | None = None
    instruction: bytes = field(default=b"", metadata=PRIVATE)  # at the instruction pointer, up to 64
    before: bytes = field(
        default=b"", metadata=PRIVATE
    )  # the 16 bytes before it: where a trap leaves the pointer past its instruction
    stack_pointer: int | None = None
    stack_address: int = 0
    stack: bytes = field(
        default=b"", metadata=PRIVATE
    )  # at stack_address, which is above the stack pointer if that was not mapped
    return_addresses: tuple[int, ...] = ()  # along the frame pointers: right where code keeps them
    # Words on the stack that point into code, stale ones among them.
    possible_return_addresses: tuple[int, ...] = field(default=(), metadata=PRIVATE)
    regions: tuple[Region, ...] = ()  # what the addresses above lie in, or right below; lowest first
    message: str = ""  # what the C library said before it called abort()
    shared_free_bytes: int | None = None  # of SIGBUS: what /dev/shm had at that moment
    shared_bytes: int | None = None  # its size

    @property
    def signal_name(self) -> str:
        try:
            return _signal.Signals(self.signal).name
        except ValueError:  # a damaged record
            return f"signal {self.signal}"

    @property
    def code_name(self) -> str:
        """«SEGV_MAPERR», «SI_USER»; the number where it has no name."""
        if self.code == SI_KERNEL:
            return "SI_KERNEL"
        names = _CODES.get(self.signal, ())
        return names[self.code - 1] if 0 < self.code <= len(names) else _SENT.get(self.code, str(self.code))

    @property
    def address_as_text(self) -> str:
        """What `address` says where text was taken for a pointer; else empty."""
        return "" if self.address is None else as_text(self.address)

    @property
    def is_sent(self) -> bool:
        """Whether a process sent it (kill(), abort()), and no instruction is to blame."""
        return self.code <= 0

    @property
    def access(self) -> str | None:
        """What was tried at `address`: «read», «write» or «execute»; None where the CPU does not say."""
        if self.address is None or self.fault_error is None:
            return None
        if self.architecture == "x86_64" and self.trap == _PAGE_FAULT:
            return "execute" if self.fault_error & 16 else "write" if self.fault_error & 2 else "read"
        if self.architecture == "aarch64":
            kind = self.fault_error >> 26 & 0x3F
            if kind in (0x20, 0x21):
                return "execute"
            if kind in (0x24, 0x25):
                return "write" if self.fault_error & 64 else "read"
        return None

    def region_of(self, address: int | None) -> Region | None:
        """The mapped file or memory that an address lies in."""
        for region in self.regions:
            if address is not None and region.start <= address < region.end:
                return region
        return None

    def region_above(self, address: int) -> Region | None:
        """The next one that is mapped, right above an address that is not."""
        return next((region for region in self.regions if region.start > address), None)

    def region_below(self, address: int) -> Region | None:
        return next((region for region in reversed(self.regions) if region.end <= address), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only; addresses and bytes in hexadecimal, as every other tool prints them."""
        return {
            "signal": self.signal_name,
            "signal_number": self.signal,
            "code": self.code_name,
            "code_number": self.code,
            "pid": self.pid,
            "thread": self.thread,
            "thread_name": self.thread_name,
            "time_ns": self.time_ns,
            "error": self.error,
            "address": _hex(self.address),
            "access": self.access,
            "sender_pid": self.sender_pid,
            "sender_uid": self.sender_uid,
            "system_call": self.system_call,
            "architecture": self.architecture,
            "trap": self.trap,
            "fault_error": self.fault_error,
            "registers": {name: _hex(value) for name, value in self.registers.items()},
            "instruction_pointer": _hex(self.instruction_pointer),
            "instruction": self.instruction.hex(),
            "before": self.before.hex(),
            "stack_pointer": _hex(self.stack_pointer),
            "stack_address": _hex(self.stack_address),
            "stack": self.stack.hex(),
            "return_addresses": [_hex(value) for value in self.return_addresses],
            "possible_return_addresses": [_hex(value) for value in self.possible_return_addresses],
            "regions": [
                {"start": _hex(r.start), "end": _hex(r.end), "permissions": r.permissions}
                | {"offset": _hex(r.offset), "path": r.path}
                for r in self.regions
            ],
            "message": self.message,
            "shared_free_bytes": self.shared_free_bytes,
            "shared_bytes": self.shared_bytes,
        }

    @classmethod
    def from_dict(cls, told: Mapping[str, Any]) -> CrashRecord:
        """The record of `to_dict`; names that a newer version tells are passed over."""
        known = {f.name for f in fields(cls)} - {"signal", "code"}
        values = {name: value for name, value in told.items() if name in known}
        for name in ("address", "instruction_pointer", "stack_pointer", "stack_address"):
            if values.get(name) is not None:
                values[name] = int(values[name], 16)
        for name in ("instruction", "before", "stack"):
            values[name] = bytes.fromhex(values.get(name, ""))
        for name in ("return_addresses", "possible_return_addresses"):
            values[name] = tuple(int(value, 16) for value in values.get(name, ()))
        values["registers"] = {name: int(value, 16) for name, value in values.get("registers", {}).items()}
        values["regions"] = tuple(
            Region(int(r["start"], 16), int(r["end"], 16), r["permissions"], int(r["offset"], 16), r["path"])
            for r in values.get("regions", ())
        )
        return cls(signal=told["signal_number"], code=told["code_number"], **values)


def as_text(value: int) -> str:
    """The characters that a word is made of, if it is text and no address; else empty."""
    raw = (value % (1 << 64)).to_bytes(8, "little").rstrip(b"\0")
    return raw.decode("ascii") if len(raw) >= 4 and all(32 <= byte < 127 for byte in raw) else ""


def _hex(value: int | None) -> str | None:
    return None if value is None else hex(value)
