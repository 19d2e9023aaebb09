"""A real terminal to run a command in, and to look at: tmux.

Reads   what the terminal shows.
Writes  keys.
Never   the user's own tmux: the server is of its own, and ends with the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from deadlines import wait_until

DEADLINE_S = 60.0
_SRC = str(Path(__file__).parents[2] / "src")


class Terminal:
    """`with Terminal("top") as terminal: …`"""

    def __init__(self, *arguments: str, width: int = 80, height: int = 24) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("tmux is not installed: apt-get install tmux")
        self._name = f"outlive-{uuid.uuid4().hex[:8]}"
        command = [sys.executable, "-m", "outlive", *arguments]
        environment = {
            name: value for name, value in os.environ.items() if name.startswith("OUTLIVE_") or name in ("PATH", "HOME")
        }
        # It stays after the command, so that what is left on the screen can be seen.
        line = " ".join(f"'{part}'" for part in command) + "; echo «left»; cat"
        exported = [
            f"{name}={value}" for name, value in {**environment, "PYTHONPATH": _SRC, "LC_ALL": "C.UTF-8"}.items()
        ]
        self._tmux(
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            str(width),
            "-y",
            str(height),
            "env",
            *exported,
            "sh",
            "-c",
            line,
        )

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        subprocess.run(["tmux", "-L", self._name, "kill-server"], capture_output=True, check=False)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-u", "-L", self._name, *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=DEADLINE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def lines(self) -> list[str]:
        return self._tmux("capture-pane", "-p").split("\n")[:-1]

    def text(self) -> str:
        return "\n".join(self.lines())

    def process(self) -> psutil.Process:
        """The command's."""
        shell = psutil.Process(int(self._tmux("list-panes", "-F", "#{pane_pid}")))
        (found,) = [each for each in (shell, *shell.children(recursive=True)) if "outlive" in each.cmdline()]
        return found

    def press(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, width: int, height: int) -> None:
        self._tmux("resize-window", "-x", str(width), "-y", str(height))

    def shows(self, *parts: str) -> None:
        """Wait until all of this is on the screen."""
        self.comes_to(lambda lines: all(part in "\n".join(lines) for part in parts), parts)

    def comes_to(self, condition: Callable[[Sequence[str]], bool], what: object = "") -> None:
        assert wait_until(lambda: condition(self.lines()), DEADLINE_S), f"not seen: {what}\n{self.text()}"
