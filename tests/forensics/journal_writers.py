"""Adds incidents to a journal: from this process and from programs.

Reads   journals in temporary folders.
Writes  them, from this process, from threads, forks and programs; damages them.
Never   the user's own: OUTLIVE_HOME is set for every test.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import outlive
import warm_server
from forensics import example_incidents
from outlive._forensics import journal

STRANGER_S = 60  # how long a program of a test may take
DEADLINE_S = 60.0
FOR_EVER_S = 1e6  # longer than any test


def written(count: int = 1, **more: Any) -> list[journal.Entry]:
    """Add incidents 0…count-1, and answer what is in the journal then."""
    for n in range(count):
        journal.add(example_incidents.segfault(**{"id": f"{n:08x}", "indices": (n,), "when": 1e9 + n} | more))
    assert journal.flush(DEADLINE_S)
    return journal.find()


def program(source: str, *args: str, **more: Any) -> subprocess.Popen[str]:
    """A Python program of its own, which has `example_incidents` and `journal`."""
    head = "import os, sys, time\nfrom forensics import example_incidents\nfrom outlive._forensics import journal\n"
    path = os.pathsep.join([str(Path(outlive.__file__).parents[1]), str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, **more.pop("env", {})}
    command = [sys.executable, "-c", head + textwrap.dedent(source), *args]
    return warm_server.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.PIPE,
        **more,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """Standard output of a program that must end well."""
    out, err = process.communicate(timeout=STRANGER_S)
    assert process.returncode == 0, err
    assert "Traceback" not in err, err
    return out
