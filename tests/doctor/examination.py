"""Runs an examination in a process of its own and says what it found.

Reads   what `programs/examine.py` prints.
Writes  nothing.
Never   an examination in pytest's own process: its threads and descriptors are none of a user's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parent / "programs" / "examine.py"
DEADLINE_S = 110.0


class Found:
    """One examination, as JSON had it."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.told = told
        self.by_name = {finding["name"]: finding for finding in told["findings"]}
        self.unseen = told["not_looked_at"]

    @property
    def ranks(self) -> dict[str, str]:
        return {name: finding["rank"] for name, finding in self.by_name.items()}

    def text(self, name: str) -> str:
        """All that one finding says."""
        finding = self.by_name[name]
        return "\n".join([finding["title"], *finding["facts"], *finding["remedies"]])

    def remedies(self, name: str) -> list[str]:
        remedies: list[str] = self.by_name[name]["remedies"]
        return remedies


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(entry for entry in sys.path if entry)
    quiet = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    return {**quiet, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", **more}


def examined(
    *situations: str,
    before: tuple[str, ...] = (),
    prepare: Any = None,
    deadline_s: float = DEADLINE_S,
    **variables: str,
) -> dict[str, Found]:
    ended = subprocess.run(
        [*before, sys.executable, str(PROGRAM), *situations],
        input="go\n",
        capture_output=True,
        text=True,
        timeout=deadline_s,
        env=environment(**variables),
        preexec_fn=prepare,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {name: Found(told) for name, told in json.loads(ended.stdout).items()}


def examined_in(group: Path, *situations: str, **variables: str) -> dict[str, Found]:
    """The same, in a control group."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    return examined(*situations, prepare=enter, **variables)
