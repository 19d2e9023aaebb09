"""The fatal-signal recorder: its source, its manners towards other handlers, and its record read back.

Reads   recorder.c as text; records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import faulthandler
import mmap
import os
import platform
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from faults import crashes
from faults.crashes import CODE, PEEK_CALL, WILD, page, run
from outlive._capture import blackbox, crash, stacks
from outlive._capture.blackbox import BlackBox
from outlive._system import memory
from outlive.crashes import CrashRecord, Region
from outlive.incident import Stage

SOURCE = Path(crash.__file__).with_name("recorder.c")
WRITING, SAVED = 1, 3

needs_recorder = pytest.mark.skipif(not crash.AVAILABLE, reason="the recorder was not built: no C compiler")


@dataclass
class DyingProcess:
    """A black box, and a place for stacks, of a process that is to die."""

    mapped: ctypes.Array[ctypes.c_ubyte]
    box: BlackBox
    stack_fd: int
    sleeps: int = 0  # of the last one that died

    def dies(self, act: Callable[[], None], minded: bool = True) -> int:
        """Do something in a forked process until it ends; its exit code, negative for a signal."""
        pid = os.fork()
        if pid == 0:
            try:
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                signal.alarm(10)  # a handler that loops must not hold up the tests
                self.box.begin(os.getpid())
                faulthandler.disable()  # pytest's, which would print the death
                if minded:
                    stacks.install(self.stack_fd)
                    crash.install(self.mapped)
                act()
            finally:
                os._exit(0)
        _, status, usage = os.wait4(pid, 0)
        self.sleeps = usage.ru_nvcsw
        return os.waitstatus_to_exitcode(status)

    @property
    def record(self) -> CrashRecord | None:
        return crash.read(self.box)

    @property
    def stack(self) -> str:
        return stacks.read(self.stack_fd)

    @property
    def state(self) -> int:
        return int(struct.unpack_from("<Q", self.box.crash_bytes())[0])


@pytest.fixture
def box() -> Iterator[DyingProcess]:
    fd = memory.create(blackbox.SIZE)
    mapped = memory.attach(fd)
    os.close(fd)
    made = DyingProcess(mapped, BlackBox(mapped), memory.create(stacks.SIZE))
    yield made
    made.box.release()
    os.close(made.stack_fd)


def load_wild() -> None:
    run(page(CODE["load"]), WILD)


# ---------------------------------------------------------------- the source

# man 7 signal-safety; plus bare system calls, which hold neither memory nor locks.
SAFE = {
    *("clock_gettime", "close", "getpid", "memcpy", "memset", "open", "poll", "pthread_sigmask", "raise", "read"),
    *("sigaction", "sigaddset", "sigemptyset", "write", "_exit"),
    "syscall",
}
NO_CALLS = {"if", "while", "for", "return", "sizeof", "switch"}


def unsafe_calls(source: str, start: str = "on_fatal_signal") -> set[str]:
    """What the handler calls, by itself or through its own functions, that is not async-signal-safe."""
    source = re.sub(r"/\*.*?\*/|//[^\n]*", " ", source, flags=re.S)
    source = re.sub(r"^#.*$", " ", source, flags=re.M)
    source = re.sub(r'"(\\.|[^"\\])*"', '""', source)
    bodies = dict(re.findall(r"^static [^;{}()=]*?(\w+)\([^;{}]*\)\n\{\n(.*?)^\}", source, re.S | re.M))
    waiting, seen, unsafe = [start], set(), set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for called in re.findall(r"\b([A-Za-z_]\w*)\s*\(", bodies[name]):
            if called in bodies:
                waiting.append(called)
            elif called not in SAFE | NO_CALLS and not called.startswith(("__atomic_", "__builtin_ia32_")):
                unsafe.add(called)
    return unsafe


@pytest.mark.parametrize("handler", ["on_fatal_signal", "on_ending_signal"])
def test_a_handler_calls_only_what_is_async_signal_safe(handler):
    """It may have interrupted anything: malloc, the dynamic linker, Python."""
    assert unsafe_calls(SOURCE.read_text(), handler) == set()


@pytest.mark.parametrize(
    ("place", "line", "found"),
    [
        ("    save_maps();\n", '    printf("%s", "saved (");\n', "printf"),
        ("    int before = errno;\n", "    free(maps);\n", "free"),
        ("    uint32_t count = 0;\n", "    PyErr_Print ();\n", "PyErr_Print"),
    ],
)
def test_an_unsafe_call_is_found(place, line, found):
    """A check that cannot fail checks nothing; calls in functions that the handler calls count, comments do not."""
    source = SOURCE.read_text()
    assert place in source

    assert unsafe_calls(source.replace(place, place + line)) == {found}
    assert unsafe_calls(source.replace(place, f"{place}    /*{line.strip()}*/\n")) == set()


def test_the_recorder_is_built_where_there_is_a_compiler():
    """Optional means that its absence is no error, not that a broken one goes unseen."""
    headers = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which("cc") is None or not headers.exists():
        pytest.skip("no C compiler, or no headers of Python")

    assert crash.AVAILABLE, "build it: make setup, or python setup.py build_ext --inplace"
    assert crash._recorder.RECORD_SIZE <= blackbox.CRASH_ROOM


@pytest.mark.parametrize("compiler", ["aarch64-linux-gnu-gcc"])
def test_the_source_compiles_for_the_other_architecture(compiler):
    """Without a warning, where there is a compiler for it."""
    if shutil.which(compiler) is None:
        pytest.skip(f"no {compiler}")
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "-DPy_LIMITED_API=0x030A0000"]

    ended = subprocess.run(
        [compiler, *flags, f"-I{sysconfig.get_path('include')}", str(SOURCE)], capture_output=True, text=True
    )

    assert ended.returncode == 0, ended.stderr


# ---------------------------------------------------------------- reading


def test_a_fresh_box_has_no_record(box):
    """Nothing but zeros."""
    assert box.record is None


def test_a_record_that_was_written_over_is_still_readable(box):
    """A wild pointer in native code: whoever reads it must not die of it."""
    noise = random.Random(7)
    for _ in range(20):
        raw = bytearray(noise.randbytes(blackbox.CRASH_ROOM))
        struct.pack_into("<QI", raw, 0, SAVED, 1)
        struct.pack_into("<I", raw, 12, noise.randrange(3))
        struct.pack_into("<q", raw, 56, time.monotonic_ns())
        box.box._bytes[blackbox.CRASH_AT : blackbox.CRASH_AT + blackbox.CRASH_ROOM] = bytes(raw)

        found = box.record

        assert found is not None
        assert isinstance(found.to_dict(), dict)


def test_maps_are_read_line_by_line():
    """Paths with blanks, memory without a path; a line that was cut short is left out."""
    text = (
        b"55d0c0a00000-55d0c0a01000 r--p 00001000 fd:01 1048 /opt/my libs/a b.so (deleted)\n"
        b"7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n"
        b"7ffc5a447000-7ffc5a4"
    )

    assert crash.parse_maps(text) == [
        Region(0x55D0C0A00000, 0x55D0C0A01000, "r--p", 0x1000, "/opt/my libs/a b.so (deleted)"),
        Region(0x7F0000000000, 0x7F0000001000, "rwxp", 0, ""),
    ]


@pytest.mark.parametrize(
    ("record", "access"),
    [
        (CrashRecord(11, 1, 1, 1, address=0, architecture="x86_64", trap=14, fault_error=4), "read"),
        (CrashRecord(11, 1, 1, 1, address=0, architecture="x86_64", trap=14, fault_error=6), "write"),
        (CrashRecord(11, 1, 1, 1, address=0, architecture="x86_64", trap=14, fault_error=0x14), "execute"),
        (CrashRecord(8, 1, 1, 1, address=0, architecture="x86_64", trap=0, fault_error=0), None),
        (CrashRecord(11, 1, 1, 1, address=0, architecture="aarch64", fault_error=0x92000005), "read"),
        (CrashRecord(11, 1, 1, 1, address=0, architecture="aarch64", fault_error=0x92000045), "write"),
        (CrashRecord(11, 1, 1, 1, address=0, architecture="aarch64", fault_error=0x82000005), "execute"),
        (CrashRecord(4, 1, 1, 1, address=0, architecture="aarch64", fault_error=0x02000000), None),
        (CrashRecord(11, 1, 1, 1, address=0), None),
        (CrashRecord(11, 0, 1, 1, architecture="x86_64", trap=14, fault_error=4), None),
    ],
)
def test_the_kind_of_access_is_told_where_the_cpu_tells_it(record, access):
    """From the error code of a page fault, or from ESR."""
    assert record.access == access


@pytest.mark.parametrize(
    ("number", "code", "name"),
    [
        (signal.SIGSEGV, 2, "SEGV_ACCERR"),
        (signal.SIGBUS, 2, "BUS_ADRERR"),
        (signal.SIGILL, 2, "ILL_ILLOPN"),
        (signal.SIGFPE, 1, "FPE_INTDIV"),
        (signal.SIGSYS, 1, "SYS_SECCOMP"),
        (signal.SIGSEGV, 0x80, "SI_KERNEL"),
        (signal.SIGABRT, -6, "SI_TKILL"),
        (signal.SIGABRT, 77, "77"),
    ],
)
def test_codes_have_the_names_of_the_manual(number, code, name):
    """man 2 sigaction."""
    assert CrashRecord(number, code, 1, 1).code_name == name


# ---------------------------------------------------------------- other handlers


@needs_recorder
def test_it_is_installed_where_it_was_installed(box):
    """And not in the process that forked it."""

    def look() -> None:
        before = crash.is_installed()
        os.abort() if not before else os._exit(3)

    assert box.dies(look) == 3
    assert not crash.is_installed()


def enable_faulthandler_anew() -> None:
    faulthandler.disable()
    faulthandler.enable(file=sys.__stderr__)


def install_handler() -> None:
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)


@needs_recorder
@pytest.mark.parametrize("replace", [enable_faulthandler_anew, install_handler])
def test_it_comes_first_again_when_it_is_reinstalled(box, replace, capfd):
    """Whoever installs a handler later comes before us, until we say otherwise."""

    def crash_after(mend: bool) -> None:
        assert crash.is_installed()
        replace()
        assert not crash.is_installed()
        if mend:
            crash.reinstall()
            assert crash.is_installed()
        load_wild()

    without = box.dies(lambda: crash_after(False)), box.record
    after = box.dies(lambda: crash_after(True)), box.record

    assert without == (-signal.SIGSEGV, None)
    assert after[0] == -signal.SIGSEGV
    assert after[1] is not None
    assert after[1].address == WILD
    # The one that was there gets the signal after us, both times.
    assert capfd.readouterr().err.count("Fatal Python error") == (2 if replace is enable_faulthandler_anew else 0)


@needs_recorder
def test_two_handlers_that_chain_to_each_other_come_to_an_end(box):
    """Ours was there first, a later one passes on to it, and then ours was put in front of that one."""

    def tie() -> None:
        crash.install(box.mapped)
        faulthandler.register(signal.SIGTRAP, file=box.stack_fd, chain=True)
        crash.reinstall()
        run(page(CODE["trap"]))

    ended = box.dies(tie, minded=False)

    assert ended == -signal.SIGTRAP
    assert box.record is not None
    assert "tie" in box.stack


@needs_recorder
def test_a_handler_that_was_there_before_gets_the_signal_and_may_live_on(box):
    """A signal that the process survives without us, it survives with us."""

    def live_on() -> None:
        signal.signal(signal.SIGTRAP, lambda *_: None)
        crash.install(box.mapped)
        signal.raise_signal(signal.SIGTRAP)
        os._exit(7)

    assert box.dies(live_on, minded=False) == 7
    assert box.record is not None
    box.box.words[blackbox.SINCE] = time.monotonic_ns() + 60 * 10**9
    assert box.record is None


@needs_recorder
def test_a_record_that_was_survived_gives_way_to_the_next(box):
    """What it died of is what counts."""

    def live_on_and_die() -> None:
        signal.signal(signal.SIGTRAP, lambda *_: None)
        crash.install(box.mapped)
        signal.raise_signal(signal.SIGTRAP)
        box.box.enter(Stage.IDLE)
        struct.pack_into("<q", box.mapped, blackbox.CRASH_AT + 56, time.monotonic_ns() - 60 * 10**9)
        load_wild()

    ended = box.dies(live_on_and_die, minded=False)

    assert ended == -signal.SIGSEGV
    assert box.record is not None
    assert (box.record.signal, box.record.address) == (signal.SIGSEGV, WILD)


@needs_recorder
def test_the_first_fault_is_kept_when_its_handler_aborts(box):
    """C++ runtimes and virtual machines print, and abort: the cause is the fault before."""
    handlers = []

    def abort_at_fault() -> None:
        action = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os.abort())
        handlers.append(action)
        ctypes.CDLL(None).signal(signal.SIGSEGV, action)
        crash.install(box.mapped)
        load_wild()

    ended = box.dies(abort_at_fault, minded=False)

    assert ended == -signal.SIGABRT
    assert box.sleeps < 100  # nobody waits for another thread, which takes 200
    assert box.record is not None
    assert (box.record.signal, box.record.address) == (signal.SIGSEGV, WILD)


class Action(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_ubyte * 128),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


@needs_recorder
def test_the_next_handler_sees_a_signal_that_was_sent_as_it_was_sent(box):
    """With its code and its sender, as if the recorder had not been there; raise() would lose both."""
    handlers = []

    def note(number: int, info: int, context: int) -> None:
        told = struct.unpack("=iii4xi", ctypes.string_at(info, 20))
        os._exit(7 if told == (signal.SIGABRT, 0, 0, os.getpid()) else 8)

    def be_killed() -> None:
        handlers.append(ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(note))
        action = Action(ctypes.cast(handlers[0], ctypes.c_void_p), flags=4)  # SA_SIGINFO
        ctypes.CDLL(None).sigaction(signal.SIGABRT, ctypes.byref(action), None)
        crash.install(box.mapped)
        os.kill(os.getpid(), signal.SIGABRT)
        time.sleep(30)  # until it dies; ends by itself if it does not

    ended = box.dies(be_killed, minded=False)

    assert ended == 7
    assert box.record is not None


@needs_recorder
def test_a_fork_of_the_worker_leaves_no_record(box):
    """It shares the black box, but its death is its own affair."""

    def fork_and_die() -> None:
        pid = os.fork()
        if pid == 0:
            load_wild()
        os._exit(os.WTERMSIG(os.waitpid(pid, 0)[1]))

    assert box.dies(fork_and_die) == signal.SIGSEGV
    assert box.record is None


# ---------------------------------------------------------------- threads


@needs_recorder
def test_one_record_is_whole_when_many_threads_crash_at_once(box):
    """As OpenMP's do, all at the same bad pointer."""
    count = 8

    def all_at_once() -> None:
        crash.install(box.mapped)
        # Many lines of maps: a thread that did not wait for the one that saves them would end it half-way.
        fragments = mmap.mmap(-1, 4000 * mmap.PAGESIZE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(fragments))
        for offset in range(0, len(fragments), 2 * mmap.PAGESIZE):
            ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + offset), mmap.PAGESIZE, mmap.PROT_READ)
        load = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(page(CODE["await"]))  # without the GIL
        flag = ctypes.c_int(0)
        for _ in range(count):
            threading.Thread(target=load, args=(ctypes.addressof(flag), WILD)).start()
        flag.value = 1
        time.sleep(30)  # until it dies; ends by itself if it does not

    ended = box.dies(all_at_once, minded=False)  # with faulthandler below, others would be slower to die

    assert ended == -signal.SIGSEGV
    assert box.state == SAVED
    assert box.record is not None
    assert box.record.address == WILD
    assert box.record.thread != box.record.pid
    assert box.record.regions


