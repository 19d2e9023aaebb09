"""Starts processes of multiprocessing's, also from programs that no process could import.

Reads   where the main module came from.
Writes  `__main__.__file__`, away and back, while a process is started.
Never   where it is a file: a missing guard must be seen.
"""

from __future__ import annotations

import os
import sys
import threading
from multiprocessing import process as stdlib_process
from typing import Any

_lock = threading.Lock()


def start(process: Any) -> None:
    """As `process.start()`; a program that was piped into Python («<stdin>») is not looked for on disk."""
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
