"""The job on its way to the zygote, and whether workers may share what it becomes there.

Reads   the types of everything in the job, while it is pickled in the trainer.
Writes  bytes.
Never   lets workers share what unpickling opened: files, connections, threads, generators seeded apart.

Under fork nothing is pickled. Under spawn and forkserver the zygote unpickles once and workers inherit the result,
which nobody can tell from a copy of their own as long as unpickling runs no code but Python's, NumPy's and torch's.
Where a class of the user's has its say in it (`__setstate__`, `__reduce__`, …) each worker unpickles for itself.

Classes and functions of a notebook or a prompt travel by value: no other process can import that `__main__`.
"""

from __future__ import annotations

import contextlib
import copyreg
import importlib
import io
import os
import stat
import sys
import threading
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

# Packages whose unpickling only restores values. What is not here is not suspect, it just gets a copy per worker.
_PLAIN = frozenset(
    {"builtins", "collections", "copyreg", "datetime", "decimal", "enum", "fractions", "functools", "outlive", "io"}
    | {"itertools", "multiprocessing", "numpy", "operator", "pathlib", "PIL", "random", "re", "torch", "typing", "uuid"}
)
_HOOKS = ("__setstate__", "__reduce__", "__reduce_ex__", "__new__")


class Payload:
    def __init__(self, job: Any, *, by_value: bool = False, alone: bool = False) -> None:
        """`by_value`: the main module is not imported there, and what it defines comes along; `alone`: each worker gets
        an interpreter of its own."""
        self._job = job
        self._by_value = by_value
        self.alone = alone
        self._pickled: bytes | None = None
        self._modules: tuple[str, ...] = ()
        self.shareable = True  # may be loaded once, in the zygote

    def __getstate__(self) -> dict[str, Any]:
        # Called while multiprocessing starts the process: only then may locks and queues be pickled.
        file = io.BytesIO()
        pickler = _Noting(file, self._by_value)
        pickler.dump(self._job)
        return {
            "_job": None,
            "_by_value": False,
            "alone": self.alone,
            "_pickled": file.getvalue(),
            "_modules": tuple(pickler.modules),
            "shareable": not pickler.runs_user_code,
        }

    @property
    def is_pickled(self) -> bool:
        return self._pickled is not None

    def warm(self) -> None:
        """In the zygote: import what workers need, once for all."""
        for name in self._modules:
            with contextlib.suppress(Exception):  # a worker will say why, in its own words
                importlib.import_module(name)

    def keep_loaded(self) -> None:
        """In the zygote: load once for all workers, if they may share it."""
        if self._pickled is not None and self.shareable:
            self._job = self.load()
            self._pickled = None

    def as_pickled(self) -> Payload:
        """A payload that pickles as it is, for a worker that loads by itself."""
        copy = _Carried(None)
        copy._pickled = self._pickled
        return copy

    def load_if_here(self) -> Any:
        """The job if this process has it, None where each worker unpickles its own."""
        return self._job

    def load(self) -> Any:
        return self._job if self._pickled is None else ForkingPickler.loads(self._pickled)


class _Carried(Payload):
    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def unforkable(control: int) -> str:
    """What the imports of a spawned zygote opened or started that a fork cannot share; "" when there is nothing."""
    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    if threads:
        return f"started threads ({', '.join(threads[:3])})"
    for name in os.listdir("/proc/self/fd"):
        fd = int(name)
        if fd <= 2 or fd == control:
            continue
        try:
            target, mode = os.readlink(f"/proc/self/fd/{name}"), os.fstat(fd).st_mode
        except OSError:
            continue
        shared_memory = target.startswith(("/memfd:", "/dev/shm/")) or target.endswith("(deleted)")
        if (stat.S_ISREG(mode) and not shared_memory) or stat.S_ISSOCK(mode):
            return f"opened {target}"
    return ""


class _Noting(ForkingPickler):
    """Pickles as multiprocessing does, and notes which types take part."""

    def __init__(self, file: io.BytesIO, by_value: bool) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}
        self.runs_user_code = False
        self._seen: set[type] = set()
        self._by_value: Any = None
        if by_value or (not main_is_importable() and _is_written_as_it_runs()):
            import cloudpickle  # here alone: a zygote need not wait for it

            self._by_value = cloudpickle.Pickler(io.BytesIO())
            theirs = dict(cloudpickle.Pickler.dispatch_table)
            theirs.pop(io.TextIOWrapper, None)  # a copy of an open file is none
            self.dispatch_table = {**theirs, **self.dispatch_table}

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind not in self._seen or kind is type:
            self._seen.add(kind)
            named = obj if isinstance(obj, type) else kind
            self.modules.setdefault(named.__module__)
            self.runs_user_code = self.runs_user_code or runs_user_code(kind)
        if self._by_value is not None and isinstance(obj, (type, types.FunctionType)):
            return _known_there(self._by_value.reducer_override(obj), obj)
        return NotImplemented


def main_is_importable() -> bool:
    """Whether a spawned process will have our main module: multiprocessing imports it again by its name or file."""
    main = sys.modules.get("__main__")
    return getattr(getattr(main, "__spec__", None), "name", None) is not None or hasattr(main, "__file__")


def _is_written_as_it_runs() -> bool:
    """A notebook, a prompt or what was piped in. A program after `python -c` is a tool's, which imports the rest."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None or "-c" not in sys.orig_argv


def _known_there(reduced: Any, obj: Any) -> Any:
    """A class of `__main__` that is made anew in a worker is to be found there by its name: batches may be of it."""
    if isinstance(reduced, tuple) and isinstance(obj, type) and obj.__module__ == "__main__":
        return (_make_in_main, (reduced[0], *reduced[1]), *reduced[2:])
    return reduced


def _make_in_main(make: Any, *args: Any) -> Any:
    made, main = make(*args), sys.modules["__main__"]
    if made.__module__ == "__main__" and not hasattr(main, made.__qualname__):
        setattr(main, made.__qualname__, made)
    return made


def runs_user_code(kind: type, also: tuple[str, ...] = ()) -> bool:
    """Whether restoring an object of this type calls something that a user wrote; `also`: other methods that count."""
    if kind in copyreg.dispatch_table and not _is_plain(copyreg.dispatch_table[kind]):
        return True
    for hook in (*_HOOKS, *also):
        for owner in kind.__mro__:
            if hook in vars(owner):
                if not _is_plain(owner) and not _is_generated(vars(owner)[hook]):
                    return True
                break
    return False


def _is_plain(owner: Any) -> bool:
    return str(getattr(owner, "__module__", "")).partition(".")[0] in _PLAIN


def _is_generated(function: Any) -> bool:
    """Methods that namedtuple, dataclass and enum write into a user's class."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    module = str(getattr(function, "__module__", "")).partition(".")[0]
    return code is not None and (code.co_filename.startswith("<") or module in ("enum", "dataclasses", "collections"))
