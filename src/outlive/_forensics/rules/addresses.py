"""What addresses in a crash record mean, and the words for it: shared by the rules on memory.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock; a verdict.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from outlive.crashes import HEAP, SIGABRT, SIGBUS, SIGSEGV, CrashRecord, Region
from outlive.evidence import CodePlace
from outlive.incident import Incident

NULL_REACH = 64 << 10  # Linux maps nothing below this by default
_HALF = 1 << 47
_TOP = 1 << 64
_POINTERS = ("rip", "eflags", "pc", "pstate")
_RUNTIME = re.compile(r"(libc|ld|libpthread|libm|libdl|libstdc\+\+|libc\+\+(abi)?|libgcc_s|libsupc\+\+)[-.]")
_GLUE = re.compile(r"libffi|_ctypes|_cffi|libpython|python\d*")
_CTYPES = re.compile(r"libffi|_ctypes")
_IN_BRACKETS = re.compile(r"\[([^\]]+)\]")
_SIZES = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def fault_of(incident: Incident, signal: int) -> CrashRecord | None:
    """The record of a fault that ended this worker; None: another signal, or one that somebody sent."""
    crash = incident.crash
    if crash is None or crash.signal != signal or crash.is_sent:
        return None
    # A handler below ours may abort, or fault itself: the first fault is the cause. One that was survived is none.
    return crash if incident.signal in (None, signal, SIGABRT, SIGBUS, SIGSEGV) else None


def size_words(count: int) -> str:
    for size, unit in _SIZES:
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"


def file_name(path: str) -> str:
    return path.removesuffix(" (deleted)").rsplit("/", 1)[-1]


# ---------------------------------------------------------------- code


def in_code(incident: Incident) -> str:
    """« in cv::imdecode (libopencv.so)», with the blank; empty where nobody knows."""
    place = _code_place(incident)
    if place is None:
        return ""
    if place.function:
        return f" in {place.function} ({file_name(place.library) or 'no file'})"
    return f" in {file_name(place.library)}" if place.library else " in code that belongs to no file"


def callers(incident: Incident) -> Iterator[CodePlace]:
    """Where the stack leads, nearest first; stale addresses may be among them."""
    crash, examined = incident.crash, incident.evidence.examined
    if crash is None:
        return
    known = {frame.address: frame for frame in examined.frames} if examined is not None else {}
    for address in incident.evidence.callers:
        region = crash.region_of(address)
        if address in known:
            yield known[address]
        elif region is not None and region.path.startswith("/"):
            yield CodePlace(address, region.path, address - region.start + region.offset)


def code_facts(incident: Incident, everywhere: bool = False) -> tuple[str, ...]:
    """Which thread it was, if not the main one, and which library called into the C library, where that is where it
    died; `everywhere`: wherever it died."""
    crash, place = incident.crash, _code_place(incident)
    facts = []
    if crash is not None and crash.thread != crash.pid:
        facts.append(f"it was thread {crash.thread} ({crash.thread_name}), not the main one")
    if everywhere or (place is not None and is_runtime(place.library)):
        found = [caller for caller in callers(incident) if caller.library and not is_runtime(caller.library)]
        # What lies between Python and native code is on every stack, and old words of it are on many.
        others = [caller for caller in found if not _GLUE.match(file_name(caller.library))]
        if others:
            facts.append(f"the stack leads to {others[0].words}")
        elif any(_CTYPES.match(file_name(caller.library)) for caller in found):
            facts.append("the stack leads to ctypes")
    return tuple(facts)


def is_runtime(library: str) -> bool:
    """Whether it is the C or C++ library: what others call, and seldom to blame."""
    return _RUNTIME.match(file_name(library)) is not None


def _code_place(incident: Incident) -> CodePlace | None:
    crash, examined = incident.crash, incident.evidence.examined
    if examined is not None and examined.place is not None and (examined.place.library or examined.place.function):
        return examined.place
    if crash is None or crash.instruction_pointer is None:
        return None
    region = crash.region_of(crash.instruction_pointer)
    if region is None:
        return None
    path = region.path if region.path.startswith(("/", "[v")) else ""
    return CodePlace(crash.instruction_pointer, path)


# ---------------------------------------------------------------- data


def is_canonical(address: int) -> bool:
    """Whether there can be anything at all: the upper bits are all alike."""
    return address < _HALF or address >= _TOP - _HALF


def is_kernels(address: int) -> bool:
    return address >= _HALF


def region_words(region: Region) -> str:
    """«the map of /data/a.bin (r--s)», «the heap (rw-p)», «memory without a file (rw-p)»."""
    if region.special == HEAP:
        named = "the heap"
    elif region.special:
        named = f"the region {region.special}"
    elif region.path:
        named = f"the map of {region.path}"
    else:
        named = "memory without a file"
    return f"{named} ({region.permissions})"


def data_registers(crash: CrashRecord) -> dict[str, int]:
    """Those that can hold an address of data."""
    return {name: value for name, value in crash.registers.items() if name not in _POINTERS}


def named_in_instruction(incident: Incident) -> tuple[str, ...]:
    """Registers that the address was made of, as the decoded instruction says, base first."""
    examined = incident.evidence.examined
    if examined is None or examined.instruction is None or incident.crash is None:
        return ()
    found = _IN_BRACKETS.search(examined.instruction.text)
    words = re.findall(r"[a-z]+[0-9]*", found[1]) if found else []
    return tuple(word for word in words if word in incident.crash.registers)


def words_on_stack(crash: CrashRecord) -> Iterator[int]:
    for at in range(0, len(crash.stack) - 7, 8):
        yield int.from_bytes(crash.stack[at : at + 8], "little")
