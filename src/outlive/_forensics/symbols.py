"""From an address of code to the library, the place in it and the function.

Reads   ELF files: headers through pyelftools, symbol tables through NumPy, names demangled by libstdc++.
Writes  nothing.
Never   fails for a file that is gone, replaced, stripped or broken: it then says less.

    address ─ region of the map ─► path, place in the file ─ segments ─► address in the file's own space
                                                                          └─ .symtab or .dynsym ─► function

A table has up to some 200,000 symbols (libtorch): it is searched as one array, straight from the file.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from outlive.crashes import Region
from outlive.evidence import CodePlace

_FUNCTION, _INDIRECT = 2, 10  # STT_FUNC, STT_GNU_IFUNC
_KEPT = 64  # files whose headers are remembered: where things are in them, not their content
_LONGEST = 160


def places_of(addresses: Iterable[int], regions: Iterable[Region]) -> tuple[CodePlace, ...]:
    """Where each address lies; those of one file cost one look at its symbols."""
    addresses = tuple(addresses)
    regions = tuple(regions)
    found: dict[int, CodePlace] = {}
    by_file: dict[str, dict[int, int]] = {}
    for address in addresses:
        region = next((r for r in regions if r.start <= address < r.end), None)
        path = "" if region is None else region.file
        shown = path or ("" if region is None else region.special)
        found[address] = CodePlace(address, shown, is_mapped=region is not None)
        if region is not None and path and not region.deleted:
            by_file.setdefault(path, {})[address] = address - region.start + region.offset
    for path, offsets in by_file.items():
        try:
            found |= _in_file(path, offsets)
        except Exception:
            pass  # Gone meanwhile, not ELF, damaged, or no pyelftools: library and address are known all the same.
    return tuple(found[address] for address in addresses)


# ---------------------------------------------------------------- one file


@dataclass(frozen=True)
class _Layout:
    """Where things are in an ELF file."""

    segments: tuple[tuple[int, int, int], ...]  # place in the file, size there, address
    symbols: tuple[int, int] | None  # place and size of the best symbol table there is
    names: tuple[int, int]

    def address_of(self, offset: int) -> int | None:
        for place, size, address in self.segments:
            if place <= offset < place + size:
                return offset - place + address
        return None


@functools.lru_cache(maxsize=_KEPT)
def _layout(path: str, identity: tuple[int, ...]) -> _Layout:
    from elftools.elf.elffile import ELFFile

    with open(path, "rb") as file:
        elf = ELFFile(file)
        if elf.elfclass != 64 or not elf.little_endian:
            return _Layout((), None, (0, 0))
        segments = tuple(
            (segment["p_offset"], segment["p_filesz"], segment["p_vaddr"])
            for segment in elf.iter_segments()
            if segment["p_type"] == "PT_LOAD"
        )
        tables: dict[str, Any] = {}
        for number in range(elf.num_sections()):
            header = elf._get_section_header(number)  # get_section() would read names that nobody asks for
            tables.setdefault(header["sh_type"], header)
        best = tables.get("SHT_SYMTAB") or tables.get("SHT_DYNSYM")
        if best is None or best["sh_size"] == 0:
            return _Layout(segments, None, (0, 0))
        names = elf._get_section_header(best["sh_link"])
        return _Layout(segments, (best["sh_offset"], best["sh_size"]), (names["sh_offset"], names["sh_size"]))


def _in_file(path: str, offsets: dict[int, int]) -> dict[int, CodePlace]:
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        layout = _layout(path, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns))
        # Mapped, for only the pages of the table are looked at: the file may have a gigabyte.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            own = {address: layout.address_of(offset) for address, offset in offsets.items()}
            wanted = [place for place in own.values() if place is not None]
            functions = _functions_at(content, layout, wanted)
    found = {}
    for address, place in own.items():
        name, start = functions.get(place, ("", None)) if place is not None else ("", None)
        beyond = place - start if place is not None and start is not None else None
        found[address] = CodePlace(address, path, place, readable(name), beyond, is_mapped=True)
    return found


def _functions_at(content: mmap.mmap, layout: _Layout, places: list[int]) -> dict[int | None, tuple[str, int]]:
    """For each place the function around it, and where that starts; nothing for places between functions."""
    import numpy

    if layout.symbols is None or not places:
        return {}
    at, size = layout.symbols
    entry = numpy.dtype(
        [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
    )
    table = numpy.frombuffer(content, dtype=entry, count=size // entry.itemsize, offset=at)
    starts = table["value"].copy()
    ends = numpy.maximum(table["size"], 1)
    ends += starts
    found: dict[int | None, tuple[str, int]] = {}
    for place in set(places):
        around = table[(starts <= place) & (ends > place)]
        kinds = around["info"] & 15
        around = around[((kinds == _FUNCTION) | (kinds == _INDIRECT)) & (around["section"] != 0)]
        if len(around):
            # Of functions in one another (a part of a larger one, aliases) the innermost, with its first name.
            inner = around[numpy.argmax(around["value"])]
            found[place] = _name_at(content, layout, int(inner["name"])), int(inner["value"])
    del table  # the file stays mapped as long as an array looks at it
    return found


def _name_at(content: mmap.mmap, layout: _Layout, offset: int) -> str:
    at, size = layout.names
    end = content.find(b"\0", at + offset, at + size)
    return content[at + offset : end].decode("utf-8", "replace") if end >= 0 else ""


# ---------------------------------------------------------------- names


def readable(name: str) -> str:
    """A C++ or Rust name as people write it, without parameters; others as they are."""
    name = name.partition("@")[0]  # the version of a symbol
    if not name.startswith("_Z"):
        return _cut(name)
    plain = _demangled(name)
    plain = re.sub(r"::h[0-9a-f]{16}$", "", plain)  # Rust's
    return _cut(_without_details(plain))


def _without_details(name: str) -> str:
    """Without parameters, and with «<…>» for the arguments of templates."""
    kept: list[str] = []
    depth = 0  # in angle brackets
    text = name.replace("(anonymous namespace)", "{anonymous}").replace("operator()", "operator\0")
    text = re.sub(r"operator(<<=?|>>=?|<=>|<=?|>=?|->\*?)", lambda m: "operator" + m[1].translate(_HIDDEN), text)
    for character in text:
        if character == "<":
            if depth == 0:
                kept.append("<…>")
            depth += 1
        elif character == ">" and depth:
            depth -= 1
        elif depth == 0:
            if character == "(":
                break
            kept.append(character)
    text = "".join(kept).replace("\0", "()").translate(_SHOWN)
    return text.rpartition(" ")[2] if " " in text and "operator" not in text else text


_HIDDEN = {ord("<"): "\1", ord(">"): "\2", ord("-"): "\3"}
_SHOWN = {1: "<", 2: ">", 3: "-"}


def _cut(name: str) -> str:
    return name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"


@functools.cache
def load_demangler() -> Any:
    """libstdc++, which every process with torch has loaded; None where there is none."""
    try:
        library = ctypes.CDLL("libstdc++.so.6")
        library.__cxa_demangle.restype = ctypes.c_void_p
        library.__cxa_demangle.argtypes = (ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        library.free.argtypes = (ctypes.c_void_p,)
        library.free.restype = None
    except (OSError, AttributeError):
        return None
    return library


def _demangled(name: str) -> str:
    library = load_demangler()
    if library is None:
        return name
    status = ctypes.c_int(0)
    made = library.__cxa_demangle(name.encode(), None, None, ctypes.addressof(status))
    if not made:
        return name
    try:
        return ctypes.string_at(made).decode("utf-8", "replace")
    finally:
        library.free(made)
