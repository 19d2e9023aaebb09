"""The job that an incident happened in: which command, where, as which rank.

Reads   sys.argv, the working folder, the environment's rank.
Writes  nothing.
Never   fails: a folder that is gone, or a command that nobody knows, is an empty text.
"""

from __future__ import annotations

import os
import shlex
import socket
import sys
from dataclasses import dataclass

_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


@dataclass(frozen=True)
class Job:
    command: str = ""
    folder: str = ""
    pid: int = -1
    host: str = ""
    rank: int | None = None

    @property
    def place(self) -> str:
        """«pid 4127 on node7, rank 3»."""
        rank = f", rank {self.rank}" if self.rank is not None else ""
        host = f" on {self.host}" if self.host else ""
        return f"pid {self.pid}{host}{rank}"

    @property
    def program(self) -> str:
        """What ran, without its arguments: `train.py`."""
        try:
            words = shlex.split(self.command)
        except ValueError:
            words = self.command.split()
        return words[0] if words else ""

    def without_private(self) -> Job:
        """Without arguments, folder and host."""
        return Job(self.program, "", self.pid, "", self.rank)

    @property
    def words(self) -> str:
        """«train.py --lr 0.1 (pid 4127 on node7, rank 3)»."""
        return f"{self.command or 'python'} ({self.place})"


def this_job() -> Job:
    """As it is now."""
    try:
        folder = os.getcwd()
    except OSError:
        folder = ""  # removed under us
    argv = [str(word) for word in getattr(sys, "argv", [])]
    return Job(_safe(shlex.join(argv)), _safe(folder), os.getpid(), _safe(socket.gethostname()), _rank())


def _rank() -> int | None:
    for name in _RANKS:
        try:
            return int(os.environ[name])
        except (KeyError, ValueError):
            continue
    return None


def _safe(text: str) -> str:
    """Without surrogates, which no database takes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
