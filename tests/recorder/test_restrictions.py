"""Records made where system calls are refused, under emulation, and without descriptors.

Reads   records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys

import pytest

from faults import crashes
from faults.crashes import CODE, PEEK_CALL, WILD
from recorder.dying_process import load_wild, needs_recorder


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
