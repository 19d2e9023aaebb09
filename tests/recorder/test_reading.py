"""A crash record is read back, also when part of it was overwritten.

Reads   records of forked processes that really die.
Writes  into black boxes of its own.
Never   installs the recorder in the process that runs the tests.
"""

from __future__ import annotations

import random
import signal
import struct
import time

import pytest

from outlive._capture import blackbox, crash
from outlive.crashes import CrashRecord, Region
from recorder.dying_process import SAVED


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
        box.box.content[blackbox.CRASH_AT : blackbox.CRASH_AT + blackbox.CRASH_ROOM] = bytes(raw)

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
