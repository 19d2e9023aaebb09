"""Tells return addresses from words that only look like one: a call stands right before them.

Reads   a few bytes of the libraries that a crash record names.
Writes  nothing.
Never   more than the record has addresses; a library that changed or went since is as if it had none.

A word on the stack that lies in code may be chance, in a library of 100 MB more so. Old ones remain: a call that
returned long ago leaves its address behind.
"""

from __future__ import annotations

import os

from holdfast.crashes import CrashRecord, Region

_BEFORE = 7  # the longest call of x86-64


def confirmed(crash: CrashRecord | None) -> tuple[int, ...]:
    """Return addresses on the stack, nearest first."""
    if crash is None or crash.architecture not in ("x86_64", "aarch64"):
        return ()
    files: dict[str, int] = {}
    found: list[int] = []
    try:
        for address in (*crash.possible_return_addresses, *crash.return_addresses):
            region = crash.region_of(address)
            if region is None or not region.path.startswith("/") or address in found:
                continue
            if _follows_call(_bytes_before(address, region, files), crash.architecture):
                found.append(address)
    finally:
        for fd in files.values():
            if fd >= 0:
                os.close(fd)
    return tuple(found)


def _bytes_before(address: int, region: Region, files: dict[str, int]) -> bytes:
    at = address - region.start + region.offset - _BEFORE
    if region.path not in files:
        try:
            files[region.path] = os.open(region.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            files[region.path] = -1
    if files[region.path] < 0 or at < 0:
        return b""
    try:
        return os.pread(files[region.path], _BEFORE, at)
    except OSError:
        return b""


def _follows_call(code: bytes, architecture: str) -> bool:
    if len(code) < _BEFORE:
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
