"""What the code of a library surely runs when it is loaded or called, and what it has without anybody asking the CPU.

Reads   an open library.
Writes  nothing.
Never   counts what a choice by CPU can keep from running; works beyond its limits: it says what it left out.

    constructors, PyInit_*   on *every* way through them, calls within the library included     surely, when loaded
    any function             only where nothing in the library ever asks which CPU this is      if it is reached
    functions by sample      AVX where there should be SSE: the compiler was told `-mavx`       whenever called

An instruction is on every way through a function if no way from its start to a return avoids it, or avoids a call of
a function that has one on every way. `if (has_avx2) f_avx2();` has a way around, whatever `has_avx2` is made from. So
has a failed allocation: what is found is certain, and not all there is. A library that asks may have functions for
many CPUs, exported or not; but one in which *no* function has SSE in its old encoding was built for AVX as a whole.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy

from outlive._forensics import examine, symbols
from outlive._forensics.cpu import Cpu
from outlive.doctor.native import features
from outlive.doctor.native.elf import Library

VERSION = 1  # of what is remembered about a file: another one makes it be looked at again

_MOST_INSTRUCTIONS = 3_000_000  # in each of the two long looks: some three seconds
_LONGEST_FUNCTION = 1 << 20  # bytes; Cython makes some of 300 KiB
_DEEPEST = 4  # calls
_SAMPLE = 2_000  # functions
_FEWEST_WIDE, _MOST_PLAIN = 20, 0.05  # of functions with vector code: built for AVX as a whole
_CHUNK = 1 << 23
_DISPATCHED = re.compile(
    r"avx|sse[34_]|ssse3|fma|amx|vnni|bmi2|popcnt|clmul|aes_?ni|hw_?aes|_sha_?ni|f16c|haswell|broadwell|skylake|cooperlake"
    r"|sapphire|icelake|zen\d?(_|$)|znver|excavator|steamroller|piledriver|bulldozer|sandybridge|nehalem|penryn"
    r"|barcelona|x86_64_v\d|simd|ukernel|knl|_vbmi|gfni|arch_v\d",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"cpu_?(info|features?|model|indicator|supports|capability|id|have|has|flags?|isa|caps)|cpuid"
    r"|mayiuse|is_x86_feature|detect_(cpu|simd|isa)|(cpu|simd|isa)_?(detect|dispatch)",
    re.IGNORECASE,
)


@dataclass
class Seen:
    """Where a feature is needed: how many functions were seen, and the first of them."""

    functions: int
    where: str  # «decode+0x14»
    text: str  # «vaddps zmm0,zmm0,zmm0»
    through: str = ""  # from where it is reached: «PyInit_fast»


@dataclass
class Code:
    """What is known of one library's code; features by iced-x86's names."""

    at_load: dict[str, Seen] = field(default_factory=dict)
    anywhere: dict[str, Seen] = field(default_factory=dict)  # only where nobody asks
    throughout: dict[str, Seen] = field(default_factory=dict)  # where somebody asks, but not about this
    asks: str = ""  # how it asks the CPU, if it does
    functions: int = 0
    left_out: tuple[str, ...] = ()


def is_dispatched_name(name: str) -> bool:
    return _DISPATCHED.search(name) is not None


def look(library: Library) -> Code:
    reader = _Reader(library)
    found = Code(functions=len(reader.starts))
    if not len(reader.starts):
        return found
    left_out: list[str] = []
    hits, asking = reader.scan()
    found.asks = _how_it_asks(library, reader, asking)
    if found.asks:
        reader.throughout(found.throughout)
    else:
        reader.budget = _MOST_INSTRUCTIONS
        undone = reader.anywhere(hits, found.anywhere)
        if undone:
            left_out.append(f"{undone} of {found.functions} functions: more code than the limit")
        elif not reader.needs_something:
            return found  # then no way through it does

    reader.budget = _MOST_INSTRUCTIONS
    roots = [(address, "a constructor") for address in library.initializers()]
    roots += [(address, name) for address, name in library.exported_functions() if name.startswith("PyInit_")]
    undone = reader.surely(roots, found.at_load)
    if undone:
        left_out.append(f"calls of {undone} of {len(roots)} functions that run at load: more code than the limit")
    found.left_out = tuple(left_out)
    return found


def _how_it_asks(library: Library, reader: _Reader, asking: Iterable[int]) -> str:
    if library.has_indirect_functions:
        return "functions that are chosen at load (ifunc)"
    for name in library.undefined():
        if _ASKS.search(name):
            return f"calls {symbols.readable(name)}"
    if reader.has_cpuid(asking):
        return "CPUID"
    return ""


# ---------------------------------------------------------------- functions

_NEEDS, _CALL, _JUMP, _BRANCH, _LEAVE, _STOP = range(6)
_Mark = tuple[int, int, Any]  # address, kind, what it needs or where it leads


class _OverLimit(Exception):
    pass


class _Reader:
    """Functions of a library, decoded when asked for, within a budget of instructions."""

    def __init__(self, library: Library) -> None:
        self.library = library
        starts = library.function_starts()
        inside = numpy.zeros(len(starts), bool)
        for part in library.code:
            inside |= (starts >= part.address) & (starts < part.address + part.size)
        self.starts: list[int] = starts[inside].tolist()
        self.budget = 0
        self.needs_something = False  # as far as `anywhere` saw
        self._targets: dict[int, int] = {}
        self._bodies: dict[int, list[_Mark]] = {}
        self._surely: dict[tuple[int, int], dict[str, int]] = {}

    def end_of(self, start: int) -> int:
        place = bisect.bisect_right(self.starts, start)
        end = self.starts[place] if place < len(self.starts) else start + _LONGEST_FUNCTION
        for part in self.library.code:
            if part.address <= start < part.address + part.size:
                end = min(end, part.address + part.size)
        return end

    def scan(self) -> tuple[dict[str, Any], Any]:
        """By class of bytes: the functions (numbers) that may need something; and where CPUID may be."""
        starts = numpy.array(self.starts, numpy.int64)
        found: dict[str, list[Any]] = {}
        asking: list[Any] = []
        for part in self.library.code:
            for done in range(0, part.size, _CHUNK):
                # A few bytes more than the chunk: of the next, for instructions on the border; zeros after the last.
                read = self.library.array(part.offset + done, min(_CHUNK + 16, part.size - done))
                code = numpy.concatenate([read, numpy.zeros(8, numpy.uint8)])
                del read
                self.library.forget()
                for kind, places in features.candidates(code, part.address + done).items():
                    numbers = numpy.searchsorted(starts, places, side="right") - 1
                    found.setdefault(kind, []).append(numpy.unique(numbers[numbers >= 0]))
                asking.append(numpy.flatnonzero((code[:-1] == 0x0F) & (code[1:] == 0xA2)) + part.address + done)
        return (
            {kind: numpy.unique(numpy.concatenate(parts)).tolist() for kind, parts in found.items()},
            numpy.concatenate(asking).tolist() if asking else [],
        )

    def has_cpuid(self, places: Iterable[int]) -> bool:
        from iced_x86 import Code as Codes
        from iced_x86 import Decoder

        for place in places:
            number = bisect.bisect_right(self.starts, place) - 1
            start = self.starts[number] if number >= 0 else place
            if place - start > _LONGEST_FUNCTION:
                continue
            code = self.library.read(start, place + 2 - start)
            # From the function's start, so that a constant with these bytes is none.
            for instruction in Decoder(64, code, ip=start):
                if instruction.ip == place and instruction.code == Codes.CPUID:
                    return True
        return False

    # ------------------------------------------------------------ on every way

    def surely(self, roots: list[tuple[int, str]], into: dict[str, Seen]) -> int:
        """What each of these functions surely runs. Returns for how many not all was looked at."""
        undone: set[int] = set()
        reached: dict[str, dict[int, tuple[str, int]]] = {}
        # The roots themselves first, then with what they call, and so on: the limit cuts off what is deepest.
        for depth in range(_DEEPEST + 1):
            for address, name in roots:
                try:
                    needed = self._on_every_way(self._resolved(address), depth)
                except _OverLimit:
                    undone.add(address)
                    continue
                for feature, place in needed.items():
                    reached.setdefault(feature, {}).setdefault(address, (name, place))
        for feature, ways in reached.items():
            name, place = next(iter(ways.values()))
            into[feature] = self._seen(len(ways), place, symbols.readable(name))
        return len(undone)

    def _on_every_way(self, start: int, depth: int) -> dict[str, int]:
        """Features that no way through the function avoids, each with the place of an instruction that needs it."""
        key = (start, depth)
        if key in self._surely:
            return self._surely[key]
        self._surely[key] = {}  # a function that calls itself: by that way nothing is added
        try:
            body = self._body(start)
            called = {
                target: self._on_every_way(target, depth - 1) if depth else {}
                for target in {mark[2] for mark in body if mark[1] == _CALL or mark[1] == _JUMP}
                if target and not (start < target < self.end_of(start))
            }
        except _OverLimit:
            del self._surely[key]
            raise
        wanted = {name for mark in body if mark[1] == _NEEDS for name in mark[2]}
        wanted |= {name for needed in called.values() for name in needed}
        found = {}
        for feature in wanted:
            place = self._unavoidable(body, start, feature, called)
            if place is not None:
                found[feature] = place
        self._surely[key] = found
        return found

    def _unavoidable(
        self, body: list[_Mark], start: int, feature: str, called: dict[int, dict[str, int]]
    ) -> int | None:
        """Walks all ways that avoid the feature. None: one of them leaves the function."""
        addresses = [mark[0] for mark in body]
        first: int | None = None
        waiting, walked = [0], set()
        while waiting:
            number = waiting.pop()
            if number in walked or number >= len(body):
                continue  # past its end runs nothing: the last call does not return
            walked.add(number)
            at, kind, value = body[number]
            inside = kind in (_JUMP, _BRANCH) and start <= value < self.end_of(start)
            if kind == _NEEDS and feature in value:
                first = at if first is None else min(first, at)
            elif kind in (_CALL, _JUMP) and not inside and feature in called.get(value, {}):
                first = called[value][feature] if first is None else first
            elif kind == _LEAVE or (kind in (_JUMP, _BRANCH) and not inside):
                return None
            elif kind != _STOP:
                if inside:
                    waiting.append(bisect.bisect_left(addresses, value))
                if kind != _JUMP:
                    waiting.append(number + 1)
        return first

    def _body(self, start: int) -> list[_Mark]:
        """The instructions that matter: those that need something, and those that lead elsewhere."""
        from iced_x86 import Decoder, FlowControl, Register

        if start in self._bodies:
            return self._bodies[start]
        size = self.end_of(start) - start
        code = self.library.read(start, size) if size <= _LONGEST_FUNCTION else b""
        if self.budget <= 0:
            raise _OverLimit
        needs = features.of_codes()
        ordinary = FlowControl.NEXT
        marks: list[_Mark] = [] if code else [(start, _LEAVE, 0)]
        decoded = 0
        for instruction in Decoder(64, code, ip=start):
            decoded += 1
            needed = needs.get(instruction.code)
            if needed is not None:
                marks.append((instruction.ip, _NEEDS, needed))
            flow = instruction.flow_control
            if flow == ordinary:
                continue
            if flow == FlowControl.CALL:
                marks.append((instruction.ip, _CALL, self._resolved(instruction.near_branch_target)))
            elif flow == FlowControl.UNCONDITIONAL_BRANCH:
                target = instruction.near_branch_target
                marks.append(
                    (instruction.ip, _JUMP, target if start <= target < start + size else self._resolved(target))
                )
            elif flow in (FlowControl.CONDITIONAL_BRANCH, FlowControl.XBEGIN_XABORT_XEND):
                marks.append((instruction.ip, _BRANCH, instruction.near_branch_target))
            elif flow in (FlowControl.INDIRECT_CALL, FlowControl.INDIRECT_BRANCH):
                by_table = instruction.memory_base == Register.RIP
                target = self.library.pointers.get(instruction.ip_rel_memory_address, 0) if by_table else 0
                is_call = flow == FlowControl.INDIRECT_CALL
                marks.append((instruction.ip, _CALL if is_call else _JUMP if target else _LEAVE, target))
            elif flow == FlowControl.RETURN:
                marks.append((instruction.ip, _LEAVE, 0))
            elif flow == FlowControl.EXCEPTION:
                marks.append((instruction.ip, _STOP, 0))
        self.budget -= decoded
        self._bodies[start] = marks
        return marks

    def _resolved(self, target: int) -> int:
        """Through the stub by which a library calls its own exported functions; 0: it leads to another library."""
        known = self._targets.get(target)
        if known is None:
            known = self._targets[target] = self._through_stub(target)
        return known

    def _through_stub(self, target: int) -> int:
        code = self.library.read(target, 16).removeprefix(b"\xf3\x0f\x1e\xfa")  # endbr64
        at = target + 16 - len(code) if len(code) >= 12 else target
        bound = code.startswith(b"\xf2")  # bnd
        code = code[bound:]
        if code.startswith(b"\xff\x25") and len(code) >= 6:
            slot = at + bound + 6 + int.from_bytes(code[2:6], "little", signed=True)
            return self.library.pointers.get(slot, 0)
        return target

    # ------------------------------------------------------------ anywhere

    def anywhere(self, hits: dict[str, list[int]], into: dict[str, Seen]) -> int:
        """What any function has. Returns how many could not be looked at."""
        from iced_x86 import Decoder

        needs = features.of_codes()
        undone = 0
        places: dict[str, dict[int, int]] = {}  # by feature and function the first of its instructions
        for number in sorted({number for numbers in hits.values() for number in numbers}):
            start = self.starts[number]
            size = self.end_of(start) - start
            if self.budget <= 0 or size > _LONGEST_FUNCTION:
                undone += 1
                continue
            decoded = 0
            for instruction in Decoder(64, self.library.read(start, size), ip=start):
                decoded += 1
                needed = needs.get(instruction.code)
                if needed is not None:
                    for feature in needed:
                        places.setdefault(feature, {}).setdefault(start, instruction.ip)
            self.budget -= decoded
        self.needs_something = bool(places)
        names = self.library.function_names([start for found in places.values() for start in found])
        for feature, found in places.items():
            kept = [at for start, at in found.items() if not is_dispatched_name(names.get(start, ""))]
            if kept:
                into[feature] = self._seen(len(kept), kept[0], "")
        return undone

    def throughout(self, into: dict[str, Seen]) -> None:
        """Whether a sample of all functions says that the whole library was compiled for AVX."""
        from iced_x86 import Decoder

        plain_codes, needs = features.plain_vector_codes(), features.of_codes()
        wide: list[int] = []
        plain = 0
        for start in self.starts[:: max(1, len(self.starts) // _SAMPLE)]:
            code = self.library.read(start, min(self.end_of(start) - start, 1 << 12))
            first, is_plain = 0, False
            for instruction in Decoder(64, code, ip=start):
                number = instruction.code
                is_plain = is_plain or number in plain_codes
                if not first and "AVX" in needs.get(number, ()):
                    first = instruction.ip
            plain += is_plain
            if first and not is_plain:
                wide.append(first)
        names = self.library.function_names([self._start_of(at) for at in wide])
        wide = [at for at in wide if not is_dispatched_name(names.get(self._start_of(at), ""))]
        if len(wide) >= _FEWEST_WIDE and plain <= _MOST_PLAIN * (len(wide) + plain):
            into["AVX"] = self._seen(len(wide), wide[0], "")

    def _start_of(self, place: int) -> int:
        return self.starts[bisect.bisect_right(self.starts, place) - 1]

    def _seen(self, functions: int, place: int, through: str) -> Seen:
        start = self._start_of(place)
        name = symbols.readable(self.library.function_names([start]).get(start, ""))
        where = f"{name}+{place - start:#x}" if name else f"{place:#x}"
        instruction = examine.decode(self.library.read(place, 15), place, "x86_64", Cpu())
        return Seen(functions, where, "" if instruction is None else instruction.text, through)
