"""The CPUs to judge against: this one, and those that `--cpu` names.

Reads   this CPU; archspec's database of microarchitectures (the extra `doctor`).
Writes  nothing.
Never   archspec's guess at this CPU: it reads /proc/cpuinfo, which is another's under emulation.

The database lists what tells microarchitectures apart, not all that they have: zen2 without RDRAND, sapphirerapids
without AVX512_FP16. Only features that it lists without gaps are called missing; others are, where what they build
on is.
"""

from __future__ import annotations

import difflib
import platform
from typing import Any

from outlive._forensics.cpu import Cpu, this_cpu
from outlive.doctor.native import features

_V2 = frozenset({"SSE3", "SSSE3", "SSE4_1", "SSE4_2", "POPCNT", "CMPXCHG16B"})
_V3 = _V2 | {"AVX", "AVX2", "FMA", "F16C", "BMI1", "BMI2", "MOVBE"}
_V4 = _V3 | {"AVX512F", "AVX512BW", "AVX512CD", "AVX512DQ", "AVX512VL"}
# The levels of the psABI, low to high. A machine of a level need have no more than this.
LEVELS = {"x86-64": frozenset[str](), "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}
_LISTED = _V4 | {  # the database has them wherever they are
    *("AES", "PCLMULQDQ", "AVX512_VBMI", "AVX512_VBMI2", "AVX512_VNNI", "AVX512_BITALG", "AVX512_VPOPCNTDQ"),
    *("AVX512_IFMA", "AVX512_BF16"),
}
_MORE = {
    *("AVX512_FP16", "AVX512_VP2INTERSECT", "AVX512_4FMAPS", "AVX512_4VNNIW", "AVX512ER", "AVX512PF"),
    *("AVX_VNNI", "AVX_IFMA", "AVX_VNNI_INT8", "AVX_VNNI_INT16", "AVX_NE_CONVERT"),
    *("VAES", "VPCLMULQDQ", "FMA4", "XOP", "SHA512", "SM3", "SM4"),
}
_FLAGS = {"cx16": "CMPXCHG16B", "avx512ifma": "AVX512_IFMA", "avx512vbmi": "AVX512_VBMI", "sha_ni": "SHA"}


class UnknownMachine(ValueError):
    """`--cpu` names what is in no database, or what needs one that is not installed."""


def machines(names: Any) -> list[Cpu]:
    """This CPU, and one for each name."""
    if isinstance(names, str):
        raise TypeError(f"cpus must be a sequence of names, got the string {names!r}; use [{names!r}]")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"cpus must be names such as 'x86-64-v2' or 'znver2', got {name!r}")
    return [this_cpu(), *(named(name) for name in dict.fromkeys(names))]


def named(name: str) -> Cpu:
    plain = name.strip().lower().replace("_", "-").removesuffix("-v1")
    if plain.startswith("x86-64") and plain in LEVELS:
        has = LEVELS[plain]
        return Cpu(plain, has, _LISTED | _MORE, "the psABI")
    targets = _database(name)
    by_name = _by_any_name(targets)
    target = by_name.get(plain)
    if target is None:
        near = difflib.get_close_matches(plain, [*by_name, *LEVELS], 3) or ["x86-64-v3", "znver2", "haswell"]
        raise UnknownMachine(f"cpu {name!r} is not in archspec's database; did you mean {' or '.join(near)}?")
    if str(target.family) != "x86_64":
        raise UnknownMachine(
            f"cpu {name!r} is {target.family}, not x86-64: no compiled code is for both; "
            "run the doctor on such a machine"
        )
    listed = {_FLAGS.get(flag, flag.upper()) for flag in target.features}
    has = frozenset(feature for feature in listed if features.is_judged(feature))
    # What the database may have left out is missing only where its ground is.
    doubtful = {more for more in _MORE - has if features.with_implied(frozenset({more})) - {more} <= has}
    return Cpu(plain, has, (_LISTED | _MORE) - doubtful - {"CMPXCHG16B"}, "archspec")  # core2 has that


def level_of(cpu: Cpu) -> str:
    """The highest level of x86-64 that the CPU has whole: what to compile for."""
    return [name for name, needed in LEVELS.items() if needed <= cpu.features or not needed][-1]


def satisfies(cpu: Cpu, level: str) -> bool:
    return not cpu.missing(LEVELS.get(level.removesuffix("-v1"), frozenset()))


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def _database(name: str) -> dict[str, Any]:
    try:
        from archspec.cpu import TARGETS
    except ImportError:
        raise UnknownMachine(
            f"cpu {name!r} needs a database of microarchitectures: pip install 'outlive[doctor]' "
            f"(without it: {', '.join(LEVELS)})"
        ) from None
    return dict(TARGETS)


def _by_any_name(targets: dict[str, Any]) -> dict[str, Any]:
    """Also by the names that GCC and Clang have for -march: znver2 is zen2."""
    found: dict[str, Any] = {}
    for target in targets.values():
        for compiler in ("gcc", "clang"):
            for entry in target.compilers.get(compiler, ()):
                alias = str(entry.get("name", "")).lower().replace("_", "-")
                if alias:
                    found.setdefault(alias, target)  # ancestors come first: of two with one name the lesser
    if "icelake" in targets:
        found["icelake-server"] = targets["icelake"]
    return found | {name.replace("_", "-"): target for name, target in targets.items()}
