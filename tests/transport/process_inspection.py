"""Looks at a process from outside: the cells it has mapped, what a program of its own prints.

Reads   /proc.
Writes  nothing.
Never   the library's own count of anything.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import warm_server

PROGRAMS = Path(__file__).with_name("programs")
CELL_BY_NAME = re.compile(r"/dev/shm/outlive-\d+-\d+c")  # under OUTLIVE_SYSTEM=portable


@dataclass(frozen=True)
class Mapped:
    """The cells that a process has mapped."""

    inodes: frozenset[int]
    size_bytes: int

    def __len__(self) -> int:
        return len(self.inodes)


NOTHING = Mapped(frozenset(), 0)


def mapped_cells(pid: int | str = "self") -> Mapped:
    inodes, size = set(), 0
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        if "memfd:outlive-cell" in line or CELL_BY_NAME.search(line):
            addresses, _, _, _, inode, *_ = line.split()
            begin, end = (int(address, 16) for address in addresses.split("-"))
            inodes.add(int(inode))
            size += end - begin
    return Mapped(frozenset(inodes), size)


def resident_cells(pid: int | str = "self") -> int:
    """How many bytes of cells are in memory, as far as this process has touched them."""
    size, is_cell = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        first = line.partition(" ")[0]
        if "-" in first:
            is_cell = "memfd:outlive-cell" in line or CELL_BY_NAME.search(line) is not None
        elif is_cell and first == "Rss:":
            size += int(line.split()[1]) << 10
    return size


def run_program(name: str, *arguments: str, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """A program of `programs/` in an interpreter of its own."""
    tests = str(Path(__file__).parent.parent)
    path = os.pathsep.join(entry for entry in [tests, *sys.path] if entry)
    run = subprocess.run if before else warm_server.run
    return run(
        [*before, sys.executable, str(PROGRAMS / name), *arguments],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )
