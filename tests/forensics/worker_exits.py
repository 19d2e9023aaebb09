"""Ways for a worker to end, and errors to raise, each for one sample. Under spawn, workers import them from here.

Reads   nothing.
Writes  files that name a worker which waits to be killed.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from deadlines import Deadline

DEADLINE_S = 30.0


# ---------------------------------------------------------------- killed by others


def await_signal(folder: Path, name: str, pid: int | None = None) -> None:
    """Ask whoever watches the folder for a signal, and wait for it to end us."""
    unnamed = folder / f"{name}.new"
    unnamed.write_text(str(pid or os.getpid()))
    unnamed.rename(folder / f"{name}.pid")
    deadline = Deadline(DEADLINE_S)
    while not deadline.passed:
        signal.sigtimedwait([], 0.01)
    raise TimeoutError("nobody killed me")


class SignalSender(threading.Thread):
    """Sends each worker that waits in a folder the signal that it names: from this process, whose pid is known."""

    def __init__(self, folder: Path) -> None:
        super().__init__(daemon=True)
        self.folder = folder
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.01):
            for path in self.folder.glob("*.pid"):
                pid = int(path.read_text())
                path.rename(path.with_suffix(".sent"))
                os.kill(pid, signal.Signals[path.stem])

    def __enter__(self) -> SignalSender:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


def be_sent(name: str) -> Callable[[Path], None]:
    def end(folder: Path) -> None:
        await_signal(folder, name)

    return end


def terminated_by_child(folder: Path) -> None:
    """By a process that has a command to show."""
    killer = subprocess.Popen(["sh", "-c", "read go; kill -TERM $PPID; sleep 60 # the-killer"], stdin=subprocess.PIPE)
    assert killer.stdin is not None
    killer.stdin.write(b"go\n")
    killer.stdin.flush()
    killer.wait()


# ---------------------------------------------------------------- by itself


def kill_itself(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def terminate_itself(folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(DEADLINE_S)  # another thread may be the one that gets it


def call_sys_exit(folder: Path) -> None:
    sys.exit(3)


def call_sys_exit_with_text(folder: Path) -> None:
    sys.exit("no such camera")


def call_os_exit(folder: Path) -> None:
    os._exit(4)


def call_os_exit_with_success(folder: Path) -> None:
    os._exit(0)


def call_os_exit_in_thread(folder: Path) -> None:
    thread = threading.Thread(target=os._exit, args=(5,))
    thread.start()
    thread.join()


def raise_keyboard_interrupt(folder: Path) -> None:
    raise KeyboardInterrupt


# ---------------------------------------------------------------- limits


def _no_core() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def use_up_processor_time(folder: Path) -> None:
    _no_core()
    used = resource.getrusage(resource.RUSAGE_SELF)
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime) + 1, hard))
    _spin()


def use_up_processor_time_for_good(folder: Path) -> None:
    """At the hard limit the kernel sends SIGKILL."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    _spin()


def _spin() -> None:
    deadline = Deadline(DEADLINE_S)
    while not deadline.passed:
        pass


def write_too_large_a_file(folder: Path) -> None:
    """Python ignores SIGXFSZ, and gets an error; a library may have it back at its default."""
    _no_core()
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    write_a_megabyte(folder)


def write_a_megabyte(folder: Path) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            for _ in range(16):
                file.write(bytes(64 << 10))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


ENDS: dict[str, Callable[[Path], None]] = {
    **{name: be_sent(name) for name in ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGSEGV", "SIGXCPU")},
    **{
        end.__name__: end
        for end in (
            *(terminated_by_child, kill_itself, terminate_itself, call_sys_exit, call_sys_exit_with_text),
            *(call_os_exit, call_os_exit_with_success, call_os_exit_in_thread, raise_keyboard_interrupt),
            *(use_up_processor_time, use_up_processor_time_for_good, write_too_large_a_file),
        )
    },
}


# ---------------------------------------------------------------- errors


class OddError(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


def raise_value_error(folder: Path) -> Any:
    raise ValueError("label 7 is not below 5\nand a second line")


def raise_in_library(folder: Path) -> Any:
    return json.loads("{")


def raise_without_words(folder: Path) -> Any:
    raise OddError(1, 2) from KeyError("first")


def raise_connection_reset(folder: Path) -> Any:
    raise ConnectionResetError(104, "Connection reset by peer")


def open_too_many(folder: Path) -> Any:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    files = []
    try:
        while True:
            files.append(open("/dev/null"))  # noqa: SIM115
    finally:
        for file in files:
            file.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def ask_python_for_too_much(folder: Path) -> Any:
    return bytearray(1 << 50)


def ask_numpy_for_too_much(folder: Path) -> Any:
    return np.empty(1 << 50, np.uint8)


def ask_torch_for_too_much(folder: Path) -> Any:
    return torch.empty(1 << 50, dtype=torch.uint8)


def return_lambda(folder: Path) -> Any:
    return {"image": torch.zeros(2), "crop": lambda x: x}


def return_lock(folder: Path) -> Any:
    return {"image": torch.zeros(2), "meta": [1, {"guard": threading.Lock()}]}


def return_generator(folder: Path) -> Any:
    return {"image": torch.zeros(2), "boxes": (n for n in range(3))}


class HasLock:
    def __init__(self) -> None:
        self.plain = 1
        self.file = threading.Lock()


def return_object_with_lock(folder: Path) -> Any:
    return (torch.zeros(2), HasLock())


class Unreadable:
    """Pickles, and cannot be made again."""

    def __reduce__(self) -> Any:
        return (_refuse, ())


def _refuse() -> Any:
    raise ValueError("not in this process")


ERRORS: dict[str, Callable[[Path], Any]] = {
    error.__name__: error
    for error in (
        *(raise_value_error, raise_in_library, raise_without_words, raise_connection_reset, open_too_many),
        *(ask_python_for_too_much, ask_numpy_for_too_much, ask_torch_for_too_much, write_a_megabyte),
        *(return_lambda, return_lock, return_generator, return_object_with_lock),
    )
}


# ---------------------------------------------------------------- datasets


class ExitingDataset(Dataset[Any]):
    """Healthy samples at even places, and between them one for each of these."""

    def __init__(self, names: list[str], folder: Path) -> None:
        self.names = names
        self.folder = folder

    def __len__(self) -> int:
        return 2 * len(self.names)

    def __getitem__(self, index: int) -> Any:
        if index % 2 == 0:
            return index
        name = self.names[index // 2]
        return (ENDS.get(name) or ERRORS[name])(self.folder)


def as_they_are(samples: list[Any]) -> list[Any]:
    """A collate function that leaves samples alone, so that what they hold is pickled."""
    return samples
