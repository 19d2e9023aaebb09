"""What tasks do in these tests: work, or one of the ways in which a task can go wrong.

Imported by workers under spawn: no test in here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


class OddError(Exception):
    """Pickles, and cannot be unpickled."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)


class Unpicklable:
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Unreadable:
    """Pickles in the worker, and cannot be unpickled here."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class LeavesWhenPickled:
    def __reduce__(self) -> Any:
        sys.exit(6)


class LeavesWhenRead:
    """Would end the thread that unpickles it here."""

    def __reduce__(self) -> Any:
        return sys.exit, (7,)


class UnpicklableError(Exception):
    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


def square(number: int) -> int:
    return number * number


def add(one: int, two: int = 1) -> int:
    return one + two


def note(folder: str, number: Any) -> Any:
    """Leaves a trace of having been begun."""
    with open(f"{folder}/{number}", "a") as file:
        file.write("x")
    return number


def count_starts(folder: str | Path) -> dict[int, int]:
    """How often each number was begun."""
    return {int(file.name): len(file.read_text()) for file in Path(folder).iterdir()}


def lock_twice() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def sleep_for_ever() -> None:
    while True:
        time.sleep(60)  # this is the hang


def wait_for(file: str, deadline_s: float = 60.0) -> None:
    """Until somebody has made it."""
    give_up_at = time.monotonic() + deadline_s
    while not os.path.exists(file) and time.monotonic() < give_up_at:
        time.sleep(0.005)  # between two looks, with a deadline


def stay(folder: str, number: int) -> None:
    """Says that it has begun, and ignores SIGTERM; where it is not ended it says so, much later."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    note(folder, number)
    wait_for(f"{folder}/never", 15.0)
    note(folder, 1000 + number)


def overflow() -> None:
    overflow()


DEATHS = {
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: ctypes.string_at(0),
    "SIGABRT": os.abort,
    "SIGILL": lambda: os.kill(os.getpid(), signal.SIGILL),
    "SIGBUS": lambda: os.kill(os.getpid(), signal.SIGBUS),
    "SIGFPE": lambda: os.kill(os.getpid(), signal.SIGFPE),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit": lambda: os._exit(3),
    "exit 0": lambda: os._exit(0),
}


def die(how: str, folder: str = "", number: int = 0) -> None:
    if folder:
        note(folder, number)
    DEATHS[how]()


def raise_odd() -> None:
    raise OddError("one", "two")


def raise_unpicklable() -> None:
    raise UnpicklableError


def leave() -> None:
    sys.exit(5)


RESULTS = {
    "unpicklable": Unpicklable,
    "unreadable": Unreadable,
    "generator": lambda: (n for n in range(3)),
    "exits pickled": LeavesWhenPickled,
    "exits read": LeavesWhenRead,
}


def returns(what: str) -> Any:
    return RESULTS[what]()


def fail_to_begin() -> None:
    raise ValueError("no way to begin")


def same(value: Any) -> Any:
    return value


def find_map(array: Any) -> str:
    """The name of the map that an array's bytes lie in."""
    address = array.__array_interface__["data"][0]
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(end, 16) for end in line.split()[0].split("-"))
        if low <= address < high:
            return line.split(maxsplit=5)[-1]
    return ""


def fill(array: Any) -> float:
    """Writes to its argument, as one may."""
    array[...] = 2
    return float(array.sum())


def grow(given: list[int]) -> int:
    given.append(1)
    return len(given)


class Counter:
    """A callable that counts its calls, as do its method and a partial of its list."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, number: int) -> int:
        return grow(self.calls)

    def call(self, number: int) -> int:
        return grow(self.calls)


def grow_and_ignore(given: list[int], number: int) -> int:
    return grow(given)


def fail_twice(array: Any, folder: str, number: int) -> float:
    """Changes its argument in each of three attempts."""
    array += 1
    note(folder, number)
    if count_starts(folder)[number] < 3:
        raise OSError("not yet")
    return float(array[0])


class DiesOnce:
    """Kills the worker that packs it, once, and only when its file of leave is there."""

    def __init__(self, folder: str, value: float) -> None:
        self.folder, self.value = folder, value

    def __reduce__(self) -> Any:
        wait_for(f"{self.folder}/changed")
        if not os.path.exists(f"{self.folder}/died"):
            note(self.folder, "died")
            os.kill(os.getpid(), signal.SIGKILL)
        return float, (self.value,)


def first_or_death(array: Any, folder: str, number: int) -> Any:
    """The first number of an array; the worker dies of the result that task 0 has."""
    note(folder, f"begun {number}")
    return DiesOnce(folder, float(array[0])) if number == 0 else float(array[0])


_KEPT: list[int] = []


def return_same_list(number: int) -> list[int]:
    """The same object every time."""
    return _KEPT


def take_a_while(folder: str, workers: str, number: int) -> int:
    """At first a moment, later long: number 1000, and each after it until two workers have begun one of these."""
    note(folder, number)
    if number >= 1000:
        (Path(workers) / str(os.getpid())).touch()
        give_up_at = time.monotonic() + 60
        while number > 1000 and len(os.listdir(workers)) < 2 and time.monotonic() < give_up_at:
            time.sleep(0.005)  # between two looks, with a deadline
        time.sleep(0.03)  # this is the work
    return os.getpid()
