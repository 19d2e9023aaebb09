"""What belongs to one process only and must not live on in a fork of it.

Reads   nothing.
Writes  closes descriptors in the child, right after a fork.
Never   touches the parent's.

If somebody forks the trainer, the copy holds our sockets: workers would then not see the
trainer die. Whatever registers here is abandoned in the child before any other code runs.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Abandonable(Protocol):
    def abandon(self) -> None: ...


_owned: weakref.WeakSet[Abandonable] = weakref.WeakSet()


def own(thing: Abandonable) -> None:
    """Have `thing.abandon()` called in every child that this process forks."""
    _owned.add(thing)


def _abandon_all() -> None:
    for thing in list(_owned):
        thing.abandon()
    _owned.clear()


if hasattr(os, "register_at_fork"):  # where there is no fork, nothing is inherited by one
    os.register_at_fork(after_in_child=_abandon_all)
