"""Start the programs that the documents contain. Every process of these tests starts here.

Reads:   Python source, or a shell command.
Writes:  nothing by itself; the programs do.
Never:   waits longer than `LIMIT_S`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import warm_server

LIMIT_S = 100


def run_python(source: str, name: str) -> subprocess.CompletedProcess[str]:
    """Run Python source as `python -c` would. A traceback shows `name` as its file."""
    runner = f"import sys; exec(compile(sys.stdin.read(), {name!r}, 'exec'), {{'__name__': '__main__'}})"
    return warm_server.run(
        [sys.executable, "-c", runner], input=source, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def run_shell(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command in a folder, as a reader with an active virtual environment would."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    return subprocess.run(
        command,
        shell=True,
        cwd=folder,
        env={**os.environ, "PATH": path, **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
