"""Who called the code that another process is in: its stack, unwound by the tables that compilers write.

Reads   /proc/PID/maps and memory: headers and tables of the libraries (`.eh_frame_hdr`, `.eh_frame`), and the stack.
Writes  nothing there, and does not stop it.
Never   guesses: it ends where a table is missing, or asks for a register that is not known.

A word on the stack that lies in code need not be a caller's. Calls that returned long ago leave theirs behind, also in
the gaps of frames that are in use now, and a fork inherits them all.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outlive._system.threads import Maps, memory_of

_MACHINE = os.uname().machine if hasattr(os, "uname") else ""
# Numbers of registers as the tables have them: the stack pointer, and those that a call leaves as they were.
_STACK_POINTER = {"x86_64": 7, "aarch64": 31}.get(_MACHINE, -1)
_KEPT = {"x86_64": (3, 6, 12, 13, 14, 15), "aarch64": tuple(range(19, 30))}.get(_MACHINE, ())

_MOST_FRAMES = 32
_STACK_BYTES = 4096  # looked at beyond them
_MOST_BYTES = 4096  # of one entry of a table
_PT_LOAD, _PT_GNU_EH_FRAME = 1, 0x6474E550
_SEARCHABLE = b"\x01\x1b\x03\x3b"  # a header whose pointers have 4 bytes, sorted: all that linkers write
BEFORE = 7  # the longest call of x86-64


class _UnknownError(Exception):
    """What the tables do not say, or say in a way that nobody writes."""


def places(pid: int, address: int, registers: dict[int, int], maps: Maps, plain: tuple[str, ...]) -> list[str]:
    """«libfoo.so+0x1a2f», innermost first, of code that is in a call now; none that is `plain`, as libc is.

    Where the tables end before any is found, what stands on the stack from there on and may be a caller's.
    """
    walked = walk(pid, address, registers, maps)
    found = _others((maps.place(each) for each in walked.addresses), plain)
    if found or walked.is_whole:
        return found
    return _others(_likely(pid, walked.stack_pointer, maps), plain)


def _others(found: Iterable[str], plain: tuple[str, ...]) -> list[str]:
    return [place for place in found if place and not place.startswith(plain)]


def _likely(pid: int, stack_pointer: int, maps: Maps) -> Iterator[str]:
    data = memory_of(pid, stack_pointer, _STACK_BYTES)
    for (word,) in struct.iter_unpack("=Q", data[: len(data) // 8 * 8]):
        place = maps.place(word) if word > 4096 else ""
        if place and follows_call(memory_of(pid, word - BEFORE, BEFORE)):
            yield place


@dataclass(frozen=True)
class Walk:
    """Addresses of code, innermost first: where it is, then its callers; from `stack_pointer` on nobody knows."""

    addresses: tuple[int, ...]
    stack_pointer: int
    is_whole: bool = False


def walk(pid: int, address: int, registers: dict[int, int], maps: Maps) -> Walk:
    """`registers`: those that are known, by their number in the tables; the stack pointer at least."""
    found = [address]
    known = dict(registers)
    try:
        for depth in range(_MOST_FRAMES):
            # A call may be the last instruction of its function: what follows it is another's.
            caller = _step(pid, address - (depth > 0), known, maps)
            if caller is None:
                return Walk(tuple(found), 0, is_whole=True)
            address, known = caller
            found.append(address)
    except (_UnknownError, struct.error, IndexError, ValueError):
        pass  # the last three: memory that is no table, or not all there
    return Walk(tuple(found), known.get(_STACK_POINTER, 0))


def at_stack(stack_pointer: int) -> dict[int, int]:
    """The registers of a thread of which no other is known."""
    return {_STACK_POINTER: stack_pointer}


def _step(pid: int, address: int, known: dict[int, int], maps: Maps) -> tuple[int, dict[int, int]] | None:
    """The caller's address and registers; None where there is none."""
    entry = _entry_of(pid, address, maps)
    frame = _frame(entry, address)
    if frame.base not in known:
        raise _UnknownError
    start = known[frame.base] + frame.offset
    before = {number: known[number] for number in _KEPT if number in known and number not in frame.lost}
    for number, offset in frame.saved.items():
        before[number] = _word(pid, start + offset)
    if entry.return_column in frame.lost:
        return None
    if entry.return_column not in frame.saved:
        raise _UnknownError  # still in a register, that of a leaf
    caller = before.pop(entry.return_column)
    before[_STACK_POINTER] = start
    return (caller, before) if caller else None


