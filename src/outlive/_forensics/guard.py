"""Tells whether the main module would start the loader again when a worker imports it.

Reads   the frames of the calling thread and of the main one, the source of the main module.
Writes  nothing.
Never   runs it.
"""

from __future__ import annotations

import ast
import os
import sys
import threading
from types import FrameType, ModuleType


def unguarded_line() -> str:
    """«train.py:12»: the line of the main module that is running now, outside of `if __name__ == "__main__"`."""
    module = sys.modules.get("__main__")
    path = getattr(module, "__file__", None)
    if module is None or path is None:  # a notebook or a prompt: no worker imports it
        return ""
    # A pool's own thread asks: the program is in the main one.
    main = _line_of(module, sys._getframe()) or _line_of(module, _main_frame())
    if main is None:
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ""
    for statement in tree.body:
        if statement.lineno <= main <= (statement.end_lineno or statement.lineno):
            return "" if is_guard(statement) else f"{os.path.basename(path)}:{main}"
    return ""


def _line_of(module: ModuleType, frame: FrameType | None) -> int | None:
    """The line of the module that leads to this frame, and is not in a function."""
    line = None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(module):
            line = frame.f_lineno
        frame = frame.f_back
    return line


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or -1)


def is_guard(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":` or its like."""
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )
