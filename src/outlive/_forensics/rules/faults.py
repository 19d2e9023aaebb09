"""Verdicts on SIGSEGV and SIGBUS: which access to memory.

Reads   incidents.
Writes  nothing.
Never   a process, a file, a lock, the clock.

    no record         → stack overflow of a thread that had nowhere to record it
    SIGBUS            → bus.py
    below a stack     → stack overflow
    about 0           → null pointer
    mapped, forbidden → write to read-only memory, or wild
    was mapped        → use after unmap
    elsewhere         → wild pointer
"""

from __future__ import annotations

from collections.abc import Callable

from outlive._forensics.rules import bus
from outlive._forensics.rules.addresses import (
    NULL_REACH,
    code_facts,
    data_registers,
    fault_of,
    file_name,
    in_code,
    is_canonical,
    is_kernels,
    named_in_instruction,
    region_words,
    size_words,
    words_on_stack,
)
from outlive.crashes import SI_KERNEL, SIGBUS, SIGSEGV, CrashRecord, Region, as_text
from outlive.incident import Incident, Stage
from outlive.verdicts import Confidence, Name, Verdict

_PAGE = 4096
_STACK_REACH = 1 << 20  # how far below its end one frame may touch a stack
_GUARD = 64 << 10
_LARGEST_FRAME = 1 << 30
_LARGEST_HOLE = 1 << 30  # of 128 TiB: a pointer made of garbage does not fall into one
_FATAL = "Fatal Python error: Segmentation fault"
_LEAST_INDEX = 256  # smaller sums are chance
_HALTS = b"\xf4"  # hlt: the CPU refuses it as it does an impossible address, but somebody wrote it
_ALIGNED_MOVES = ("movaps", "movapd", "movdqa", "movntdq", "movntps", "fxsave", "fxrstor")

_STACK_REMEDIES = (
    "give threads more stack before they start: threading.stack_size(64 << 20)",
    "the main thread's is the shell's: ulimit -s 65536, before the job starts",
    "in Python, let recursion fail earlier: sys.setrecursionlimit(1000), or make a loop of it",
)


def _unrecorded(incident: Incident) -> Verdict | None:
    """A handler was there and did not run: it had no stack to run on."""
    evidence = incident.evidence
    unseen = evidence.crash is None and evidence.recorder and incident.in_hand.stage is not Stage.STARTING
    if incident.signal != SIGSEGV or not unseen or incident.hung:
        return None
    if _FATAL in incident.stack or _FATAL in evidence.last_words:
        return None  # a handler did run: somebody's, in place of ours
    return Verdict(
        Name.STACK_OVERFLOW,
        "the stack of a thread that native code started is full, and its worker had nowhere to say so",
        (
            "the handler of fatal signals was installed, and left no record",
            "threads that Python starts, and the main thread, have a second stack for it; this one had none",
            "no signal that somebody sends goes unrecorded",
        ),
        (
            "give the library's threads more stack: OMP_STACKSIZE=64M, or its own option",
            "ulimit -s 65536 before the job starts: it is the default for new threads, too",
        ),
        Confidence.LIKELY,
    )


# ---------------------------------------------------------------- stacks


def _stack_overflow(incident: Incident) -> Verdict | None:
    crash = fault_of(incident, SIGSEGV)
    if crash is None or crash.address is None or crash.stack_pointer is None or crash.access == "execute":
        return None
    stack = _overflowed(crash)
    if stack is None:
        return None
    main = stack.path == "[stack]"
    whose = "the main thread" if main else f"thread {crash.thread} ({crash.thread_name})"
    guard = crash.region_of(crash.address)
    facts = [
        f"{crash.access or 'access'} of {crash.address:#x}, {size_words(abs(crash.address - crash.stack_pointer))} "
        "from the stack pointer",
        "the guard page below the stack was touched"
        if guard is not None
        else f"the stack begins {size_words(stack.start - crash.address)} above",
    ]
    repeated = _repeated(crash)
    if repeated:
        facts.append(f"one return address stands {repeated} times on the last 4 KiB of it: a function calls itself")
    used = f"all {size_words(stack.end - stack.start)} of it are used{in_code(incident)}"
    if stack.start - crash.stack_pointer > _STACK_REACH:
        used = f"one frame{in_code(incident)} takes {size_words(stack.start - crash.stack_pointer)} more than there is"
    return Verdict(
        Name.STACK_OVERFLOW,
        f"the stack of {whose} is full: {used}",
        (*facts, *code_facts(incident)),
        (_STACK_REMEDIES[1], _STACK_REMEDIES[2], _STACK_REMEDIES[0] + ", and recurse in a thread")
        if main
        else (_STACK_REMEDIES[0], _STACK_REMEDIES[2]),
        Confidence.CERTAIN,
    )


def _overflowed(crash: CrashRecord) -> Region | None:
    """The stack that the fault lies right below."""
    assert crash.address is not None
    assert crash.stack_pointer is not None
    at, pointer = crash.address, crash.stack_pointer
    inside = crash.region_of(at)
    if inside is not None and inside.permissions[:3] != "---":
        # Newer C libraries mark guard pages inside of the stack's own mapping, where no map shows them.
        allowed = inside.permissions[:2] == "rw" and crash.access is not None
        near_end = at - inside.start <= _GUARD and inside.start <= pointer < inside.end
        return inside if allowed and near_end and abs(at - pointer) <= _STACK_REACH else None
    edge = at if inside is None else inside.end - 1
    stack = crash.region_above(edge)
    if stack is None or stack.permissions[:2] != "rw" or (stack.executable and stack.path != "[stack]"):
        return None
    if inside is not None and inside.end != stack.start:
        return None
    if not (stack.path == "[stack]" or inside is not None or stack.start <= pointer < stack.end):
        return None  # a hole below any memory: only a stack that has no guard page would look so
    near = abs(at - pointer) <= _STACK_REACH and stack.start - at <= _STACK_REACH
    # One frame may be larger than the stack: its pointer is far below, on no memory, and so is what it touches.
    lost = crash.region_of(pointer)
    below = pointer <= at < stack.start and stack.start - pointer <= _LARGEST_FRAME
    below = below and (lost is None or lost.permissions[:3] == "---")
    return stack if near or below else None


def _repeated(crash: CrashRecord) -> int:
    counts = [crash.possible_return_addresses.count(value) for value in set(crash.possible_return_addresses)]
    most = max(counts, default=0)
    return most if most >= 3 else 0


# ---------------------------------------------------------------- null


def _null_pointer(incident: Incident) -> Verdict | None:
    crash = fault_of(incident, SIGSEGV)
    if crash is None or crash.address is None or crash.access == "execute":
        return None
    address = crash.address
    before = (1 << 64) - address
    if address >= NULL_REACH and before > NULL_REACH:
        return None
    facts = [f"the kernel says {crash.code_name}: nothing is ever mapped there"]
    if address >= NULL_REACH:
        shown, meaning = f"{address:#x}", f": {before} bytes before a null pointer"
    elif address >= 8:
        shown, meaning = f"{address:#x}", f": a field or element at offset {address} from a null pointer"
    else:
        shown, meaning = f"{address:#x}", ": a null pointer"
    base = _null_base(incident, crash)
    if base:
        facts.append(f"register {base} holds the null pointer")
    return Verdict(
        Name.NULL_POINTER,
        f"{crash.access or 'access'} of address {shown}{in_code(incident)}{meaning}",
        (*facts, *code_facts(incident)),
        (
            "check what this sample hands to that library: an empty or corrupt file often decodes to nothing",
            "with ctypes: a function that failed returned NULL, and nobody looked",
            "update the library, or report it with the sample",
        ),
    )


def _null_base(incident: Incident, crash: CrashRecord) -> str:
    registers = data_registers(crash)
    named = [name for name in named_in_instruction(incident) if registers.get(name) == 0]
    if named:
        return named[0]
    zero = [name for name, value in registers.items() if value == 0]
    return zero[0] if len(zero) == 1 else ""


# ---------------------------------------------------------------- forbidden


def _forbidden(incident: Incident) -> Verdict | None:
    """What is mapped may not be touched so."""
    crash = fault_of(incident, SIGSEGV)
    if crash is None or crash.address is None or crash.access == "execute" or crash.code_name == "SEGV_MAPERR":
        return None
    region = crash.region_of(crash.address)
    if region is None or region.permissions[1] == "w":
        return None
    facts = (
        f"the kernel says {crash.code_name}: the address is mapped, but not for this",
        f"it lies in {region_words(region)}",
        *code_facts(incident),
    )
    code, shown = in_code(incident), f"address {crash.address:#x}"
    if region.permissions[0] != "r":
        return Verdict(
            Name.WILD_POINTER,
            f"{crash.access or 'access'}{code} of {shown}, which is reserved: nobody may read or write there",
            facts,
            _WILD_REMEDIES,
        )
    target, remedies = _read_only(region)
    return Verdict(Name.READ_ONLY_WRITE, f"write{code} to {shown}, which is {target}", facts, remedies)


def _read_only(region: Region) -> tuple[str, tuple[str, ...]]:
    path, name = region.path, file_name(region.path)
    if not path.startswith("/"):
        return (
            "in memory that was made read-only",
            ("copy before writing: array = array.copy(), tensor = tensor.clone()",),
        )
    if ".so" in name or region.executable:
        what = "code" if region.executable else "constants"
        return (
            f"among the {what} of {name}",
            (
                "native code changes a string constant or a const table: copy it first",
                "with ctypes: pass ctypes.create_string_buffer(data), never bytes, to a function that writes",
            ),
        )
    return (
        f"in the read-only map of {path}",
        (
            'map it for private changes: np.memmap(path, mode="c"), mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)',
            'or copy it for native code: np.array(memmap), torch.tensor(memmap); mode="r+" would change the file',
        ),
    )


# ---------------------------------------------------------------- unmapped


def _unmapped(incident: Incident) -> Verdict | None:
    """It was mapped once: the worker was forked with it, or it left a hole."""
    crash = fault_of(incident, SIGSEGV)
    if crash is None or crash.address is None or crash.access == "execute":
        return None
    address = crash.address
    if is_kernels(address) or not crash.regions or crash.region_of(address) is not None:
        return None
    shown = f"{crash.access or 'access'}{in_code(incident)} of address {address:#x}"
    inherited = incident.evidence.inherited
    if inherited is not None:
        return Verdict(
            Name.USE_AFTER_UNMAP,
            f"{shown}, where {inherited.path} was mapped and is no more",
            (
                f"the worker was forked with {region_words(inherited)} there",
                "at its death nothing was mapped there",
                *code_facts(incident),
            ),
            _UNMAP_REMEDIES,
        )
    below, above = crash.region_below(address), crash.region_above(address)
    if below is None or above is None or above.path == "[stack]" or _index_fact(incident, crash, address):
        return None
    if not _in_hole(address, below, above):
        return None
    registers = data_registers(crash)
    if address - below.end < _PAGE and any(below.start <= value <= below.end for value in registers.values()):
        return None  # read on over the end of what lies below
    facts = [
        f"nothing is mapped there, between {below.end:#x} and {above.start:#x}",
        "an address made of garbage seldom lies so near to memory that is in use",
    ]
    confidence = Confidence.POSSIBLE
    start = max(below.end, above.start - _LARGEST_HOLE)
    others = {value for value in (*registers.values(), *words_on_stack(crash)) if start <= value < above.start}
    others -= {value for value in others if abs(value - address) < 64}
    if below.path == above.path and below.path.startswith("/"):
        facts.append(f"what lies below and above it belongs to one file: {below.path}")
        confidence = Confidence.LIKELY
    elif others:
        facts.append(f"registers and stack have {len(others)} more addresses in that hole")
        confidence = Confidence.LIKELY
    return Verdict(
        Name.USE_AFTER_UNMAP,
        f"{shown}, in memory that was given back to the system",
        (*facts, *code_facts(incident)),
        _UNMAP_REMEDIES,
        confidence,
    )


def _in_hole(address: int, below: Region, above: Region) -> bool:
    """Between mappings, or below the lowest of them: the last one that came is the lowest."""
    return above.start - below.end <= _LARGEST_HOLE or above.start - address <= _LARGEST_HOLE


_UNMAP_REMEDIES = (
    "keep the owner alive as long as native code uses its memory: the mmap, memmap, array or tensor itself",
    "close no mmap, and free no array, that a view, a tensor or a thread still reads",
    "ctypes and torch.from_blob hold no reference: keep one beside what you make of the address",
)


# ---------------------------------------------------------------- wild


def _wild_pointer(incident: Incident) -> Verdict | None:
    crash = fault_of(incident, SIGSEGV) or fault_of(incident, SIGBUS)
    if crash is None or crash.access == "execute" or _is_trap(incident, crash):
        return None
    if crash.address is None:
        return _refused(incident, crash)
    address = crash.address
    what, confidence = "nothing is mapped there", Confidence.CERTAIN
    facts: list[str] = []
    remedies: tuple[str, ...] = _WILD_REMEDIES
    index = _index_fact(incident, crash, address)
    whole = _cut_from(crash)
    below = crash.region_below(address)
    if index:
        what, confidence, remedies = "an index is out of range", Confidence.LIKELY, _INDEX_REMEDIES
        facts.append(index)
    elif whole:
        what, confidence = f"the lower half of {whole:#x}, a pointer kept in 32 bits", Confidence.LIKELY
        remedies = ("with ctypes: declare restype and argtypes as c_void_p; the default is a C int", *_WILD_REMEDIES)
    elif is_kernels(address):
        what = "that half of the address space is the kernel's"
    elif below is not None and address - below.end < _PAGE:
        what, confidence, remedies = f"right past the end of {region_words(below)}", Confidence.LIKELY, _INDEX_REMEDIES
    elif as_text(address):
        what = f"these bytes are the text {as_text(address)!r}"
    facts.append(f"the kernel says {crash.code_name}")
    return Verdict(
        Name.WILD_POINTER,
        f"{crash.access or 'access'} of address {address:#x}{in_code(incident)}: {what}",
        (*facts, *code_facts(incident)),
        remedies,
        confidence,
    )


