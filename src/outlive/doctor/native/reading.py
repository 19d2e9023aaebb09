"""Reads every library once: its header always, its code where that is not remembered.

Reads   the files that `libraries` names; what was remembered of them.
Writes  what is to be remembered.
Never   lets one file that is broken, or code that no decoder knows, end the look at the others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from outlive.doctor.native import code, libraries
from outlive.doctor.native.elf import Library, NotReadable
from outlive.doctor.native.libraries import Owner
from outlive.doctor.native.remembering import Memory

Progress = Callable[[int, int], None]
_TORCHS_NAMESPACE = re.compile(r"_Z\w{0,4}?(?:3c10|2at|5torch)\d")
_SAVED_EVERY = 100  # libraries: an interrupted run is not lost


@dataclass(frozen=True, eq=False)
class Read:
    """What is known of one library."""

    path: str
    machine: str
    loaded: bool = False
    level: str = ""  # of x86-64, on which ld.so insists
    needed: tuple[str, ...] = ()
    needed_files: tuple[str, ...] = ()  # of those, the ones it finds by itself
    is_module: bool = False  # Python can import it
    wants_of_torch: tuple[str, ...] = ()  # names that torch's libraries must define
    code: code.Code | None = None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def owner(self) -> Owner | None:
        return libraries.owner_of(self.path)

    @property
    def label(self) -> str:
        """Who it belongs to, as people know it."""
        owner = self.owner
        return owner.words if owner is not None else self.name


@dataclass
class Environment:
    """All libraries, and what could not be looked at."""

    libraries: list[Read] = field(default_factory=list)
    not_looked_at: list[str] = field(default_factory=list)


def read_all(folders: list[str] | None = None, progress: Progress | None = None, *, with_code: bool) -> Environment:
    """`folders`: instead of sys.path, and then without what is loaded here."""
    found = Environment()
    importable, is_all = libraries.importable(folders)
    if not is_all:
        found.not_looked_at.append(f"libraries beyond the first {len(importable)}: more files than the limit")
    loaded = {os.path.realpath(path) for path in libraries.loaded()} if folders is None else set()
    waiting = list(dict.fromkeys([*sorted(loaded), *sorted(importable)]))
    known = set(waiting)
    memory = Memory()
    for done, path in enumerate(waiting):  # it grows: what a library needs comes after it
        if progress is not None:
            progress(done, len(waiting))
        try:
            read = _read(path, path in loaded, memory if with_code else None)
        except FileNotFoundError:
            continue  # removed meanwhile
        except (NotReadable, OSError) as error:
            found.not_looked_at.append(str(error))
            continue
        found.libraries.append(read)
        if read.code is not None:
            found.not_looked_at += [f"in {path}: {what}" for what in read.code.left_out]
        new = [file for file in read.needed_files if file not in known]
        known.update(new)
        waiting += new
        if done % _SAVED_EVERY == _SAVED_EVERY - 1:
            memory.save()
    memory.save()
    if progress is not None:
        progress(len(waiting), len(waiting))
    return found


def _read(path: str, loaded: bool, memory: Memory | None) -> Read:
    with Library(path) as library:
        wanted = tuple(name for name in library.undefined() if _TORCHS_NAMESPACE.match(name))
        return Read(
            path,
            library.machine,
            loaded,
            library.level,
            library.needed,
            tuple(filter(None, (libraries.needed_file(path, name, library.search) for name in library.needed))),
            _is_module(library),
            wanted,
            _code_of(library, memory) if memory is not None and library.machine == "x86_64" else None,
        )


def _is_module(library: Library) -> bool:
    return library.defines(f"PyInit_{os.path.basename(library.path).partition('.')[0]}")


def _code_of(library: Library, memory: Memory) -> code.Code | None:
    found = memory.recall(library)
    if found is None:
        try:
            found = code.look(library)
        except (ArithmeticError, LookupError, ValueError, RecursionError) as error:
            return code.Code(left_out=(f"its code: {type(error).__name__}: {error}",))
        memory.keep(library, found)
    return found
