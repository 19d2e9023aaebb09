"""Signals that another process sends to end a worker.

Reads   records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable

import pytest

from outlive._capture import crash
from recorder.dying_process import needs_recorder

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
