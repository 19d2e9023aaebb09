"""The threads of another process, as the kernel shows them: what each waits for, or where its code runs.

Reads   /proc/PID, its memory; registers through ptrace, of a process that is about to be ended.
Writes  nothing there. `sample_registers` stops a thread for less than a millisecond at a time.
Never   waits for long: a thread that does not stop is left alone.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass

from outlive._system import calls, descriptors

_MOST_THREADS = 32
_MOST_POLLED = 8
_MOST_NATIVE = 8  # names of native threads
_PTRACE_CONT, _PTRACE_DETACH = 7, 17
_PTRACE_GETREGSET, _PTRACE_SEIZE, _PTRACE_INTERRUPT = 0x4204, 0x4206, 0x4207
_NT_PRSTATUS = 1
# Where the kernel has the instruction pointer, and each register that the tables for unwinding name by a number.
_REGISTERS: dict[str, tuple[int, dict[int, int]]] = {
    "x86_64": (16, {7: 19, 6: 4, 3: 5, 12: 3, 13: 2, 14: 1, 15: 0}),
    "aarch64": (32, {number: number for number in range(19, 32)}),
}
_STOP_PATIENCE_S = 2.0  # for all samples together, where it gets no processor
_PRIVATE_FUTEX = 128  # not set where other processes may wake


@dataclass(frozen=True)
class Thread:
    """One thread at one moment."""

    number: int
    name: str
    state: str
    cpu_ns: int
    system_call: str
    arguments: tuple[int, ...]
    stack_pointer: int
    instruction_pointer: int
    waits_in: str


def threads_of(pid: int) -> list[Thread]:
    """The main thread first; none when the process is gone."""
    try:
        numbers = sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda number: (number != pid, number))
    except OSError:
        return []
    return [thread for number in numbers[:_MOST_THREADS] if (thread := _thread(pid, number)) is not None]


def others_here() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The other threads of this process: Python's by name, and native ones, counted: «4 × python»."""
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    named[threading.get_native_id()] = ""
    native = Counter(
        _read(f"/proc/self/task/{number}/comm").strip()
        for number in sorted(os.listdir("/proc/self/task"))
        if int(number) not in named
    )
    counted = (f"{count} × {name}" for name, count in native.most_common(_MOST_NATIVE) if name)
    return tuple(name for name in named.values() if name), tuple(counted)