@needs_recorder
def test_a_thread_waits_when_another_one_is_recording(box):
    """But not for ever: should the other never come to an end, it dies of its own fault."""

    def come_second() -> None:
        struct.pack_into("<Q", box.mapped, blackbox.CRASH_AT, WRITING)
        load_wild()

    began = time.monotonic()
    ended = box.dies(come_second)

    assert ended == -signal.SIGSEGV
    assert time.monotonic() - began >= 0.9
    assert box.record is None
    assert "load_wild" in box.stack


@needs_recorder
def test_a_stack_overflow_of_a_thread_is_recorded_when_python_started_it(box):
    """It is given a second stack when it begins."""

    def overflow() -> None:
        thread = threading.Thread(target=run, args=(page(CODE["recurse"]),))
        thread.start()
        thread.join()

    assert box.dies(overflow) == -signal.SIGSEGV
    assert box.record is not None
    assert box.record.thread != box.record.pid
    assert "run" in box.stack


@needs_recorder
def test_a_stack_overflow_kills_without_a_record_when_the_thread_has_no_second_stack(box):
    """As threads that native code starts; the signal is right all the same, and it is known that it could be seen."""

    def overflow() -> None:
        _thread.start_new_thread(run, (page(CODE["recurse"]),))
        time.sleep(30)  # until it dies; ends by itself if it does not

    assert box.dies(overflow) == -signal.SIGSEGV
    assert box.record is None
    assert crash.could_record(box.box)


