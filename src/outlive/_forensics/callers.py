"""Tells return addresses from words that only look like one: a call stands right before them.

Reads   a few bytes of the libraries that a crash record names.
Writes  nothing.
Never   more than the record has addresses; a library that changed or went since is as if it had none.

A word on the stack that lies in code may be chance, in a library of 100 MB more so. Old ones remain: a call that
returned long ago leaves its address behind.
"""

from __future__ import annotations

import os

from outlive._system import unwinding
from outlive.crashes import CrashRecord, Region


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
            if unwinding.follows_call(_bytes_before(address, region, files), crash.architecture):
                found.append(address)
    finally:
        for fd in files.values():
            if fd >= 0:
                os.close(fd)
    return tuple(found)


def _bytes_before(address: int, region: Region, files: dict[str, int]) -> bytes:
    at = address - region.start + region.offset - unwinding.BEFORE
    if region.path not in files:
        try:
            files[region.path] = os.open(region.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            files[region.path] = -1
    if files[region.path] < 0 or at < 0:
        return b""
    try:
        return os.pread(files[region.path], unwinding.BEFORE, at)
    except OSError:
        return b""
