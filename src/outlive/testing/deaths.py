"""Ways in which a process can really die, hang or waste: each function does it to the process that calls it.

Reads   nothing.
Writes  nothing that outlives the process, but what it is about: processes that are left behind end by themselves.
Never   pretends: a segmentation fault is a read of an address that is not there, not a signal that is sent.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import sys
import tempfile
import threading
import time
from typing import NoReturn

_PAGE = mmap.PAGESIZE
_STACK_BYTES = 8 << 20
_FOR_EVER_S = 3600.0
_ORPHANS_LIVE_S = 600
_kept: list[object] = []  # what was leaked, as long as the process lives


def without_core() -> None:
    """A real crash of a process with torch in it would otherwise write a gigabyte of core."""
    if sys.platform == "win32":
        return
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


# ---------------------------------------------------------------- deaths


def read_null() -> None:
    ctypes.string_at(0)


def execute_illegal() -> None:
    _run("illegal")


def read_truncated_map() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(_PAGE)
        view = mmap.mmap(file.fileno(), _PAGE)
        file.truncate(0)
        view[0]


def call_abort() -> None:
    ctypes.CDLL(None).abort()


def divide_by_zero() -> None:
    # Integer division does not trap outside of x86: there the signal is sent.
    if _code("divide"):
        _run("divide")
    os.kill(os.getpid(), signal.SIGFPE)


def overflow_stack() -> None:
    import resource

    # The main thread's stack grows up to the limit of this moment: an unlimited one would take all memory first.
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (_STACK_BYTES, hard))
    _run("recurse")


def kill_self(number: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), number)


def call_sys_exit(code: int = 4) -> NoReturn:
    sys.exit(code)


def call_os_exit(code: int = 3) -> NoReturn:
    os._exit(code)


def run_out_of_memory(most_bytes: int) -> None:
    """Take memory until somebody ends this; at `most_bytes` it ends itself as the kernel's OOM killer would."""
    step = 16 << 20
    taken = []
    for _ in range(0, most_bytes, step):
        taken.append(_touched(step))
    os.kill(os.getpid(), signal.SIGKILL)


# ---------------------------------------------------------------- hangs


def loop_with_gil() -> None:
    _run("loop")


def loop_in_python() -> NoReturn:
    while True:
        pass


def sleep_for_ever() -> NoReturn:
    while True:
        time.sleep(_FOR_EVER_S)


def wait_for_lock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def stop_self() -> NoReturn:
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


# ---------------------------------------------------------------- waste


def leak_memory(size_bytes: int) -> None:
    _kept.append(_touched(size_bytes))


def leak_descriptors(count: int) -> None:
    for _ in range(count):
        _kept.append(os.open(os.devnull, os.O_RDONLY))


def leave_processes(count: int) -> None:
    """Start processes in sessions of their own, and forget them. They end by themselves after ten minutes."""
    program = f"import time; time.sleep({_ORPHANS_LIVE_S})"
    for _ in range(count):
        os.posix_spawn(
            sys.executable, [sys.executable, "-S", "-E", "-c", program], dict(os.environ), setsid=True, setsigmask=()
        )


def close_descriptors() -> None:
    """All but the standard streams, behind everybody's back."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.closerange(3, min(soft, 1 << 20))


def _touched(size_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for at in range(0, size_bytes, _PAGE):
        memory[at] = 1
    return memory


# ---------------------------------------------------------------- machine code

_CODE = {
    "x86_64": {
        "illegal": "0f0b",  # ud2
        "divide": "31c9 b801000000 99 f7f9 c3",  # xor ecx,ecx; mov eax,1; cdq; idiv ecx; ret
        "recurse": "4881ec00040000 e8f4ffffff",  # sub rsp,1024; call itself
        "loop": "ebfe",  # jmp itself
    },
    "aarch64": {
        "illegal": "00000000",  # udf
        "divide": "",
        "recurse": "ff0310d1 fe0300f9 feffff97",  # sub sp,sp,1024; str x30,[sp]; bl itself
        "loop": "00000014",  # b itself
    },
}


def _code(name: str) -> bytes:
    known = _CODE.get(platform.machine())
    if known is None:
        raise NotImplementedError(
            f"this fault is machine code, and there is some for {' and '.join(_CODE)}, not for {platform.machine()}"
        )
    return bytes.fromhex(known[name])


def _run(name: str) -> None:
    """Execute machine code in this thread, with the GIL held."""
    code = _code(name)
    memory = mmap.mmap(-1, _PAGE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.PYFUNCTYPE(None)(address)()