@needs_recorder
def test_second_stacks_go_with_their_threads(box):
    """A thousand threads leave about as many maps as none; kept, they would be two thousand."""

    def start_many() -> None:
        def lines() -> int:
            return len(Path("/proc/self/maps").read_text().splitlines())

        before = lines()
        for _ in range(1000):
            thread = threading.Thread(target=int)
            thread.start()
            thread.join()
        os._exit(7 if lines() < before + 500 else 8)

    assert box.dies(start_many) == 7


@needs_recorder
def test_threads_are_as_they_were_when_a_second_stack_is_added(box):
    """Their exceptions, and their names, are their own; one that nobody joins is no leak."""

    def start() -> None:
        raised: list[object] = []
        threading.excepthook = raised.append
        thread = threading.Thread(target=lambda: 1 / 0, name="divider")
        thread.start()
        thread.join()
        (hook,) = raised
        known = hook.exc_type is ZeroDivisionError and hook.thread is thread and thread.name == "divider"
        crash._mind_threads()  # a second time changes nothing
        os._exit(7 if known and not hasattr(threading.Thread._bootstrap_inner.__wrapped__, "__wrapped__") else 8)

    assert box.dies(start) == 7


@needs_recorder
def test_a_crash_cannot_be_recorded_when_there_was_no_recorder(box):
    """Then a death without a record says nothing."""
    assert not crash.could_record(box.box)


