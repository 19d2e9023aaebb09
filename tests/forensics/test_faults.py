"""Verdicts on bad memory accesses: real ones in real workers, and synthetic ones that this machine cannot produce."""

from __future__ import annotations

import ctypes
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import outlive
from forensics import deaths, native_libraries
from outlive import FaultPolicy
from outlive._capture import crash as recorder
from outlive._forensics import callers, mapped_files, verdict
from outlive.crashes import SI_KERNEL, SIGBUS, SIGSEGV, CrashRecord, Region
from outlive.evidence import CodePlace, Evidence, Examined, Instruction, MappedFile
from outlive.incident import Exit, Incident, IncidentKind, InHand, Stage
from outlive.verdicts import Confidence, Name

METHODS = ("fork", "spawn")
NAMES = list(deaths.FAULTS)
needs_recorder = pytest.mark.skipif(not recorder.AVAILABLE, reason="the recorder was not built: no C compiler")


@pytest.fixture(scope="module", params=METHODS)
def died(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Incident]:
    if not native_libraries.have_compilers():
        pytest.skip("no C and C++ compilers")
    folder = tmp_path_factory.mktemp(f"faults-{request.param}")
    native_libraries.build(folder)
    mounts = deaths.can_mount()
    return deaths.let_die([name for name in NAMES if mounts or name not in deaths.MOUNTING], folder, request.param)


@needs_recorder
@pytest.mark.parametrize("name", NAMES)
def test_a_bad_access_is_explained(died: dict[str, Incident], name: str) -> None:
    """Which access, by which library, to what; with the sample that was in hand."""
    if name not in died:
        pytest.skip("only root may mount a small /dev/shm")

    deaths.assert_judged(name, died[name], 2 * list(died).index(name) + 1)


class Inheriting:
    """Maps a file before the worker is forked; sample 1 unmaps it behind Python's back, and reads on."""

    def __init__(self, path: Path, library: Path) -> None:
        self.array = np.memmap(path, dtype=np.uint8, mode="r")
        self.library = library

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        if index == 1:
            library = ctypes.CDLL(str(self.library))  # before: loading it maps memory, perhaps right there
            address = self.array.ctypes.data
            deaths.LIBC.munmap(address, self.array.size)
            library.read_at(ctypes.c_void_p(address + 5000))
        return index


@needs_recorder
def test_what_a_worker_was_forked_with_is_known_when_it_is_gone(tmp_path: Path) -> None:
    """The zygote still has the map: so the file's name is known, and the verdict is no guess. Under spawn a dataset
    that holds a map cannot be pickled."""
    if not native_libraries.have_compilers():
        pytest.skip("no C and C++ compilers")
    native_libraries.build(tmp_path)
    path = deaths.file_of(tmp_path, "inherited", 1 << 20)
    dataset: Any = Inheriting(path, tmp_path / "libfaulty.so")
    policy = FaultPolicy(on_error="skip", retries=0, max_bad=None)
    loader: outlive.DataLoader[Any] = outlive.DataLoader(
        dataset, num_workers=1, multiprocessing_context="fork", faults=policy
    )

    delivered = [int(batch) for batch in loader]

    (incident,) = loader.incidents
    assert delivered == [0, 2]
    assert incident.indices == (1,)
    assert incident.verdict is not None
    assert (incident.verdict.name, incident.verdict.confidence) == (Name.USE_AFTER_UNMAP, Confidence.CERTAIN)
    assert str(path) in incident.verdict.cause


# ---------------------------------------------------------------- synthetic

LIBRARY = Region(0x7F0000000000, 0x7F0000100000, "r-xp", 0x1000, "/opt/libdecode.so")
STACK = Region(0x7FFC00000000, 0x7FFC00800000, "rw-p", 0, "[stack]")
THREAD = Region(0x7F1000001000, 0x7F1000801000, "rw-p", 0, "")
GUARD = Region(0x7F1000000000, 0x7F1000001000, "---p", 0, "")
FILE = Region(0x7F2000000000, 0x7F2000010000, "r--s", 0x10000, "/data/train.bin")


def fault(
    address: int | None, signal: int = SIGSEGV, code: int = 1, access: str | None = "read", **more: Any
) -> Incident:
    """A fault at an instruction of libdecode.so; `evidence`: what else is known."""
    errors = {"read": 4, "write": 6, "execute": 20, None: 0}
    evidence = more.pop("evidence", Evidence())
    record = CrashRecord(
        **{
            **{"signal": signal, "code": code, "pid": 7, "thread": 7, "thread_name": "reader", "address": address},
            **{"architecture": "x86_64", "trap": 14 if access else 13, "fault_error": errors[access]},
            **{"instruction_pointer": LIBRARY.start + 64, "stack_pointer": STACK.start + 4096},
            **{"regions": (LIBRARY, GUARD, THREAD, FILE, STACK)},
            **more,
        }
    )
    return Incident(
        IncidentKind.CRASH,
        *(0, 0, 7, 0),
        InHand(Stage.FETCHING, 0, 0),
        exit=Exit(signal=signal),
        evidence=replace(evidence, crash=record, recorder=True),
    )


