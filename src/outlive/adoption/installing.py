"""Has every `torch.utils.data.DataLoader` of this program supervised, whatever library makes it.

Reads   OUTLIVE, OUTLIVE_… variables.
Writes  `__init__` of torch's two iterators, until it is uninstalled; `_get_iterator` of classes that need none of them.
Never   a loader's own attributes, or a loader whose class makes its iterator by itself: that is said once.

Whoever makes an iterator of torch's gets one of ours: it becomes of our class before it is initialised. So
it does not matter which subclass asks for it, or whether it is a `DataLoader` at all (fastai's is none).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from outlive.adoption import hook
from outlive.incident import Incident

log = logging.getLogger("outlive")


class Adoption:
    """Loaders that are supervised because of one `install()`."""

    def __init__(self, options: dict[str, Any] | None) -> None:
        self._options = options  # None: what the variables say, when a loader begins
        self._ledgers: list[tuple[Any, Any]] = []  # of each loader, as long as it lives or had incidents

    @property
    def incidents(self) -> tuple[Incident, ...]:
        """Everything that went wrong in these loaders, in order."""
        return tuple(sorted((i for _, ledger in self._ledgers for i in ledger.incidents), key=lambda i: i.when))

    @property
    def loader_count(self) -> int:
        """Supervised loaders that are still there, or had incidents."""
        return len(self._ledgers)

    def uninstall(self) -> None:
        """Leave loaders alone from now on; iterators that there are stay supervised."""
        _withdraw(self)

    @property
    def options(self) -> dict[str, Any]:
        """Those of `outlive.DataLoader` that count here."""
        if self._options is None:
            from outlive.adoption import options as texts

            self._options = texts.from_environment()
        return self._options

    def _view(self, loader: Any) -> Any:
        from outlive.adoption import iterators

        view = iterators.view_of(loader, self.options)
        if not any(ledger is view._ledger for _, ledger in self._ledgers):
            kept = [(alive, ledger) for alive, ledger in self._ledgers if alive() is not None or ledger.incidents]
            self._ledgers = [*kept, (weakref.ref(loader), view._ledger)]
        return view


active: list[Adoption] = []  # the last one counts
_restore: list[Callable[[], None]] = []
named_classes: set[str] = set()


def install(faults: Any = None, **options: Any) -> Adoption:
    """From now on, every iteration over a loader of torch's is supervised, as by `outlive.DataLoader(…, **options)`.

    Takes the options that `outlive.DataLoader` has beyond torch's; those that are not given come from the
    OUTLIVE_… variables. OUTLIVE=0 makes it do nothing. Returns the `Adoption`, which knows what happened.
    """
    from outlive.adoption import options as texts

    chosen = {**texts.from_environment(), **options}
    if faults is not None:
        chosen["faults"] = faults
    adoption = Adoption(chosen)
    if hook.is_off():
        return adoption
    _check(chosen)
    active.append(adoption)
    hook.when_imported(_patch)
    return adoption


def uninstall() -> None:
    """Undo the last `install()`; without one, nothing."""
    if active:
        _withdraw(active[-1])


@contextlib.contextmanager
def installed(faults: Any = None, **options: Any) -> Iterator[Adoption]:
    """`install` for the length of a block."""
    adoption = install(faults, **options)
    try:
        yield adoption
    finally:
        adoption.uninstall()


def install_from_environment() -> None:
    """Under `outlive run`: torch's module has just been imported. What variables say is read when a loader begins."""
    active.insert(0, Adoption(None))
    _patch(sys.modules[hook.LOADER_MODULE])


def _check(options: dict[str, Any]) -> None:
    """Complain now rather than at the first loader, without waiting for an import of torch."""
    from outlive import limits, settings

    known = {"faults", "describe", "on_incident", "worker_threads", "memory_limit", "memory_budget"}
    known |= {"recycle_after", "share_dataset", "quarantine"}
    for name in options:
        if name not in known:
            raise TypeError(f"install() takes no option {name!r}; it takes {', '.join(sorted(known))}")
    settings.fault_policy(options.get("faults", "raise"))
    settings.check_callable("describe", options.get("describe"))
    settings.check_listeners(options.get("on_incident", ()))
    settings.check_threads(options.get("worker_threads", 1))
    limits.limits_of(options.get("memory_limit"), options.get("recycle_after"))
    limits.budget_of(options.get("memory_budget"))
    if options.get("quarantine") is not None:
        from outlive.loader import quarantine_file

        quarantine_file.check(options["quarantine"])


