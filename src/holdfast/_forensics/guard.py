"""Tells whether the main module would start the loader again when a worker imports it.

Reads   the frames of the calling thread, the source of the main module.
Writes  nothing.
Never   runs it.
"""

from __future__ import annotations

import ast
import os
import sys
from types import FrameType


def unguarded_line() -> str:
    """«train.py:12»: the line of the main module that is running now, outside of `if __name__ == "__main__"`."""
    module = sys.modules.get("__main__")
    path = getattr(module, "__file__", None)
    if module is None or path is None:  # a notebook or a prompt: no worker imports it
        return ""
    frame: FrameType | None = sys._getframe()
    main: FrameType | None = None
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals is vars(module):
            main = frame
        frame = frame.f_back
    if main is None:  # another thread
        return ""
    try:
        with open(path, encoding="utf-8") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return ""
    line = main.f_lineno
    for statement in tree.body:
        if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
            return "" if is_guard(statement) else f"{os.path.basename(path)}:{line}"
    return ""


def is_guard(statement: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":` or its like."""
    return isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )
