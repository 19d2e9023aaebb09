"""Looks at a worker that hangs, twice, before it is ended: who waits for what, who runs where.

Reads   /proc/PID; the worker's stack file; registers through ptrace; py-spy or pystack where they are installed.
Writes  nothing; the worker writes its stacks when it is asked.
Never   for long: half a second, and two more where it gets no processor, or a tool for native stacks helps. Its caller
        watches others, too.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

from outlive._capture import stacks
from outlive._forensics import locks, missing_threads
from outlive._forensics.kin import Kin
from outlive._system import threads, unwinding
from outlive._system.threads import Maps, Thread
from outlive.evidence import Seen, ThreadSeen

_WATCHED_S = 0.05
_BUSY_SHARE = 0.25  # of the time between two looks: less than that is an answer to our asking, or a poll
_SAMPLES = 4
_SAMPLE_PAUSE_S = 0.008
_MORE_LOOKS = 20
_TOOL_S = 2.0
_TOOL_REST_S = 20.0  # between two uses of a tool: other workers are not watched meanwhile
_MOST_PLACES = 4
_MOST_NAMED = 16
_PLAIN_LIBRARIES = ("libc.so", "libc-", "ld-linux", "libpthread", "libm.so", "[vdso]", "[vvar]")


def see(pid: int, stack_fd: int, *, ending: bool, kin: Kin | None = None) -> Seen:
    """`ending`: it is killed after this, so it may be stopped for a moment; `kin`: None where it is no fork of ours."""
    first = threads.threads_of(pid)
    if not first:
        return Seen()
    if first[0].state in ("T", "t"):
        seen = tuple(_thread(pid, thread, None, 0.0) for thread in first)
        return Seen(seen, tracer=threads.tracer_of(pid))
    dump = stacks.take(pid, stack_fd)
    begun = time.monotonic()
    before = {thread.number: thread for thread in threads.threads_of(pid)}
    time.sleep(_WATCHED_S)
    after = threads.threads_of(pid)
    watched_s = time.monotonic() - begun
    if not after:
        return Seen(stack_answered=bool(dump))
    for _ in range(_MORE_LOOKS):
        if after[0].state != "R" or _grew(after[0], before.get(after[0].number), time.monotonic() - begun):
            break
        # Just awake, for a moment: who waits for the GIL looks about every few milliseconds. Or it still writes the
        # stacks that it was asked for, and waits for a processor.
        time.sleep(_SAMPLE_PAUSE_S)
        after = threads.threads_of(pid) or after
    elapsed_s = time.monotonic() - begun
    seen = tuple(_thread(pid, thread, before.get(thread.number), elapsed_s) for thread in after)
    main = seen[0]
    moved: bool | None = None
    places: tuple[str, ...] = ()
    native = ""
    lock = ""
    inherited: tuple[str, ...] = ()
    out_of_reach = ""
    if main.busy:
        if ending:
            moved, places = _follow(pid, stack_fd, dump)
    elif main.system_call == "futex":
        lock, inherited = _lock(pid, after[0], kin)
        if not lock:
            places = _callers(pid, after[0])
        if kin is not None:
            out_of_reach = missing_threads.awaited(seen, inherited, places, dump, kin)
    if ending and not moved and not lock and (places or main.state == "D") and not _is_python(places):
        native = _native_stack(pid)
    return Seen(
        threads=seen,
        watched_s=round(watched_s, 3),
        stack_answered=bool(dump),
        python_moved=moved,
        native_stack=native,
        inherited_locks=inherited,
        places=places,
        lock=lock,
        left_behind=kin.left_behind[:_MOST_NAMED] if kin is not None else (),
        left_native=kin.left_native if kin is not None else (),
        out_of_reach=out_of_reach,
    )


def see_corpse(pid: int, seen: Seen | None) -> Seen:
    """A worker that SIGKILL has not ended: where in the kernel it is. `seen`: how it looked before that."""
    known = {thread.number: thread for thread in seen.threads} if seen is not None else {}
    now = sorted(threads.threads_of(pid), key=lambda thread: thread.state != "D")
    looked = tuple(
        replace(
            known.get(thread.number) or _thread(pid, thread, None, 0.0),
            state=thread.state,
            waits_in=thread.waits_in,
            busy=False,
            kernel_stack=threads.kernel_stack(pid, thread.number),
        )
        for thread in now
    )
    return replace(seen or Seen(), threads=looked or (seen or Seen()).threads, outlives_kill=True)


def drive_of(seen: Seen) -> str:
    """What a worker waits for in the kernel, as short as can be: «nas:/export», a path, or the kernel's function."""
    main = seen.threads[0] if seen.threads else ThreadSeen(0)
    _, on, mount = main.target.rpartition("(on ")
    return mount.rstrip(")").partition(" ")[2] if on else main.target or main.waits_in


