"""Verdicts on SIGILL, SIGTRAP, SIGFPE and SIGSYS, and on SIGSEGV where code was to be run: which instruction.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock; a signal that somebody sent: that is the kills' family.

    the instruction is        and it is in             verdict
    ────────────────────────  ───────────────────────  ──────────────────────
    one that traps            code                     deliberate trap
    wanting a feature         code, jitted or not      CPU feature missing
    none, or a plain one      a library                jumped into data, or newer than the decoder
    not to be run at all      data, nothing            jumped into data
    a division                code                     arithmetic fault
    a system call             code                     forbidden system call
"""

from __future__ import annotations

import re
from collections.abc import Callable

from outlive._forensics.rules import instruction_remedies as remedies
from outlive.crashes import CrashRecord
from outlive.evidence import CodePlace, Examined, Instruction
from outlive.incident import Incident
from outlive.verdicts import Confidence, Name, Verdict

_NULL_PAGES = 0x10000
_WRITTEN_BEFORE_A_TRAP = re.compile(
    r"panicked at|assert|check failed|\bfatal\b|runtime error|unreachable|terminat|overflow|abort", re.IGNORECASE
)
_PLAIN = re.compile(r"INTEL\d+|X64|FPU\d*|CMOV|CX8|MMX|SSE2?|FXSR|TSC|SYSCALL|CPUID|MULTIBYTENOP|PAUSE|CET_\w+")
_WIDE_PREFIXES = {0x62: "AVX-512", 0xC4: "AVX", 0xC5: "AVX", 0xD5: "APX"}
_FLOAT_FAULTS = {
    "FPE_FLTDIV": "division by zero",
    "FPE_FLTOVF": "overflow",
    "FPE_FLTUND": "underflow",
    "FPE_FLTRES": "inexact result",
    "FPE_FLTINV": "invalid operation",
}


def forbidden_system_call(incident: Incident) -> Verdict | None:
    record = _died_at(incident, "SIGSYS")
    if record is None:
        return None
    examined = _examined(incident)
    call = f"system call {record.system_call}" + (f" ({examined.system_call})" if examined.system_call else "")
    who = "a seccomp filter" if record.code_name == "SYS_SECCOMP" else "the process's own dispatch of system calls"
    return Verdict(
        Name.FORBIDDEN_SYSTEM_CALL,
        f"{call} is forbidden by {who}{_at(examined.place)}",
        facts=_facts(record, examined),
        remedies=remedies.for_system_call(examined.system_call or str(record.system_call)),
    )


def arithmetic_fault(incident: Incident) -> Verdict | None:
    record = _died_at(incident, "SIGFPE")
    if record is None:
        return None
    examined = _examined(incident)
    facts = _facts(record, examined)
    if record.code_name in _FLOAT_FAULTS:
        what = f"floating-point {_FLOAT_FAULTS[record.code_name]}{_at(examined.place, examined.instruction)}"
        return Verdict(
            Name.ARITHMETIC_FAULT,
            f"{what}, in a process that asked for a signal at it",
            facts=(*facts, "floating-point faults raise no signal unless feenableexcept() or a compiler flag asks"),
            remedies=("find who calls feenableexcept() (gfortran -ffpe-trap=, PyTrilinos, PETSc -fp_trap)",),
        )
    return Verdict(Name.ARITHMETIC_FAULT, _division(examined), facts, remedies.for_division(examined.place))


def _division(examined: Examined) -> str:
    """x86-64 has one fault for both: a divisor of zero, and a result that does not fit."""
    instruction, at = examined.instruction, _at(examined.place, examined.instruction)
    value = None if instruction is None else instruction.divisor_value
    if instruction is None or value is None:
        return f"integer division{at}: by zero, or the result does not fit"
    if value == 0:
        return f"integer division by zero{at}: {instruction.divisor} is 0"
    if value == -1:
        return f"the most negative integer divided by -1{at}: the result does not fit"
    return f"integer division by {value}{at}: the result does not fit"


def deliberate_trap(incident: Incident) -> Verdict | None:
    """ud2, int3, hlt and their like."""
    record = _died_at(incident, "SIGILL", "SIGTRAP", "SIGSEGV")
    if record is None:
        return None
    examined = _examined(incident)
    instruction = examined.instruction
    if instruction is not None and instruction.is_trap and not _is_run(record):
        sure = Confidence.CERTAIN if _in_library(record, examined.place) else Confidence.LIKELY
        return _trap(incident, f"{instruction.text}{_at(examined.place)}", sure)
    if record.signal_name == "SIGTRAP":
        return _trap(incident, f"a breakpoint or a watchpoint{_at(examined.place)}", Confidence.POSSIBLE)
    return None