@pytest.mark.parametrize("code", [4, 5])
def test_broken_memory_is_told_from_all_else(code: int) -> None:
    """BUS_MCEERR: no test breaks a memory module, and poisoning a page would cost the machine that page for good."""
    found = verdict.judge(fault(FILE.start, SIGBUS, code))

    assert (found.name, found.confidence) == (Name.HARDWARE_FAULT, Confidence.CERTAIN)
    assert "memory module" in found.cause


def test_a_page_that_its_disk_does_not_deliver_is_possibly_the_disks_fault() -> None:
    """The file is long enough: then it is an I/O error, and no disk here fails on request."""
    file = MappedFile("/data/train.bin", False, 1 << 30, 0x10000, "nfs4", 1 << 40)

    found = verdict.judge(fault(FILE.start, SIGBUS, 2, evidence=Evidence(mapped=file)))

    assert (found.name, found.confidence) == (Name.HARDWARE_FAULT, Confidence.POSSIBLE)
    assert "byte 65536 of /data/train.bin" in found.cause
    assert "it is on nfs4" in found.facts


def test_a_full_disk_behind_a_map_is_no_truncated_file() -> None:
    """A sparse file that is written through its map takes room as it goes; filling a disk here would hurt others."""
    file = MappedFile("/data/cache.bin", False, 1 << 30, 0x10000, "ext4", 0)

    found = verdict.judge(fault(FILE.start, SIGBUS, 2, "write", evidence=Evidence(mapped=file)))

    assert found.name is Name.SHARED_MEMORY_FULL
    assert "the file system of /data/cache.bin is full" in found.cause


def test_huge_pages_run_out() -> None:
    """The pool of huge pages is empty on most machines, and root's to change."""
    huge = Region(0x7F2000000000, 0x7F2000200000, "rw-s", 0, "/anon_hugepage (deleted)")

    found = verdict.judge(fault(huge.start, SIGBUS, 2, "write", regions=(LIBRARY, huge, STACK)))

    assert (found.name, found.confidence) == (Name.SHARED_MEMORY_FULL, Confidence.LIKELY)
    assert "huge pages" in found.cause


def test_the_function_and_the_register_are_told_when_they_are_known() -> None:
    """The examiner decodes the instruction and finds the symbol."""
    examined = Examined(
        place=CodePlace(LIBRARY.start + 64, LIBRARY.path, 0x1040, "decode_header", 31),
        instruction=Instruction("mov eax,[rdi+rcx*4+18h]", 4),
    )
    registers = {"rax": 0, "rcx": 0, "rdi": 0, "rsi": 5}

    found = verdict.judge(fault(0x18, registers=registers, evidence=Evidence(examined=examined)))

    assert found.cause.startswith("read of address 0x18 in decode_header (libdecode.so)")
    assert "register rdi holds the null pointer" in found.facts


def test_an_aligned_vector_access_is_named_when_it_is_decoded() -> None:
    """movaps and its like fault as impossible addresses do: without an address."""
    examined = Examined(instruction=Instruction("movaps xmm0,[rdi]", 3))

    found = verdict.judge(
        fault(None, code=SI_KERNEL, access=None, registers={"rdi": 8}, evidence=Evidence(examined=examined))
    )

    assert (found.name, found.confidence) == (Name.WILD_POINTER, Confidence.LIKELY)
    assert "misaligned access by movaps xmm0,[rdi]" in found.cause


def test_guard_pages_that_no_map_shows_are_known_by_their_place() -> None:
    """glibc 2.42 and later mark them inside of the stack's own mapping; the one here is older."""
    low = THREAD.start + 4096

    found = verdict.judge(fault(low, code=2, access="write", stack_pointer=low + 16, thread=9))

    assert found.name is Name.STACK_OVERFLOW
    assert "thread 9 (reader)" in found.cause


def test_the_guard_page_of_another_thread_is_no_stack_overflow() -> None:
    """The stack pointer is where it should be, on a stack that lies lower."""
    lower = Region(0x7F0FF0000000, 0x7F0FF0800000, "rw-p", 0, "")

    found = verdict.judge(
        fault(GUARD.start + 8, code=2, stack_pointer=lower.start + 4096, regions=(LIBRARY, lower, GUARD, THREAD, STACK))
    )

    assert found.name is Name.WILD_POINTER
    assert "reserved" in found.cause


def test_a_word_past_the_end_of_memory_is_no_use_after_unmap() -> None:
    """A loop that runs over the end of a block: a register still points into it."""
    found = verdict.judge(fault(FILE.end, registers={"rsi": FILE.end, "rdi": FILE.start + 16}))

    assert (found.name, found.confidence) == (Name.WILD_POINTER, Confidence.LIKELY)
    assert "past the end of the map of /data/train.bin" in found.cause