@needs_recorder
@pytest.mark.parametrize("heard", [True, False])
def test_the_c_librarys_message_is_recorded(box, heard, capfd):
    """Where standard error is closed, too: it keeps a copy for debuggers."""

    def free_twice() -> None:
        if not heard:
            os.close(2)
        libc = ctypes.CDLL(None)
        libc.malloc.restype = ctypes.c_void_p
        block = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64 << 10)))
        libc.free(block)
        libc.free(block)

    assert box.dies(free_twice) == -signal.SIGABRT
    assert box.record is not None
    assert "double free" in box.record.message
    assert ("double free" in capfd.readouterr().err) == heard


@needs_recorder
def test_there_is_no_message_when_nothing_was_printed(box):
    """abort() alone is silent."""
    assert box.dies(os.abort) == -signal.SIGABRT
    assert box.record is not None
    assert box.record.message == ""


@needs_recorder
def test_the_room_in_shared_memory_is_recorded_at_a_bus_error(box):
    """As it was at that moment: what the dying process holds is free a moment later."""
    assert box.dies(lambda: crashes.read_truncated_file(lambda *_, **__: None)) == -signal.SIGBUS
    assert box.record is not None
    assert box.record.code_name == "BUS_ADRERR"
    if Path("/dev/shm").is_dir():
        room = os.statvfs("/dev/shm")
        assert box.record.shared_bytes == room.f_blocks * room.f_frsize
        assert box.record.shared_free_bytes is not None


