"""Crashes in threads, stack overflows, messages of the C library, and room in shared memory.

Reads   records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import _thread
import ctypes
import mmap
import os
import signal
import struct
import threading
import time
from pathlib import Path

import pytest

from faults import crashes
from faults.crashes import CODE, WILD, page, run
from outlive._capture import blackbox, crash
from recorder.dying_process import SAVED, WRITING, load_wild, needs_recorder


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

    ended = box.dies(come_second)

    assert ended == -signal.SIGSEGV
    assert box.sleeps >= 200  # looks at whether the other thread is done
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
        crash.watch_threads()  # a second time changes nothing
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
