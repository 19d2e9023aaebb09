"""The crash record: what a worker's fatal-signal handler leaves in its black box.

Reads   (trainer) the record and the maps behind it, after the worker's death.
Writes  (worker) nothing by itself: it has the recorder write, a C extension (recorder.c, recorder.h).
Never   fails for want of the extension, or because the record is damaged: there is none then.

    fault → recorder → (returns, faults again) → faulthandler → the default: death of the original signal

A handler that is installed later comes first and may keep the signal from us; `reinstall` puts us first again.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from outlive._capture import blackbox
from outlive._capture.blackbox import BlackBox
from outlive.crashes import SI_KERNEL, CrashRecord, Region

try:
    from outlive._capture import _recorder
except ImportError:  # built without a C compiler: everything else works, and incidents have no crash record
    _recorder = None  # type: ignore[assignment]

AVAILABLE = _recorder is not None
RECORD_SIZE: int = _recorder.RECORD_SIZE if _recorder is not None else 0  # bytes

_WRITING, _FACTS, _VERSION = 1, 2, 1
_HEAD = struct.Struct("<QII6iIiQqQQ16sQQ4IQII")
_REGISTERS_AT, _INSTRUCTION_AT, _BEFORE_AT, _RETURNS_AT, _STACK_AT = 144, 464, 528, 544, 1024
_MOST_REGISTERS, _INSTRUCTION_ROOM, _BEFORE_ROOM, _MOST_RETURNS, _STACK_ROOM = 40, 64, 16, 32, 4096
_TAIL, _TAIL_AT, _MESSAGE_AT, _MESSAGE_ROOM = struct.Struct("<QQI"), 5120, 5144, 1000
_SURVIVED_NS = 10_000_000_000  # recorder.c has the same
_MOST_POSSIBLE = 64
_USER_BITS = (1 << 48) - 1  # aarch64 may sign the rest of a return address

_ARCHITECTURES: dict[int, tuple[str, tuple[str, ...]]] = {
    1: (
        "x86_64",
        (
            *("rax", "rbx", "rcx", "rdx", "rsi", "rdi", "rbp", "rsp"),
            *(f"r{number}" for number in range(8, 16)),
            *("rip", "eflags"),
        ),
    ),
    2: ("aarch64", (*(f"x{number}" for number in range(31)), "sp", "pc", "pstate")),
}


class _Head(NamedTuple):
    """The fixed part, up to the registers."""

    state: int
    version: int
    architecture: int
    signal: int
    code: int
    error: int
    pid: int
    thread: int
    sender_pid: int
    sender_uid: int
    system_call: int
    address: int
    time_ns: int
    trap: int
    fault_error: int
    thread_name: bytes
    instruction_pointer: int
    stack_pointer: int
    register_count: int
    instruction_size: int
    before_size: int
    return_count: int
    stack_address: int
    stack_size: int
    maps_size: int


# ---------------------------------------------------------------- the worker's side

_held: ctypes.Array[ctypes.c_ubyte] | None = None


def install(mapped: ctypes.Array[ctypes.c_ubyte]) -> None:
    """In a worker: record fatal signals in this black box, from now until the process ends."""
    global _held
    if _recorder is None:
        return
    _held = mapped  # unmapped under the handler, it would fault on its own
    at = ctypes.addressof(mapped)
    try:
        _recorder.install(
            at + blackbox.CRASH_AT, at + 8 * blackbox.SINCE, at + blackbox.MAPS_AT, len(mapped) - blackbox.MAPS_AT
        )
    except OSError:
        return  # No memory for a stack of its own: the worker is as good as one without the extension.
    watch_threads()


def watch_threads() -> None:
    """Give each thread that Python starts a second stack, so that an overflow of its first one is recorded, too."""
    run: Callable[[Any], None] | None = getattr(threading.Thread, "_bootstrap_inner", None)
    if run is None or hasattr(run, "__wrapped__"):
        return

    @functools.wraps(run)
    def run_with_second_stack(self: Any) -> None:
        stack = _recorder.add_stack()
        try:
            run(self)
        finally:
            _recorder.drop_stack(stack)

    threading.Thread._bootstrap_inner = run_with_second_stack  # type: ignore[attr-defined]


def reinstall() -> None:
    """Come first again, before handlers that were installed since; they still get the signal after us."""
    if _recorder is not None:
        _recorder.reinstall()


def is_installed() -> bool:
    """Whether every fatal signal of this process comes to the recorder first."""
    return _recorder is not None and _recorder.is_installed()


# ---------------------------------------------------------------- the other side


def read(box: BlackBox) -> CrashRecord | None:
    """What the worker died of; None if it recorded nothing, or lived on after it."""
    raw = box.crash_bytes()
    head = _Head._make(_HEAD.unpack_from(raw))
    # A handler of the user's may have mended the fault, and the worker gone on. The margin is for faults in
    # other threads: ours takes steps until the process is gone.
    survived = box.words[blackbox.SINCE] - head.time_ns > _SURVIVED_NS
    if head.state < _FACTS or head.version != _VERSION or survived:
        return None
    machine, names = _ARCHITECTURES.get(head.architecture, ("", ()))
    stack = raw[_STACK_AT : _STACK_AT + min(head.stack_size, _STACK_ROOM)]
    on_stack = _words(stack, 0, len(stack) // 8)
    returns = _words(raw, _RETURNS_AT, min(head.return_count, _MOST_RETURNS))
    if machine == "aarch64":
        returns, on_stack = _unsigned(returns), _unsigned(on_stack)
    address = head.address if head.code > 0 and head.code != SI_KERNEL else None
    regions = parse_maps(box.maps_bytes(head.maps_size))
    possible = _pointing_into_code(on_stack, regions)
    registers = _words(raw, _REGISTERS_AT, min(head.register_count, _MOST_REGISTERS))
    places = [address or 0, head.stack_pointer, head.instruction_pointer, *registers, *returns, *possible]
    shared_free, shared, message_size = _TAIL.unpack_from(raw, _TAIL_AT)
    message = raw[_MESSAGE_AT : _MESSAGE_AT + min(message_size, _MESSAGE_ROOM)]
    return CrashRecord(
        signal=head.signal,
        code=head.code,
        pid=head.pid,
        thread=head.thread,
        thread_name=head.thread_name.split(b"\0")[0].decode("utf-8", "replace"),
        time_ns=head.time_ns,
        error=head.error,
        address=address,
        sender_pid=head.sender_pid or None,
        sender_uid=head.sender_uid if head.sender_pid else None,
        system_call=head.system_call if head.system_call >= 0 else None,
        architecture=machine,
        trap=head.trap if machine == "x86_64" else None,
        fault_error=head.fault_error if machine else None,
        registers=dict(zip(names, registers)),
        instruction_pointer=head.instruction_pointer if machine else None,
        instruction=raw[_INSTRUCTION_AT : _INSTRUCTION_AT + min(head.instruction_size, _INSTRUCTION_ROOM)],
        before=raw[_BEFORE_AT : _BEFORE_AT + min(head.before_size, _BEFORE_ROOM)],
        stack_pointer=head.stack_pointer if machine else None,
        stack_address=head.stack_address,
        stack=stack,
        return_addresses=returns,
        possible_return_addresses=possible,
        regions=_around(places, [address or 0, head.stack_pointer], regions),
        message=message.split(b"\0")[0].decode("utf-8", "replace"),
        shared_free_bytes=shared_free if shared else None,
        shared_bytes=shared or None,
    )


def inherited(box: BlackBox) -> Region | None:
    """In the process that forked the worker: the file that was mapped where it faulted, as it still is here."""
    head = _Head._make(_HEAD.unpack_from(box.crash_bytes()))
    if head.state < _FACTS or head.version != _VERSION or head.code <= 0 or head.code == SI_KERNEL:
        return None
    found = None
    try:
        with open("/proc/self/maps", "rb") as file:
            for line in file:
                start, _, end = line.partition(b" ")[0].partition(b"-")
                if head.address < int(end, 16):
                    found = next(iter(parse_maps(line)), None) if int(start, 16) <= head.address else None
                    break
    except (OSError, ValueError):
        return None
    # Memory without a file may have come after the fork, and so may the boxes of other workers.
    if found is None or not found.path.startswith("/") or "memfd:" in found.path:
        return None
    return found


def could_record(box: BlackBox) -> bool:
    """Whether a fatal signal of this worker would have left a record: there was a recorder, and nothing stopped it."""
    head = _Head._make(_HEAD.unpack_from(box.crash_bytes()))
    return head.version == _VERSION and head.state != _WRITING


def sender_of(box: BlackBox) -> int | None:
    """The pid that sent the signal which a worker died of, without reading the rest; None: no process did."""
    head = _Head._make(_HEAD.unpack_from(box.crash_bytes()))
    return head.sender_pid or None if head.state >= _FACTS and head.version == _VERSION else None


def parse_maps(text: bytes) -> list[Region]:
    """The lines of /proc/self/maps, lowest first; one that was cut short is left out."""
    regions = []
    for line in text.decode("utf-8", "replace").split("\n")[:-1]:
        try:
            span, permissions, offset, _, _, *path = line.split(None, 5)
            start, _, end = span.partition("-")
            regions.append(Region(int(start, 16), int(end, 16), permissions, int(offset, 16), path[0] if path else ""))
        except ValueError:
            continue  # no such line
    return regions


def _words(raw: bytes, at: int, count: int) -> tuple[int, ...]:
    return struct.unpack_from(f"<{count}Q", raw, at)


def _unsigned(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value & _USER_BITS for value in values)


def _at_or_above(address: int, regions: list[Region], ends: list[int]) -> Region | None:
    place = bisect.bisect_right(ends, address)
    return regions[place] if place < len(regions) else None


def _pointing_into_code(values: tuple[int, ...], regions: list[Region]) -> tuple[int, ...]:
    code = [region for region in regions if region.executable]
    ends = [region.end for region in code]
    found = []
    for value in values:
        region = _at_or_above(value, code, ends)
        if region is not None and region.start <= value:
            found.append(value)
    return tuple(found[:_MOST_POSSIBLE])


def _around(addresses: Sequence[int], crucial: Sequence[int], regions: list[Region]) -> tuple[Region, ...]:
    """The regions that these addresses lie in, or are right below: a stack that overflowed is above its fault. Of the
    crucial ones the neighbours, too."""
    ends = [region.end for region in regions]
    found = {bisect.bisect_right(ends, address) for address in addresses if address}
    for address in crucial:
        place = bisect.bisect_right(ends, address)
        found |= {place - 1, place, place + 1} if address else set()
    return tuple(regions[place] for place in sorted(found) if 0 <= place < len(regions))