def _withdraw(adoption: Adoption) -> None:
    with contextlib.suppress(ValueError):
        active.remove(adoption)
    if not active:
        hook.forget()
        while _restore:
            _restore.pop()()


# ---------------------------------------------------------------- torch's classes


def _patch(module: Any) -> None:
    if _restore:
        return
    _replace(module._MultiProcessingDataLoaderIter, "__init__", _with_workers)
    _replace(module._SingleProcessDataLoaderIter, "__init__", _without_workers)
    _attend_subclasses(module.DataLoader)


def _replace(owner: type, name: str, wrap: Callable[[type, Any], Any]) -> None:
    theirs = vars(owner)[name]
    ours = functools.wraps(theirs)(wrap(owner, theirs))
    setattr(owner, name, ours)

    def restore() -> None:
        if vars(owner).get(name) is ours:  # else somebody has wrapped it once more, and calls us: we pass it on
            setattr(owner, name, theirs)

    _restore.append(restore)


def _with_workers(owner: type, theirs: Any) -> Any:
    def __init__(self: Any, loader: Any) -> None:
        if not active:
            theirs(self, loader)
        elif type(self) is not owner:
            _leave(type(loader), f"{type(loader).__name__} makes its iterator, {type(self).__name__}, by itself")
            theirs(self, loader)
        elif not starts_processes(loader.multiprocessing_context):
            _leave(type(loader), f"{type(loader).__name__} starts its workers by itself")
            theirs(self, loader)
        else:
            from outlive.adoption import iterators

            active[-1]._view(loader)
            _become(self, iterators.AdoptedIterator, loader)

    return __init__


def _become(iterator: Any, kind: Any, loader: Any) -> None:
    """Before it is anything: have an iterator be of our class."""
    iterator.__class__ = kind
    iterator.__init__(loader)


def _without_workers(owner: type, theirs: Any) -> Any:
    def __init__(self: Any, loader: Any) -> None:
        if active and type(self) is owner and _deals_with_exceptions(loader):
            from outlive.adoption import iterators

            _become(self, iterators.AdoptedInlineIterator, loader)
        else:
            theirs(self, loader)

    return __init__


def _deals_with_exceptions(loader: Any) -> bool:
    """Whether there is something to be done where there are no workers. A policy that raises is torch's own way."""
    adoption = active[-1]
    if not adoption.options.keys() & {"faults", "quarantine"}:
        return False
    from outlive.adoption import iterators

    if iterators.is_ours(loader):
        return False
    view = adoption._view(loader)
    policy = view._policy
    return bool(policy.on_error != "raise" or policy.retry_on or view._ledger.quarantine.has_foreseen)


def starts_processes(context: Any) -> bool:
    """Whether workers are processes of Python's: MONAI's ThreadDataLoader has a context whose are threads."""
    home = getattr(context, "__name__", None) or type(context).__module__
    return context is None or home.partition(".")[0] == "multiprocessing" or home.startswith("torch.multiprocessing")


# ---------------------------------------------------------------- loaders that are left alone


def _attend_subclasses(owner: Any) -> None:
    """Classes that make their iterator without asking torch's: nobody would notice them otherwise."""
    waiting = owner.__subclasses__()
    while waiting:
        kind = waiting.pop()
        _attend(kind)
        waiting += kind.__subclasses__()

    def __init_subclass__(cls: Any, /, **options: Any) -> None:
        super(owner, cls).__init_subclass__(**options)
        if active:
            _attend(cls)

    owner.__init_subclass__ = classmethod(__init_subclass__)
    _restore.append(lambda: delattr(owner, "__init_subclass__"))


def _attend(kind: Any) -> None:
    make = vars(kind).get("_get_iterator")
    code = getattr(make, "__code__", None)
    if code is None or "_get_iterator" in code.co_names or kind.__module__.startswith("outlive."):
        return  # it has another's, and adds to it
    _replace(kind, "_get_iterator", _telling)


def _telling(owner: type, theirs: Any) -> Any:
    def _get_iterator(self: Any) -> Any:
        iterator = theirs(self)
        if active and self.num_workers and not hasattr(iterator, "usable"):
            _leave(type(self), f"{type(self).__name__} makes its iterator, {type(iterator).__name__}, by itself")
        return iterator

    return _get_iterator


def _leave(kind: type, why: str) -> None:
    """Say once of a class that it is left alone."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name not in named_classes:
        named_classes.add(name)
        log.warning("%s: its workers are not supervised. Use outlive.DataLoader in its place, if that is yours", why)
