"""A dataset with faults planted in it.

Reads   the dataset, through which everything else goes: length, attributes, `__getitems__`, `state_dict`.
Writes  what the faults do, to the worker that fetches their samples.
Never   the random generators; never kills the process that made it.

Faults at «fetch» need nothing but the dataset. For those at «start», «collate» and «send» the loader must be made with
`**faulty.hooks()`, for a dataset does not see these moments:

    worker_init_fn → «start»     __getitem__ → «fetch», the sample in a `_Bearer` if more is to come
    collate_fn → «collate»       the batch in a `_Parcel`, whose pickling is → «send»; it arrives as the batch alone
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset, IterableDataset, default_collate, default_convert, get_worker_info

from outlive._forensics.ledger import StreamIndex, key_of
from outlive.testing.faults import MOMENTS, Fault

_OWN = frozenset({"_faulty_dataset", "_faulty_plan", "_faulty_home", "_faulty_hooked", "_faulty_watch"})


class Watch(Protocol):
    """Hears of faults that fire and samples that arrive; `outlive chaos` passes one in."""

    def fired(self, fault: Fault, key: Any, moment: str) -> None: ...
    def went_on(self) -> None: ...
    def received(self, keys: list[Any]) -> None: ...


class Faulty(Dataset[Any]):
    """A dataset with faults planted in it, map-style or iterable as the dataset is.

    faults  a mapping from samples to a fault, or to several: the index of a map-style dataset; of an iterable one the
            number of a sample in its worker's stream, from 0 in each, or (worker, number) for one worker. For faults
            at «start» the key is the number of the worker. Or a fault, or several, for every sample: with
            `Sometimes` for a share of them
    everywhere  faults for every sample, beside those of a mapping
    """

    def __new__(cls, dataset: Any = None, faults: Any = None, **more: Any) -> Faulty:
        if cls is not Faulty:
            return super().__new__(cls)
        if isinstance(dataset, Fault):
            raise TypeError("Faulty takes the dataset first: Faulty(dataset, {18: Segfault()})")
        if isinstance(dataset, IterableDataset):
            kind: type[Faulty] = SizedFaultyStream if hasattr(dataset, "__len__") else FaultyStream
        else:
            kind = SizedFaultyMap if hasattr(dataset, "__len__") else FaultyMap
        return kind.__new__(kind)

    def __init__(
        self, dataset: Any, faults: Any, *, watch: Watch | None = None, everywhere: Sequence[Fault] = ()
    ) -> None:
        vars(self).update(
            _faulty_dataset=dataset,
            _faulty_plan=PlantedFaults(faults, everywhere),
            _faulty_home=os.getpid(),
            _faulty_hooked=False,
            _faulty_watch=watch,
        )

    @property
    def original(self) -> Any:
        """The dataset without faults."""
        return vars(self)["_faulty_dataset"]

    def hooks(
        self,
        collate_fn: Callable[[Any], Any] | None = None,
        worker_init_fn: Callable[[int], None] | None = None,
        *,
        batched: bool = True,
    ) -> dict[str, Any]:
        """Arguments for the loader, by which faults at «start», «collate» and «send» fire.

        `collate_fn` and `worker_init_fn` are yours; `batched=False` goes with `batch_size=None`.
        """
        vars(self)["_faulty_hooked"] = True
        collate = collate_fn or (default_collate if batched else default_convert)
        return {"collate_fn": _Collate(self, collate, batched), "worker_init_fn": _Begin(self, worker_init_fn)}

    def __getattr__(self, name: str) -> Any:
        if name in _OWN or "_faulty_dataset" not in vars(self):
            raise AttributeError(name)  # while it is unpickled
        if name.startswith("__") and name.endswith("__") and name != "__getitems__":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        theirs = getattr(self.original, name)
        return self._faulty_many if name == "__getitems__" and theirs else theirs

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.original, name, value)

    def __getstate__(self) -> dict[str, Any]:
        return dict(vars(self))

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)

    def __repr__(self) -> str:
        return f"Faulty({self.original!r}, {vars(self)['_faulty_plan']})"

    # ------------------------------------------------------------ firing

    def _faulty_fire(self, key: Any, moment: str) -> list[Any]:
        """Fire the faults that are due, and return what they returned."""
        state = vars(self)
        results = []
        for fault in state["_faulty_plan"].at(key, moment):
            due = fault.due(" ".join(f"{moment} {key!r}".split()))
            if due is None:
                continue
            if due.plain.deadly and os.getpid() == state["_faulty_home"]:
                raise RuntimeError(f"{due!r} would end this process: use a loader with num_workers=1 or more")
            watch = state["_faulty_watch"]
            if watch is not None:
                watch.fired(due, key, moment)
            results.append(due())
        return results

    def _faulty_fetch(self, key: Any, fetch: Callable[[], Any]) -> Any:
        state = vars(self)
        if state["_faulty_watch"] is not None:
            state["_faulty_watch"].went_on()
        self._faulty_fire(key, "fetch")
        return self._faulty_borne(key, fetch())

    def _faulty_borne(self, key: Any, sample: Any) -> Any:
        """Return the sample, with its key where a later fault needs it."""
        state = vars(self)
        later = state["_faulty_plan"].has_later(key)
        if later and not state["_faulty_hooked"]:
            raise RuntimeError(
                f'a fault at "collate" or "send" is planted at sample {key!r}, and the loader would not reach it; '
                "use DataLoader(faulty, …, **faulty.hooks())"
            )
        if state["_faulty_hooked"] and (later or state["_faulty_watch"] is not None):
            return _Bearer(key, sample)
        return sample

    def _faulty_many(self, indices: Sequence[Any]) -> Any:
        """`__getitems__`, where the dataset has it."""
        keys = [key_of(index) for index in indices]
        state = vars(self)
        if state["_faulty_watch"] is not None:
            state["_faulty_watch"].went_on()
        for key in keys:
            self._faulty_fire(key, "fetch")
        samples = self.original.__getitems__(indices)
        if not hasattr(samples, "__len__") or len(samples) != len(keys):
            return samples
        return [self._faulty_borne(key, sample) for key, sample in zip(keys, samples, strict=True)]


class FaultyMap(Faulty):
    """A map-style dataset."""

    def __getitem__(self, index: Any) -> Any:
        return self._faulty_fetch(key_of(index), lambda: self.original[index])


class FaultyStream(Faulty, IterableDataset[Any]):
    """An iterable dataset."""

    def __iter__(self) -> Iterator[Any]:
        return _Stream(self, iter(self.original))


class SizedFaultyMap(FaultyMap):
    def __len__(self) -> int:
        return len(self.original)


class SizedFaultyStream(FaultyStream):
    def __len__(self) -> int:
        return len(self.original)


class _Stream:
    """An iterator that counts, and passes on what the iterator behind it can do (`skip`, `state_dict`)."""

    def __init__(self, faulty: FaultyStream, iterator: Any) -> None:
        info = get_worker_info()
        self._faulty, self._iterator = faulty, iterator
        self._worker = info.id if info is not None else 0
        self._taken = 0

    def __iter__(self) -> _Stream:
        return self

    def __next__(self) -> Any:
        # First the sample: a fault that only raises has then cost this one, and not put the next in its place.
        sample = next(self._iterator)
        number, self._taken = self._taken, self._taken + 1
        return self._faulty._faulty_fetch(StreamIndex(self._worker, number), lambda: sample)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        theirs = getattr(self._iterator, name)
        ours = {"skip": self._skip, "state_dict": self._state, "load_state_dict": self._load}
        return ours.get(name, theirs)

    def _skip(self, count: int) -> None:
        self._iterator.skip(count)
        self._taken += count

    def _state(self) -> Any:
        return {"taken": self._taken, "iterator": self._iterator.state_dict()}

    def _load(self, state: Any) -> None:
        self._taken = state["taken"]
        self._iterator.load_state_dict(state["iterator"])


# ---------------------------------------------------------------- moments that a dataset does not see


class _Bearer:
    """A sample on its way from `__getitem__` to collate_fn, with its key."""

    __slots__ = ("key", "sample")

    def __init__(self, key: Any, sample: Any) -> None:
        self.key, self.sample = key, sample


class _Collate:
    def __init__(self, faulty: Faulty, collate: Callable[[Any], Any], batched: bool) -> None:
        self._faulty, self._collate, self._batched = faulty, collate, batched

    def __call__(self, data: Any) -> Any:
        faulty = self._faulty
        samples = data if self._batched and isinstance(data, list) else [data]
        borne = [sample for sample in samples if isinstance(sample, _Bearer)]
        bare = [sample.sample if isinstance(sample, _Bearer) else sample for sample in samples]
        for one in borne:
            faulty._faulty_fire(one.key, "collate")
        batch = self._collate(bare if samples is data else bare[0])
        if not borne or get_worker_info() is None:
            return batch  # in the trainer's own process nothing is sent
        return _Parcel(faulty, [one.key for one in borne], batch)


class _Parcel:
    """A batch on its way to the trainer, where it arrives as if it had not been packed."""

    def __init__(self, faulty: Faulty, keys: list[Any], batch: Any) -> None:
        self._faulty, self._keys, self._batch = faulty, keys, batch

    def __reduce__(self) -> Any:
        results = [thing for key in self._keys for thing in self._faulty._faulty_fire(key, "send") if thing is not None]
        watch = vars(self._faulty)["_faulty_watch"]
        return _unpack, (self._batch, watch, self._keys if watch is not None else [], results)


def _unpack(batch: Any, watch: Watch | None, keys: list[Any], results: list[Any]) -> Any:
    if watch is not None:
        watch.received(keys)
    return batch


class _Begin:
    def __init__(self, faulty: Faulty, theirs: Callable[[int], None] | None) -> None:
        self._faulty, self._theirs = faulty, theirs

    def __call__(self, worker: int) -> None:
        self._faulty._faulty_fire(worker, "start")
        if self._theirs is not None:
            self._theirs(worker)


# ---------------------------------------------------------------- what is planted where


class PlantedFaults:
    """The faults of each sample."""

    def __init__(self, faults: Any, everywhere: Sequence[Fault] = ()) -> None:
        self._by_key: dict[Any, tuple[Fault, ...]] = {}
        self._everywhere = _checked(tuple(everywhere))
        if isinstance(faults, Mapping):
            self._by_key = {_plain_key(key): _checked(value) for key, value in faults.items()}
        else:
            self._everywhere += _checked(faults)
        self._moments = {moment: self._stands_at(moment) for moment in MOMENTS}

    def _stands_at(self, moment: str) -> bool:
        planted = (*self._everywhere, *(fault for faults in self._by_key.values() for fault in faults))
        return any(fault.moment == moment for fault in planted)

    def at(self, key: Any, moment: str) -> list[Fault]:
        if not self._moments[moment]:
            return []
        planted = self._everywhere + self._by_key.get(key, ())
        if type(key) is StreamIndex:  # a number alone means that of every worker
            planted += self._by_key.get(key.ordinal, ())
        elif type(key) is not int:
            planted += self._by_key.get(repr(key), ())  # as a plan names it
        return [fault for fault in planted if fault.moment == moment]

    def has_later(self, key: Any) -> bool:
        """Whether something may fire at this sample after it was fetched."""
        return bool(self.at(key, "collate") or self.at(key, "send"))

    def __str__(self) -> str:
        return str(self._by_key or list(self._everywhere))


def _plain_key(key: Any) -> Any:
    return tuple(key) if isinstance(key, tuple) else key_of(key)


def _checked(faults: Any) -> tuple[Fault, ...]:
    several = tuple(faults) if isinstance(faults, (list, tuple)) else (faults,)
    for fault in several:
        if not isinstance(fault, Fault):
            named = f"; write {fault.__name__}()" if isinstance(fault, type) and issubclass(fault, Fault) else ""
            raise TypeError(f"Faulty takes faults such as Segfault() or Once(Kill()), got {fault!r}{named}")
    return several
