"""A worker in a fresh interpreter, for what cannot be shared by forking: files and threads that imports open or start.

Reads   a memory file with everything it needs, made by the zygote.
Writes  what any worker writes.
Never   the zygote's memory: it begins as multiprocessing's spawn begins.

The zygote stays its parent and watchman. Slower to start than a fork by the user's imports.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from collections.abc import Callable
from multiprocessing import forkserver, spawn, util
from typing import Any

from outlive._system import nameless, processes, starting
from outlive._system.channel import Channel
from outlive._system.starting import Family
from outlive._transport.wire import Kind, dump
from outlive._worker import failures
from outlive.incident import Stage


def become(
    slot: int, descriptors: tuple[int, ...], payload: Any, entry: Callable[..., None], family: Family, zygote: int
) -> None:
    """In a fork of the zygote: run a fresh interpreter in our place. Does not return."""
    inherited = list(getattr(forkserver._forkserver, "_inherited_fds", None) or [])
    # Two pickles: the first one sets sys.path for the second.
    preparation: dict[str, Any] = spawn.get_preparation_data(starting.HastyName(family.names[slot]))
    preparation["authkey"] = bytes(preparation["authkey"])
    told = pickle.dumps(preparation)
    rest = pickle.dumps((slot, descriptors, payload.as_pickled(), entry, family, zygote, inherited))
    fd = os.memfd_create("outlive-solo")
    os.write(fd, len(told).to_bytes(8, "little") + told)
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(rest)
    for number in (fd, *descriptors):
        os.set_inheritable(number, True)
    for number in inherited:
        with contextlib.suppress(OSError):  # the zygote's own socket is among them, and is closed here by now
            os.set_inheritable(number, True)
    folder = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    code = f"import sys; sys.path.append({folder!r}); from outlive.engines.local.solo import main; main({fd})"
    executable = os.fsdecode(spawn.get_executable())
    os.execv(executable, [executable, *util._args_from_interpreter_flags(), "-c", code, "--multiprocessing-fork"])  # type: ignore[attr-defined]


def main(fd: int) -> None:
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        told = file.read(int.from_bytes(file.read(8), "little"))
        rest = file.read()
    error: BaseException | None = None
    try:
        spawn.prepare(pickle.loads(told))
    except BaseException as problem:  # told below, once there is somebody to tell
        error = problem
    slot, descriptors, payload, entry, family, zygote, inherited = pickle.loads(rest)
    starting.settle()
    processes.die_with_parent(zygote)
    processes.name_thread(f"outlive-w{slot}")
    if inherited:
        forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
    socket_fd, bell_fd, box_fd, stack_fd, trainer = descriptors
    os.set_inheritable(trainer, False)
    channel = Channel(socket.socket(fileno=socket_fd), blocking=True, owned=True, bell=bell_fd)
    if error is not None:
        channel.send(Kind.UNPREPARED, 0, 0, [dump(failures.capture(error, Stage.PREPARING))])
        os._exit(1)
    code = family.become(slot, entry, (channel, nameless.adopt(box_fd), stack_fd, payload.load, slot), trainer)
    sys.stdout.flush()
    os._exit(code)
