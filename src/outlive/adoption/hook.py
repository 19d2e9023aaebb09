"""Waits for torch's DataLoader to be imported, and has it supervised from then on.

Reads   OUTLIVE; sys.modules.
Writes  sys.meta_path, until the import has come.
Never   imports torch, nor anything that Python has not imported by itself when it starts: every Python that a
        program under `outlive run` starts comes through here.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

LOADER_MODULE = "torch.utils.data.dataloader"
SWITCH = "OUTLIVE"
_OFF = ("0", "off", "no", "false")


def is_off() -> bool:
    """Whether OUTLIVE=0 says that nothing is to be supervised."""
    return os.environ.get(SWITCH, "").strip().lower() in _OFF


def begin() -> None:
    """At the start of a Python under `outlive run`."""
    if is_off():
        return
    from outlive._forensics import tally

    tally.begin()
    when_imported(_supervise)


def _supervise(module: Any) -> None:
    from outlive.adoption import installing

    installing.install_from_environment()


def when_imported(do: Callable[[Any], object]) -> None:
    """Do it with torch's module of the DataLoader: now, or as soon as somebody imports it."""
    module = sys.modules.get(LOADER_MODULE)
    if module is not None:
        do(module)
    else:
        sys.meta_path.insert(0, _Finder(do))


def forget() -> None:
    """Wait no longer."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]


class _Finder:
    """Finds one module, with the loader that would load it anyway, and is told when that is done."""

    def __init__(self, do: Callable[[Any], object]) -> None:
        self._do = do

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != LOADER_MODULE:
            return None
        for finder in list(sys.meta_path):
            if isinstance(finder, _Finder) or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(name, path, target)
            if spec is not None:
                self._attend(spec.loader)
                return spec
        return None

    def _attend(self, loader: Any) -> None:
        load = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module  # the class's own is back
            load(module)
            waiting = [finder for finder in sys.meta_path if isinstance(finder, _Finder)]
            forget()
            for finder in waiting:
                finder._do(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            pass  # a loader of a kind that cannot be attended: torch's loaders stay as they are
