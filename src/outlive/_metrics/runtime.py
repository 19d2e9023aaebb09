"""Where jobs publish: a folder of outlive in the user's runtime folder, with a folder for each loader and pool in it.

Reads   OUTLIVE_RUNTIME, XDG_RUNTIME_DIR; owners and modes of folders.
Writes  folders that only this user may enter; removes those of jobs that are long gone.
Never   trusts a folder that another user owns, or may write to; removes anything but the files of a job, one by one,
        from a folder with a job's name in a folder with our mark.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from outlive._system.safe_files import check_private, create

WHO, BOARD, EVENTS, EARLIER = "who.json", "board", "events.jsonl", "events.1.jsonl"
_FILES = (WHO, BOARD, EVENTS, EARLIER)  # all that is in a job's folder
MARK = ".outlive-runtime"
_MARK_TEXT = b"outlive made this folder. It removes folders of jobs that are gone from it, and nothing else.\n"
_KEY = re.compile(r"\d+-\d+-[0-9a-f]+")  # of a job: process, number, time
SWEEP_S = 900.0  # so long a job that has ended can still be looked at
_CROWD = 40  # more folders than this: whoever adds one sweeps
_AT_ONCE = 100


def is_on() -> bool:
    return os.environ.get("OUTLIVE_BOARD", "") != "0"


def folder() -> Path:
    """Where this user's jobs publish; it need not be there."""
    named = os.environ.get("OUTLIVE_RUNTIME", "")
    if named:
        return Path(named, "outlive")  # never the folder itself: other things of the user's may be there
    session = os.environ.get("XDG_RUNTIME_DIR", "")
    if session and os.access(session, os.W_OK):
        return Path(session, "outlive")
    return Path(tempfile.gettempdir(), f"outlive-{os.getuid() if hasattr(os, 'getuid') else 0}")


def ready() -> Path:
    """The folder where this user's jobs publish, made and marked if it was not there."""
    home = folder()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(home)
    if not os.listdir(home):
        _mark(home)
    return home


def is_marked(home: Path) -> bool:
    """Whether we made this folder, so that what has a name of ours in it is ours."""
    return (home / MARK).is_file()


def make(key: str) -> Path:
    """A folder for a job, for this user only."""
    home = ready()
    others = [name for name in os.listdir(home) if _KEY.fullmatch(name)]
    made = home / key
    made.mkdir(mode=0o700)
    if len(others) >= _CROWD:
        for name in others[:_AT_ONCE]:
            sweep_one(home / name, SWEEP_S if len(others) < 10 * _CROWD else 60.0)
    return made


def _mark(home: Path) -> None:
    """Say that all that will be in this folder is ours; it is empty."""
    with contextlib.suppress(FileExistsError):  # another job was faster
        descriptor = create(home / MARK)
        try:
            os.write(descriptor, _MARK_TEXT)
        finally:
            os.close(descriptor)


def found(home: Path, known: Mapping[str, dict[str, Any]]) -> Iterator[tuple[Path, dict[str, Any] | None]]:
    """Every job's folder that is ours, with who it is (by their paths, who is `known` from before); None: that cannot
    be read. Those of jobs that are long gone are removed on the way."""
    try:
        check_private(home)
        names = sorted(filter(_KEY.fullmatch, os.listdir(home)))
    except OSError:
        return
    living: dict[Any, bool] = {}  # one process may have had many jobs
    for name in names:
        path = home / name
        who = read_who(path, known.get(str(path)))
        if who is None:
            if is_whole(path) and not sweep_one(path, SWEEP_S):
                yield path, None
            continue
        process = who["pid"], who.get("start")
        if process not in living:
            living[process] = is_alive(who)
        if living[process] or not sweep_one(path, SWEEP_S):
            yield path, who


def is_whole(path: Path) -> bool:
    """Whether a job of this user's has said who it is: it does so last."""
    try:
        check_private(path)
    except OSError:
        return False
    return (path / WHO).exists()


class _Who(msgspec.Struct):
    """What a job says of itself."""

    pid: Annotated[int, msgspec.Meta(gt=0, lt=1 << 31)]
    start: int = 0
    command: str = ""
    folder: str = ""
    rank: int | None = None
    world_size: int | None = None
    run: str = ""
    kind: str = "loader"
    name: str = ""
    began: float = 0.0
    limits: dict[str, int | float | str | None] = {}
    here: bool = False


def read_who(path: Path, known: dict[str, Any] | None = None) -> dict[str, Any] | None:
    """None: it is no job's, or not to be trusted. `known`: from before; that does not change."""
    try:
        check_private(path)
        if known is not None:
            return known
        if not (path / WHO).is_file():  # a pipe would be waited for
            return None
        told: dict[str, Any] = msgspec.to_builtins(msgspec.convert(parse((path / WHO).read_bytes()), _Who))
        return told
    except (OSError, ValueError, msgspec.ValidationError):
        return None


def parse(text: bytes) -> Any:
    """JSON; ValueError also for what is not: numbers without an end, and more brackets than Python can follow."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _refuse(constant: str) -> float:
    raise ValueError(f"{constant} is no JSON")


def _finite(number: str) -> float:
    return float(number) if math.isfinite(float(number)) else _refuse(number)


def sweep_one(path: Path, after_s: float) -> bool:
    """Remove a job's folder if the job is gone and it was last written long ago; whether that was so.

    The folder is left alone unless it is certainly ours: it has a job's name, lies in a folder with our mark, and has
    nothing in it but what a job writes.
    """
    try:
        if not (_KEY.fullmatch(path.name) and is_marked(path.parent)):
            return False
        check_private(path)
        inside = {name: os.lstat(path / name) for name in os.listdir(path)}
        if not all(name in _FILES and stat.S_ISREG(found.st_mode) for name, found in inside.items()):
            return False
        if time.time() - max(found.st_mtime for found in (os.lstat(path), *inside.values())) < after_s:
            return False
    except OSError:
        return False
    who = read_who(path)
    if who is not None and is_alive(who):
        return False
    remove(path)
    return True


def remove(path: Path) -> None:
    """Remove a job's folder: its files, then the folder, if nothing else is in it."""
    with contextlib.suppress(OSError):
        for name in _FILES:
            (path / name).unlink(missing_ok=True)
        path.rmdir()


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
