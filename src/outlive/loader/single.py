"""num_workers=0 where exceptions are simply raised: torch's own iterator, which can also say where it is.

Reads   the dataset, through torch's fetcher.
Writes  the ledger's counts; what is published of the pass.
Never   changes what torch does with a batch.

Here random augmentation draws from the trainer's own generators. A position has them as they were at `state_dict()`,
and `iter()` sets them so: who restores his own random state of that moment finds the same.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader as torch_loader
from torch.utils.data._utils import pin_memory as torch_pin

from outlive.loader import drawing, here
from outlive.loader.jobs import is_stateful
from outlive.loader.resuming import Begun, Bookmark
from outlive.loader.streams import snapshot_of


class Passage:
    """A pass without workers, as far as its position goes: it outlives an iterator that was left in the middle."""

    def __init__(self, bookmark: Bookmark, loader: Any, told: dict[str, Any] | None) -> None:
        self.bookmark = bookmark
        self.begun: Begun = bookmark.begin(loader, self, told)
        self.taken = 0  # index lists that were drawn to be fetched
        self.finished = False
        self.iterator: Any = None  # the sampler's
        self.exhausted = False
        self.tell: Callable[[bool], dict[str, Any]] = lambda finished: {}
        self._planned: list[Any] = []

    def draw_from(self, loader: Any, made: Any, told: dict[str, Any] | None) -> Passage:
        """Take indices from a sampler's iterator that was just made, from where a position says it was."""
        self.iterator = drawing.iterator_of(loader, made, self.bookmark.resumed)
        if told is not None:
            if "base_seed" in told:  # with workers the seed is drawn before the pass begins; here it just was
                self.bookmark.set(loader, told)
            self.iterator = drawing.restore(loader, self.iterator, told["sampler"])
            self._planned = list(reversed(told.get("indices") or ()))  # drawn for workers, and not delivered
            self.taken = told.get("taken", told["sampler"]["drawn"] - len(self._planned))
        return self

    def __iter__(self) -> Passage:
        return self

    def __next__(self) -> Any:
        if self._planned:
            index = self._planned.pop()
        else:
            try:
                index = next(self.iterator)
            except StopIteration:
                self.exhausted = True
                raise
        self.taken += 1
        return index

    def end(self) -> None:
        if not self.finished:
            self.finished = True
            self.bookmark.ended(self)

    def position(self, given: bool = False) -> dict[str, Any]:
        if self.finished:
            return self.tell(True)
        parts = self.bookmark.parts
        drawn = self.taken + len(self._planned)
        return {
            **self.bookmark.middle(self.begun),
            **self.tell(False),
            "taken": self.taken,
            "indices": list(reversed(self._planned)),
            "sampler": drawing.tell(parts, self.iterator, drawn, self.exhausted),
        }

    def counts(self) -> Counter[str]:
        return Counter()


class Unprofiled(torch_loader._SingleProcessDataLoaderIter):
    """Does not tell a profiler that nobody runs: that takes longer than a small batch."""

    def __next__(self) -> Any:
        stream = self._dataset_kind == torch_loader._DatasetKind.Iterable
        if stream or self._sampler_iter is None or torch._C._autograd._profiler_enabled():
            return super().__next__()
        data = self._next_data()  # type: ignore[no-untyped-call]
        self._num_yielded += 1
        return data


class SingleIterator(Unprofiled):
    def __init__(self, loader: Any) -> None:
        self._bookmark: Bookmark = loader._bookmark
        resumed = self._bookmark.resumed or {}
        told = resumed.get("begun")
        dataset = (told or resumed).get("dataset") or {}
        if "dataset" in dataset:  # before the pass is begun as then: it may bring a random state of its own
            loader.dataset.load_state_dict(copy.deepcopy(dataset["dataset"]))
            self._bookmark.set(loader, told or resumed)
        self._passage = Passage(self._bookmark, loader, told)
        super().__init__(loader)
        self._profile_name = f"enumerate(DataLoader)#{torch_loader._SingleProcessDataLoaderIter.__name__}.__next__"
        self._sampler_iter = self._passage.draw_from(loader, self._sampler_iter, told)
        self._ledger = loader._ledger
        self._ledger.begin_epoch()
        fetcher: Any = self._dataset_fetcher
        stream: Any = getattr(fetcher, "dataset_iter", None)
        for name in ("itself", "iterator"):
            if name in dataset:
                stream.load_state_dict(copy.deepcopy(dataset[name]))
        if told is not None and stream is not None:
            if dataset:
                fetcher.ended = told["stream_ended"]
            else:
                for _ in range(self._passage.taken):
                    try:
                        fetcher.fetch(next(self._passage.iterator))
                    except StopIteration:
                        break
                    except Exception:
                        pass  # it failed the first time, too
        self._starts_over = told is None and bool(dataset)
        self._passage.tell = _teller(loader.dataset, fetcher, stream)
        one_by_one = stream is not None or not getattr(loader.dataset, "__getitems__", None)
        self._is_stream = stream is not None and self._auto_collation
        self._seen = here.attach(loader, self, batched=self._auto_collation, noted=one_by_one)
        self._seen.begin(self._passage.taken)

    def _next_data(self) -> Any:
        seen = self._seen
        told = seen.asked()
        try:
            index = next(self._sampler_iter)
            data = self._fetch(seen.takes(index) if told else index)
            if self._pin_memory:
                data = torch_pin.pin_memory(data, self._pin_memory_device)
        except StopIteration:
            seen.failed()
            self._passage.end()
            self._ledger.end_epoch()
            seen.end()
            raise
        except BaseException:
            seen.failed()
            raise
        self._bookmark.delivered(self._passage)
        self._ledger.delivered += 1
        samples = len(index) if self._auto_collation and hasattr(index, "__len__") else 1
        if self._is_stream and self._dataset_fetcher.ended:
            samples = here.samples_in(data, samples)
        if told:
            seen.gave(data, samples)
        else:
            seen.passed(data, samples)
        return data

    def _fetch(self, index: Any) -> Any:
        try:
            return self._dataset_fetcher.fetch(index)
        except StopIteration:
            # What a stream told at its end may bring it to its end: then this epoch begins like any other.
            if not self._starts_over or self._passage.taken > 1:
                raise
        fetcher: Any = self._dataset_fetcher
        fetcher.dataset_iter, fetcher.ended = iter(fetcher.dataset), False
        return fetcher.fetch(index)


def _teller(dataset: Any, fetcher: Any, stream: Any) -> Callable[[bool], dict[str, Any]]:
    """Says where a dataset in this process is. It holds the stream's iterator only where that can be asked."""
    if not (is_stateful(dataset) or is_stateful(stream)):
        return lambda finished: {}

    def tell(finished: bool) -> dict[str, Any]:
        told = copy.deepcopy(snapshot_of(dataset, stream))
        if finished:
            told.pop("iterator", None)  # the next epoch has another
            return {"dataset": told} if told else {}
        return {"dataset": told, "stream_ended": bool(getattr(fetcher, "ended", False))}

    return tell
