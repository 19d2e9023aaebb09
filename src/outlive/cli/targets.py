"""What a verb works on, named on the command line: «module:attribute» or «file.py:attribute».

Reads   the module or file, by importing it as `python -m` and `python file.py` would find it.
Writes  sys.path: the file's folder, or the current one, comes first, also in workers.
Never   a traceback for what a user can mend; standard output (what the module prints goes to standard error).

    target = targets.load("train.py:loader")      a loader, a dataset, or a function that makes one
    target.dataset, target.loader                 the loader is None where a dataset was named
"""

from __future__ import annotations

import atexit
import contextlib
import difflib
import importlib
import importlib.util
import logging
import os
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import click

WRONG_USAGE = 2
_NO_DATASETS = (str, bytes, bytearray, int, float, complex, type(None), ModuleType)
_NAMED_AT_MOST = 5


class TargetError(click.ClickException):
    """There is nothing of that name to work on."""

    exit_code = WRONG_USAGE


@dataclass(frozen=True)
class Target:
    name: str  # as it was written
    dataset: Any
    loader: Any = None  # a DataLoader, ours or torch's; None where a dataset was named


def load(name: str) -> Target:
    """What `name` means: imported, looked up, called if it is a function. TargetError says why it cannot be."""
    place, _, path = name.rpartition(":")
    if not place or not path:
        place = name.strip(":")
        raise TargetError(f"{name!r} names no attribute; write {place or 'module'}:dataset{_candidates(place)}")
    module = _module(place)
    with outputs_aside():
        value = _attribute(module, place, path)
        if _makes(value):
            value = _made(value, name)
    return target(name, value)


def target(name: str, value: Any) -> Target:
    """A value that is a loader or a dataset, told apart."""
    if is_loader(value):
        return Target(name, value.dataset, value)
    if not _is_dataset(value):
        raise TargetError(
            f"{name} is {_kind(value)}: neither a DataLoader nor a dataset (which has __getitem__ or __iter__), nor a"
            " function that returns one"
        )
    return Target(name, value)


def is_loader(value: Any) -> bool:
    """Whether it is a DataLoader: torch's, ours, or one that was made from them. Imports no torch for it."""
    torch_data = sys.modules.get("torch.utils.data")
    return torch_data is not None and isinstance(value, torch_data.DataLoader)


def _is_dataset(value: Any) -> bool:
    kind = type(value)  # of the class, as Python looks it up; an instance's __getattr__ may answer anything
    return not isinstance(value, _NO_DATASETS) and (hasattr(kind, "__getitem__") or hasattr(kind, "__iter__"))


def _makes(value: Any) -> bool:
    """Whether this is to be called: a function, a class, a partial; not a dataset that can be called, too."""
    return isinstance(value, type) or (callable(value) and not is_loader(value) and not _is_dataset(value))


def _made(maker: Any, name: str) -> Any:
    try:
        return maker()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script's SystemExit, too
        hint = ""
        if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
            kind = getattr(maker, "__name__", "Dataset")
            hint = f"; it is called without arguments: name a function that needs none (def make(): return {kind}(…))"
        raise TargetError(f"{name}() raised {_told(error)}{hint}") from None


def _module(place: str) -> ModuleType:
    if place.endswith(".py") or os.sep in place:
        return _from_file(place)
    # As `python -m` has it.
    _look_first_in(os.getcwd())
    try:
        with outputs_aside():
            return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name is not None and (place == error.name or place.startswith(f"{error.name}.")):
            file = f"{place.replace('.', os.sep)}.py"
            raise TargetError(
                f"there is no module {error.name!r} here or in sys.path; for a file, write {file}:…"
            ) from None
        raise TargetError(f"{place} cannot be imported: {_told(error)}") from None
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script's SystemExit, too
        raise TargetError(f"{place} cannot be imported: {_told(error)}") from None


def _from_file(place: str) -> ModuleType:
    file = os.path.abspath(place)
    if not os.path.isfile(file):
        raise TargetError(f"there is no file {place}")
    folder, stem = os.path.dirname(file), os.path.splitext(os.path.basename(file))[0]
    _look_first_in(folder)
    try:
        with outputs_aside():
            importlib.invalidate_caches()
            known = sys.modules.get(stem)
            found = known.__spec__ if known is not None else importlib.util.find_spec(stem) if "." not in stem else None
            if found is not None and found.origin is not None and os.path.abspath(found.origin) == file:
                return importlib.import_module(stem)  # by this name workers find it, too
            return _beside(stem.replace(".", "_"), file)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a script's SystemExit, too
        raise TargetError(f"{place} cannot be imported: {_told(error)}") from None


def _beside(stem: str, file: str) -> ModuleType:
    """A file whose name a module has that is not it («random.py»), or that no module can have."""
    name = f"_outlive_target_{stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None  # it has a suffix of Python's
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _attribute(module: ModuleType, place: str, path: str) -> Any:
    value: Any = module
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            near = _near(module, place, path) or _candidates_in(module, place)
            raise TargetError(f"{place} has no attribute {path!r}{near}") from None
        except Exception as error:
            raise TargetError(f"{place}:{path} cannot be read: {_told(error)}") from None
    return value


def _near(module: ModuleType, place: str, path: str) -> str:
    """What the module has of nearly the same name: data, and what may make it."""
    known = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (is_loader(value) or _is_dataset(value) or getattr(value, "__module__", None) == module.__name__)
    ]
    found = difflib.get_close_matches(path, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(f'{place}:{name}' for name in found)}?" if found else ""


def _candidates(place: str) -> str:
    try:
        return _candidates_in(_module(place), place)
    except TargetError:
        return ""


def _candidates_in(module: ModuleType, place: str) -> str:
    """What the module has that could have been meant."""
    named = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (is_loader(value) or (_is_dataset(value) and _looks_like_data(value)))
    ]
    if not named:
        return ""
    more = f" and {len(named) - _NAMED_AT_MOST} more" if len(named) > _NAMED_AT_MOST else ""
    return f"; it has {', '.join(f'{place}:{name}' for name in named[:_NAMED_AT_MOST])}{more}"


def _looks_like_data(value: Any) -> bool:
    """Not every list of a module is meant for training."""
    return not isinstance(value, (list, tuple, dict, set, frozenset, type))


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def _told(error: BaseException) -> str:
    """The exception in a line, with the place in the user's code where it came from."""
    text = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {text[0]}" if text else type(error).__name__
    theirs = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_machinery(frame.filename)]
    if not theirs:
        return said
    return f"{said} ({os.path.basename(theirs[-1].filename)}:{theirs[-1].lineno})"


def _is_machinery(file: str) -> bool:
    return file.startswith("<frozen ") or f"{os.sep}importlib{os.sep}" in file or file == __file__


def _look_first_in(folder: str) -> None:
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)


def hush(level: int = logging.ERROR) -> None:
    """Leave out of the log, until this command is over, what its answer tells."""
    log = logging.getLogger("outlive")
    before = log.level
    log.setLevel(level)
    click.get_current_context().call_on_close(lambda: log.setLevel(before))


@contextlib.contextmanager
def outputs_aside() -> Iterator[None]:
    """What user code prints, here or in processes that are started meanwhile, is not part of our answer: it goes to
    standard error.
    """
    with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as back:
        try:
            sys.__stdout__.flush()  # type: ignore[union-attr]
            kept = os.dup(1)
            back.callback(os.close, kept)
            os.dup2(2, 1)
            back.callback(os.dup2, kept, 1)
            back.callback(sys.__stdout__.flush)  # type: ignore[union-attr]
        except (OSError, ValueError, AttributeError):
            pass  # a stream that is closed, or none at all: then nobody reads it
        yield


class Answered(SystemExit):
    """The command has said all it had to say: what is left to do is to end."""


def leave(status: int) -> NoReturn:
    """End the command. The process ends with it where it is ours: see `end`."""
    raise Answered(status)


def end(answered: Answered) -> None:
    """End this process, with our answer as the last on standard output; also where the target's module has started a
    thread that never does.
    """
    others = [thread for thread in threading.enumerate() if thread is not threading.main_thread()]
    if any(not thread.daemon for thread in others):
        _end_output()
        os._exit(int(str(answered.code)))
    # After what the module has registered, and so before that runs.
    atexit.register(_end_output)


def _end_output() -> None:
    """From now on nothing is for whoever reads our answer."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(2, 1)
    except (OSError, ValueError, AttributeError):
        pass  # as above
    sys.stdout = sys.stderr
