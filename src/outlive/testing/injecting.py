"""Plants the faults of a chaos run in the loaders of a program that knows nothing of it, and notes what comes of them.

Reads   OUTLIVE_CHAOS, which names a file of orders; the loaders that the program iterates over.
Writes  notes, a line each: epochs begun and ended, samples drawn and received, faults fired, workers that went on.
Never   changes what a program sees of its loaders: dataset and functions are exchanged only while an iterator is
        made of them. A loader without workers is left alone: its faults would be the program's own.

Works under outlive and under stock torch alike, for it sees only what both do: iterate.
"""

from __future__ import annotations

import json
import os
import sys
import time

from outlive.adoption import hook

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    from outlive.testing.faults import Fault

VARIABLE = "OUTLIVE_CHAOS"


def begin() -> None:
    """At the start of a Python under `outlive chaos`."""
    if os.environ.get(VARIABLE):
        hook.when_imported(_patch)


class Notes:
    """A file of lines of JSON that many processes write."""

    def __init__(self, path: str) -> None:
        self.path = path

    def add(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "t": time.monotonic(), **more}, separators=(",", ":"))
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return  # the chaos run is over, and its folder gone
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)


def plain_key(key: Any) -> Any:
    """A sample's name as JSON has it: a number; [worker, number] of a stream; or a text."""
    if type(key) is int:
        return key
    if hasattr(key, "ordinal"):
        return [key[0], key[1]]
    return repr(key)


def number_of(loader: str) -> int:
    """The how manyth of its process a loader is: «3», or in a rank «1.3»."""
    return int(loader.rpartition(".")[2])


# ---------------------------------------------------------------- in workers and in the trainer


class Observer:
    """What `Faulty` tells: in a worker of what fires, in the trainer of what arrives. Travels by its two names."""

    def __init__(self, notes: str, loader: str) -> None:
        self.notes, self.loader = Notes(notes), loader

    def __reduce__(self) -> Any:
        return Observer, (self.notes.path, self.loader)

    def fired(self, fault: Fault, key: Any, moment: str) -> None:
        pid = os.getpid()
        _going.discard((pid, self.loader))
        self.notes.add(
            "fired", fault=fault.name, key=plain_key(key), moment=moment, pid=pid, loader=self.loader, worker=_worker()
        )

    def went_on(self) -> None:
        """A worker fetches: told once in its life, and once more after each fault that it has survived itself."""
        pid = os.getpid()
        if (pid, self.loader) not in _going:
            _going.add((pid, self.loader))
            self.notes.add("went on", pid=pid, loader=self.loader, worker=_worker())

    def received(self, keys: list[Any]) -> None:
        self.notes.add("got", loader=self.loader, epoch=_epochs.get(self.loader, 0), keys=list(map(plain_key, keys)))


_going: set[tuple[int, str]] = set()
_epochs: dict[str, int] = {}  # of the trainer: which one runs


def _worker() -> int:
    from torch.utils.data import get_worker_info

    info = get_worker_info()
    return info.id if info is not None else -1


# ---------------------------------------------------------------- in the trainer


class Attended:
    """What is known of a loader: its number, its dataset with faults, its epochs."""

    def __init__(self, loader: Any, orders: dict[str, Any], number: str) -> None:
        from outlive.testing.faulty import Faulty

        self.number = number
        self.notes = Notes(orders["notes"])
        self.batched = loader.batch_sampler is not None
        self.faulty = Faulty(
            loader.dataset,
            _faults(orders, number),
            watch=Observer(self.notes.path, number),
            everywhere=_outages(orders, number),
        )
        hooks = self.faulty.hooks(loader.collate_fn, loader.worker_init_fn, batched=self.batched)
        self.shown = {"dataset": self.faulty, **hooks}
        self.is_stream = hasattr(self.faulty, "__iter__")

    def begin_epoch(self) -> None:
        _epochs[self.number] = _epochs.get(self.number, -1) + 1
        self.notes.add("begun", loader=self.number, epoch=_epochs[self.number])

    def note(self, what: str, **more: Any) -> None:
        self.notes.add(what, loader=self.number, epoch=_epochs.get(self.number, 0), **more)


def _faults(orders: dict[str, Any], number: str) -> dict[Any, Any]:
    """What is planted in this loader, by sample."""
    from outlive.testing.marks import Marks
    from outlive.testing.plan import from_dict

    if not orders["planned"]:
        return {}
    planned = from_dict({"fault": orders["planned"]}).faults
    found: dict[Any, list[Any]] = {}
    for place, key in orders["targets"].get(number, ()):
        marks = f"{orders['marks']}-{number}-{place}"
        with open(marks, "a"):
            pass
        named = tuple(key) if isinstance(key, list) else key
        found.setdefault(named, []).append(planned[place].make(Marks(path=marks)))
    return found


def _outages(orders: dict[str, Any], number: str) -> list[Any]:
    """Sources that fail for a while: every sample of this loader."""
    from outlive.testing.marks import Marks
    from outlive.testing.modifiers import Outage
    from outlive.testing.plan_words import exception_of

    return [
        Outage(exception_of(told["error"]), marks=Marks(path=told["marks"]))
        for told in orders["outages"]
        if not told["loaders"] or number_of(number) in told["loaders"]
    ]


