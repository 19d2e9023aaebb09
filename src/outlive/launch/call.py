"""The function and its arguments on their way into a rank.

Reads   the function, the arguments; the source of the main module, for what stands under its guard.
Writes  a memory file, so that starting a rank waits for nobody: a pipe would fill up until the rank has imported all.
Never   by value what the rank can import: classes must be the same ones there.

Under fork nothing is pickled. Under spawn and forkserver, what a rank cannot import (a notebook's or a prompt's
functions, lambdas, closures, what stands under the main guard) is sent whole, by cloudpickle.
"""

from __future__ import annotations

import ast
import collections
import functools
import io
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing import reduction, spawn
from typing import Any

import cloudpickle

from outlive._forensics.guard import is_guard


class Call:
    """`fn(rank, *args)`."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.fn = fn
        self.args = args
        self._file: Any = None
        self._sent: list[int] = []  # memory files, until the ranks that they are for were started

    @property
    def name(self) -> str:
        return name_of(self.fn)

    def __getstate__(self) -> dict[str, Any]:
        # Called while multiprocessing starts the process: only then may locks and queues be pickled.
        fd = os.memfd_create("outlive-call", os.MFD_CLOEXEC)
        self._sent.append(fd)
        with os.fdopen(os.dup(fd), "wb") as file:
            _Pickler(file).dump((self.fn, self.args))
        return {"fn": None, "args": (), "_file": reduction.DupFd(fd), "_sent": []}

    def close(self) -> None:
        """A rank was started, or could not be: it has what it needs."""
        while self._sent:
            os.close(self._sent.pop())

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """In the rank."""
        if self._file is None:
            return self.fn, self.args
        fd = self._file.detach()
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            self.fn, self.args = pickle.load(file)
        self._file = None
        return self.fn, self.args


def name_of(fn: Any) -> str:
    """«train», «Trainer.fit», «partial of train»."""
    while isinstance(fn, functools.partial):
        return f"partial of {name_of(fn.func)}"
    return str(getattr(fn, "__qualname__", type(fn).__qualname__)).replace("<locals>.", "")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles as multiprocessing does where that is possible, and as cloudpickle does where it is not."""

    def __init__(self, file: io.IOBase) -> None:
        extra = reduction.ForkingPickler._extra_reducers  # type: ignore[attr-defined]  # torch's are among them
        # Before the pickler is made: it looks for the table once, then.
        self.dispatch_table = collections.ChainMap(extra, cloudpickle.Pickler.dispatch_table)
        super().__init__(file)

    def reducer_override(self, obj: Any) -> Any:
        if getattr(obj, "__module__", None) == "__main__" and isinstance(obj, (type, _FUNCTION)):
            top, _, rest = str(getattr(obj, "__qualname__", "")).partition(".")
            if "<" not in rest and top in importable_names() and _found(top, rest) is obj:
                return obj.__qualname__  # by name, as pickle would
        return super().reducer_override(obj)


_FUNCTION = type(lambda: None)


def _found(top: str, rest: str) -> Any:
    found = getattr(sys.modules["__main__"], top, None)
    for name in rest.split(".") if rest else ():
        found = getattr(found, name, None)
    return found


def importable_names() -> frozenset[str]:
    """Functions and classes of the main module that a rank has when it has imported that: not those under the guard."""
    preparation = spawn.get_preparation_data("")
    if not {"init_main_from_name", "init_main_from_path"} & preparation.keys():
        return frozenset()  # a notebook or a prompt: no rank imports it
    return _defined_in(getattr(sys.modules["__main__"], "__file__", "") or "")


@functools.cache
def _defined_in(path: str) -> frozenset[str]:
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, SyntaxError, ValueError):
        return frozenset()
    names: set[str] = set()
    for statement in tree.body:
        if not is_guard(statement):
            names.update(
                node.name
                for node in ast.walk(statement)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            )
    return frozenset(names)
