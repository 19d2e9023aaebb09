"""The iterators of adopted loaders: ours, which look at the loader through a view.

Reads   a loader of torch's, or of a library's.
Writes  its view's ledger.
Never   makes another batch than the loader's own iterator would.
"""

from __future__ import annotations

import weakref
from typing import Any

from outlive.adoption import fastai
from outlive.adoption.views import View, Views
from outlive.loader.dataloader import DataLoader
from outlive.loader.inline import InlineIterator
from outlive.loader.iterator import SupervisedIterator

_views = Views()


def view_of(loader: Any, options: dict[str, Any] | None = None) -> Any:
    """The view of a loader, made with these options if there is none yet, or one with others."""
    return _views.of(loader, options, _made)


def _made(loader: Any, options: dict[str, Any]) -> View:
    view = fastai.view_of(loader, options) if fastai.is_one(loader) else None
    return view or View(loader, options)


class AdoptedIterator(SupervisedIterator):
    """The iterator of a loader with workers."""

    def __init__(self, loader: Any) -> None:
        view = view_of(loader)
        super().__init__(view)
        view._latest = weakref.ref(self)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter or self.usable:
            super()._reset(view_of(loader), first_iter)
        else:  # given up, shut down by a library, or interrupted: the loader keeps this object, which begins anew
            self._shutdown_workers()
            AdoptedIterator.__init__(self, loader)


class AdoptedInlineIterator(InlineIterator):
    """The iterator of a loader without workers, under a policy that deals with exceptions."""

    def __init__(self, loader: Any) -> None:
        super().__init__(view_of(loader))


def is_ours(loader: Any) -> bool:
    """Whether it is a loader of ours, which has options of its own."""
    return isinstance(loader, DataLoader)
