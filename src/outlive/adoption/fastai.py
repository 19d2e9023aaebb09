"""fastai's loader, which is not torch's: it hands torch's iterator a stand-in that pretends to be a stream of batches.

Reads   the stand-in, and the loader behind it.
Writes  nothing.
Never   imports fastai.

As a stream, one sample that kills its worker puts the rest of that worker's batches out of reach. But fastai draws all
indices before an epoch, and gives chunk i of them to worker i mod n: that is a map-style loader, whose
batches are the same bit for bit, and whose samples can be left out one by one.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import dataloader as torch_loader

from outlive.adoption.views import View

_MODULE = "fastai.data.load"
_CHUNKING = ("create_batches", "sample", "chunkify")  # how fastai makes chunks: a class may have its own way


def is_one(loader: Any) -> bool:
    return type(loader).__module__ == _MODULE and type(loader).__name__ == "_FakeLoader"


def view_of(stand_in: Any, options: dict[str, Any]) -> View | None:
    """A view as of a map-style loader; None where this loader is none, or has its own way of making batches."""
    loader = stand_in.d
    homes = {owner.__module__ for name in _CHUNKING for owner in type(loader).__mro__ if name in vars(owner)}
    replaced = any(name in vars(loader) for name in _CHUNKING)
    if replaced or homes != {_MODULE} or not loader.indexed or not loader.bs or loader.n is None:
        return None
    return _FastaiView(stand_in, options)


class _FastaiView(View):
    """Chunks of indices are drawn here, items and batches made by fastai's own methods."""

    _auto_collation = True
    _dataset_kind = torch_loader._DatasetKind.Map

    @property
    def dataset(self) -> _Items:
        return _Items(self.d)

    @property
    def checked(self) -> Any:
        return self.d.dataset

    @property
    def collate_fn(self) -> Any:
        return _Batches(self.d)

    @property
    def batch_size(self) -> int:
        return int(self.d.bs)

    @property
    def drop_last(self) -> bool:
        return bool(self.d.drop_last)

    @property
    def _index_sampler(self) -> list[list[Any]]:
        indices, size = list(self.d._DataLoader__idxs), self.batch_size
        chunks = [indices[at : at + size] for at in range(0, len(indices), size)]
        return chunks[:-1] if chunks and self.drop_last and len(chunks[-1]) < size else chunks


class _Items:
    """What fastai calls items, by index."""

    def __init__(self, loader: Any) -> None:
        self.d = loader  # as fastai's worker_init_fn expects it

    def __len__(self) -> int:
        return int(self.d.n)

    def __getitem__(self, index: Any) -> Any:
        return self.d.do_item(index)


class _Batches:
    def __init__(self, loader: Any) -> None:
        self.d = loader

    def __call__(self, items: list[Any]) -> Any:
        # None: fastai's SkipItemException.
        return self.d.do_batch([item for item in items if item is not None])
