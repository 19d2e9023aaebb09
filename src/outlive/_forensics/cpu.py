"""Which features this CPU has, and its system lets programs use.

Reads   the CPU, by CPUID and XGETBV; where that cannot be: NumPy's list, then /proc/cpuinfo.
Writes  one page of code, once, and runs it.
Never   a feature of which nobody knows: those are neither there nor missing.

Names are those of iced-x86's CpuidFeature (on aarch64: those of /proc/cpuinfo, in capitals), so that what an
instruction needs and what the CPU has can be compared. /proc/cpuinfo comes last: under emulation it is the host's.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import mmap
import platform
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

Cpuid = Callable[[int, int], tuple[int, int, int, int]]


@dataclass(frozen=True)
class Cpu:
    """A CPU, as a program sees it."""

    name: str = ""
    features: frozenset[str] = frozenset()
    known: frozenset[str] = frozenset()  # of which it is known whether they are there
    source: str = ""  # who says so

    def missing(self, needed: Iterable[str]) -> tuple[str, ...]:
        """Of these features, the ones that it has not got."""
        return tuple(name for name in needed if name in self.known and name not in self.features)


@functools.cache
def this_cpu() -> Cpu:
    """The CPU that we run on. Asked once: CPUID leaves a virtual machine, and costs some 50 µs there."""
    machine = platform.machine()
    if machine == "aarch64":
        return from_cpuinfo(_cpuinfo(), machine)
    if machine not in ("x86_64", "AMD64"):
        return Cpu(platform.processor())
    if sys.platform == "linux":
        try:
            return from_cpuid(*load_instructions())
        except OSError:
            pass  # No page may be written and executed (SELinux): others have asked the CPU, too.
    return from_numpy() or from_cpuinfo(_cpuinfo(), "x86_64")


# ---------------------------------------------------------------- the CPU itself

_CPUID_CODE = bytes.fromhex(
    "53 89f8 89f1 4989d0"  # push rbx; mov eax,edi; mov ecx,esi; mov r8,rdx
    "0fa2 418900 41895804 41894808 4189500c"  # cpuid; mov [r8],eax; mov [r8+4],ebx; mov [r8+8],ecx; mov [r8+12],edx
    "5b c3"  # pop rbx; ret
)
_XGETBV_CODE = bytes.fromhex("89f9 0f01d0 48c1e220 4809d0 c3")  # mov ecx,edi; xgetbv; shl rdx,32; or rax,rdx; ret
_XGETBV_AT = 64


def load_instructions() -> tuple[Cpuid, Callable[[], int]]:
    """CPUID and XGETBV(0) as functions; OSError where the system allows no code that is made at run time."""
    page = mmap.mmap(
        -1,
        mmap.PAGESIZE,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS,
        prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC,
    )
    page.write(_CPUID_CODE.ljust(_XGETBV_AT, b"\xcc") + _XGETBV_CODE)
    held = ctypes.c_char.from_buffer(page)  # the page lives as long as the functions do
    at = ctypes.addressof(held)
    ask = ctypes.CFUNCTYPE(None, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)(at)
    states = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_uint32)(at + _XGETBV_AT)

    def cpuid(leaf: int, subleaf: int) -> tuple[int, int, int, int]:
        answer = (ctypes.c_uint32 * 4)()
        ask(leaf, subleaf, ctypes.addressof(answer))
        return answer[0], answer[1], answer[2], answer[3]

    def enabled() -> int:
        assert held is not None
        return int(states(0))

    return cpuid, enabled


_EAX, _EBX, _ECX, _EDX = range(4)
# (leaf, subleaf, register): bits. From Intel's manual, volume 2A, and AMD's, volume 3, appendix E.
_BITS: dict[tuple[int, int, int], dict[str, int]] = {
    (1, 0, _ECX): {
        **{"SSE3": 0, "PCLMULQDQ": 1, "MONITOR": 3, "VMX": 5, "SMX": 6, "SSSE3": 9, "FMA": 12, "CMPXCHG16B": 13},
        **{"SSE4_1": 19, "SSE4_2": 20, "MOVBE": 22, "POPCNT": 23, "AES": 25, "XSAVE": 26, "AVX": 28, "F16C": 29},
        **{"RDRAND": 30},
    },
    (1, 0, _EDX): {
        **{"FPU": 0, "TSC": 4, "MSR": 5, "CX8": 8, "SEP": 11, "CMOV": 15, "CLFSH": 19, "MMX": 23, "FXSR": 24},
        **{"SSE": 25, "SSE2": 26},
    },
    (7, 0, _EBX): {
        **{"FSGSBASE": 0, "BMI1": 3, "HLE": 4, "AVX2": 5, "BMI2": 8, "INVPCID": 10, "RTM": 11, "MPX": 14},
        **{"AVX512F": 16, "AVX512DQ": 17, "RDSEED": 18, "ADX": 19, "SMAP": 20, "AVX512_IFMA": 21, "PCOMMIT": 22},
        **{"CLFLUSHOPT": 23, "CLWB": 24, "AVX512PF": 26, "AVX512ER": 27, "AVX512CD": 28, "SHA": 29, "AVX512BW": 30},
        **{"AVX512VL": 31},
    },
    (7, 0, _ECX): {
        **{"PREFETCHWT1": 0, "AVX512_VBMI": 1, "PKU": 3, "WAITPKG": 5, "AVX512_VBMI2": 6, "CET_SS": 7, "GFNI": 8},
        **{"VAES": 9, "VPCLMULQDQ": 10, "AVX512_VNNI": 11, "AVX512_BITALG": 12, "AVX512_VPOPCNTDQ": 14, "RDPID": 22},
        **{"KL": 23, "CLDEMOTE": 25, "MOVDIRI": 27, "MOVDIR64B": 28, "ENQCMD": 29},
    },
    (7, 0, _EDX): {
        **{"AVX512_4VNNIW": 2, "AVX512_4FMAPS": 3, "UINTR": 5, "AVX512_VP2INTERSECT": 8, "SERIALIZE": 14},
        **{"TSXLDTRK": 16, "PCONFIG": 18, "CET_IBT": 20, "AMX_BF16": 22, "AVX512_FP16": 23, "AMX_TILE": 24},
        **{"AMX_INT8": 25},
    },
    (7, 1, _EAX): {
        **{"SHA512": 0, "SM3": 1, "SM4": 2, "RAO_INT": 3, "AVX_VNNI": 4, "AVX512_BF16": 5, "CMPCCXADD": 7},
        **{"FRED": 17, "LKGS": 18, "WRMSRNS": 19, "AMX_FP16": 21, "HRESET": 22, "AVX_IFMA": 23, "MSRLIST": 27},
    },
    (7, 1, _EDX): {"AVX_VNNI_INT8": 4, "AVX_NE_CONVERT": 5, "AMX_COMPLEX": 8, "AVX_VNNI_INT16": 10, "PREFETCHITI": 14},
    (0xD, 1, _EAX): {"XSAVEOPT": 0, "XSAVEC": 1, "XSAVES": 3},
    (0x14, 0, _EBX): {"PTWRITE": 4},
    (0x19, 0, _EBX): {"AESKLE": 0, "WIDE_KL": 2},
    (0x80000001, 0, _ECX): {
        **{"SVM": 2, "LZCNT": 5, "SSE4A": 6, "PREFETCHW": 8, "XOP": 11, "SKINIT": 12, "LWP": 15, "FMA4": 16},
        **{"TBM": 21, "MONITORX": 29},
    },
    (0x80000001, 0, _EDX): {"SYSCALL": 11, "RDTSCP": 27, "X64": 29, "D3NOWEXT": 30, "D3NOW": 31},
    (0x80000008, 0, _EBX): {"CLZERO": 0, "INVLPGB": 3, "RDPRU": 4, "MCOMMIT": 8, "WBNOINVD": 9},
}
_KNOWN = frozenset(name for bits in _BITS.values() for name in bits) | {"HLE_OR_RTM", "SKINIT_OR_SVM"}

# The system must save their registers, or the CPU refuses them: which bits of XCR0 that takes.
_STATES = {"AMX": 0x60000, "AVX512": 0xE6, "AVX": 0x6}
_WIDE = {"FMA", "FMA4", "XOP", "F16C", "VAES", "VPCLMULQDQ", "SHA512", "SM3", "SM4"}  # encoded as AVX is
_OSXSAVE = 27


def from_cpuid(cpuid: Cpuid, enabled: Callable[[], int]) -> Cpu:
    """What the CPU says of itself, less what the system has not enabled."""
    highest = {base: cpuid(base, 0)[_EAX] for base in (0, 0x80000000)}
    has: set[str] = set()
    for (leaf, subleaf, register), bits in _BITS.items():
        # Beyond the highest leaf Intel's CPUs answer with something else; beyond the highest subleaf with zeros.
        if leaf <= highest[leaf & 0x80000000]:
            answer = cpuid(leaf, subleaf)[register]
            has |= {name for name, bit in bits.items() if answer >> bit & 1}
    states = enabled() if cpuid(1, 0)[_ECX] >> _OSXSAVE & 1 else 0
    has = {name for name in has if states & _states_for(name) == _states_for(name)}
    return Cpu(_brand(cpuid, highest[0x80000000]), _with_either(has), _KNOWN, "CPUID")


def _states_for(name: str) -> int:
    for family, states in _STATES.items():
        if name.startswith(family):
            return states
    return _STATES["AVX"] if name in _WIDE else 0


def _with_either(has: set[str]) -> frozenset[str]:
    either = {"HLE_OR_RTM": {"HLE", "RTM"}, "SKINIT_OR_SVM": {"SKINIT", "SVM"}}
    return frozenset(has | {name for name, names in either.items() if names & has})


def _brand(cpuid: Cpuid, highest: int) -> str:
    if highest < 0x80000004:
        return ""
    text = b"".join(struct.pack("<4I", *cpuid(leaf, 0)) for leaf in range(0x80000002, 0x80000005))
    return " ".join(text.split(b"\0")[0].decode("ascii", "replace").split())


# ---------------------------------------------------------------- what others know

_NUMPYS = {
    "FMA3": "FMA",
    "BMI": "BMI1",
    "SSE41": "SSE4_1",
    "SSE42": "SSE4_2",
    "AVX512VNNI": "AVX512_VNNI",
    "AVX512IFMA": "AVX512_IFMA",
    "AVX512VBMI": "AVX512_VBMI",
    "AVX512VBMI2": "AVX512_VBMI2",
    "AVX512BITALG": "AVX512_BITALG",
    "AVX512VPOPCNTDQ": "AVX512_VPOPCNTDQ",
    "AVX5124FMAPS": "AVX512_4FMAPS",
    "AVX5124VNNIW": "AVX512_4VNNIW",
    "AVX512BF16": "AVX512_BF16",
    "AVX512FP16": "AVX512_FP16",
}


def from_numpy() -> Cpu | None:
    """What NumPy found out when it was imported; None where it does not tell."""
    found = None
    for home in ("numpy._core", "numpy.core"):  # from 2.0 on, and before
        try:
            found = importlib.import_module(f"{home}._multiarray_umath").__cpu_features__
            break
        except (ImportError, AttributeError):
            continue
    if found is None:
        return None
    told = {_NUMPYS.get(name, name): bool(there) for name, there in found.items()}
    known = frozenset(told.keys() & _KNOWN)
    name = from_cpuinfo(_cpuinfo(), "x86_64").name
    return Cpu(name, frozenset(feature for feature in known if told[feature]), known, "NumPy")


_FLAGS = {
    "pni": "SSE3",
    "cx16": "CMPXCHG16B",
    "clflush": "CLFSH",
    "abm": "LZCNT",
    "sha_ni": "SHA",
    "lm": "X64",
    "3dnow": "D3NOW",
    "3dnowext": "D3NOWEXT",
    "3dnowprefetch": "PREFETCHW",
    "mwaitx": "MONITORX",
    "keylocker": "KL",
    "keylocker_wide": "WIDE_KL",
    "user_shstk": "CET_SS",
    "ibt": "CET_IBT",
    "avx512ifma": "AVX512_IFMA",
    "avx512vbmi": "AVX512_VBMI",
}
# A kernel does not show these, however new it is.
_NEVER_SHOWN = {"PCOMMIT", "PREFETCHWT1", "PREFETCHITI", "PTWRITE", "SMX", "MSRLIST", "RAO_INT", "UINTR", "AESKLE"}


def from_cpuinfo(text: str, machine: str) -> Cpu:
    """What the kernel writes into /proc/cpuinfo about the first CPU."""
    fields = dict(_fields(text))
    flags = fields.get("flags" if machine == "x86_64" else "Features", "").split()
    name = fields.get("model name", "")
    if machine != "x86_64":
        # The kernel shows all that a program may use; an old one does not know what is new, so only what is there
        # is known.
        has = frozenset(flag.upper() for flag in flags)
        return Cpu(name or platform.processor() or machine, has, has, "/proc/cpuinfo")
    names = {_FLAGS.get(flag, flag.upper()) for flag in flags}
    known = _KNOWN - _NEVER_SHOWN if flags else frozenset()
    return Cpu(name, _with_either(names) & known, known, "/proc/cpuinfo")


def _fields(text: str) -> Iterator[tuple[str, str]]:
    for line in text.split("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
