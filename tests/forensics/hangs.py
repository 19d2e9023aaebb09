"""Ways to hang, for real, and a dataset with one in every other sample.

Reads   what a test has prepared for them: a port, paths, a library.
Writes  nothing.
Never   ends by itself.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import queue
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

SOURCE = """
#include <pthread.h>
#include <semaphore.h>
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
void spin(void) { for (volatile int i = 0;; i++) {} }
void lock(void) { pthread_mutex_lock(&mutex); }
static sem_t never;
static void litter(void *address) { void *volatile room[2048]; for (int i = 0; i < 2048; i++) room[i] = address; }
void wait_over_litter(void *address) { litter(address); sem_wait(&never); }
"""
DEBUGGER = """
#include <sys/ptrace.h>
#include <unistd.h>
int main(void) { if (ptrace(PTRACE_ATTACH, getppid(), 0, 0)) return 1; for (;;) pause(); }
"""
COMPILER = shutil.which("cc") or shutil.which("gcc")
GLOBAL = threading.Lock()


@dataclass(frozen=True)
class HangInputs:
    """What hangs need of the world."""

    port: int = 0
    fifo: str = ""
    other_fifo: str = ""
    locked: str = ""
    library: str = ""
    debugger: str = ""


def compile_library(folder: Path) -> str:
    source, library = folder / "spinner.c", folder / "libspinner.so"
    source.write_text(SOURCE)
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    return str(library)


def compile_debugger(folder: Path) -> str:
    source, program = folder / "debugger.c", folder / "debugger"
    source.write_text(DEBUGGER)
    subprocess.run([str(COMPILER), "-o", program, source], check=True)
    return str(program)


def be_debugged(inputs: HangInputs) -> None:
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1))  # PR_SET_PTRACER, where only parents may
    subprocess.Popen([inputs.debugger]).wait()


def spin_on_one_line(inputs: HangInputs) -> None:
    while True: pass  # noqa: E701  # fmt: skip


def spin_over_many(inputs: HangInputs) -> None:
    count = 0
    while count >= 0:
        count += 1
        if count % 2:
            count += 1


def spin_with_the_gil(inputs: HangInputs) -> None:
    ctypes.PyDLL(inputs.library).spin()


def spin_without_the_gil(inputs: HangInputs) -> None:
    ctypes.CDLL(inputs.library).spin()


def match_for_ever(inputs: HangInputs) -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def sleep_for_ever(inputs: HangInputs) -> None:
    time.sleep(1e6)  # this is the hang


def read_empty_pipe(inputs: HangInputs) -> None:
    reader, _ = os.pipe()
    os.read(reader, 1)


def open_fifo(inputs: HangInputs) -> None:
    with open(inputs.fifo, "rb"):
        pass


def read_fifo(inputs: HangInputs) -> None:
    # One of its own: opened for writing, it would let somebody else's open() go on.
    os.read(os.open(inputs.other_fifo, os.O_RDWR), 1)


def receive_from_silence(inputs: HangInputs) -> None:
    with socket.create_connection(("127.0.0.1", inputs.port)) as connection:
        connection.recv(1)


def receive_with_timeout(inputs: HangInputs) -> None:
    with socket.create_connection(("127.0.0.1", inputs.port), timeout=1e6) as connection:
        connection.recv(1)


def lock_file(inputs: HangInputs) -> None:
    with open(inputs.locked) as file:
        fcntl.flock(file, fcntl.LOCK_EX)


def lock_twice(inputs: HangInputs) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def get_from_queue(inputs: HangInputs) -> None:
    queue.Queue[int]().get()


def wait_for_event(inputs: HangInputs) -> None:
    threading.Event().wait()


def stop_self(inputs: HangInputs) -> None:
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)


def wait_for_program(inputs: HangInputs) -> None:
    subprocess.Popen(["sleep", "100000"]).wait()


def read_from_program(inputs: HangInputs) -> None:
    subprocess.run(["sleep", "100000"], capture_output=True)


def take_global_lock(inputs: HangInputs) -> None:
    with GLOBAL:
        pass


def take_native_lock(inputs: HangInputs) -> None:
    ctypes.CDLL(inputs.library).lock()


NATIVE = (spin_with_the_gil, spin_without_the_gil, be_debugged)
HANGS: dict[str, Callable[[HangInputs], Any]] = {
    hang.__name__: hang
    for hang in (
        *(spin_on_one_line, spin_over_many, match_for_ever, sleep_for_ever, read_empty_pipe, open_fifo, read_fifo),
        *(receive_from_silence, receive_with_timeout, lock_file, lock_twice, get_from_queue, wait_for_event),
        *(stop_self, wait_for_program, read_from_program),
        *(NATIVE if COMPILER else ()),
    )
}


class Hanging(Dataset[int]):
    """Healthy samples, and after each of them one that hangs."""

    def __init__(self, names: list[str], inputs: HangInputs, lock: Any = None) -> None:
        self.names = names
        self.inputs = inputs
        if lock is not None:
            self.lock = lock

    def __len__(self) -> int:
        return 2 * len(self.names)

    def __getitem__(self, index: int) -> int:
        if index % 2:
            name = self.names[index // 2]
            if name == "take_own_lock":
                with self.lock:
                    return index
            {**HANGS, "take_global_lock": take_global_lock, "take_native_lock": take_native_lock}[name](self.inputs)
        return index