class _Drawn:
    """A sampler whose draws are noted; in all else the program's own."""

    def __init__(self, sampler: Any, attended: Attended) -> None:
        self._sampler, self._attended = sampler, attended

    def __iter__(self) -> Iterator[Any]:
        return _Draws(iter(self._sampler), self._attended)

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        if name in ("_sampler", "_attended"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class _Draws:
    def __init__(self, draws: Any, attended: Attended) -> None:
        self._draws, self._attended = draws, attended

    def __iter__(self) -> _Draws:
        return self

    def __next__(self) -> Any:
        from outlive._forensics.ledger import key_of

        drawn = next(self._draws)
        attended = self._attended
        if not attended.is_stream:
            keys = list(drawn) if attended.batched else [drawn]
            attended.note("drawn", keys=[plain_key(key_of(key)) for key in keys])
        return drawn

    def __getattr__(self, name: str) -> Any:
        if name in ("_draws", "_attended"):
            raise AttributeError(name)
        return getattr(self._draws, name)


def _patch(module: Any) -> None:
    """torch's module of the DataLoader has just been imported."""
    import weakref

    try:
        with open(os.environ[VARIABLE], encoding="utf-8") as file:
            orders = json.load(file)
    except OSError:
        return  # the chaos run is over, and its folder gone
    if orders["networks"]:
        _attend_sockets(orders)
    known: weakref.WeakKeyDictionary[Any, Attended | None] = weakref.WeakKeyDictionary()
    numbers = 0
    their_iter = module.DataLoader.__iter__

    def attend(loader: Any) -> Attended | None:
        nonlocal numbers
        if loader in known:
            return known[loader]
        _attend_ours()
        rank = os.environ.get("RANK", "")
        number, numbers = f"{rank}{'.' if rank else ''}{numbers}", numbers + 1
        why = _reason_to_leave(loader)
        if why:
            Notes(orders["notes"]).add("left", loader=number, why=why)
        known[loader] = attended = None if why else Attended(loader, orders, number)
        return attended

    def __iter__(self: Any) -> Any:
        attended = attend(self)
        if attended is None or vars(self)["dataset"] is attended.faulty:
            return their_iter(self)
        shown = dict(attended.shown)
        drawer = "batch_sampler" if attended.batched else "sampler"
        shown[drawer] = _Drawn(getattr(self, drawer), attended)
        if attended.is_stream:
            del shown[drawer]  # it draws nothing
        attended.begin_epoch()
        before = {name: vars(self)[name] for name in shown}
        vars(self).update(shown)
        try:
            iterator = their_iter(self)
        finally:
            vars(self).update(before)
        vars(iterator)["_chaos"] = attended
        return iterator

    module.DataLoader.__iter__ = __iter__
    base = module._MultiProcessingDataLoaderIter
    base.__next__ = _telling(base.__next__)


def _attend_sockets(orders: dict[str, Any]) -> None:
    """Connections that workers open by Python's sockets are refused, or take longer, while a network is said to."""
    import errno
    import socket

    from outlive.testing.marks import Marks
    from outlive.testing.modifiers import Outage

    notes = Notes(orders["notes"])
    networks = [(Outage(marks=Marks(path=told["marks"])), told["delay"]) for told in orders["networks"]]

    def is_refused(connection: Any) -> bool:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        worker = _worker()
        for network, delay_s in networks if worker >= 0 else ():
            try:
                on = network.is_on()
            except RuntimeError:
                continue  # the chaos run is over, and its folder gone
            if on:
                notes.add("fired", fault="network", key="", moment="fetch", pid=os.getpid(), loader="", worker=worker)
                if delay_s is None:
                    return True
                time.sleep(delay_s)
        return False

    class_: Any = socket.socket
    connect, connect_ex = class_.connect, class_.connect_ex

    def our_connect(self: Any, address: Any) -> Any:
        if is_refused(self):
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused (injected)")
        return connect(self, address)

    def our_connect_ex(self: Any, address: Any) -> Any:
        return errno.ECONNREFUSED if is_refused(self) else connect_ex(self, address)

    class_.connect, class_.connect_ex = our_connect, our_connect_ex


def _reason_to_leave(loader: Any) -> str:
    from torch.utils.data import IterDataPipe, MapDataPipe

    if not loader.num_workers:
        return "it has no workers: a fault would be the program's own"
    if isinstance(loader.dataset, (IterDataPipe, MapDataPipe)):
        return "its dataset is a DataPipe"
    return ""


def _attend_ours() -> None:
    """outlive's iterator has a `__next__` of its own."""
    if not {"outlive.adoption.installing", "outlive.loader"} & sys.modules.keys():
        return
    from outlive.loader.iterator import SupervisedIterator

    if not hasattr(SupervisedIterator.__next__, "_tells"):
        SupervisedIterator.__next__ = _telling(SupervisedIterator.__next__)  # type: ignore[method-assign]


def _telling(theirs: Any) -> Any:
    def __next__(self: Any) -> Any:
        attended = vars(self).pop("_chaos", None)
        if attended is None:  # not ours, or we are inside of the same call
            return theirs(self)
        try:
            batch = theirs(self)
        except StopIteration:
            attended.note("ended")
            raise
        except Exception as error:
            attended.note("raised", error=f"{type(error).__name__}: {error}"[:500])
            raise
        finally:
            vars(self)["_chaos"] = attended
        attended.note("gave")
        return batch

    __next__._tells = True  # type: ignore[attr-defined]
    return __next__
