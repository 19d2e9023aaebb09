"""Which features of an x86-64 CPU an instruction needs, of those whose lack kills; and where such bytes may be.

Reads   iced-x86's tables.
Writes  nothing.
Never   counts `tzcnt`, `lzcnt` and prefetches: a CPU that has them not runs them as something else, and compilers use
        that on purpose.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

import numpy

_SSE = ("SSE3", "SSSE3", "SSE4_1", "SSE4_2")
_BESIDE_AVX = {"FMA", "FMA4", "F16C", "XOP", "VAES", "VPCLMULQDQ", "SHA512", "SM3", "SM4"}  # encoded as AVX is
_OTHERS = {
    *("SSE4A", "POPCNT", "CMPXCHG16B", "AES", "PCLMULQDQ", "GFNI", "SHA", "BMI1", "BMI2", "TBM", "MOVBE", "ADX"),
    *("D3NOW", "D3NOWEXT"),
}
_RUN_AS_OTHERS = {"TZCNT", "LZCNT"}

# Classes of bytes that `candidates` tells apart.
WIDE, WIDEST, OLD = "VEX", "EVEX", "SSE4"


def is_judged(name: str) -> bool:
    return name.startswith(("AVX", "AMX")) or name in _BESIDE_AVX or name in _OTHERS or name in _SSE


def with_implied(names: frozenset[str]) -> frozenset[str]:
    """Also those without which no CPU has these: so «without AVX» finds all that AVX-512 code is."""
    found = set(names)
    if any(name.startswith("AVX512") for name in found):
        found |= {"AVX512F", "AVX2"}
    if any(name.startswith("AVX") for name in found) or found & _BESIDE_AVX:
        found.add("AVX")
    for place, name in enumerate(_SSE):
        if name in found:
            found |= set(_SSE[:place])
    return frozenset(found)


@functools.cache
def of_codes() -> dict[int, frozenset[str]]:
    """By iced's number of an instruction: what it needs. Those that every x86-64 CPU runs are not in it."""
    from iced_x86 import CpuidFeature, Mnemonic

    names = {value: name for name, value in vars(CpuidFeature).items() if name.isupper() and isinstance(value, int)}
    as_others = {getattr(Mnemonic, name) for name in _RUN_AS_OTHERS}
    found: dict[int, frozenset[str]] = {}
    for number, instruction in _every_instruction():
        if instruction.mnemonic in as_others:
            continue
        needed = frozenset(names[feature] for feature in instruction.cpuid_features())
        judged = frozenset(name for name in needed if is_judged(name))
        if judged:
            found[number] = with_implied(judged)
    return found


@functools.cache
def plain_vector_codes() -> frozenset[int]:
    """SSE and SSE2 in their old encoding: code that is compiled for AVX has none of them."""
    from iced_x86 import CpuidFeature, EncodingKind, Mnemonic

    others = re.compile("PREFETCH|.FENCE|MOVNTI|PAUSE|CLFLUSH|MASKMOVQ|..MXCSR")
    mnemonics = {value: name for name, value in vars(Mnemonic).items() if name.isupper() and isinstance(value, int)}
    found = set()
    sse = {CpuidFeature.SSE, CpuidFeature.SSE2}
    for number, instruction in _every_instruction():
        is_old = instruction.encoding == EncodingKind.LEGACY and not sse.isdisjoint(instruction.cpuid_features())
        if is_old and not others.match(mnemonics[instruction.mnemonic]):
            found.add(number)
    return frozenset(found)


def _every_instruction() -> Iterator[tuple[int, Any]]:
    """Each that iced-x86 knows, with its number."""
    from iced_x86 import Code, Instruction

    for name, number in vars(Code).items():
        if name.isupper() and isinstance(number, int):
            instruction: Any = Instruction()
            instruction.code = number
            yield number, instruction


@functools.cache
def _opcodes() -> dict[str, Any]:
    """By encoding: whether (map, prefix, opcode) is an instruction that needs something."""
    from iced_x86 import EncodingKind, MandatoryPrefix, OpCodeTableKind

    maps = {OpCodeTableKind.T0F: 1, OpCodeTableKind.T0F38: 2, OpCodeTableKind.T0F3A: 3}
    maps |= {
        getattr(OpCodeTableKind, name): n for name, n in (("MAP5", 5), ("MAP6", 6)) if hasattr(OpCodeTableKind, name)
    }
    prefixes = {MandatoryPrefix.P66: 1, MandatoryPrefix.PF3: 2, MandatoryPrefix.PF2: 3}
    kinds = {EncodingKind.VEX: WIDE, EncodingKind.EVEX: WIDEST, EncodingKind.LEGACY: OLD}
    found = {kind: numpy.zeros((8, 4, 256), bool) for kind in (WIDE, WIDEST, OLD)}
    for number, instruction in _every_instruction():
        if number not in of_codes():
            continue
        code = instruction.op_code()
        kind, table = kinds.get(code.encoding), maps.get(code.table)
        if kind is not None and table is not None and code.op_code < 256:
            found[kind][table, prefixes.get(code.mandatory_prefix, 0), code.op_code] = True
    return found


def candidates(code: Any, start: int) -> dict[str, Any]:
    """Places (from `start` on) whose bytes look like an instruction that needs something: a superset of those.

    `code` is an array of bytes, with eight of any kind after the last that counts. Every VEX and EVEX instruction is
    found; of the older encodings those of SSSE3 and SSE4, AES and SHA (0F 38, 0F 3A) and POPCNT.
    """
    valid = _opcodes()
    body = code[: max(0, len(code) - 8)]
    found: dict[str, Any] = {}

    at = numpy.flatnonzero(body == 0xC5)
    two = at[valid[WIDE][1, code[at + 1] & 3, code[at + 2]]]
    at = numpy.flatnonzero(body == 0xC4)
    at = at[code[at + 1] & 0x1F < 8]
    three = at[valid[WIDE][code[at + 1] & 7, code[at + 2] & 3, code[at + 3]]]
    found[WIDE] = numpy.concatenate([two, three]) + start

    at = numpy.flatnonzero(body == 0x62)
    at = at[(code[at + 1] & 8 == 0) & (code[at + 2] & 4 == 4)]
    found[WIDEST] = at[valid[WIDEST][code[at + 1] & 7, code[at + 2] & 3, code[at + 4]]] + start

    at = numpy.flatnonzero(body == 0x0F)
    at = at[at >= 2]
    second, third = code[at + 1], code[at + 2]
    any_prefix = valid[OLD].any(axis=1)
    counted = (second == 0xB8) & ((code[at - 1] == 0xF3) | ((code[at - 1] & 0xF0 == 0x40) & (code[at - 2] == 0xF3)))
    hits = counted | ((second == 0x38) & any_prefix[2, third]) | ((second == 0x3A) & any_prefix[3, third])
    found[OLD] = at[hits] + start
    return found


def essential(names: Iterable[str]) -> list[str]:
    """Without what the others imply."""
    kept = set(names)
    for name in list(kept):
        kept -= with_implied(frozenset({name})) - {name}
    return sorted(kept)


def spoken(names: Iterable[str]) -> str:
    """«AVX2 and FMA»."""
    ordered = essential(names)
    return " and ".join(ordered) if len(ordered) < 3 else f"{', '.join(ordered[:-1])} and {ordered[-1]}"
