"""What code, CPU and system calls are called: against the real files and the real CPU of this machine.

Reads   a small compiled library, /proc/self/maps, the CPU.
Writes  libraries in temporary folders.
Never   crashes.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from forensics import illegal_instructions
from outlive._capture.crash import parse_maps
from outlive._forensics import cpu, examine, symbols, system_calls
from outlive._forensics.cpu import Cpu
from outlive.crashes import CrashRecord, Region
from outlive.evidence import CodePlace

X86 = platform.machine() == "x86_64"
needs_x86 = pytest.mark.skipif(not X86, reason="not x86-64")


@pytest.fixture(autouse=True)
def _needs_extra() -> None:
    pytest.importorskip("iced_x86", reason="the extra «forensics» is not installed")
    pytest.importorskip("elftools", reason="the extra «forensics» is not installed")


# ---------------------------------------------------------------- the CPU


@needs_x86
@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="no /proc/cpuinfo")
def test_the_cpu_says_what_the_kernel_says() -> None:
    """Two ways to the same list; a kernel that hides a feature from programs is not among those we test on."""
    asked = cpu.this_cpu()
    told = cpu.from_cpuinfo(Path("/proc/cpuinfo").read_text(), "x86_64")
    # The kernel keeps these for itself, shows them by other rules than CPUID's, or hides them on CPUs with an erratum.
    own = {
        "RDSEED",
        "HLE_OR_RTM",
        "SKINIT_OR_SVM",
        "VMX",
        "SVM",
        "CET_SS",
        "CET_IBT",
        "KL",
        "WIDE_KL",
        "FRED",
        "LKGS",
        "WRMSRNS",
    }

    assert asked.source == "CPUID"
    assert asked.name == told.name != ""
    assert asked.features & told.known - own == told.features - own
    assert {"SSE2", "X64", "CMOV"} <= asked.features


@needs_x86
def test_the_cpu_says_what_numpy_says() -> None:
    """Its list serves where no code may be made at run time."""
    told = cpu.from_numpy()

    assert told is not None
    assert "AVX2" in told.known
    assert told.features == cpu.this_cpu().features & told.known


@needs_x86
def test_others_are_asked_when_no_page_may_be_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under SELinux; and where NumPy does not tell, the kernel does."""

    def refuse() -> None:
        raise PermissionError

    monkeypatch.setattr(cpu, "load_instructions", refuse)
    by_numpy = cpu.this_cpu.__wrapped__()
    monkeypatch.setattr(cpu, "from_numpy", lambda: None)
    by_kernel = cpu.this_cpu.__wrapped__()

    assert (by_numpy.source, by_kernel.source) == ("NumPy", "/proc/cpuinfo")
    assert by_numpy.name == by_kernel.name == cpu.this_cpu().name


def answers(leaves: dict[tuple[int, int], tuple[int, int, int, int]]) -> cpu.Cpuid:
    return lambda leaf, subleaf: leaves.get((leaf, subleaf), (0, 0, 0, 0))


AVX, AVX2, AVX512F, OSXSAVE, FMA, AMX = 1 << 28, 1 << 5, 1 << 16, 1 << 27, 1 << 12, 1 << 24


@pytest.mark.parametrize(
    ("enabled", "there"),
    [
        (0x602E7, {"AVX", "AVX2", "FMA", "AVX512F", "AMX_TILE"}),
        (0xE7, {"AVX", "AVX2", "FMA", "AVX512F"}),
        (0x7, {"AVX", "AVX2", "FMA"}),
        (0x3, set()),
    ],
)
def test_a_feature_that_the_system_has_not_enabled_is_missing(enabled: int, there: set[str]) -> None:
    """The CPU has it, but its registers would be lost at the next switch: so it refuses."""
    cpuid = answers(
        {
            (0, 0): (7, 0, 0, 0),
            (1, 0): (0, 0, OSXSAVE | AVX | FMA, 0),
            (7, 0): (0, AVX2 | AVX512F, 0, AMX),
            (0x80000000, 0): (0x80000001, 0, 0, 0),
        }
    )

    found = cpu.from_cpuid(cpuid, lambda: enabled)

    assert found.features == there
    assert found.missing(("AVX512F", "NOBODY_KNOWS")) == (() if "AVX512F" in there else ("AVX512F",))