def _thread(pid: int, number: int) -> Thread | None:
    folder = f"/proc/{pid}/task/{number}"
    stat = _read(f"{folder}/stat")
    head, _, rest = stat.rpartition(")")
    fields = rest.split()
    if len(fields) < 13:
        return None
    waits_in = _read(f"{folder}/wchan").strip()
    waits_in = "" if waits_in == "0" else waits_in
    name, arguments, stack, instruction = _system_call(_read(f"{folder}/syscall").split(), waits_in)
    spent = _read(f"{folder}/schedstat").split()
    ticks = int(fields[11]) + int(fields[12])
    cpu_ns = int(spent[0]) if spent else ticks * (1_000_000_000 // os.sysconf("SC_CLK_TCK"))
    return Thread(number, head.partition("(")[2], fields[0], cpu_ns, name, arguments, stack, instruction, waits_in)


def _system_call(words: list[str], waits_in: str) -> tuple[str, tuple[int, ...], int, int]:
    """From «202 0x7f… 0x189 … SP PC»; «running», «-1 SP PC» and nothing at all are no system call."""
    if len(words) < 9:
        return (calls.by_kernel_function(waits_in) if not words else ""), (), 0, 0
    values = [int(word, 16) for word in words[1:]]
    return calls.name_of(int(words[0]), waits_in), tuple(values[:6]), values[6], values[7]


def kernel_stack(pid: int, number: int) -> tuple[str, ...]:
    """Innermost first; empty where only root may see it."""
    lines = _read(f"/proc/{pid}/task/{number}/stack").splitlines()
    return tuple(line.partition("] ")[2].partition("+")[0] for line in lines[:8])


def tracer_of(pid: int) -> str:
    """Who debugs it, in words; "" for nobody."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith("TracerPid:") and (tracer := int(line.split()[1])):
            return descriptors.describe_process(tracer)
    return ""


def target_of(pid: int, thread: Thread) -> str:
    """What its system call is about: a file, a peer, a process; "" where nobody knows."""
    name, arguments = thread.system_call, thread.arguments
    if not arguments:
        return ""
    if name in calls.FD_FIRST:
        target = descriptors.describe(pid, arguments[0])
        holder = descriptors.holder_of_awaited_lock(pid) if name in ("flock", "fcntl") else ""
        return f"{target}, which {holder} has locked" if holder else target
    if name in calls.PATH_AT:
        path = _text_at(pid, arguments[calls.PATH_AT[name]])
        return descriptors.describe_path(pid, path) if path else ""
    if name in ("wait4", "waitid"):
        return _awaited(pid, arguments[0] if name == "wait4" else arguments[1])
    fds: list[int] = []
    if name in ("poll", "ppoll"):
        fds = _polled(pid, arguments[0], arguments[1])
    elif name in ("select", "pselect6"):
        fds = _selected(pid, arguments)
    elif name.startswith("epoll"):
        fds = descriptors.epoll_members(pid, arguments[0])
    found = [what for fd in fds[:_MOST_POLLED] if (what := descriptors.describe(pid, fd))]
    return ", ".join(dict.fromkeys(found))


def waits_for_ever(thread: Thread) -> bool:
    """Whether its system call has no timeout; False where nobody knows."""
    name, arguments = thread.system_call, thread.arguments
    if not arguments:
        return False
    if name == "futex":
        return arguments[3] == 0
    if name in ("poll", "ppoll"):
        return arguments[2] in ((1 << 32) - 1, (1 << 64) - 1) if name == "poll" else arguments[2] == 0
    if name in ("select", "pselect6"):
        return arguments[4] == 0
    if name in ("epoll_wait", "epoll_pwait"):
        return arguments[3] & 0xFFFFFFFF == 0xFFFFFFFF
    return name in calls.FD_FIRST or name in calls.PATH_AT or name in ("wait4", "waitid")


def is_shared_futex(thread: Thread) -> bool:
    """Whether somebody in another process may wake it."""
    return thread.system_call == "futex" and len(thread.arguments) > 1 and not thread.arguments[1] & _PRIVATE_FUTEX


def _awaited(pid: int, number: int) -> str:
    if number & 0x80000000 or not number:  # any child
        return ", ".join(map(descriptors.describe_process, descriptors.children_of(pid)[:3]))
    return descriptors.describe_process(number)


def _polled(pid: int, address: int, count: int) -> list[int]:
    count = min(count, _MOST_POLLED)
    data = memory_of(pid, address, 8 * count)
    return [fd for fd, _ in struct.iter_unpack("=iI", data[: len(data) // 8 * 8]) if fd >= 0]


def _selected(pid: int, arguments: tuple[int, ...]) -> list[int]:
    count = min(arguments[0], 1024)
    found: list[int] = []
    for address in arguments[1:4]:
        bits = int.from_bytes(memory_of(pid, address, (count + 7) // 8), "little") if address else 0
        found += [fd for fd in range(count) if bits >> fd & 1]
    return found


# ---------------------------------------------------------------- memory and code


def memory_of(pid: int, address: int, size: int) -> bytes:
    """b"" where it is not mapped, or not for us to read."""
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
            return os.pread(file.fileno(), size, address)
    except (OSError, OverflowError, ValueError):
        return b""


def _text_at(pid: int, address: int) -> str:
    room = 4096 - address % 4096  # not into the next page, which may not be there
    data = memory_of(pid, address, room)
    if b"\0" not in data:
        data += memory_of(pid, address + room, 4096)
    return data.partition(b"\0")[0].decode("utf-8", "replace")


def all_processes() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return []


def maps_same(pid: int, other: int, address: int) -> bool:
    """Whether a process maps the file that another one has at this address, and shares in it."""
    shared = next((row for row in _shared_files(other) if row[0] <= address < row[1]), None)
    return shared is not None and any(row[2] == shared[2] for row in _shared_files(pid))


def _shared_files(pid: int) -> list[tuple[int, int, tuple[str, str]]]:
    """Where files lie that a process shares with others: begin, end, and which file it is."""
    found = []
    for line in _read(f"/proc/{pid}/maps").splitlines():
        span, permissions, _, device, inode, *_ = line.split(None, 5)
        if permissions[3] == "s" and inode != "0":
            begin, _, end = span.partition("-")
            found.append((int(begin, 16), int(end, 16), (device, inode)))
    return found


class Maps:
    """Which file lies at which address of a process."""

    def __init__(self, pid: int) -> None:
        self._rows: list[tuple[int, int, bool, int, str]] = []
        for line in _read(f"/proc/{pid}/maps").splitlines():
            span, permissions, offset, _, _, *path = line.split(None, 5)
            begin, _, end = span.partition("-")
            row = (int(begin, 16), int(end, 16), "x" in permissions, int(offset, 16), path[0] if path else "")
            self._rows.append(row)

    def place(self, address: int, *, code: bool = True) -> str:
        """«libfoo.so+0x1a2f»; "" where there is no such memory, or it is not code."""
        for begin, end, executable, offset, path in self._rows:
            if begin <= address < end:
                if code and not executable:
                    return ""
                name = os.path.basename(path) or "code without a file"
                return f"{name}+{address - begin + offset:#x}" if path.startswith("/") else name
        return ""

    def path(self, address: int) -> str:
        return next((row[4] for row in self._rows if row[0] <= address < row[1]), "")

    def image(self, address: int) -> int:
        """Where the beginning of the file lies whose code is at an address; 0 for none."""
        path = self.path(address)
        if not path.startswith("/"):
            return 0
        return max((row[0] for row in self._rows if row[4] == path and not row[3] and row[0] <= address), default=0)


def sample_registers(thread: int, count: int, pause_s: float) -> list[tuple[int, dict[int, int]]]:
    """Instruction pointer and registers, as `unwinding` has them, of a thread that runs, some times over; only before
    it is killed.

    Fewer, or none, where we may not know, or where it does not stop in time: on a busy machine it must first be given a
    processor to stop on.
    """
    instruction, numbers = _REGISTERS.get(os.uname().machine, (0, {}))
    if not numbers:
        return []
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    libc.ptrace.restype = ctypes.c_long
    if libc.ptrace(_PTRACE_SEIZE, thread, None, None) != 0:
        return []
    deadline = time.monotonic() + _STOP_PATIENCE_S
    found: list[tuple[int, dict[int, int]]] = []
    for number in range(count):
        if libc.ptrace(_PTRACE_INTERRUPT, thread, None, None) != 0 or not _has_stopped(thread, deadline):
            break
        room = (ctypes.c_uint64 * 40)()
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(room), ctypes.sizeof(room))
        if libc.ptrace(_PTRACE_GETREGSET, thread, _NT_PRSTATUS, ctypes.addressof(vector)) == 0:
            found.append((room[instruction], {number: room[at] for number, at in numbers.items()}))
        if number < count - 1:
            libc.ptrace(_PTRACE_CONT, thread, None, None)
            time.sleep(pause_s)
    libc.ptrace(_PTRACE_DETACH, thread, None, None)
    return found


def _has_stopped(thread: int, deadline: float) -> bool:
    while True:
        try:
            # Without WEXITED: its end, should it come now, stays there for whoever reaps it.
            if os.waitid(os.P_PID, thread, os.WSTOPPED | os.WNOHANG) is not None:
                return True
        except ChildProcessError:
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""
