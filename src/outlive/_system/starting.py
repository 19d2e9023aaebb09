"""Starts processes of multiprocessing's, also from programs that no process could import; and sooner.

Reads   where the main module came from.
Writes  `__main__.__file__`, away and back, while a process is started; how often a new interpreter collects garbage.
Never   the former where it is a file: a missing guard must be seen.

While a new interpreter imports, hardly anything becomes garbage, and looking for it again and again is a fifth of the
time that `import torch` takes. So it looks rarely until it is told to `settle`.
"""

from __future__ import annotations

import gc
import operator
import os
import sys
import threading
from multiprocessing import process as stdlib_process
from typing import Any

_RARELY = (100_000, 50, 100)
_USUALLY = (700, 10, 10) if sys.version_info < (3, 13) else (2000, 10, 10 if sys.version_info < (3, 14) else 0)

_lock = threading.Lock()


def start(process: Any) -> None:
    """As `process.start()`; a program that was piped into Python («<stdin>») is not looked for on disk."""
    process.name = HastyName(process.name)
    module = sys.modules.get("__main__")
    path = getattr(module, "__file__", None)
    if module is None or not isinstance(path, str) or _is_there(path):
        process.start()
        return
    with _lock:
        del module.__file__
        try:
            process.start()
        finally:
            module.__file__ = path


def _is_there(path: str) -> bool:
    folder = getattr(stdlib_process, "ORIGINAL_DIR", None) or ""  # where multiprocessing looks
    return os.path.exists(os.path.join(folder, path))


def settle() -> None:
    """In the new process, once it has imported: collect garbage as ever, unless the user's imports said how."""
    if gc.get_threshold() == _RARELY:
        gc.set_threshold(*_USUALLY)


class HastyName(str):
    """The first thing that an interpreter started by multiprocessing unpickles, before it imports the main module."""

    __slots__ = ("_told",)

    def __reduce__(self) -> Any:
        if hasattr(self, "_told"):  # the second time is after those imports
            return str, (str(self),)
        self._told = True
        return operator.getitem, ((str(self), _Rarely()), 0)


class _Rarely:
    def __reduce__(self) -> Any:
        return gc.set_threshold, _RARELY
