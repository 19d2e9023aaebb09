"""One native library as its file tells it: for which machine, what it needs and defines, where its functions are.

Reads   an ELF file, mapped: only the tables that are asked for are touched.
Writes  nothing.
Never   trusts a length or an offset of the file: what is broken raises NotReadable.

Headers by `struct`, tables by NumPy: libtorch has 300,000 functions, and the extras need not be installed for this.
"""

from __future__ import annotations

import functools
import mmap
import struct
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy

MACHINES = {0x3E: "x86_64", 0xB7: "aarch64", 0x03: "i386", 0x28: "arm", 0x15: "ppc64", 0x16: "s390x", 0xF3: "riscv"}
_LOAD, _DYNAMIC, _NOTE, _EH_FRAME, _PROPERTY = 1, 2, 4, 0x6474E550, 0x6474E553
_NEEDED, _INIT, _SONAME, _RPATH, _INIT_ARRAY, _INIT_ARRAY_SIZE, _RUNPATH = 1, 12, 14, 15, 25, 27, 29
_STRTAB, _STRTAB_SIZE, _RELA, _RELA_SIZE, _JMPREL, _JMPREL_SIZE = 5, 10, 7, 8, 23, 2
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_DYNSYM = 1, 2, 11
_SHF_EXECUTABLE = 4
_EXECUTABLE = 1
_ISA_NEEDED = 0xC0008002  # GNU_PROPERTY_X86_ISA_1_NEEDED
_LEVELS = {1: "x86-64-v1", 2: "x86-64-v2", 4: "x86-64-v3", 8: "x86-64-v4"}

SYMBOL = numpy.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION = numpy.dtype([("place", "<u8"), ("info", "<u8"), ("addend", "<i8")])
_RELATIVE, _ABSOLUTE, _GLOB_DAT, _JUMP_SLOT = 8, 1, 6, 7
FUNCTION, INDIRECT = 2, 10  # STT_FUNC, STT_GNU_IFUNC
_WEAK = 2
_LARGEST_TABLE = 1 << 28


class NotReadable(Exception):
    """No 64-bit little-endian ELF file, or a broken one."""


@dataclass(frozen=True)
class Segment:
    address: int
    offset: int
    size: int
    executable: bool