def test_leaves_beyond_the_highest_are_not_asked() -> None:
    """There old Intel CPUs answer with the highest one's values."""

    def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        return (1, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF) if leaf < 0x80000000 else (0x80000000, 0, 0, 0)

    found = cpu.from_cpuid(cpuid, lambda: 0xFFFFFFFF)

    assert "SSE3" in found.features
    assert {"AVX2", "XOP"}.isdisjoint(found.features)


def test_features_of_another_architecture_are_those_the_kernel_names() -> None:
    """aarch64 has no CPUID for programs; what an old kernel does not name may still be there."""
    found = cpu.from_cpuinfo("processor\t: 0\nFeatures\t: fp asimd crc32 sve\n\nprocessor\t: 1\n", "aarch64")

    assert found.features == {"FP", "ASIMD", "CRC32", "SVE"}
    assert found.missing(("SVE2",)) == ()


# ---------------------------------------------------------------- functions


@pytest.fixture
def library(tmp_path: Path) -> Path:
    if not illegal_instructions.can_compile():
        pytest.skip("no C compiler, or not x86-64")
    return illegal_instructions.build(tmp_path)


def regions_here() -> tuple[Region, ...]:
    return tuple(parse_maps(Path("/proc/self/maps").read_bytes()))


def address_of(loaded: ctypes.CDLL, name: str) -> int:
    found = ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value
    assert found is not None
    return found


def test_functions_are_found_by_their_addresses(library: Path) -> None:
    """With the place in the file's own address space, which a disassembler of it shows."""
    loaded = ctypes.CDLL(str(library))
    at, cxx = address_of(loaded, "divide"), address_of(loaded, "_ZN8cruncher5shakeEi")
    listed = subprocess.run(["nm", library], capture_output=True, text=True, check=True).stdout
    (own,) = (int(line.split()[0], 16) for line in listed.splitlines() if line.endswith(" T divide"))

    first, second, nowhere = symbols.places_of([at + 1, cxx, 16], regions_here())

    assert first == CodePlace(at + 1, str(library), own + 1, "divide", 1, is_mapped=True)
    assert (second.function, second.function_offset) == ("cruncher::shake", 0)
    assert nowhere == CodePlace(16)


@pytest.mark.skipif(shutil.which("strip") is None, reason="no strip")
def test_exported_functions_are_found_when_it_is_stripped(library: Path) -> None:
    """As most wheels are: .dynsym stays."""
    subprocess.run(["strip", library], check=True)
    loaded = ctypes.CDLL(str(library))

    (place,) = symbols.places_of([address_of(loaded, "divide")], regions_here())

    assert (place.function, place.function_offset) == ("divide", 0)


def test_a_place_between_functions_has_no_name(library: Path) -> None:
    """The nearest one before it would be a wrong name."""
    loaded = ctypes.CDLL(str(library))

    (place,) = symbols.places_of([address_of(loaded, "between") + 32], regions_here())

    assert (place.library, place.function) == (str(library), "")


@pytest.mark.parametrize("spoil", ["delete", "replace", "shorten", "scramble"])
def test_a_library_without_its_file_is_still_named(library: Path, tmp_path: Path, spoil: str) -> None:
    """Somebody upgraded the package while the job ran; nobody may fail for that."""
    loaded = ctypes.CDLL(str(library))
    at = address_of(loaded, "divide")
    before = regions_here()
    regions = before
    if spoil in ("delete", "replace"):
        whole = library.read_bytes()
        library.unlink()
        if spoil == "replace":
            library.write_bytes(whole)  # the same functions, by chance: nobody can know that
        regions = regions_here()
    else:
        whole = library.read_bytes()
        copy = tmp_path / "other.so"
        copy.write_bytes(whole[:100] if spoil == "shorten" else whole[:32] + os.urandom(len(whole) - 32))
        regions = tuple(
            Region(r.start, r.end, r.permissions, r.offset, str(copy)) if r.path == str(library) else r for r in before
        )
        library = copy

    (place,) = symbols.places_of([at], regions)

    assert (place.library, place.function) == (str(library), "")


