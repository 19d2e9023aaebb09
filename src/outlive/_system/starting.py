"""Starts processes of multiprocessing's, also from programs that no process could import; sooner, and for no longer.

Reads   where the main module came from.
Writes  `__main__.__file__`, away and back, while a process is started; how often a new interpreter collects garbage.
Never   the former where it is a file: a missing guard must be seen.

While a new interpreter imports, hardly anything becomes garbage, and looking for it again and again is a fifth of the
time that `import torch` takes. So it looks rarely until it is told to `settle`.

With the end of a lifeline, a process goes with us from its first moment: it takes the end before it imports the main
module, which may take long. Under forkserver the server imports that first: so it goes with us until then.
"""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import operator
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import process as stdlib_process
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from outlive._system.lifeline import End  # not everywhere there is one

_RARELY = (100_000, 50, 100)
_USUALLY = (700, 10, 10) if sys.version_info < (3, 13) else (2000, 10, 10 if sys.version_info < (3, 14) else 0)

_lock = threading.Lock()


def start(process: Any, end: End | None = None, *, imports_main: bool = True) -> None:
    """As `process.start()`; a program that was piped into Python («<stdin>») is not looked for on disk. Not
    `imports_main`: a new interpreter does not import the main module, which may do anything when it is imported."""
    process.name = HastyName(process.name, end)
    process.name.imports_main = imports_main
    module = sys.modules.get("__main__")
    path = getattr(module, "__file__", None)
    if module is None or not isinstance(path, str) or _is_there(path):
        _start(process, end)
        return
    with _lock:
        del module.__file__
        try:
            _start(process, end)
        finally:
            module.__file__ = path


def _start(process: Any, end: End | None) -> None:
    if end is None or (process._start_method or multiprocessing.get_start_method()) != "forkserver":
        process.start()
        return
    from multiprocessing import forkserver  # not everywhere there are these

    from outlive._system.lifeline import Lifeline

    forkserver.ensure_running()
    lifeline = Lifeline()
    # It travels with the process, though that has no use for it: on its way it is open when all of ours is closed.
    process.name.server = lifeline.end()
    try:
        lifeline.bind(forkserver._forkserver._forkserver_pid)  # type: ignore[attr-defined]
        process.start()
    finally:
        lifeline.release()
        os.close(process.name.server)


def _is_there(path: str) -> bool:
    folder = getattr(stdlib_process, "ORIGINAL_DIR", None) or ""  # where multiprocessing looks
    return os.path.exists(os.path.join(folder, path))


@dataclass(frozen=True)
class Family:
    """Who workers are to multiprocessing: as if the trainer had started one process for each slot."""

    names: tuple[str, ...]  # by slot
    identities: tuple[tuple[int, ...], ...]
    parent_name: str
    parent_pid: int

    @classmethod
    def here(cls, context: Any, slots: int) -> Family:
        members = [context.Process() for _ in range(slots)]  # each takes the next number
        parent = stdlib_process.current_process().name
        return cls(tuple(m.name for m in members), tuple(m._identity for m in members), parent, os.getpid())

    def assign(self, slot: int, process: Any) -> None:
        """Make this process the one of that slot. It may start others, which a daemonic process may not."""
        process._name, process._identity = self.names[slot], self.identities[slot]
        process._config["daemon"] = False

    def become(self, slot: int, target: Callable[..., Any], args: tuple[Any, ...], sentinel: int) -> int:
        """Run `target` as a child of multiprocessing's runs its own: with fresh registries, without standard input;
        its exit code. `sentinel`: can be read once the trainer has ended."""
        process: Any = multiprocessing.Process(target=target, args=args)
        self.assign(slot, process)
        process._parent_name, process._parent_pid = self.parent_name, self.parent_pid
        code: int = process._bootstrap(parent_sentinel=sentinel)
        return code


def settle() -> None:
    """In the new process, once it has imported: collect garbage as ever, unless the user's imports said how."""
    if gc.get_threshold() == _RARELY:
        gc.set_threshold(*_USUALLY)


class HastyName(str):
    """The first thing that an interpreter started by multiprocessing unpickles, before it imports the main module."""

    __slots__ = ("_end", "_told", "imports_main", "server")
    _end: End | None
    server: End | None

    def __new__(cls, name: str, end: End | None = None) -> HastyName:
        made = super().__new__(cls, name)
        made._end, made.server = end, None
        return made

    def __reduce__(self) -> Any:
        if hasattr(self, "_told"):  # the second time is after those imports
            return str, (str(self),)
        self._told = True
        held = _Held(self._end, self.server) if self._end is not None else None
        more = () if getattr(self, "imports_main", True) else (_Ignores("name"), _Ignores("path"))
        return operator.getitem, ((str(self), _Rarely(), held, *more), 0)


class _Ignores:
    """There: what imports the main module, by its name or its path, becomes a function that does nothing."""

    def __init__(self, by: str) -> None:
        self._by = by

    def __reduce__(self) -> Any:
        return setattr, (_Spawn(), f"_fixup_main_from_{self._by}", bool)


class _Spawn:
    def __reduce__(self) -> Any:
        return importlib.import_module, ("multiprocessing.spawn",)


class _Rarely:
    def __reduce__(self) -> Any:
        return gc.set_threshold, _RARELY


class _Held:
    def __init__(self, *ends: End | None) -> None:
        self._ends = ends

    def __reduce__(self) -> Any:
        from outlive._system.lifeline import HOLD

        return exec, (HOLD, dict(zip(("end", "server"), self._ends)))