def _trap(incident: Incident, what: str, sure: Confidence) -> Verdict:
    record, examined = incident.crash, _examined(incident)
    words = _words_before(incident.evidence.last_words)
    said = f": {words}" if words and _WRITTEN_BEFORE_A_TRAP.search(words) else ""
    facts = () if record is None else _facts(record, examined)
    return Verdict(
        Name.DELIBERATE_TRAP,
        f"{what} ended the process on purpose{said}",
        facts=(*facts, *((f"it last wrote: {words}",) if words else ())),
        remedies=remedies.for_trap(
            examined.place, is_rust="panicked at" in words, is_breakpoint=_is_breakpoint(examined)
        ),
        confidence=sure,
    )


def _is_breakpoint(examined: Examined) -> bool:
    return examined.instruction is None or examined.instruction.text.startswith("int")


def _words_before(last_words: str) -> str:
    """The line that tells why, else the last one."""
    lines = [line.strip() for line in last_words.splitlines() if line.strip()]
    for place in reversed(range(len(lines))):
        if _WRITTEN_BEFORE_A_TRAP.search(lines[place]):
            # Rust says where in one line, and what in the next.
            more = lines[place + 1 : place + 2] if lines[place].endswith(":") else []
            return " ".join([lines[place], *more])[:200]
    return lines[-1][:200] if lines else ""


def jumped_into_data(incident: Incident) -> Verdict | None:
    """The CPU was sent to where no code is, and may not run what is there."""
    record = _died_at(incident, "SIGSEGV")
    if record is None:
        return None
    examined = _examined(incident)
    if _is_run(record):
        return _ran_what_is_no_code(record, examined)
    text = "" if examined.instruction is None else examined.instruction.text
    target = _target_of(text, record)
    # x86-64 has no page fault for an address that cannot be: the CPU stops at the jump itself.
    if record.code_name != "SI_KERNEL" or target is None or _is_canonical(target):
        return None
    overwritten = text.startswith("ret")
    return Verdict(
        Name.JUMPED_INTO_DATA,
        f"{text} to {target:#x}, which is no address,{_at(examined.place)}"
        + (": the return address on the stack was overwritten" if overwritten else ""),
        facts=_facts(record, examined),
        remedies=(remedies.for_smashed_stack if overwritten else remedies.for_corruption)(examined.place),
    )


def _ran_what_is_no_code(record: CrashRecord, examined: Examined) -> Verdict:
    address = record.instruction_pointer or 0
    caller = f" from {examined.frames[0].words}" if examined.frames else ""
    place = examined.frames[0] if examined.frames else None
    if address < _NULL_PAGES:
        return Verdict(
            Name.NULL_POINTER,
            f"call of address {address:#x}{caller}: a function pointer that is null",
            facts=_facts(record, examined),
            remedies=remedies.for_null_call(place),
        )
    region = record.region_of(address)
    if region is None:
        what = "where nothing is mapped"
    elif region.file:
        what = f"which is data of {region.file.rsplit('/', 1)[-1]}"
    elif region.special:
        what = f"which is in the {region.special.strip('[]')}"
    else:
        what = "which is data"
    return Verdict(
        Name.JUMPED_INTO_DATA,
        f"jump to {address:#x}, {what}{caller and ','}{caller}",
        facts=_facts(record, examined),
        remedies=remedies.for_corruption(place),
    )


def illegal_instruction(incident: Incident) -> Verdict | None:
    """SIGILL that is no trap: a feature that is missing, or bytes that were never meant to be run."""
    record = _died_at(incident, "SIGILL")
    if record is None:
        return None
    examined = _examined(incident)
    instruction = examined.instruction
    if instruction is None:
        return _not_decoded(record, examined)
    if instruction.missing:
        return _feature_missing(record, examined, instruction)
    if instruction.is_valid and record.architecture != "x86_64" and _in_library(record, examined.place):
        return _not_decoded(record, examined)  # its decoder names few features, and not what is missing
    special = [name for name in instruction.features if not _PLAIN.fullmatch(name)]
    if instruction.is_valid and special and _is_code(record):
        return _refused(record, examined, instruction, special)
    prefix = _wide_prefix(record.instruction)
    if not instruction.is_valid and prefix and _in_library(record, examined.place):
        return _newer_than_the_decoder(record, examined, prefix)
    return _no_instruction(record, examined, instruction)