@pytest.mark.parametrize(
    "path", ["", "[heap]", "/dev/zero (deleted)", "/memfd:jit (deleted)", "/SYSV00000000 (deleted)"]
)
def test_memory_without_a_file_is_in_no_library(path: str) -> None:
    """Shared memory has a path in the maps, but no code was installed there."""
    region = Region(0x1000, 0x2000, "rwxp", 0, path)

    (place,) = symbols.places_of([0x1800], [region])

    assert place == CodePlace(0x1800, path if path.startswith("[") else "", is_mapped=True)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("divide", "divide"),
        ("memcpy@@GLIBC_2.14", "memcpy"),
        ("_ZN2cv8imdecodeERKNS_11_InputArrayEi", "cv::imdecode"),
        ("_ZNSt6vectorIiSaIiEE9push_backERKi", "std::vector<…>::push_back"),
        ("_ZN2at6native12_GLOBAL__N_110exp_kernelERNS_18TensorIteratorBaseE", "at::native::{anonymous}::exp_kernel"),
        ("_ZNK3FooclEi", "Foo::operator()"),
        ("_ZlsRSo3Foo", "operator<<"),
        ("_ZSt4sortIPiEvT_S1_", "std::sort<…>"),
        ("_ZN5image6decode4main17h0123456789abcdefE", "image::decode::main"),
        ("_Z", "_Z"),
        ("x" * 300, "x" * 159 + "…"),
    ],
)
def test_names_are_shown_as_people_write_them(name: str, shown: str) -> None:
    """Without parameters, and with templates closed: they can have a thousand characters."""
    if symbols.load_demangler() is None:
        pytest.skip("no libstdc++")

    assert symbols.readable(name) == shown


# ---------------------------------------------------------------- instructions

NEHALEM = Cpu("Nehalem", frozenset({"SSE2", "SSE4_2"}), frozenset({"SSE2", "SSE4_2", "AVX", "AVX2", "AVX512F"}), "test")


