"""The recorder beside handlers of other libraries and of the user.

Reads   records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import struct
import sys
import time

import pytest

from faults.crashes import CODE, WILD, page, run
from outlive._capture import blackbox, crash
from outlive.incident import Stage
from recorder.dying_process import load_wild, needs_recorder


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
