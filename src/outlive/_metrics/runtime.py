"""Where jobs publish: the user's runtime folder, with a folder for each loader and pool in it.

Reads   OUTLIVE_RUNTIME, XDG_RUNTIME_DIR; owners and modes of folders.
Writes  folders that only this user may enter; removes those of jobs that are long gone.
Never   trusts a folder that another user owns, or may write to.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WHO, BOARD, EVENTS, EARLIER = "who.json", "board", "events.jsonl", "events.1.jsonl"
SWEEP_S = 900.0  # so long a job that has ended can still be looked at
_CROWD = 40  # more folders than this: whoever adds one sweeps
_AT_ONCE = 100


class UnsafeFolder(OSError):
    """Somebody else could have put things there."""


def is_on() -> bool:
    return os.environ.get("OUTLIVE_BOARD", "") != "0"


def folder() -> Path:
    """Where this user's jobs publish; it need not be there."""
    named = os.environ.get("OUTLIVE_RUNTIME", "")
    if named:
        return Path(named)
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and os.access(session, os.W_OK):
        return Path(session, "outlive")
    return Path(tempfile.gettempdir(), f"outlive-{os.getuid() if hasattr(os, 'getuid') else 0}")


def check(path: Path) -> None:
    """Raise UnsafeFolder unless it is a folder of ours that nobody else may write to."""
    found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeFolder(f"{path} is no folder")
    if not hasattr(os, "getuid"):
        return
    if found.st_uid != os.geteuid():
        raise UnsafeFolder(f"{path} belongs to another user (uid {found.st_uid})")
    if found.st_mode & 0o022:
        raise UnsafeFolder(f"{path} can be written to by other users; `chmod 700 {path}` makes it safe")


def make(key: str) -> Path:
    """A folder for a job, for this user only."""
    home = folder()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    check(home)
    made = home / key
    made.mkdir(mode=0o700)
    others = os.listdir(home)
    if len(others) > _CROWD:
        for name in others[:_AT_ONCE]:
            sweep_one(home / name, SWEEP_S if len(others) < 10 * _CROWD else 60.0)
    return made


def found(home: Path, known: Mapping[str, dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Every job's folder that is ours, with who it is (by their paths, who is `known` from before). Those of jobs that
    are long gone are removed on the way."""
    try:
        check(home)
        names = sorted(os.listdir(home))
    except OSError:
        return
    living: dict[Any, bool] = {}  # one process may have had many jobs
    for name in names:
        path = home / name
        who = read_who(path, known.get(str(path)))
        if who is None:
            continue
        process = who["pid"], who.get("start")
        if process not in living:
            living[process] = is_alive(who)
        if living[process] or not sweep_one(path, SWEEP_S):
            yield path, who


def read_who(path: Path, known: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """None: it is no job's, or not to be trusted. `known`: from before; that does not change."""
    try:
        check(path)
        if known is not None:
            return known
        told = json.loads((path / WHO).read_bytes())
        return told if isinstance(told, dict) and isinstance(told.get("pid"), int) else None
    except (OSError, ValueError):
        return None


def sweep_one(path: Path, after_s: float) -> bool:
    """Remove a job's folder if the job is gone and it was last written long ago; whether that was so."""
    try:
        check(path)
        age = time.time() - max(os.lstat(each).st_mtime for each in (path, *path.iterdir()))
        if age < after_s:
            return False
    except OSError:
        return False
    who = read_who(path)
    if who is not None and is_alive(who):
        return False
    shutil.rmtree(path, ignore_errors=True)
    return True


def start_of(pid: int) -> int:
    """When a process began, in the kernel's ticks; 0: there is none, or this system does not say."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return int(file.read().rpartition(b")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0


def is_alive(who: dict[str, Any]) -> bool:
    """Whether the very process that published this lives: its number may be another's by now."""
    if who.get("start"):
        return bool(start_of(who["pid"]) == who["start"])
    try:
        os.kill(who["pid"], 0)
    except OSError:
        return False
    return True