def _feature_missing(record: CrashRecord, examined: Examined, instruction: Instruction) -> Verdict:
    missing = _spoken(instruction.missing)
    needed = f"{instruction.text} needs {_spoken(instruction.features)}"
    return Verdict(
        Name.CPU_FEATURE_MISSING,
        f"{instruction.text}{_at(examined.place)} needs {missing}, which this CPU has not got",
        facts=(*_facts(record, examined), f"{needed}; {examined.cpu or 'this CPU'} lacks {missing}"),
        remedies=remedies.for_missing_feature(examined.place, instruction.missing),
    )


def _refused(record: CrashRecord, examined: Examined, instruction: Instruction, special: list[str]) -> Verdict:
    if any(name.startswith("AMX") for name in special):
        why = "for which the process has not asked the kernel (arch_prctl ARCH_REQ_XCOMP_PERM)"
        sure = Confidence.LIKELY
    else:
        why = "which the CPU claims to have and refuses: there may be a virtual machine or an emulator in between"
        sure = Confidence.POSSIBLE
    return Verdict(
        Name.CPU_FEATURE_MISSING,
        f"{instruction.text}{_at(examined.place)} needs {_spoken(special)}, {why}",
        facts=_facts(record, examined),
        remedies=remedies.for_missing_feature(examined.place, tuple(special)),
        confidence=sure,
    )


def _newer_than_the_decoder(record: CrashRecord, examined: Examined, prefix: str) -> Verdict:
    return Verdict(
        Name.CPU_FEATURE_MISSING,
        f"bytes that begin as {prefix} instructions do{_at(examined.place)}, and that no decoder here knows, "
        "need what this CPU has not got",
        facts=_facts(record, examined),
        remedies=(
            "pip install -U 'outlive[forensics]'   a newer decoder may name the instruction",
            *remedies.for_missing_feature(examined.place, ()),
        ),
        confidence=Confidence.POSSIBLE,
    )


def _not_decoded(record: CrashRecord, examined: Examined) -> Verdict:
    """Without a decoder that names features, or without bytes."""
    prefix = _wide_prefix(record.instruction) if record.architecture == "x86_64" else ""
    decoded = examined.instruction is not None
    text = examined.instruction.text if examined.instruction is not None else record.instruction[:15].hex(" ")
    shown = text or "nobody knows which"
    kind = f"an illegal instruction of the {prefix} kind" if prefix else "an illegal instruction"
    return Verdict(
        Name.CPU_FEATURE_MISSING,
        f"{kind} ({shown}){_at(examined.place)}, likely for want of a CPU feature",
        facts=_facts(record, examined),
        remedies=(
            *(() if decoded else ("pip install 'outlive[forensics]'   the next report then names what is missing",)),
            *remedies.for_missing_feature(examined.place, ()),
        ),
        confidence=Confidence.POSSIBLE,
    )


def _no_instruction(record: CrashRecord, examined: Examined, instruction: Instruction) -> Verdict:
    what = "are no instruction" if not instruction.is_valid else f"({instruction.text}) are refused here"
    where = _at(examined.place) if _in_library(record, examined.place) else f" at {_where(record)}"
    return Verdict(
        Name.JUMPED_INTO_DATA,
        f"the bytes {record.instruction[:8].hex(' ')}{where} {what}: the CPU was sent into data",
        facts=_facts(record, examined),
        remedies=remedies.for_corruption(examined.frames[0] if examined.frames else examined.place),
        confidence=Confidence.LIKELY if not instruction.is_valid else Confidence.POSSIBLE,
    )


def known_by_its_signal(incident: Incident) -> Verdict | None:
    """No recorder saw it: what such a signal mostly means."""
    if incident.crash is not None or incident.exit is None:
        return None
    name = incident.exit.signal_name
    record_next = () if incident.evidence.recorder else (remedies.BUILD_RECORDER,)
    if name == "SIGILL":
        return Verdict(
            Name.CPU_FEATURE_MISSING,
            "an illegal instruction, likely for want of a CPU feature; nobody saw which",
            facts=("died of SIGILL, without a record of it",),
            remedies=(*record_next, *remedies.for_missing_feature(None, ())),
            confidence=Confidence.POSSIBLE,
        )
    if name == "SIGTRAP":
        return _trap(incident, "a breakpoint or a trap that nobody saw", Confidence.POSSIBLE)
    if name == "SIGFPE":
        return Verdict(
            Name.ARITHMETIC_FAULT,
            "an arithmetic fault in native code, such as an integer division by zero; nobody saw where",
            facts=("died of SIGFPE, without a record of it",),
            remedies=(*record_next, *remedies.for_division(None)),
            confidence=Confidence.LIKELY,
        )
    if name == "SIGSYS":
        return Verdict(
            Name.FORBIDDEN_SYSTEM_CALL,
            "a system call that a seccomp filter forbids, and punishes at once; nobody saw which",
            facts=("died of SIGSYS, without a record of it: a filter that kills lets no handler run",),
            remedies=("dmesg | grep seccomp, or ausearch -m SECCOMP   names the call", *remedies.for_system_call("")),
            confidence=Confidence.LIKELY,
        )
    return None


