"""A loader that is not ours, as our iterators want to see it: everything of torch's from it, the rest from us.

Reads   the loader, whenever it is asked: what a library changes in it after it was made counts.
Writes  what it is given to keep: nothing into the loader, which is pickled, copied and compared as ever.
Never   keeps the loader alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from outlive.loader import quarantine_file
from outlive.loader.dataloader import DataLoader

# What every loader of torch's has, and an adopted one has itself; and what is a property of ours under that name.
_TORCHS = frozenset(vars(torch.utils.data.DataLoader(range(1)))) | {"quarantine"}  # type: ignore[arg-type]


class View:
    """Stands for an adopted loader; lives as long as that one, so that its ledger spans epochs."""

    def __init__(self, loader: Any, options: dict[str, Any]) -> None:
        # A loader of ours, over nothing, checks the options and has all that our iterators ask for.
        lendable = {name: value for name, value in options.items() if name != "quarantine"}
        lender: DataLoader[Any] = DataLoader(range(0), **lendable)  # type: ignore[arg-type]
        lent = {name: value for name, value in vars(lender).items() if name not in _TORCHS}
        lent |= {"_loader": weakref.ref(loader), "_options": options}
        vars(self).update(lent)
        files = options.get("quarantine")
        if files is not None:
            quarantine_file.obey_where_it_fits(files, self, self.checked)

    @property
    def checked(self) -> Any:
        """The dataset as `outlive check` would have seen it."""
        return self.dataset

    def __getattr__(self, name: str) -> Any:
        loader = vars(self)["_loader"]()
        try:
            return getattr(loader, name)
        except AttributeError:
            if name in _DEFAULTS:  # what newer versions of torch have, or a library's stand-in for a loader lacks
                return _DEFAULTS[name]
            lent = getattr(DataLoader, name, None)
            if lent is None or loader is None:
                raise
            return lent.__get__(self)


_DEFAULTS = {"in_order": True, "batch_size": None, "batch_sampler": None, "sampler": None}


class Views:
    """The views of the loaders that there are."""

    def __init__(self) -> None:
        self._views: dict[int, tuple[weakref.ref[Any], Any]] = {}

    def of(self, loader: Any, options: dict[str, Any] | None, make: Callable[[Any, dict[str, Any]], Any]) -> Any:
        """The view of a loader; `make` makes it if there is none with these options yet (None: with any)."""
        if isinstance(loader, View):
            return loader
        known = self._views.get(id(loader))
        if known is not None and known[0]() is loader and (options is None or known[1]._options is options):
            return known[1]
        view = make(loader, options or {})
        key = id(loader)
        self._views[key] = weakref.ref(loader, lambda gone: self._forget(key, gone)), view
        return view

    def _forget(self, key: int, gone: weakref.ref[Any]) -> None:
        if key in self._views and self._views[key][0] is gone:
            del self._views[key]