def _refused(incident: Incident, crash: CrashRecord) -> Verdict | None:
    """The CPU refused the access before it looked where it leads: it tells no address."""
    if crash.code != SI_KERNEL:
        return None
    impossible = {name: value for name, value in data_registers(crash).items() if not is_canonical(value)}
    named = [name for name in named_in_instruction(incident) if name in impossible]
    examined = incident.evidence.examined
    text = examined.instruction.text if examined is not None and examined.instruction is not None else ""
    told = "the kernel says SI_KERNEL and no address: the CPU refused the access itself"
    if impossible:
        name = named[0] if named else next(iter(impossible))
        value = impossible[name]
        spelled = f", which is the text {as_text(value)!r}" if as_text(value) else ""
        index = _index_fact(incident, crash, value)
        if index:
            return Verdict(
                Name.WILD_POINTER,
                f"access to address {value:#x}{in_code(incident)}: an index is out of range",
                (index, told, *code_facts(incident)),
                _INDEX_REMEDIES,
                Confidence.LIKELY,
            )
        sure = bool(named) or set(impossible.values()) == {value}
        return Verdict(
            Name.WILD_POINTER,
            f"access through a pointer that can be none{in_code(incident)}: {name} holds {value:#x}{spelled}",
            (told, f"register {name} holds an address that no process can have", *code_facts(incident)),
            _WILD_REMEDIES,
            Confidence.CERTAIN if sure else Confidence.LIKELY,
        )
    if any(move in text for move in _ALIGNED_MOVES):
        return Verdict(
            Name.WILD_POINTER,
            f"misaligned access by {text}{in_code(incident)}",
            (told, "this instruction needs addresses that are multiples of its size"),
            ("hand native code arrays that are aligned: np.require(array, requirements='AC')", *_WILD_REMEDIES),
            Confidence.LIKELY,
        )
    return Verdict(
        Name.WILD_POINTER,
        f"an access that the CPU refuses{in_code(incident)}: a pointer that can be none, or one that is not aligned",
        (told, *((f"the instruction is {text}",) if text else ())),
        _WILD_REMEDIES,
        Confidence.POSSIBLE,
    )


def _is_trap(incident: Incident, crash: CrashRecord) -> bool:
    examined = incident.evidence.examined
    if examined is not None and examined.instruction is not None:
        return examined.instruction.is_trap
    return crash.architecture == "x86_64" and crash.address is None and crash.instruction.startswith(_HALTS)


def _index_fact(incident: Incident, crash: CrashRecord, address: int) -> str:
    """A sound base and an index that leads out of it, where two registers add up to the address."""
    named = named_in_instruction(incident)
    # With one register in it, the instruction was handed the sum: its parts may still stand in the others.
    registers = {name: v for name, v in data_registers(crash).items() if len(named) < 2 or name in named}
    sound = [(base, start, crash.region_of(start)) for base, start in registers.items() if base not in ("rsp", "sp")]
    signed = {name: value - (1 << 64) if value >> 63 else value for name, value in registers.items()}
    for scale in (8, 4, 2, 1):  # the largest first: with 1, the product itself stands in some register
        for base, start, region in sound:
            for name, index in signed.items():
                leads = start + index * scale == address and name != base and abs(index) >= _LEAST_INDEX
                if leads and region is not None and region.permissions[0] == "r":
                    return (
                        f"{base} holds {start:#x}, which is sound, and {name} the index {index}, "
                        f"{scale} bytes each: together they lead out of {region_words(region)}"
                    )
    return ""


def _cut_from(crash: CrashRecord) -> int:
    """A whole pointer, seen beside its own lower half."""
    address = crash.address or 0
    low = address & 0xFFFFFFFF
    if address not in (low, low | 0xFFFFFFFF00000000) or low < 1 << 20:
        return 0
    for value in (*data_registers(crash).values(), *words_on_stack(crash)):
        if value & 0xFFFFFFFF == low and value >> 32 and not is_kernels(value) and value >> 40:
            return value
    return 0


_WILD_REMEDIES = (
    "memory was overwritten, freed or never set: run the sample under valgrind, or build the library with "
    "-fsanitize=address",
    "with ctypes: declare argtypes and restype of every function; pointers are c_void_p",
    "update the library that crashed, or report it with the sample",
)
_INDEX_REMEDIES = (
    "check indices and sizes that native code gets from this sample: labels, offsets, shapes",
    "with ctypes and custom kernels: pass the length along, and compare",
    *_WILD_REMEDIES[:1],
)

RULES: tuple[Callable[[Incident], Verdict | None], ...] = (
    _unrecorded,
    bus.judge,
    _stack_overflow,
    _null_pointer,
    _forbidden,
    _unmapped,
    _wild_pointer,
)