# The trap first: ud2 in a library needs no further question. What was not to be run comes before what it contains.
RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    forbidden_system_call,
    arithmetic_fault,
    jumped_into_data,
    deliberate_trap,
    illegal_instruction,
    known_by_its_signal,
)


# ---------------------------------------------------------------- what the record says


def _died_at(incident: Incident, *signals: str) -> CrashRecord | None:
    """The record, if an instruction raised one of these signals."""
    record = incident.crash
    return None if record is None or record.is_sent or record.signal_name not in signals else record


def _examined(incident: Incident) -> Examined:
    return incident.evidence.examined or _NOT_EXAMINED


_NOT_EXAMINED = Examined()


def _is_run(record: CrashRecord) -> bool:
    """Whether the fault was to fetch an instruction, not what an instruction did."""
    return record.signal_name == "SIGSEGV" and (
        record.access == "execute" or (record.address is not None and record.address == record.instruction_pointer)
    )


def _is_code(record: CrashRecord) -> bool:
    region = record.region_of(record.instruction_pointer)
    return region is None or region.executable


def _in_library(record: CrashRecord, place: CodePlace | None) -> bool:
    region = record.region_of(record.instruction_pointer)
    return (region is not None and region.executable and bool(region.file)) or bool(place and place.function)


def _where(record: CrashRecord) -> str:
    region = record.region_of(record.instruction_pointer)
    address = f"{record.instruction_pointer or 0:#x}"
    if region is None:
        return address
    if region.special:
        return f"{address} in the {region.special.strip('[]')}"
    return (
        f"{address} in memory without a file" if not region.file else f"{address} in {region.file.rsplit('/', 1)[-1]}"
    )


def _at(place: CodePlace | None, instruction: Instruction | None = None) -> str:
    """« at decode+0x1f in libx.so»; with an instruction « by idiv ecx at …»."""
    by = f" by {instruction.text}" if instruction is not None and instruction.text else ""
    if place is None:
        return by
    if not place.library:
        return f"{by} at {place.address:#x}" + (" in code made at run time" if place.is_mapped else "")
    return f"{by} at {place.words}"


def _facts(record: CrashRecord, examined: Examined) -> tuple[str, ...]:
    facts = [f"{record.signal_name} ({record.code_name}) at {_where(record)}"]
    if examined.instruction is not None and record.instruction and examined.instruction.size:
        if record.signal_name == "SIGTRAP":
            shown = record.before[-examined.instruction.size :]
        else:
            shown = record.instruction[: examined.instruction.size]
        facts.append(f"the instruction: {examined.instruction.text} ({shown.hex(' ')})")
    if examined.place is not None and examined.place.library:
        facts.append(f"library: {examined.place.library}")
    if examined.frames:
        facts.append("called from " + " ← ".join(frame.words for frame in examined.frames[:4]))
    return tuple(facts)


def _target_of(text: str, record: CrashRecord) -> int | None:
    """Where a jump by a register, or a return, leads."""
    mnemonic, _, operand = text.partition(" ")
    if mnemonic == "ret" and len(record.stack) >= 8 and record.stack_address == record.stack_pointer:
        return int.from_bytes(record.stack[:8], "little")
    return record.registers.get(operand) if mnemonic in ("call", "jmp") else None


def _is_canonical(address: int) -> bool:
    return address >> 47 in (0, 0x1FFFF)


def _wide_prefix(code: bytes) -> str:
    """«AVX», «AVX-512», «APX» by the first byte; empty: something else."""
    return _WIDE_PREFIXES.get(code[0], "") if code else ""


def _spoken(names: tuple[str, ...] | list[str]) -> str:
    return " and ".join(name.replace("D3NOWEXT", "extended 3DNow!").replace("D3NOW", "3DNow!") for name in names)