def _thread(pid: int, now: Thread, before: Thread | None, watched_s: float) -> ThreadSeen:
    runs = before is not None and before.state == now.state == "R"  # or would, if a processor were free
    busy = runs or _grew(now, before, watched_s)
    return ThreadSeen(
        number=now.number,
        name=now.name,
        state=now.state,
        system_call="" if busy else now.system_call,
        arguments=() if busy else now.arguments,
        waits_in=now.waits_in,
        target="" if busy else threads.target_of(pid, now),
        for_ever=not busy and threads.waits_for_ever(now),
        busy=busy,
        kernel_stack=threads.kernel_stack(pid, now.number) if now.state in ("S", "D") else (),
    )


def _grew(now: Thread, before: Thread | None, watched_s: float) -> bool:
    return before is not None and now.cpu_ns - before.cpu_ns >= _BUSY_SHARE * watched_s * 1e9


def _follow(pid: int, stack_fd: int, dump: str) -> tuple[bool | None, tuple[str, ...]]:
    """Whether a busy worker gets on in Python, and in which code its main thread is found."""
    maps = Maps(pid)
    places: list[str] = []
    for address, registers in threads.sample_registers(pid, _SAMPLES, _SAMPLE_PAUSE_S):
        place = maps.place(address)
        if place.startswith(_PLAIN_LIBRARIES):  # memcpy and its like: whoever called it is of interest
            place = next(iter(unwinding.places(pid, address, registers, maps, _PLAIN_LIBRARIES)), place)
        if place:
            places.append(place)
    frames = stacks.current_thread(dump)
    moved: bool | None = None
    for _ in range(_SAMPLES if frames else 0):
        again = stacks.current_thread(stacks.take(pid, stack_fd))
        if not again:
            break  # it does not answer any more: nobody waits for that again
        moved = stacks.differ(frames, again)
        if moved:
            break
    return moved, tuple(places)


def _lock(pid: int, main: Thread, kin: Kin | None) -> tuple[str, tuple[str, ...]]:
    """The lock that it waits for, by name; and the same if a thread that it has not got holds it."""
    address = main.arguments[0] if main.arguments else 0
    if not address or not threads.waits_for_ever(main):
        return "", ()
    known = locks.find(address, kin.job()) if kin is not None else None
    if known is not None:
        return known.words, (known.words,) if known.held and not known.shared else ()
    owner = locks.owner_is_gone(pid, address)
    if owner is None or threads.is_shared_futex(main):
        return "", ()
    place = Maps(pid).place(address, code=False)
    words = f"a native mutex{f' in {place}' if place else ''} that thread {owner} holds"
    return words, (words,)


def _callers(pid: int, main: Thread) -> tuple[str, ...]:
    """Native libraries on the stack of a thread that waits, up to Python's own code: nothing where that waits."""
    if not main.stack_pointer:
        return ()
    registers = unwinding.at_stack(main.stack_pointer)
    callers = unwinding.places(pid, main.instruction_pointer, registers, Maps(pid), _PLAIN_LIBRARIES)
    return tuple(itertools.takewhile(lambda place: not _is_python((place,)), callers))[:_MOST_PLACES]


def _is_python(places: tuple[str, ...]) -> bool:
    return any(place.startswith(("python", "libpython")) for place in places)


# ---------------------------------------------------------------- native stacks

_rests_until = 0.0


def _native_stack(pid: int) -> str:
    """By py-spy or pystack, where installed and allowed; "" otherwise."""
    global _rests_until
    command = _tool(pid)
    if command is None or time.monotonic() < _rests_until:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return ""
    finally:
        _rests_until = time.monotonic() + _TOOL_REST_S
    return done.stdout.strip() if done.returncode == 0 else ""


def _tool(pid: int) -> list[str] | None:
    search = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")])
    spy = shutil.which("py-spy", path=search)
    if spy:
        return [spy, "dump", "--native", "--pid", str(pid)]
    pystack = shutil.which("pystack", path=search)
    return [pystack, "remote", "--native", str(pid)] if pystack else None