@pytest.mark.parametrize(
    "incident",
    [
        fault(0x1000, access="execute"),  # a jump to nowhere
        fault(None, code=0, sender_pid=9),  # somebody's kill -SEGV
        fault(None, code=SI_KERNEL, access=None, instruction=b"\xf4\xc3"),  # hlt: a trap
        replace(fault(0), exit=Exit(signal=9)),  # survived, and killed later
    ],
    ids=["jump", "sent", "trap", "survived"],
)
def test_what_is_not_an_access_is_left_to_others(incident: Incident) -> None:
    """Other rules know more about it."""
    mine = (Name.NULL_POINTER, Name.WILD_POINTER, Name.STACK_OVERFLOW, Name.READ_ONLY_WRITE, Name.USE_AFTER_UNMAP)

    assert verdict.judge(incident).name not in mine


@pytest.mark.parametrize(
    ("recorded", "stack", "told"),
    [
        (True, "", True),
        (True, "Fatal Python error: Segmentation fault", False),  # somebody's handler ran, in place of ours
        (False, "", False),  # nothing to go by
    ],
)
def test_a_segfault_without_a_record_is_a_stack_overflow_only_if_recording_was_impossible(
    recorded: bool, stack: str, told: bool
) -> None:
    """A thread of native code has no second stack: the kernel ends the process without asking anybody."""
    incident = fault(0)
    bare = replace(incident, stack=stack, evidence=Evidence(recorder=recorded))

    assert (verdict.judge(bare).name is Name.STACK_OVERFLOW) == told


# ---------------------------------------------------------------- return addresses


@pytest.mark.parametrize(
    ("code", "is_call"),
    [
        ("9090 e8 11223344", True),  # call relative
        ("9090909090 ffd0", True),  # call rax
        ("90909090 41ffd4", True),  # call r12
        ("90 ff15 11223344", True),  # call [rip+…]
        ("90909090 ff5008", True),  # call [rax+8]
        ("90909090 41ff14", False),  # cut short: the scale is missing
        ("909090 41ff14c4", True),  # call [r12+rax*8]
        ("90909090909090", False),
        ("9090909090 ffe0", False),  # jmp rax
    ],
)
def test_a_return_address_follows_a_call(tmp_path: Path, code: str, is_call: bool) -> None:
    """Any other word that lies in code is chance."""
    path = tmp_path / "lib.so"
    path.write_bytes(bytes(16) + bytes.fromhex(code))
    region = Region(0x7F0000000000, 0x7F0000001000, "r-xp", 0, str(path))
    address = region.start + 16 + 7
    record = CrashRecord(
        SIGSEGV, 1, 1, 1, architecture="x86_64", possible_return_addresses=(address,), regions=(region,)
    )

    assert callers.confirmed(record) == ((address,) if is_call else ())


def test_no_caller_is_known_when_the_library_is_gone() -> None:
    """A wheel that was updated under a running job."""
    region = Region(0x7F0000000000, 0x7F0000001000, "r-xp", 0, "/gone/lib.so")
    record = CrashRecord(
        SIGSEGV, 1, 1, 1, architecture="x86_64", possible_return_addresses=(region.start + 64,), regions=(region,)
    )

    assert callers.confirmed(record) == ()


# ---------------------------------------------------------------- the file behind a map


def test_a_mapped_file_is_looked_at_where_it_lies(tmp_path: Path) -> None:
    """Its size now, and where in it the fault is; without opening it."""
    path = tmp_path / "a b.bin"
    path.write_bytes(bytes(100))
    region = Region(0x1000, 0x9000, "r--s", 0x2000, str(path))
    record = CrashRecord(SIGBUS, 2, 1, 1, address=0x1010, regions=(region,))

    file = mapped_files.look(record)

    assert file is not None
    assert (file.size_bytes, file.offset_bytes, file.deleted) == (100, 0x2010, False)
    assert file.file_system
    assert file.free_bytes is not None


@pytest.mark.parametrize("path", ["/gone/for/ever.bin", "/tmp/x.bin (deleted)"])
def test_a_file_that_is_gone_has_no_size(path: str) -> None:
    """And looking for it harms nobody."""
    record = CrashRecord(SIGBUS, 2, 1, 1, address=0x1010, regions=(Region(0x1000, 0x9000, "r--s", 0, path),))

    file = mapped_files.look(record)

    assert file is not None
    assert (file.size_bytes, file.deleted) == (None, True)


def test_a_pipe_in_a_files_place_is_not_waited_for(tmp_path: Path) -> None:
    """Opening one would block until somebody writes."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    record = CrashRecord(SIGBUS, 2, 1, 1, address=0x1010, regions=(Region(0x1000, 0x9000, "r--s", 0, str(path)),))

    file = mapped_files.look(record)

    assert file is not None
    assert file.size_bytes is None
