"""Kills a worker at a chosen moment.

Reads   the worker's generators; marker files, where a dataset is to kill its worker.
Writes  marker files, each before the kill that it counts.
Never   pytest: importing this is part of every worker's start.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any


class Kills:
    """Kills its worker whenever a named moment comes for the nth time; counts in files, which outlive workers.

    A moment that kills comes again when the work is redone: {"a": {1, 3}} kills at «a» in two epochs.
    """

    def __init__(self, folder: Path | None, when: dict[Any, set[int]]) -> None:
        self.folder = folder
        self.when = when

    def at(self, moment: Any) -> None:
        if self.folder is None or moment not in self.when:
            return
        with open(self.folder / f"moment-{moment}", "ab") as file:
            file.write(b".")
            file.flush()
            times = file.tell()
        if times in self.when[moment]:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def total(self) -> int:
        return sum(map(len, self.when.values()))


class NoKills(Kills):
    def __init__(self) -> None:
        super().__init__(None, {})
