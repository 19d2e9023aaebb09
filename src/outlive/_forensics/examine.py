"""Examines a crash record: which code, which instruction, which features of the CPU it needs.

Reads   a crash record; the files of the libraries it names; what this CPU has.
Writes  nothing.
Never   fails for want of iced-x86, pyelftools or capstone (the extra `forensics`): it then says less.

They are imported when the first crash comes: `import outlive`, and a job without a crash, do not pay for them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from outlive._forensics import cpu, symbols, system_calls
from outlive._forensics.cpu import Cpu
from outlive.crashes import CrashRecord
from outlive.evidence import CodePlace, Examined, Instruction

_MOST_FRAMES = 16
_FEW = 6  # of the words on the stack that may be return addresses: many are stale
_TRAPS = {b"\x0f\x0b": "ud2", b"\x0f\xb9": "ud1", b"\x0f\xff": "ud0", b"\xcc": "int3", b"\xf4": "hlt"}


def examine(record: CrashRecord, on: Cpu | None = None) -> Examined:
    """All that files and decoders say about it; `on`: the CPU that it happened on, if that is not this one."""
    on = on or cpu.this_cpu()
    at, code = _where(record)
    frames = _returns(record)
    # A return address is after its call, which may be the last instruction of a function: look one byte before it.
    places = symbols.places_of(([] if at is None else [at]) + [address - 1 for address in frames], record.regions)
    return Examined(
        place=places[0] if at is not None else None,
        frames=tuple(_one_on(place) for place in places[len(places) - len(frames) :]),
        instruction=decode(code, at or 0, record.architecture, on, record) if code else None,
        cpu=on.name,
        system_call="" if record.system_call is None else system_calls.name_of(record.system_call, record.architecture),
    )


def _where(record: CrashRecord) -> tuple[int | None, bytes]:
    """Address and bytes of the instruction: x86-64 leaves the pointer past one that traps."""
    at = record.instruction_pointer
    if at is not None and record.signal_name == "SIGTRAP" and record.architecture == "x86_64":
        for trap in (b"\xcc", b"\xf1", b"\xcd\x03"):  # int3, int1, int 3
            if record.before.endswith(trap):
                return at - len(trap), trap
        return at, b""  # a step or a watchpoint of a debugger: the instruction before it was none of these
    return at, record.instruction


def _returns(record: CrashRecord) -> tuple[int, ...]:
    """Return addresses, the innermost first."""

    def is_code(address: int) -> bool:
        region = record.region_of(address)
        return region is not None and region.executable

    found = [address for address in record.return_addresses if is_code(address)]
    if record.address is not None and record.address == record.instruction_pointer and len(record.stack) >= 8:
        # Whoever called into nowhere made no frame there: where it came from is still on top of the stack.
        (top,) = struct.unpack_from("<Q", record.stack)
        if is_code(top) and record.stack_address == record.stack_pointer:
            found.insert(0, top)
    return tuple(found[:_MOST_FRAMES]) or record.possible_return_addresses[:_FEW]


def _one_on(place: CodePlace) -> CodePlace:
    return replace(
        place,
        address=place.address + 1,
        offset=None if place.offset is None else place.offset + 1,
        function_offset=None if place.function_offset is None else place.function_offset + 1,
    )


# ---------------------------------------------------------------- instructions


def decode(
    code: bytes, address: int, architecture: str, on: Cpu, record: CrashRecord | None = None
) -> Instruction | None:
    """The first instruction of some code; None where there is no decoder for it. `record`: what registers held."""
    try:
        if architecture == "x86_64":
            return _decode_x86(code, address, on, record)
        if architecture == "aarch64":
            return _decode_aarch64(code, address, on)
    except (ImportError, AttributeError):
        pass  # The extra is not installed, or one of another age: traps can be told by their bytes.
    return _known_by_its_bytes(code, architecture)


def _known_by_its_bytes(code: bytes, architecture: str) -> Instruction | None:
    if architecture == "x86_64":
        for start, text in _TRAPS.items():
            if code.startswith(start):
                return Instruction(text, len(start), is_trap=True)
    elif architecture == "aarch64" and len(code) >= 4:
        (word,) = struct.unpack_from("<I", code)
        if word & 0xFFE0001F == 0xD4200000:
            return Instruction(f"brk #{word >> 5 & 0xFFFF:#x}", 4, is_trap=True)
        if word >> 16 == 0:
            return Instruction(f"udf #{word:#x}", 4, is_trap=True)
    return None


def _decode_x86(code: bytes, address: int, on: Cpu, record: CrashRecord | None) -> Instruction:
    import iced_x86

    found = iced_x86.Decoder(64, code, ip=address).decode()
    if found.is_invalid:
        return Instruction(code[:15].hex(" "), 0, is_valid=False)
    features = tuple(_feature_names()[number] for number in found.cpuid_features())
    divisor, value = _divisor(found, record)
    return Instruction(
        _formatter()(found),
        found.len,
        features,
        on.missing(features),
        is_trap=found.mnemonic in _trap_mnemonics(),
        divisor=divisor,
        divisor_value=value,
    )


@functools.cache
def _feature_names() -> dict[int, str]:
    from iced_x86 import CpuidFeature

    return {value: name for name, value in vars(CpuidFeature).items() if name.isupper() and isinstance(value, int)}


@functools.cache
def _trap_mnemonics() -> frozenset[int]:
    from iced_x86 import Mnemonic

    return frozenset({Mnemonic.UD0, Mnemonic.UD1, Mnemonic.UD2, Mnemonic.INT1, Mnemonic.INT3, Mnemonic.HLT})


@functools.cache
def _formatter() -> Callable[[Any], str]:
    from iced_x86 import Formatter, FormatterSyntax

    formatter = Formatter(FormatterSyntax.INTEL)
    formatter.hex_prefix, formatter.hex_suffix = "0x", ""
    formatter.uppercase_hex = False
    formatter.space_after_operand_separator = False
    text: Callable[[Any], str] = formatter.format
    return text


def _decode_aarch64(code: bytes, address: int, on: Cpu) -> Instruction:
    trap = _known_by_its_bytes(code, "aarch64")
    if trap is not None:
        return trap
    import capstone

    architecture = capstone.CS_ARCH_AARCH64 if hasattr(capstone, "CS_ARCH_AARCH64") else capstone.CS_ARCH_ARM64  # 6, 5
    decoder = capstone.Cs(architecture, capstone.CS_MODE_ARM)
    decoder.detail = True
    for found in decoder.disasm(code[:4], address, 1):
        # Its groups name a few features only (crc, crypto, neon): what is not among them is not known.
        features = tuple(str(found.group_name(group)).upper() for group in found.groups)
        return Instruction(f"{found.mnemonic} {found.op_str}".strip(), 4, features, on.missing(features))
    return Instruction(code[:4].hex(" "), 0, is_valid=False)


# ---------------------------------------------------------------- divisions


def _divisor(found: Any, record: CrashRecord | None) -> tuple[str, int | None]:
    """What a division divides by, and its value (signed as the instruction sees it) where that is known."""
    from iced_x86 import MemorySizeExt, Mnemonic, OpKind

    if found.mnemonic not in (Mnemonic.DIV, Mnemonic.IDIV):
        return "", None
    text = _formatter()(found).split(" ", 1)[1]
    if found.op0_kind == OpKind.REGISTER:
        value, size = _register(found.op0_register, record)
    else:
        size = MemorySizeExt.size(found.memory_size)
        value = _on_stack(found, size, record)
    if value is not None and found.mnemonic == Mnemonic.IDIV and value >> (8 * size - 1):
        value -= 1 << 8 * size
    return text, value


def _register(number: Any, record: CrashRecord | None) -> tuple[int | None, int]:
    """Its value and its size in bytes."""
    from iced_x86 import Register, RegisterExt

    size = RegisterExt.size(number)
    if record is None:
        return None, size
    if number == Register.NONE:
        return 0, size
    whole = record.registers.get(_register_names()[RegisterExt.full_register(number)])
    if whole is None:
        return None, size
    if number in (Register.AH, Register.BH, Register.CH, Register.DH):
        whole >>= 8
    return whole & ((1 << 8 * size) - 1), size


@functools.cache
def _register_names() -> dict[int, str]:
    from iced_x86 import Register

    return {value: name.lower() for name, value in vars(Register).items() if name.isupper() and isinstance(value, int)}


def _on_stack(found: Any, size: int, record: CrashRecord | None) -> int | None:
    """The value of a memory operand, where it lies in the part of the stack that was saved."""
    base, _ = _register(found.memory_base, record)
    index, _ = _register(found.memory_index, record)
    if record is None or base is None or index is None:
        return None
    address = base + index * found.memory_index_scale + found.memory_displacement & (1 << 64) - 1
    at = address - record.stack_address
    if not 0 <= at <= len(record.stack) - size:
        return None
    return int.from_bytes(record.stack[at : at + size], "little")