@pytest.mark.parametrize(
    ("code", "text", "missing", "is_trap"),
    [
        ("62f17c4858c2", "vaddps zmm0,zmm0,zmm2", ("AVX512F",), False),
        ("c5fc58c1", "vaddps ymm0,ymm0,ymm1", ("AVX",), False),
        ("660f3800c1", "pshufb xmm0,xmm1", (), False),  # SSSE3, of which nobody knows
        ("0f0b", "ud2", (), True),
        ("0fb9c0", "ud1 eax,eax", (), True),
        ("cc", "int3", (), True),
        ("f4", "hlt", (), True),
        ("488b07", "mov rax,[rdi]", (), False),
    ],
)
def test_an_instruction_tells_what_it_needs(code: str, text: str, missing: tuple[str, ...], is_trap: bool) -> None:
    """By a decoder made for it."""
    found = examine.decode(bytes.fromhex(code), 0x1000, "x86_64", NEHALEM)

    assert found is not None
    assert (found.text, found.size) == (text, len(code) // 2)
    assert (found.missing, found.is_trap, found.is_valid) == (missing, is_trap, True)


@pytest.mark.parametrize("code", ["06", "62ffffffffffff", "c5"])
def test_what_is_no_instruction_is_told_so(code: str) -> None:
    """With its bytes."""
    found = examine.decode(bytes.fromhex(code), 0, "x86_64", NEHALEM)

    assert found is not None
    assert not found.is_valid
    assert found.text.startswith(code[:2])


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize(
    ("architecture", "code", "text"),
    [
        ("x86_64", "0f0b", "ud2"),
        ("x86_64", "62f17c4858c2", None),
        ("aarch64", "007d20d4", "brk #0x3e8"),
        ("aarch64", "00000000", "udf #0x0"),
        ("aarch64", "0000203c", None),
        ("riscv64", "0f0b", None),
    ],
)
def test_traps_are_known_without_a_decoder(
    monkeypatch: pytest.MonkeyPatch, architecture: str, code: str, text: str | None
) -> None:
    """The extra may be missing, and then there is less to say."""
    without(monkeypatch, "iced_x86", "capstone")

    found = examine.decode(bytes.fromhex(code), 0, architecture, NEHALEM)

    assert (found and found.text) == text
    assert found is None or found.is_trap


@pytest.mark.parametrize(
    ("code", "registers", "stack", "divisor", "value"),
    [
        ("f7f9", {"rcx": 0xFFFFFFFF_00000000}, [], "ecx", 0),  # idiv ecx
        ("f7f9", {"rcx": 0xFFFFFFFF}, [], "ecx", -1),
        ("f7f1", {"rcx": 0xFFFFFFFF}, [], "ecx", 0xFFFFFFFF),  # div ecx
        ("49f7f8", {"r8": 3}, [], "r8", 3),  # idiv r8
        ("f6fc", {"rax": 0xFF00}, [], "ah", -1),  # idiv ah
        ("f77c2408", {"rsp": 0x7000}, [9, 0], "dword ptr [rsp+8]", 0),  # idiv dword [rsp+8]
        ("f77c2408", {"rsp": 0x9000}, [9, 0], "dword ptr [rsp+8]", None),
        ("f77c8808", {"rax": 0x6FF8, "rcx": 2}, [9, 5], "dword ptr [rax+rcx*4+8]", 5),
        ("f7f9", {}, [], "ecx", None),
        ("01c8", {"rcx": 0}, [], "", None),  # add eax,ecx
    ],
)
def test_a_division_tells_what_it_divided_by(
    code: str, registers: dict[str, int], stack: list[int], divisor: str, value: int | None
) -> None:
    """From registers, or from the part of the stack that was saved."""
    saved = struct.pack(f"<{len(stack)}Q", *stack)
    record = CrashRecord(8, 1, 1, 1, registers=registers, stack_address=0x7000, stack=saved)

    found = examine.decode(bytes.fromhex(code), 0, "x86_64", NEHALEM, record)

    assert found is not None
    assert (found.divisor, found.divisor_value) == (divisor, value)


def test_a_record_is_examined_without_the_extra(monkeypatch: pytest.MonkeyPatch, library: Path) -> None:
    """The library is known from the maps."""
    loaded = ctypes.CDLL(str(library))
    at = address_of(loaded, "divide")
    without(monkeypatch, "iced_x86", "elftools", "elftools.elf", "elftools.elf.elffile")
    record = CrashRecord(
        8, 1, 1, 1, architecture="x86_64", instruction_pointer=at, instruction=b"\xf7\xf9", regions=regions_here()
    )

    found = examine.examine(record)

    assert found.place == CodePlace(at, str(library), is_mapped=True)
    assert found.instruction is None
    assert found.cpu == cpu.this_cpu().name


def test_a_damaged_record_is_examined_all_the_same() -> None:
    """A wild write over the black box."""
    highest = (1 << 64) - 1
    record = CrashRecord(
        *(4, 2, 1, 1),
        architecture="x86_64",
        instruction_pointer=highest,
        instruction=os.urandom(64),
        return_addresses=(0, 1, highest),
        possible_return_addresses=(0, 5),
        stack=b"x" * 4096,
        address=highest,
    )

    found = examine.examine(record)

    assert found.place == CodePlace(highest)


# ---------------------------------------------------------------- system calls


@pytest.mark.parametrize(
    ("number", "architecture", "name"),
    [
        (0, "x86_64", "read"),
        (162, "x86_64", "sync"),
        (334, "x86_64", "rseq"),
        (335, "x86_64", ""),
        (435, "x86_64", "clone3"),
        (81, "aarch64", "sync"),
        (220, "aarch64", "clone"),
        (435, "aarch64", "clone3"),
        (9999, "x86_64", ""),
        (0, "riscv64", ""),
    ],
)
def test_system_calls_have_names(number: int, architecture: str, name: str) -> None:
    """As strace shows them."""
    assert system_calls.name_of(number, architecture) == name


@needs_x86
def test_names_of_system_calls_are_those_of_the_headers() -> None:
    """All of them, where the headers are."""
    headers = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not headers.exists():
        pytest.skip("no headers of the kernel")
    lines = (line.split() for line in headers.read_text().splitlines() if line.startswith("#define __NR_"))
    told = {int(number): name.removeprefix("__NR_") for _, name, number in lines}

    # Newer headers than ours have more.
    assert {n: system_calls.name_of(n, "x86_64") for n in told if n <= 450} == {n: told[n] for n in told if n <= 450}