class Library:
    """An open library; close it, or use it in `with`."""

    def __init__(self, path: str) -> None:
        with open(path, "rb") as file:
            head = file.read(64)
            if head[:4] != b"\x7fELF" or len(head) < 20:
                raise NotReadable(f"{path} is no ELF file")
            number = struct.unpack_from("<H", head, 18)[0]
            self.machine = MACHINES.get(number, f"machine {number}")
            self.is_readable = head[4] == 2 and head[5] == 1 and len(head) == 64
            if not self.is_readable:
                self.machine = {1: "32-bit ", 2: ""}.get(head[4], "") + self.machine
                raise NotReadable(f"{path} is {self.machine}, not a 64-bit little-endian file")
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.path = path
        try:
            self._read_headers()
        except (struct.error, IndexError, OverflowError, ValueError) as error:
            self.close()
            raise NotReadable(f"{path} is broken: {error}") from None

    def __enter__(self) -> Library:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self.__dict__.pop("dynamic_symbols", None)  # they hold the map
        try:
            self._content.close()
        except BufferError:
            pass  # an array that an exception still holds: the map goes with it

    # ------------------------------------------------------------ headers

    def _read_headers(self) -> None:
        head = self._content[:64]
        segments_at, sections_at = struct.unpack_from("<QQ", head, 32)
        segment_size, segments, section_size, sections = struct.unpack_from("<HHHH", head, 54)
        self.segments: list[Segment] = []
        self._dynamic: list[tuple[int, int]] = []
        self._eh_frame = 0
        notes: list[tuple[int, int]] = []
        for place in range(segments):
            kind, flags, offset, address, _, size, _, _ = struct.unpack_from(
                "<IIQQQQQQ", self._content, segments_at + place * segment_size
            )
            if kind == _LOAD:
                self.segments.append(Segment(address, offset, size, bool(flags & _EXECUTABLE)))
            elif kind == _DYNAMIC:
                found = struct.iter_unpack("<QQ", self._content[offset : offset + size // 16 * 16])
                for tag, value in found:
                    if tag == 0:
                        break
                    self._dynamic.append((tag, value))
            elif kind == _EH_FRAME:
                self._eh_frame = address
            elif kind in (_NOTE, _PROPERTY):
                notes.append((offset, size))
        self._sections = [
            struct.unpack_from("<IIQQQQIIQQ", self._content, sections_at + place * section_size)
            for place in range(sections if sections_at else 0)
        ]
        self.build_id, self.level = self._read_notes(notes)

    def _read_notes(self, notes: list[tuple[int, int]]) -> tuple[str, str]:
        """The build id, and the highest level of x86-64 that ld.so will insist on."""
        build_id, bits = "", 0
        for at, size in notes:
            end = at + size
            while at + 12 <= end:
                name_size, value_size, kind = struct.unpack_from("<III", self._content, at)
                name = self._content[at + 12 : at + 12 + name_size].rstrip(b"\0")
                value_at = at + 12 + (name_size + 3) // 4 * 4
                value = self._content[value_at : value_at + value_size]
                if name == b"GNU" and kind == 3:
                    build_id = value.hex()
                elif name == b"GNU" and kind == 5:
                    bits |= _isa_bits(value)
                at = value_at + (value_size + 7) // 8 * 8 if kind == 5 else value_at + (value_size + 3) // 4 * 4
        return build_id, _LEVELS.get(1 << bits.bit_length() - 1, "") if bits else ""

    @functools.cached_property
    def code(self) -> tuple[Segment, ...]:
        """Where code is. Sections tell it from constants, which older linkers put into the same segment."""
        found = [
            Segment(section[3], section[4], section[5], True)
            for section in self._sections
            if section[1] == _SHT_PROGBITS and section[2] & _SHF_EXECUTABLE
        ]
        return tuple(found or [segment for segment in self.segments if segment.executable])

    def offset_of(self, address: int) -> int | None:
        for segment in self.segments:
            if segment.address <= address < segment.address + segment.size:
                return address - segment.address + segment.offset
        return None

    def read(self, address: int, size: int) -> bytes:
        offset = self.offset_of(address)
        return b"" if offset is None else self._content[offset : offset + size]

    def array(self, offset: int, size: int) -> Any:
        """Bytes of the file as an array, which the caller must let go before the library is closed."""
        size = min(size, len(self._content) - offset)
        return numpy.frombuffer(self._content, numpy.uint8, max(size, 0), offset)

    def forget(self) -> None:
        """Lets go the pages that were read: of a large file they count as this process's memory."""
        self._content.madvise(mmap.MADV_DONTNEED)

    def _entry(self, tag: int) -> int:
        return next((value for found, value in self._dynamic if found == tag), 0)

    @functools.cached_property
    def _names(self) -> int:
        offset = self.offset_of(self._entry(_STRTAB))
        return -1 if offset is None else offset

    def name_at(self, offset: int) -> str:
        if self._names < 0:
            return ""
        start = self._names + offset
        end = self._content.find(b"\0", start, start + 8192)
        return self._content[start:end].decode("utf-8", "replace") if end >= 0 else ""

    @functools.cached_property
    def needed(self) -> tuple[str, ...]:
        return tuple(self.name_at(value) for tag, value in self._dynamic if tag == _NEEDED)

    @functools.cached_property
    def search(self) -> tuple[str, ...]:
        """Where it looks for what it needs, $ORIGIN and all."""
        paths = [self.name_at(value) for tag, value in self._dynamic if tag in (_RPATH, _RUNPATH)]
        return tuple(part for path in paths for part in path.split(":") if part)

    @functools.cached_property
    def soname(self) -> str:
        return next((self.name_at(value) for tag, value in self._dynamic if tag == _SONAME), "")

    # ------------------------------------------------------------ symbols

    @functools.cached_property
    def dynamic_symbols(self) -> Any:
        return self._symbols(_SHT_DYNSYM)

    def _symbols(self, kind: int) -> Any:
        for section in self._sections:
            if section[1] == kind and section[5] <= _LARGEST_TABLE:
                count = min(section[5], len(self._content) - section[4]) // SYMBOL.itemsize
                if count > 0:
                    return numpy.frombuffer(self._content, SYMBOL, count, section[4])
        return numpy.zeros(0, SYMBOL)

    def undefined(self) -> tuple[str, ...]:
        """Names that another library must define, or this one cannot be loaded."""
        table = self.dynamic_symbols
        wanted = table[(table["section"] == 0) & (table["name"] != 0) & (table["info"] >> 4 != _WEAK)]
        return tuple(self.name_at(int(name)) for name in wanted["name"])

    def defined(self) -> tuple[str, ...]:
        table = self.dynamic_symbols
        return tuple(self.name_at(int(name)) for name in table[table["section"] != 0]["name"])

    def defines(self, wanted: str) -> bool:
        """Without making a text of every name."""
        table = self.dynamic_symbols
        known = set(table[table["section"] != 0]["name"].tolist())
        at, end = self._names, self._names + self._entry(_STRTAB_SIZE)
        while at >= 0:
            at = self._content.find(wanted.encode() + b"\0", at, end)
            if at >= 0 and at - self._names in known:
                return True
            at += at >= 0
        return False

    def exported_functions(self) -> list[tuple[int, str]]:
        """Address and name."""
        table = self.dynamic_symbols
        there = table[(table["section"] != 0) & (table["info"] & 15 == FUNCTION)]
        return [(int(entry["value"]), self.name_at(int(entry["name"]))) for entry in there]

    @functools.cached_property
    def has_indirect_functions(self) -> bool:
        """Functions that are chosen when the library is loaded: dispatch by the loader."""
        table = self.dynamic_symbols
        kinds = set(numpy.unique(table["info"] & 15).tolist())
        return INDIRECT in kinds or any(int(kind) == 37 for kind in self._relocation_kinds())

    def initializers(self) -> list[int]:
        """Functions that run when it is loaded, before anybody can ask anything."""
        found = [self._entry(_INIT)] if self._entry(_INIT) else []
        at, size = self._entry(_INIT_ARRAY), min(self._entry(_INIT_ARRAY_SIZE), 1 << 20)
        content = self.read(at, size)
        for place in range(len(content) // 8):
            plain = struct.unpack_from("<Q", content, place * 8)[0]
            found.append(self.pointers.get(at + place * 8) or plain)
        return [address for address in found if address not in (0, (1 << 64) - 1)]

    # ------------------------------------------------------------ relocations

    def _relocations(self) -> Any:
        parts = []
        for tag, size_tag in ((_RELA, _RELA_SIZE), (_JMPREL, _JMPREL_SIZE)):
            offset = self.offset_of(self._entry(tag)) if self._entry(tag) else None
            size = min(self._entry(size_tag), _LARGEST_TABLE)
            if offset is not None and offset + size <= len(self._content):
                parts.append(numpy.frombuffer(self._content, _RELOCATION, size // _RELOCATION.itemsize, offset))
        return numpy.concatenate(parts) if parts else numpy.zeros(0, _RELOCATION)

    def _relocation_kinds(self) -> list[int]:
        return [int(kind) for kind in numpy.unique(self._relocations()["info"] & 0xFFFFFFFF)]

    @functools.cached_property
    def pointers(self) -> dict[int, int]:
        """Places that the loader fills with the address of a function of this very library: tables of calls."""
        table = self._relocations()
        kinds = table["info"] & 0xFFFFFFFF
        symbols = self.dynamic_symbols
        found: dict[int, int] = {}
        at, size = self._entry(_INIT_ARRAY), self._entry(_INIT_ARRAY_SIZE)
        plain = table[(kinds == _RELATIVE) & (table["place"] >= at) & (table["place"] < at + size)]
        found |= zip(plain["place"].tolist(), plain["addend"].tolist())
        named = table[(kinds == _ABSOLUTE) | (kinds == _GLOB_DAT) | (kinds == _JUMP_SLOT)]
        numbers = (named["info"] >> numpy.uint64(32)).astype(numpy.int64)
        named, numbers = named[numbers < len(symbols)], numbers[numbers < len(symbols)]
        own = (symbols["section"][numbers] != 0) & (symbols["info"][numbers] & 15 == FUNCTION)
        found |= zip(named["place"][own].tolist(), symbols["value"][numbers[own]].tolist())
        return found

    # ------------------------------------------------------------ functions

    def function_starts(self) -> Any:
        """Sorted addresses at which functions start: from the table that unwinds the stack, and from symbols."""
        found = [self._from_unwind_table()]
        for table in (self.dynamic_symbols, self._symbols(_SHT_SYMTAB)):
            there = table[(table["section"] != 0) & (table["info"] & 15 == FUNCTION)]
            found.append(there["value"].astype(numpy.int64))
        return numpy.unique(numpy.concatenate(found))

    def _from_unwind_table(self) -> Any:
        head = self.read(self._eh_frame, 12) if self._eh_frame else b""
        # Version 1, the usual encodings: a pointer relative to here, a count, pairs relative to this table.
        if len(head) < 12 or head[0] != 1 or head[2] != 0x03 or head[3] != 0x3B:
            return numpy.zeros(0, numpy.int64)
        count = min(struct.unpack_from("<I", head, 8)[0], _LARGEST_TABLE // 8)
        pairs = numpy.frombuffer(self.read(self._eh_frame + 12, count * 8), "<i4")
        return pairs[0::2].astype(numpy.int64) + self._eh_frame

    def function_names(self, addresses: list[int]) -> dict[int, str]:
        """The names of the functions that start there, as the linker knows them."""
        wanted = set(addresses)
        found: dict[int, str] = {}
        for kind in (_SHT_SYMTAB, _SHT_DYNSYM):
            table = self._symbols(kind)
            hits = table[
                numpy.isin(table["value"], numpy.array(sorted(wanted), numpy.uint64)) & (table["section"] != 0)
            ]
            names_at = self._names_of(kind)
            for entry in hits[hits["info"] & 15 == FUNCTION]:
                end = self._content.find(b"\0", names_at + int(entry["name"]))
                name = self._content[names_at + int(entry["name"]) : end].decode("utf-8", "replace")
                found.setdefault(int(entry["value"]), name)
        return found

    def _names_of(self, kind: int) -> int:
        if kind == _SHT_DYNSYM:
            return self._names
        link = next((section[6] for section in self._sections if section[1] == kind), len(self._sections))
        return int(self._sections[link][4]) if link < len(self._sections) else 0


def _isa_bits(properties: bytes) -> int:
    at, bits = 0, 0
    while at + 8 <= len(properties):
        kind, size = struct.unpack_from("<II", properties, at)
        if kind == _ISA_NEEDED and size == 4 and at + 12 <= len(properties):
            bits |= struct.unpack_from("<I", properties, at + 8)[0]
        at += 8 + (size + 7) // 8 * 8
    return bits
