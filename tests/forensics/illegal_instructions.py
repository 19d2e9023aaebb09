"""Deaths by an instruction: real ones, in a page of their own and in a real library, each with the verdict it must get.

Reads   nothing.
Writes  a small library, compiled with cc.
Never   a class or function that a spawned worker could not import by name.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from faults.crashes import FORBIDDEN_CALL, WILD, X86, forbid, page, run
from outlive._forensics import cpu
from outlive.verdicts import Confidence, Name

# Each needs one feature that many CPUs lack; the code ends with ret, for where it does not fault.
WANTING = {
    "AVX512F": "62f17c4858c0",  # vaddps zmm0,zmm0,zmm0
    "AVX512_VP2INTERSECT": "62f27f4868c0",  # vp2intersectd k0,zmm0,zmm0
    "AVX512_4FMAPS": "62f27f489a00",  # v4fmaddps zmm0,zmm0+3,[rax]
    "AVX512_FP16": "62f57c4858c0",  # vaddph zmm0,zmm0,zmm0
    "AVX_VNNI": "c4e27950c0",  # vpdpbusd xmm0,xmm0,xmm0
    "AVX_IFMA": "c4e2f9b4c0",  # vpmadd52luq xmm0,xmm0,xmm0
    "AVX_VNNI_INT8": "c4e27b50c0",  # vpdpbssd xmm0,xmm0,xmm0
    "AMX_TILE": "c4e27b49c0",  # tilezero tmm0
    "AMX_BF16": "c4e26a5cc1",  # tdpbf16ps tmm0,tmm1,tmm2
    "SHA512": "c4e27fcdc0",  # vsha512msg2 ymm0,ymm0
    "SM3": "c4e278dac0",  # vsm3msg1 xmm0,xmm0,xmm0
    "SM4": "c4e27adac0",  # vsm4key4 xmm0,xmm0,xmm0
    "XOP": "8fe978c1c0",  # vphaddbw xmm0,xmm0
    "D3NOW": "0f0fc09e",  # pfadd mm0,mm0
    "SSE4A": "660f79c0",  # extrq xmm0,xmm0
    "RTM": "0f01d5",  # xend
    "TSXLDTRK": "f20f01e8",  # xsusldtrk
    "UINTR": "f30f01ee",  # clui
    "PTWRITE": "f30faee0",  # ptwrite eax
    "AESKLE": "f30f38dc00",  # aesenc128kl xmm0,[rax]
    "RAO_INT": "0f38fc00",  # aadd [rax],eax
    "CMPCCXADD": "c4e279e000",  # cmpoxadd [rax],eax,eax
}
RETURN = b"\xc3"

SOURCE = """
#include <stdio.h>
__asm__(".text; .globl between; between: .skip 64,0x90"); /* code that belongs to no function */
void shake(int) __asm__("_ZN8cruncher5shakeEi"); /* a C++ name without a C++ compiler */
%s
void trap(void) { __builtin_trap(); }
void shake(int n) { if (n) __builtin_trap(); }
void panic(void) {
    fputs("thread 'main' panicked at src/decode.rs:88:9:\\nindex out of bounds: the len is 3\\n", stderr);
    __builtin_trap();
}
void halt(void) { __asm__ volatile("hlt"); }
void breakpoint(void) { __asm__ volatile("int3"); }
int divide(int a, int b) { return a / b; }
double ratio(double a, double b) { return a / b; }
int divide_in_memory(volatile int a, volatile int b) {
    int result;
    __asm__ volatile("cltd; idivl %%2" : "=a"(result) : "a"(a), "m"(b) : "edx");
    return result;
}
void call(void (*pointer)(void)) { pointer(); __asm__ volatile(""); }
void smash(void) { __asm__ volatile("movabs $0x4141414141414141,%%rax; mov %%rax,(%%rsp); ret"); }
"""
NAME = "libcruncher.so"


def can_compile() -> bool:
    return X86 and shutil.which("cc") is not None


def build(folder: Path) -> Path:
    """A library with functions that die, with the names of real ones."""
    wanting = "\n".join(
        f'void want_{name}(void) {{ __asm__ volatile(".byte {bytes_of(code)}"); }}' for name, code in WANTING.items()
    )
    source, library = folder / "cruncher.c", folder / NAME
    source.write_text(SOURCE % wanting)
    # Without a red zone: what lies below the stack pointer is not saved, and the divisor would be unknown.
    flags = ["-shared", "-fPIC", "-O1", "-fno-omit-frame-pointer", "-fcf-protection=none", "-mno-red-zone"]
    flags.append("-Wl,-Ttext-segment=0x100000")  # so that places in the file and addresses in it differ
    subprocess.run(["cc", *flags, "-o", library, source], check=True)
    return library


def bytes_of(code: str) -> str:
    return ",".join(f"0x{byte:02x}" for byte in bytes.fromhex(code))


def missing_here() -> list[str]:
    """Features of the list that this CPU says it lacks, and whose instruction it really refuses: a virtual machine may
    hide a feature that works all the same."""
    return [name for name in cpu.this_cpu().missing(WANTING) if _dies_of_sigill(bytes.fromhex(WANTING[name]))]


def _dies_of_sigill(code: bytes) -> bool:
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGILL, signal.SIG_DFL)
        run(page(code + RETURN))
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGILL


# ---------------------------------------------------------------- deaths


@dataclass(frozen=True)
class Death:
    """A way to die, and what must be said about it."""

    act: Callable[[ctypes.CDLL], object]
    verdict: Name
    words: tuple[str, ...]  # of the cause
    facts: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    confidence: Confidence = Confidence.CERTAIN
    signal: signal.Signals = field(default=signal.SIGILL)


def _run_bytes(code: str) -> Callable[[ctypes.CDLL], object]:
    return lambda _: run(page(bytes.fromhex(code) + RETURN))


def _call(name: str, *arguments: int) -> Callable[[ctypes.CDLL], object]:
    return lambda library: getattr(library, name)(*map(ctypes.c_int, arguments))


def _call_heap(library: ctypes.CDLL) -> None:
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    library.call(ctypes.c_void_p(libc.sbrk(0) - 64))  # not malloc's answer, which may lie in a thread's arena


def _call_forbidden(library: ctypes.CDLL) -> None:
    forbid(FORBIDDEN_CALL)
    ctypes.CDLL(None).sync()


def _call_deadly(library: ctypes.CDLL) -> None:
    forbid(FORBIDDEN_CALL, kill=True)
    ctypes.CDLL(None).sync()


def _divide_floats(library: ctypes.CDLL) -> None:
    ctypes.CDLL("libm.so.6").feenableexcept(4)  # FE_DIVBYZERO
    library.ratio(ctypes.c_double(1), ctypes.c_double(0))


_LIB = f"in {NAME}"
DEATHS = {
    "trap": Death(_call("trap"), Name.DELIBERATE_TRAP, ("ud2 at trap+0x", _LIB), ("0f 0b",), ("addr2line",)),
    "C++ trap": Death(_call("_ZN8cruncher5shakeEi", 1), Name.DELIBERATE_TRAP, ("ud2 at cruncher::shake+0x", _LIB)),
    "panic": Death(
        _call("panic"),
        Name.DELIBERATE_TRAP,
        ("ud2 at panic+0x", "panicked at src/decode.rs:88:9: index out of bounds: the len is 3"),
        remedies=("RUST_BACKTRACE=1",),
    ),
    "halt": Death(_call("halt"), Name.DELIBERATE_TRAP, ("hlt at halt+0x", _LIB), signal=signal.SIGSEGV),
    "breakpoint": Death(
        _call("breakpoint"), Name.DELIBERATE_TRAP, ("int3 at breakpoint+0x", _LIB), ("(cc)",), signal=signal.SIGTRAP
    ),
    "trap in a page": Death(
        _run_bytes("0f0b"), Name.DELIBERATE_TRAP, ("ud2 at 0x", "made at run time"), confidence=Confidence.LIKELY
    ),
    "division by zero": Death(
        _call("divide", 7, 0),
        Name.ARITHMETIC_FAULT,
        ("division by zero by idiv ", "at divide+0x", "is 0", _LIB),
        signal=signal.SIGFPE,
    ),
    "division by zero in memory": Death(
        _call("divide_in_memory", 7, 0),
        Name.ARITHMETIC_FAULT,
        ("division by zero by idiv dword ptr [", "at divide_in_memory+0x", "is 0"),
        signal=signal.SIGFPE,
    ),
    "overflow": Death(
        _call("divide", -(1 << 31), -1),
        Name.ARITHMETIC_FAULT,
        ("divided by -1", "at divide+0x", "does not fit"),
        signal=signal.SIGFPE,
    ),
    "floating-point division": Death(
        _divide_floats,
        Name.ARITHMETIC_FAULT,
        ("floating-point division by zero by divsd ", "at ratio+0x", "asked for a signal"),
        remedies=("feenableexcept",),
        signal=signal.SIGFPE,
    ),
    "call of the heap": Death(
        _call_heap, Name.JUMPED_INTO_DATA, ("jump to 0x", ", which is in the heap, from call+0x"), signal=signal.SIGSEGV
    ),
    "call of nothing": Death(
        lambda library: library.call(ctypes.c_void_p(WILD)),
        Name.JUMPED_INTO_DATA,
        (f"jump to {WILD:#x}, where nothing is mapped, from call+0x",),
        signal=signal.SIGSEGV,
    ),
    "call of null": Death(
        lambda library: library.call(ctypes.c_void_p(0)),
        Name.NULL_POINTER,
        ("call of address 0x0 from call+0x", _LIB),
        signal=signal.SIGSEGV,
    ),
    "return address smashed": Death(
        _call("smash"),
        Name.JUMPED_INTO_DATA,
        ("ret to 0x4141414141414141, which is no address, at smash+0x", "overwritten"),
        remedies=("an array in smash",),
        signal=signal.SIGSEGV,
    ),
    "call of impossible": Death(
        lambda library: library.call(ctypes.c_void_p(0x4242424242424242)),
        Name.JUMPED_INTO_DATA,
        ("to 0x4242424242424242, which is no address, at call+0x",),
        remedies=("keep callbacks alive",),
        signal=signal.SIGSEGV,
    ),
    "data that may be run": Death(
        _run_bytes("060606"),
        Name.JUMPED_INTO_DATA,
        ("bytes 06 06 06", "are no instruction"),
        confidence=Confidence.LIKELY,
    ),
    "forbidden": Death(
        _call_forbidden,
        Name.FORBIDDEN_SYSTEM_CALL,
        (f"system call {FORBIDDEN_CALL} (sync)", "seccomp", "libc"),
        remedies=("allows sync",),
        signal=signal.SIGSYS,
    ),
    "forbidden and killed": Death(  # no handler runs
        _call_deadly,
        Name.FORBIDDEN_SYSTEM_CALL,
        ("seccomp", "nobody saw which"),
        remedies=("ausearch",),
        confidence=Confidence.LIKELY,
        signal=signal.SIGSYS,
    ),
}


def deaths_of(missing: list[str]) -> dict[str, Death]:
    """Also one in a page and one in the library for each feature that is missing here."""
    found = dict(DEATHS)
    for name in missing:
        spoken = {"D3NOW": "3DNow!"}.get(name, name)
        words = (f"needs {spoken}", "which this CPU has not got")
        found[f"{name} in a page"] = Death(
            _run_bytes(WANTING[name]), Name.CPU_FEATURE_MISSING, (*words, "made at run time"), (f"lacks {spoken}",)
        )
        found[f"{name} in a library"] = Death(
            _call(f"want_{name}"), Name.CPU_FEATURE_MISSING, (*words, f"at want_{name}+0x", _LIB), (f"lacks {spoken}",)
        )
    return found
