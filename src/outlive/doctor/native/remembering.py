"""What was found out about a library's code, kept from one run to the next.

Reads   one file in the user's cache folder.
Writes  it, whole or not at all.
Never   fails: a folder that cannot be written, or a file that is broken, costs time only.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from outlive._system import safe_files
from outlive.doctor.native.code import VERSION, Code, Seen
from outlive.doctor.native.elf import Library

_MOST = 20_000  # libraries; some ten megabytes


class Memory:
    def __init__(self, file: Path | None = None) -> None:
        self._file = file or folder() / "native-libraries.json"
        self._stamp = f"{VERSION}/{_decoder()}"
        self._known: dict[str, Any] = self._read()
        self._changed = False

    def _read(self) -> dict[str, Any]:
        try:
            content = json.loads(self._file.read_text(encoding="utf-8"))
            known = content["libraries"] if content["stamp"] == self._stamp else {}
            return known if isinstance(known, dict) else {}
        except (OSError, ValueError, KeyError, TypeError):
            return {}

    def recall(self, library: Library) -> Code | None:
        found = self._known.get(_key(library))
        if found is None:
            return None
        try:
            return _code(found)
        except (KeyError, TypeError, AttributeError, ValueError):
            return None  # of another age, or damaged: it is looked at again

    def keep(self, library: Library, code: Code) -> None:
        self._known[_key(library)] = asdict(code)
        self._changed = True

    def save(self) -> None:
        if not self._changed:
            return
        recent = dict(list(self._known.items())[-_MOST:])
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with safe_files.replacing(self._file) as file:
                file.write(json.dumps({"stamp": self._stamp, "libraries": recent}).encode())
            self._changed = False
        except OSError:
            pass  # the next run takes as long as this one


def folder() -> Path:
    """Where programs of this user keep what they can make again."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    # XDG: a path that is not absolute is to be ignored.
    top = Path(given) if given.startswith("/") else Path(os.path.expanduser("~")) / ".cache"
    return top / "outlive"


def _decoder() -> str:
    try:
        return metadata.version("iced-x86")
    except metadata.PackageNotFoundError:
        return ""


def _key(library: Library) -> str:
    status = os.stat(library.path)
    # The linker makes the id from the content; without one the file's place and time must do.
    identity = library.build_id or f"{library.path}:{status.st_mtime_ns}"
    return f"{identity}:{status.st_size}"


def _code(found: dict[str, Any]) -> Code:
    def seen(name: str) -> dict[str, Seen]:
        return {feature: Seen(**fields) for feature, fields in found[name].items()}

    return Code(
        at_load=seen("at_load"),
        anywhere=seen("anywhere"),
        throughout=seen("throughout"),
        asks=str(found["asks"]),
        functions=int(found["functions"]),
        left_out=tuple(found["left_out"]),
    )
