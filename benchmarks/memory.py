"""Peak memory of a process and all its descendants, sampled by a process of its own: `memory.py PID`.

Samples every 20 ms, and when it reads a line (then it says «done»), until its standard input ends; then prints two
peaks in bytes: of PSS, and of PSS with what is in flight. PSS shares what several processes map among them, so that the
sum counts each page once. In flight is shared memory that some process holds a descriptor of and nobody maps, as
torch's batches on their way: in no one's PSS.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

INTERVAL_S = 0.02
SHARED = ("/dev/shm/", "/memfd:")


def family(pid: int) -> Iterator[int]:
    """This process and its descendants, ourselves left out."""
    if pid == os.getpid():
        return
    yield pid
    try:
        for thread in os.scandir(f"/proc/{pid}/task"):
            for child in Path(thread.path, "children").read_text().split():
                yield from family(int(child))
    except (FileNotFoundError, ProcessLookupError):
        pass  # it ended while we looked: its memory is gone with it


def pss_bytes(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)
    except (FileNotFoundError, ProcessLookupError):
        return 0  # as above


def in_flight_bytes(pids: list[int]) -> int:
    """Shared memory that has a descriptor in one of these processes, and a map in none."""
    open_files: dict[int, int] = {}
    mapped: set[int] = set()
    for pid in pids:
        try:
            for link in os.scandir(f"/proc/{pid}/fd"):
                if os.readlink(link.path).startswith(SHARED):
                    status = os.stat(link.path)
                    open_files[status.st_ino] = status.st_blocks * 512
            with open(f"/proc/{pid}/maps") as lines:
                mapped.update(int(line.split()[4]) for line in lines if any(name in line for name in SHARED))
        except (FileNotFoundError, ProcessLookupError):
            pass  # as above
    return sum(size for inode, size in open_files.items() if inode not in mapped)


@dataclass
class Peak:
    """What was measured, once the `with` has ended."""

    sampler: subprocess.Popen[bytes]
    pss_mib: float = 0.0
    with_flight_mib: float = 0.0

    def sample_now(self) -> None:
        """One more sample, and waits for it: on a busy machine a short epoch may else have none."""
        assert self.sampler.stdin is not None
        assert self.sampler.stdout is not None
        self.sampler.stdin.write(b"now\n")
        self.sampler.stdin.flush()
        assert self.sampler.stdout.readline() == b"done\n"


@contextmanager
def peak_memory() -> Iterator[Peak]:
    """Samples this process and its descendants while the block runs."""
    command = [sys.executable, "-S", __file__, str(os.getpid())]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as sampler:
        peak = Peak(sampler)
        peak.sample_now()
        try:
            yield peak
        finally:
            said, _ = sampler.communicate()
    peak.pss_mib, peak.with_flight_mib = (int(word) / 2**20 for word in said.split())


def main(pid: int) -> None:
    most = most_with_flight = 0
    while True:
        asked = select.select([0], [], [], INTERVAL_S)[0]
        if asked and not os.read(0, 4096):
            break
        pids = list(family(pid))
        pss = sum(map(pss_bytes, pids))
        most = max(most, pss)
        most_with_flight = max(most_with_flight, pss + in_flight_bytes(pids))
        if asked:
            print("done", flush=True)
    print(most, most_with_flight)


if __name__ == "__main__":
    main(int(sys.argv[1]))
