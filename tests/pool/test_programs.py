"""Whole programs with a pool: where their functions come from, and a main module without a guard.

Reads   what programs print, and whether one of their processes is left.
Writes  programs to files, pipes and a terminal of their own.
Never   leaves one of them running.
"""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
METHODS = ("fork", "spawn", "forkserver")
DEADLINE_S = 100.0
TOLD = [
    "mapped [0, 2, 4] [7, 8, 9]",
    "closure 7 8",
    "class 8 True",
    "raised True",
    "died TaskCrashedError",
]


def environment(method: str) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return {**os.environ, "PYTHONPATH": path, "METHOD": method, "PYTHONSTARTUP": "", "TERM": "dumb"}


def run(method: str, *command: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=environment(method),
        input=text,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


@pytest.mark.parametrize("method", METHODS)
def test_tasks_come_from_a_script(method):
    ended = run(method, str(PROGRAMS / "program.py"))

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == TOLD


@pytest.mark.parametrize("method", METHODS)
def test_tasks_come_from_standard_input(method):
    """«<stdin>» is no file that a worker could import: everything travels by value."""
    ended = run(method, "-", text=(PROGRAMS / "program.py").read_text())

    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == TOLD


@pytest.mark.parametrize("method", METHODS)
def test_tasks_come_from_a_prompt(method):
    """In a terminal, line by line, as somebody types."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-i", "-q"], env=environment(method), stdin=theirs, stdout=subprocess.PIPE, stderr=theirs
    )
    os.close(theirs)
    lines = (PROGRAMS / "program.py").read_text().splitlines()[1:]  # the docstring would be echoed
    # To a prompt, an empty line ends what is indented.
    typed = [line for line, after in zip(lines, [*lines[1:], ""]) if line or not after.startswith(" ")]
    try:
        os.write(ours, "\n".join([*typed, "", "exit()", ""]).encode())
        with contextlib.suppress(OSError):  # its other side is closed
            while process.poll() is None and os.read(ours, 65536):
                pass  # what Python echoes; a full terminal would stop it
        told, _ = process.communicate(timeout=DEADLINE_S)
    finally:
        os.close(ours)
        process.kill()

    assert told.decode().splitlines() == TOLD


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_missing_guard_is_named_and_nothing_multiplies(method):
    ended = run(method, str(PROGRAMS / "unguarded.py"))

    assert ended.returncode == 1
    assert ended.stdout == ""
    assert 'unguarded.py:8 starts the pool outside of  if __name__ == "__main__":' in ended.stderr
    assert "next     put what makes the pool under   if __name__" in ended.stderr
    assert "dataset" not in ended.stderr