def _word(pid: int, address: int) -> int:
    return int(struct.unpack("=Q", memory_of(pid, address, 8))[0])


# ---------------------------------------------------------------- the tables


@dataclass(frozen=True)
class _Entry:
    """What a table says of one function."""

    begin: int
    code_unit: int
    data_unit: int
    return_column: int
    common: bytes  # instructions for all functions of its kind, then its own
    own: bytes


def _entry_of(pid: int, address: int, maps: Maps) -> _Entry:
    image = maps.image(address)
    if not image:
        raise _UnknownError
    index = _index_of(pid, image)
    if memory_of(pid, index, 4) != _SEARCHABLE:
        raise _UnknownError
    (count,) = struct.unpack("=I", memory_of(pid, index + 8, 4))
    low, high = 0, count  # the last that begins at or before it
    while low < high:
        middle = (low + high) // 2
        (begin,) = struct.unpack("=i", memory_of(pid, index + 12 + 8 * middle, 4))
        low, high = (middle + 1, high) if index + begin <= address else (low, middle)
    if not low:
        raise _UnknownError
    (place,) = struct.unpack("=i", memory_of(pid, index + 8 + 8 * low, 4))
    return _read_entry(pid, index + place, address)


def _index_of(pid: int, image: int) -> int:
    """Where a library's sorted index of its functions is."""
    head = memory_of(pid, image, 64)
    if head[:5] != b"\x7fELF\x02":
        raise _UnknownError
    (offset,) = struct.unpack_from("=Q", head, 32)
    size, count = struct.unpack_from("=HH", head, 54)
    distance = index = None
    for data in (memory_of(pid, image + offset + size * number, size) for number in range(count)):
        kind, _, at, linked = struct.unpack_from("=IIQQ", data)
        if kind == _PT_LOAD and at == 0:
            distance = image - linked
        if kind == _PT_GNU_EH_FRAME:
            index = linked
    if distance is None or index is None:
        raise _UnknownError
    return int(distance + index)


def _read_entry(pid: int, place: int, address: int) -> _Entry:
    own = _record(pid, place)
    (back,) = struct.unpack_from("=I", own.data)
    common = _record(pid, place + 4 - back)
    version = common.data[4]
    end = common.data.index(0, 5)
    letters = common.data[5:end].decode("ascii", "replace")
    common.at = end + 1
    code_unit, data_unit = common.unsigned(), common.signed()
    return_column = common.byte() if version == 1 else common.unsigned()
    encoding = 0
    if letters.startswith("z"):
        after = common.unsigned() + common.at
        for letter in letters[1:]:
            if letter == "R":
                encoding = common.byte()
            elif letter == "P":
                common.at += {2: 2, 3: 4, 4: 8}.get(common.byte() & 7, 8)
            elif letter == "L":
                common.byte()
            elif letter not in "SB":
                raise _UnknownError
        common.at = after
    if encoding != 0x1B or "B" in letters:  # 4 bytes from here on; signed return addresses
        raise _UnknownError
    shift, length = struct.unpack_from("=iI", own.data, 4)
    begin = place + 8 + shift
    own.at = 12
    if letters.startswith("z"):
        own.at += own.unsigned()
    if not begin <= address < begin + length:
        raise _UnknownError
    return _Entry(begin, code_unit, data_unit, return_column, common.data[common.at :], own.data[own.at :])


def _record(pid: int, place: int) -> _Bytes:
    (length,) = struct.unpack("=I", memory_of(pid, place, 4))
    if not 4 < length <= _MOST_BYTES:
        raise _UnknownError
    return _Bytes(memory_of(pid, place + 4, length))


class _Bytes:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def number(self, size: int) -> int:
        self.at += size
        return int.from_bytes(self.data[self.at - size : self.at], "little")

    def unsigned(self) -> int:
        value = shift = 0
        while True:
            byte = self.byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value

    def signed(self) -> int:
        begin = self.at
        value = self.unsigned()
        bits = 7 * (self.at - begin)
        return value - (1 << bits) if value >> (bits - 1) & 1 else value


# ---------------------------------------------------------------- what they say of one address


@dataclass
class _Frame:
    """At one instruction: the frame starts at `base` + `offset`, and registers lie at offsets from there."""

    base: int
    offset: int
    saved: dict[int, int]
    lost: set[int]

    def copy(self) -> _Frame:
        return _Frame(self.base, self.offset, dict(self.saved), set(self.lost))


def _frame(entry: _Entry, address: int) -> _Frame:
    frame = _Frame(-1, 0, {}, set())
    for _ in _run(entry.common, entry, frame, None):
        pass
    first = frame.copy()
    at = entry.begin
    for further in _run(entry.own, entry, frame, first):
        at += further
        if at > address:
            break
    return frame


def _run(code: bytes, entry: _Entry, frame: _Frame, first: _Frame | None) -> Iterator[int]:
    """Carries instructions out, and says how far each one that moves on goes."""
    read = _Bytes(code)
    kept: list[_Frame] = []
    while read.at < len(code):
        instruction = read.byte()
        low = instruction & 0x3F
        match instruction & 0xC0 or instruction:
            case 0x40:
                yield low * entry.code_unit
            case 0x02 | 0x03 | 0x04:
                yield read.number({2: 1, 3: 2, 4: 4}[instruction]) * entry.code_unit
            case 0x80:
                _save(frame, low, read.unsigned() * entry.data_unit)
            case 0x05:
                _save(frame, read.unsigned(), read.unsigned() * entry.data_unit)
            case 0x11:
                _save(frame, read.unsigned(), read.signed() * entry.data_unit)
            case 0xC0:
                _restore(frame, low, first)
            case 0x06:
                _restore(frame, read.unsigned(), first)
            case 0x07:
                number = read.unsigned()
                frame.saved.pop(number, None)
                frame.lost.add(number)
            case 0x08:
                _restore(frame, read.unsigned(), None)
            case 0x0A:
                kept.append(frame.copy())
            case 0x0B:
                frame.__dict__.update(kept.pop().__dict__)
            case 0x0C:
                frame.base, frame.offset = read.unsigned(), read.unsigned()
            case 0x12:
                frame.base, frame.offset = read.unsigned(), read.signed() * entry.data_unit
            case 0x0D:
                frame.base = read.unsigned()
            case 0x0E:
                frame.offset = read.unsigned()
            case 0x13:
                frame.offset = read.signed() * entry.data_unit
            case 0x2E:  # how much a call took for its arguments: of no use here
                read.unsigned()
            case 0x00:
                pass
            case _:  # expressions, and what else may come
                raise _UnknownError


def _save(frame: _Frame, number: int, offset: int) -> None:
    frame.lost.discard(number)
    frame.saved[number] = offset


def _restore(frame: _Frame, number: int, first: _Frame | None) -> None:
    frame.saved.pop(number, None)
    frame.lost.discard(number)
    if first is not None and number in first.saved:
        frame.saved[number] = first.saved[number]


# ---------------------------------------------------------------- where there is no table


def follows_call(code: bytes, architecture: str = _MACHINE) -> bool:
    """Whether a return address may stand after these bytes (`BEFORE` of them): a call ends there."""
    if len(code) < BEFORE:
        return False
    if architecture == "aarch64":
        word = int.from_bytes(code[-4:], "little")
        return word & 0xFC000000 == 0x94000000 or word & 0xFFFFFC1F == 0xD63F0000  # bl; blr
    if code[-5] == 0xE8:  # call to a place in the same library
        return True
    return any(_is_indirect_call(code[-size:]) for size in (2, 3, 4, 6, 7))


def _is_indirect_call(code: bytes) -> bool:
    """«call [where]» or «call register», exactly as long as these bytes."""
    if code[0] & 0xF0 == 0x40:  # a prefix for the upper registers
        code = code[1:]
    if len(code) < 2 or code[0] != 0xFF or code[1] >> 3 & 7 != 2:
        return False
    mode, base = code[1] >> 6, code[1] & 7
    size = 2 + {0: 4 if base == 5 else 0, 1: 1, 2: 4, 3: 0}[mode]
    if mode != 3 and base == 4:
        size += 1
    return size == len(code)
