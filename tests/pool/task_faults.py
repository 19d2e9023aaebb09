"""What a task can do to the worker that runs it.

Reads   nothing.
Writes  files that count executions; otherwise it ruins the process that it is called in.
Never   a class or function that a spawned worker could not import by name.

The rows of the loader's fault table, and those that only a task can bring: what it leaves running, what it closes,
what it does while its result is on its way.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from faults.table import FAULTS, PlantedFault
from outlive._system.channel import Bytes, Channel
from outlive._system.portable_channel import PortableChannel
from pool import task_functions

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
LARGE = 48 << 20  # more than a socket holds, and than is written in an instant


def exhaust_memory() -> None:
    """Take memory until it is refused."""
    held = []
    while True:
        held.append(bytearray(8 << 20))


def recurse_in_python(depth: int = 0) -> int:
    return recurse_in_python(depth + 1)


def exit_with_zero() -> None:
    os._exit(0)


def exit_by_sys() -> None:
    sys.exit(4)


def interrupt() -> None:
    raise KeyboardInterrupt("by the task itself")


def leave_generator() -> None:
    raise GeneratorExit("by the task itself")


def close_all_descriptors() -> None:
    """And go on, as a task that makes itself a daemon would."""
    os.closerange(3, 65536)
    while True:
        time.sleep(3600)


def close_all_and_return() -> str:
    os.closerange(3, 65536)
    return "done"


def fork_and_die() -> None:
    """With a child, and one in a session of its own: nothing of it may stay."""
    subprocess.Popen(SLEEP)
    subprocess.Popen(SLEEP, start_new_session=True)
    if os.fork() == 0:
        while True:
            time.sleep(3600)
    os.kill(os.getpid(), signal.SIGKILL)


def leave_a_fork_and_die() -> None:
    """Which holds every descriptor that this process had."""
    if os.fork() == 0:
        while True:
            time.sleep(3600)  # this is what is left
    os.kill(os.getpid(), signal.SIGKILL)


def return_in_a_fork() -> str:
    """A fork that forgets to exit comes back out of the task, too."""
    return "parent" if os.fork() else "child"


class DiesWhenPickled:
    """Kills the worker that packs the result."""

    def __reduce__(self) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)
        return DiesWhenPickled, ()


def die_while_sent() -> bytes:
    """The result has memory of its own, and half of the message about it is on its way when the worker dies."""
    for kind in (Channel, PortableChannel):
        kind._write = _write_half  # type: ignore[method-assign]
    return b"x" * LARGE


def _write_half(channel: Channel, parts: list[Bytes], descriptors: tuple[int, ...]) -> None:
    data = b"".join(parts)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    channel._socket.sendmsg([data[: len(data) // 2]], rights)
    os.kill(os.getpid(), signal.SIGKILL)


def spin_in_thread_with_gil() -> None:
    """The worker's main thread never comes to anything again."""
    thread = threading.Thread(target=FAULTS["gil-loop"].fire, daemon=True)
    thread.start()
    thread.join()


OWN: dict[str, Callable[[], Any]] = {
    "exhaust_memory": exhaust_memory,
    "recursion": recurse_in_python,
    "exit-0": exit_with_zero,
    "keyboard-interrupt": interrupt,
    "generator-exit": leave_generator,
    "closed-descriptors": close_all_descriptors,
    "closed-and-returned": close_all_and_return,
    "children": fork_and_die,
    "left-fork": leave_a_fork_and_die,
    "forked-return": return_in_a_fork,
    "dies-when-pickled": DiesWhenPickled,
    "dies-while-sent": die_while_sent,
    "gil-thread": spin_in_thread_with_gil,
    "unpicklable-result": task_functions.Unpicklable,
    "unreadable-result": task_functions.Unreadable,
}


def misbehave(way: str) -> Any:
    return OWN[way]() if way in OWN else PlantedFault(way)()


def note_and_misbehave(folder: str, number: int, way: str) -> Any:
    task_functions.note(folder, number)
    return misbehave(way)


def square_or_die(number: int, way: str | None) -> int:
    if way is not None:
        misbehave(way)
    return number * number
