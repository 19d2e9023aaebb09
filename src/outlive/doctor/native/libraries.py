"""Which native libraries there are: loaded in this process, importable, and needed by those.

Reads   /proc/self/maps, the folders of sys.path, the records of installed packages.
Writes  nothing.
Never   imports a package; follows more folders or files than its limits say.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from outlive._forensics.rules.instruction_remedies import package_of

_NATIVE = re.compile(r"\.so(\.\d+)*$")
_MOST_FOLDERS, _MOST_FILES = 50_000, 10_000
_INSTALLED = ("site-packages", "dist-packages", "lib-dynload")


@dataclass(frozen=True)
class Place:
    """A library's file."""

    path: str
    loaded: bool = False

    @property
    def name(self) -> str:
        return os.path.basename(self.path)


@dataclass(frozen=True)
class Owner:
    """The installed package that a file belongs to."""

    name: str
    version: str = ""

    @property
    def requirement(self) -> str:
        """«foo==1.2», without a local part such as +cpu: no index has that."""
        return f"{self.name}=={self.version.partition('+')[0]}" if self.version else self.name

    @property
    def words(self) -> str:
        return f"{self.name} {self.version}".strip()


def is_native(name: str) -> bool:
    return _NATIVE.search(name) is not None


def loaded() -> list[str]:
    """Files that are mapped here, and are libraries."""
    found: dict[str, None] = {}
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                path = line.partition("/")[2].rstrip("\n")
                if is_native(path):  # of a deleted file the name ends otherwise
                    found.setdefault(f"/{path}")
    except OSError:
        pass  # no /proc: what is importable is known all the same
    return list(found)


def importable(folders: Iterable[str] | None = None) -> tuple[list[str], bool]:
    """Libraries under these folders (sys.path); and whether that are all."""
    found: dict[str, None] = {}
    seen = 0
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    for folder in dict.fromkeys(os.path.realpath(entry or ".") for entry in (sys.path if folders is None else folders)):
        if not os.path.isdir(folder) or folder == standard:
            continue
        everything = os.path.basename(folder) in _INSTALLED or folders is not None
        for path in _walk(folder, everything):
            seen += 1
            if seen > _MOST_FOLDERS or len(found) > _MOST_FILES:
                return list(found), False
            if path:
                found.setdefault(path)
    return list(found), True


def _walk(top: str, everything: bool) -> Iterator[str]:
    """Libraries in it; an empty text for each folder. Of a checkout only packages: it may hold data."""
    waiting = [top]
    while waiting:
        yield ""
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if entry.name != "__pycache__" and (everything or _is_package(entry.path)):
                            waiting.append(entry.path)
                    elif is_native(entry.name) and entry.is_file():
                        yield os.path.realpath(entry.path)
        except OSError:
            continue  # gone meanwhile, or not ours to read


def _is_package(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "__init__.py"))


def needed_file(path: str, name: str, search: Iterable[str]) -> str:
    """Where a library finds another that it needs; empty: where the system looks, or nowhere."""
    origin = os.path.dirname(path)
    for folder in [*search, *os.environ.get("LD_LIBRARY_PATH", "").split(":")]:
        folder = folder.replace("$ORIGIN", origin).replace("${ORIGIN}", origin)
        candidate = os.path.join(folder, name)
        if folder.startswith("/") and os.path.isfile(candidate):
            return os.path.realpath(candidate)
    return ""


# ---------------------------------------------------------------- packages


def owner_of(path: str) -> Owner | None:
    """The package that installed it; None: nobody knows of one."""
    found = _owners().get(os.path.realpath(path))
    if found is not None:
        return found
    name = package_of(path)
    if not name:
        return None
    try:
        return Owner(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.lru_cache(maxsize=1)
def _owners_for(_: tuple[str, ...]) -> dict[str, Owner]:
    found: dict[str, Owner] = {}
    for package in importlib.metadata.distributions():
        owner = Owner(package.metadata["Name"] or "", package.version)
        # The records have tens of thousands of lines: only those of libraries are made paths of.
        for line in (package.read_text("RECORD") or "").splitlines():
            name = line.rsplit(",", 2)[0].strip('"')
            if ".so" in name and is_native(name):
                found[os.path.realpath(str(package.locate_file(name)))] = owner
    return found


def _owners() -> dict[str, Owner]:
    return _owners_for(tuple(sys.path))
