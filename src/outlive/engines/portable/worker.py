"""A worker that was spawned: loads the job, then waits to be told which slot it fills.

Reads   its socket.
Writes  what any worker writes.
Never   outlives the trainer: a thread waits for that one's end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing import connection
from typing import Any

from outlive._capture import blackbox
from outlive._system import memory, processes, starting
from outlive._system.memory import Handle
from outlive._system.portable_channel import PortableChannel
from outlive._system.starting import Family
from outlive._transport.wire import Kind
from outlive._worker import loop
from outlive.engines.payload import Payload


def main(sock: socket.socket, box: Handle, stack_path: str, payload: Payload, family: Family) -> None:
    """In a process of its own, until the trainer hangs up or dies."""
    processes.lead_own_group()
    _leave_with_trainer()
    mapped = memory.adopt(box, blackbox.SIZE)
    stack_fd = os.open(stack_path, os.O_WRONLY | os.O_APPEND)
    with contextlib.suppress(OSError):
        os.unlink(stack_path)  # the trainer has it open; where that forbids it, the trainer removes it
    channel = PortableChannel(sock, blocking=True, owned=True)
    load = _loaded(payload)
    starting.settle()
    frames = channel.receive()
    while not frames and not channel.closed:
        frames = channel.receive()
    if not frames:
        return
    assert frames[0].kind == Kind.ASSIGN
    family.assign(frames[0].seq, multiprocessing.current_process())
    loop.main(channel, mapped, stack_fd, load, frames[0].seq, frames[1:])


def _loaded(payload: Payload) -> Callable[[], Any]:
    """The job, loaded before it is needed; what loading raised is raised when it is."""
    try:
        job = payload.load()
    except BaseException as error:
        problem = error

        def fail() -> Any:
            raise problem

        return fail
    return lambda: job


def _leave_with_trainer() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    sentinel = parent.sentinel

    def wait() -> None:
        connection.wait([sentinel])
        processes.kill_group(os.getpid())
        os._exit(1)

    threading.Thread(target=wait, name="outlive-parent", daemon=True).start()