class AlternateStack(ctypes.Structure):
    _fields_ = (("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@needs_recorder
def test_a_stack_overflow_is_recorded_on_a_stack_of_its_own(box):
    """It does not live on faulthandler's, which the user may take away."""

    def overflow() -> None:
        ctypes.CDLL(None).sigaltstack(ctypes.byref(AlternateStack(None, 2, 0)), None)  # SS_DISABLE
        crash.install(box.mapped)
        crashes.overflow_stack(lambda *_, **__: None)

    assert box.dies(overflow, minded=False) == -signal.SIGSEGV
    assert box.record is not None
    assert box.record.access == "write"


# ---------------------------------------------------------------- when little is allowed


@needs_recorder
@pytest.mark.parametrize("refusal", [None, errno.EPERM], ids=["SIGSYS", "EPERM"])
def test_facts_are_recorded_when_memory_may_not_be_read(box, refusal):
    """Under a strict seccomp filter: no instruction, no stack, but the fault, and the right signal."""

    def forbid_and_die() -> None:
        crashes.forbid(PEEK_CALL, refusal)
        load_wild()

    ended = box.dies(forbid_and_die)

    assert ended == -signal.SIGSEGV
    assert "load_wild" in box.stack
    assert box.record is not None
    assert (box.record.address, box.record.access) == (WILD, "read")
    assert box.record.registers[crashes.ARGUMENT] == WILD
    assert (box.record.instruction, box.record.stack) == (b"", b"")


@needs_recorder
def test_an_illegal_instruction_is_saved_when_memory_may_not_be_read(box):
    """Under emulation, where illegal instructions are at home: copied directly, to the end of its page at most."""

    def forbid_and_die() -> None:
        crashes.forbid(PEEK_CALL, errno.ENOSYS)
        crashes.execute_illegal_at_the_end_of_memory(lambda *_, **__: None)

    ended = box.dies(forbid_and_die)

    assert ended == -signal.SIGILL
    assert box.record is not None
    assert box.record.instruction == CODE["illegal"]


EMULATED = """
import os, sys, resource
from faults.crashes import CODE, page, run
from outlive._capture import blackbox, crash, stacks
from outlive._system import memory
fd, stack_fd = memory.create(blackbox.SIZE), memory.create(stacks.SIZE)
mapped = memory.attach(fd)
box = blackbox.BlackBox(mapped)
pid = os.fork()
if pid == 0:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    box.begin(os.getpid())
    stacks.install(stack_fd)
    crash.install(mapped)
    run(page(CODE["illegal"]))
status = os.waitpid(pid, 0)[1]
print(os.WTERMSIG(status), crash.read(box).instruction[:4].hex(), "Illegal instruction" in stacks.read(stack_fd))
"""


@needs_recorder
@pytest.mark.skipif(shutil.which(f"qemu-{platform.machine()}") is None, reason="no qemu-user")
def test_an_illegal_instruction_is_saved_under_emulation():
    """qemu has no process_vm_readv, and enters handlers with a stack that is not aligned."""
    search = os.pathsep.join(path for path in sys.path if path)

    ended = subprocess.run(
        [f"qemu-{platform.machine()}", sys.executable, "-c", EMULATED],
        env={**os.environ, "PYTHONPATH": search},
        capture_output=True,
        text=True,
    )

    instruction = CODE["illegal"].ljust(4, b"\0").hex()
    assert ended.stdout.split() == [str(int(signal.SIGILL)), instruction, "True"], ended.stderr


@needs_recorder
def test_a_fault_of_the_handler_itself_does_not_loop(box):
    """The black box cannot be written: the process dies, and faulthandler speaks."""

    def forbid_and_die() -> None:
        ctypes.CDLL(None).mprotect(ctypes.c_void_p(ctypes.addressof(box.mapped)), mmap.PAGESIZE * 4, mmap.PROT_READ)
        os.abort()

    ended = box.dies(forbid_and_die)

    assert ended == -signal.SIGSEGV
    assert "forbid_and_die" in box.stack
    assert box.record is None


@needs_recorder
def test_there_are_no_regions_when_no_descriptor_is_left(box):
    """/proc/self/maps cannot be opened then; all else is there."""

    def use_up_and_die() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
        load_wild()

    ended = box.dies(use_up_and_die)

    assert ended == -signal.SIGSEGV
    assert box.record is not None
    assert box.record.instruction.startswith(CODE["load"])
    assert (box.record.regions, box.record.possible_return_addresses) == ((), ())


# ---------------------------------------------------------------- signals that others send to end it

ENDINGS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGXCPU")


def send_default(name: str) -> Callable[[], None]:
    """As it comes to a worker, whose SIGINT is at its default as well."""

    def act() -> None:
        signal.signal(signal.Signals[name], signal.SIG_DFL)
        crash.reinstall()
        os.kill(os.getpid(), signal.Signals[name])

    return act


@needs_recorder
@pytest.mark.parametrize("name", ENDINGS)
def test_the_sender_of_an_ending_signal_is_noted(box, name):
    """And the process dies of it, as it would have."""
    code = box.dies(send_default(name))

    assert code == -signal.Signals[name]
    assert box.record is not None
    assert (box.record.signal_name, box.record.code_name) == (name, "SI_USER")
    assert box.record.sender_pid == box.record.pid
    assert box.record.sender_uid == os.getuid()
    assert crash.sender_of(box.box) == box.record.pid


@needs_recorder
def test_an_alarm_has_no_sender(box):
    """The kernel's own timer went off."""
    signalled = box.dies(lambda: (signal.setitimer(signal.ITIMER_REAL, 0.01), signal.pause()))

    assert signalled == -signal.SIGALRM
    assert box.record is not None
    assert box.record.sender_pid is None
    assert not box.record.is_sent


@needs_recorder
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_users_never_meets_us(box, when):
    """Python's signal.signal, before the recorder came or later: it is called, and nothing is recorded."""

    def act() -> None:
        got = []
        signal.signal(signal.SIGTERM, lambda number, _: got.append(number))
        if when == "before":
            crash.reinstall()
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7 if got == [signal.SIGTERM] else 8)

    assert box.dies(act) == 7
    assert box.record is None


@needs_recorder
def test_a_signal_that_is_ignored_stays_ignored(box):
    """Also after a reinstall."""

    def act() -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        crash.reinstall()
        os.kill(os.getpid(), signal.SIGHUP)
        os._exit(7)

    assert box.dies(act) == 7
    assert box.record is None


@needs_recorder
def test_python_still_calls_it_the_default(box):
    """Who saves the handler to put it back later puts back the default."""

    def act() -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        crash.reinstall()
        os._exit(7 if signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL else 8)

    assert box.dies(act) == 7


@needs_recorder
def test_a_process_that_waits_for_a_signal_gets_it(box):
    """sigwait takes a blocked signal before any handler is asked."""

    def act() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(7 if signal.sigwait([signal.SIGTERM]) == signal.SIGTERM else 8)

    assert box.dies(act) == 7
    assert box.record is None


@needs_recorder
def test_a_program_that_a_worker_starts_dies_of_sigterm_without_a_record(box):
    """A fork of it as well: the box is the worker's."""

    def act() -> None:
        crash.reinstall()
        fork = os.fork()
        if fork == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        ended = (os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), program.wait())
        os._exit(7 if ended == (-signal.SIGTERM, -signal.SIGTERM) else 8)

    assert box.dies(act) == 7
    assert box.record is None
