"""Python stacks of a worker: written by the worker itself at its death, or when it is asked.

Reads   the memory file that the stacks went to.
Writes  (worker) through faulthandler, whose handlers need neither the GIL nor memory.
Never   the user's standard error.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
import traceback

# A real-time signal that neither Python, torch nor common libraries use.
STACK_SIGNAL = signal.SIGRTMAX - 3
SIZE = 0  # the file grows as it is written
_MOST_BYTES = 1 << 20
_MOST_FRAMES = 100
_ANSWER_S = 0.3
REQUEST_TIMEOUT_S = 2.0  # for one that has not got a processor yet to read what it was asked
_HEADER = re.compile(r"^(?=(?:Current thread|Thread) 0x)", re.MULTILINE)
# Fatal as well, but not among those that faulthandler.enable() minds.
_MORE_SIGNALS = (signal.SIGTRAP, signal.SIGSYS)


def install(fd: int) -> None:
    """In a worker: write the stacks of all threads to `fd` at a fatal signal and at STACK_SIGNAL."""
    faulthandler.enable(file=fd, all_threads=True)
    for number in _MORE_SIGNALS:
        faulthandler.register(number, file=fd, all_threads=True, chain=True)
    faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True, chain=False)


def note(fd: int, error: BaseException) -> None:
    """In a worker that an exception ends: where it was raised, as faulthandler would have written it."""
    frames = reversed(traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:])
    lines = [f'  File "{frame.filename}", line {frame.lineno} in {frame.name}\n' for frame in frames]
    text = f"{type(error).__name__} ended the process\n\nCurrent thread (most recent call first):\n{''.join(lines)}"
    try:
        os.write(fd, text.encode("utf-8", "replace"))
    except OSError:
        return  # no memory for it: then the exit code is all that is known


def ask(pid: int) -> None:
    """Ask a worker for its stacks; a native loop that holds the GIL answers too, a stopped worker does not."""
    try:
        os.kill(pid, STACK_SIGNAL)
    except OSError:
        return


def read(fd: int) -> str:
    return os.pread(fd, _MOST_BYTES, 0).decode("utf-8", "replace").strip()


def take(pid: int, fd: int) -> str:
    """Have a worker write its stacks, and return them; "" when it does not answer in time."""
    before = os.fstat(fd).st_size
    ask(pid)
    asked = time.monotonic()
    last = -1
    while (waited := time.monotonic() - asked) < REQUEST_TIMEOUT_S:
        size = os.fstat(fd).st_size
        if waited >= _ANSWER_S and size == before and not _is_starved(pid):
            break
        if size > before and size == last:
            break
        last = size
        time.sleep(0.005)
    # Whatever ended it: who asks may itself have been without a processor, and the answer lies there.
    return os.pread(fd, _MOST_BYTES, before).decode("utf-8", "replace").strip()


def is_listened_for(pid: int) -> bool:
    """Whether a process would answer to STACK_SIGNAL, and not die of it."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            caught = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) & 1 << (STACK_SIGNAL - 1))
    except (OSError, StopIteration, ValueError, IndexError):
        return False


def _is_starved(pid: int) -> bool:
    """Whether a process that runs has still to come to the signal, on a machine where others run as well."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as lines:
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
        bit = 1 << (STACK_SIGNAL - 1)
        pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
        return bool(pending & ~int(fields["SigBlk"], 16) & bit) and fields["State"].split()[0] in "RS"
    except (OSError, KeyError, ValueError, IndexError):
        return False  # it is gone, or this system says no such thing


def without_repeats(text: str) -> str:
    """Stacks that were written more than once, once: where it was the last time."""
    blocks = [block.strip() for block in _HEADER.split(text) if block.strip()]
    told = list(reversed(dict.fromkeys(reversed(blocks))))
    # One that was cut short, as a worker without a processor leaves it, says nothing that the whole one does not.
    return "\n\n".join(block for block in told if not any(o.startswith(block) for o in told if o is not block))


def current_thread(dump: str) -> str:
    """The frames of the thread that answered; "" where they are cut short before it."""
    _, found, after = dump.rpartition("Current thread ")
    return after.partition("\n\n")[0].partition("\n")[2] if found else ""


def differ(frames: str, again: str) -> bool:
    """Whether two stacks of a thread are of different places. Either may be cut short: on a busy machine a worker may
    be without a processor in the middle of writing, for longer than anybody waits."""
    one, other = frames.splitlines(), again.splitlines()
    shared = min(len(one), len(other))
    if not shared:
        return False
    if one[: shared - 1] != other[: shared - 1]:
        return True
    return not (one[shared - 1].startswith(other[shared - 1]) or other[shared - 1].startswith(one[shared - 1]))
