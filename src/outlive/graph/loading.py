"""The NeighborLoader: outlive's own DataLoader, whose batches are neighbourhoods of a shared graph.

Reads   its arguments.
Writes  nothing by itself; its iterators do.
Never   copies the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import RandomSampler

from outlive._forensics.ledger import Ledger
from outlive.graph import checking
from outlive.graph.batch import Batch, Choice
from outlive.graph.checking import ONE_KIND
from outlive.graph.jobs import Neighborhoods, SamplingJob
from outlive.graph.shared import SharedGraph
from outlive.loader.dataloader import DataLoader
from outlive.loader.inline import InlineIterator
from outlive.loader.jobs import JobSettings, batch_seed
from outlive.loader.samples import MapJob
from outlive.loader.streams import StreamJob
from outlive.settings import FaultPolicy, FaultRule

_OURS = {
    "dataset": "the seeds are the dataset",
    "collate_fn": "the sampler makes batches",
    "share_dataset": "the graph is shared already",
}


class NeighborLoader(DataLoader[Batch]):
    """Batches of seeds with sampled neighbourhoods around them, made by workers that may die in any way.

    graph       a `SharedGraph`
    sampler     what samples around seeds: `NeighborSampler` and its kin, or any object with `sample(graph, seeds)`. Of
            what it returns a `Batch` is made if it is a `Sampled`; anything else is delivered as it is. If `sample`
            takes `seed`, `batch` or `seed_times`, it is told them; if not `seed`, then the generators of random, NumPy
            and torch are seeded by batch before
    seeds       node numbers; a mask of booleans; None: all nodes. Of a graph of several kinds: a kind, or (kind,
            numbers). Rows of two numbers are seed edges, for samplers that take these
    seed        with the epoch and the batch's number it decides everything random, whatever the number of workers
    seed_times  a time for each seed, for temporal sampling
    node_features, edge_features  names of what is gathered; None: all

    All other arguments are those of `outlive.DataLoader`. Its indices (`quarantine`, `incident.index`) are positions
    in `seeds`; messages and `incident.described` name the nodes.
    """

    def __init__(
        self,
        graph: SharedGraph,
        sampler: Any,
        seeds: Any = None,
        *,
        batch_size: int = 1,
        shuffle: bool | None = None,
        num_workers: int | Literal["auto"] = 0,
        faults: FaultRule | FaultPolicy = "raise",
        seed: int = 0,
        seed_times: Any = None,
        node_features: Iterable[str] | None = None,
        edge_features: Iterable[str] | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(graph, SharedGraph):
            raise TypeError(
                f"graph must be a SharedGraph, got {type(graph).__name__} "
                f"(make one: SharedGraph.from_edge_index, from_scipy, from_networkx, from_pyg, from_dgl)"
            )
        if not callable(getattr(sampler, "sample", None)):
            raise TypeError(f"sampler must have a method sample(graph, seeds), and {type(sampler).__name__} has none")
        for name in options.keys() & _OURS.keys():
            raise TypeError(f"NeighborLoader takes no {name}: {_OURS[name]} (for one of your own, outlive.DataLoader)")
        if batch_size is None:
            raise TypeError("batch_size must be a number: a batch is what is sampled around so many seeds, got None")
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise ValueError(f"seed must be a whole number from 0 and below 2**63, got {seed!r}")
        choice = Choice(
            _names(node_features, "node_features", graph.node_features),
            _names(edge_features, "edge_features", graph.edge_features),
        )
        kind, numbers, input_ids = seeds_of(graph, seeds)
        if seed_times is not None:
            seed_times = checking.edge_times(seed_times, len(numbers), "seed_times").astype(np.int64)
        around = Neighborhoods(graph, sampler, numbers, kind, input_ids, seed, choice, seed_times)
        options.setdefault("describe", around.describe)
        order = None
        if shuffle and all(options.get(name) is None for name in ("generator", "sampler", "batch_sampler")):
            order = options["sampler"] = Shuffled(around, seed)
        if options.get("generator") is None:
            options["generator"] = torch.Generator().manual_seed(seed)  # the trainer's own is left alone
        self.graph = graph
        self.seed = seed
        super().__init__(
            around,
            batch_size,
            shuffle if order is None else None,
            num_workers=num_workers,
            faults=faults,
            collate_fn=around.collate,
            **options,
        )
        if order is not None:
            order.ledger = self._ledger

    def _make_job(self, settings: JobSettings, stream: bool) -> MapJob | StreamJob:
        # An iterator makes its job before its first epoch is counted.
        return SamplingJob(settings, self._ledger.epoch + (0 if self.num_workers == 0 else 1))

    def _get_iterator(self) -> Any:
        return InlineIterator(self) if self.num_workers == 0 else super()._get_iterator()


class Shuffled(RandomSampler):
    """A random order that depends on the seed and the epoch alone; torch's depends on how workers are kept, too."""

    ledger: Ledger  # the loader's: it counts epochs

    def __init__(self, seeds: Neighborhoods, seed: int) -> None:
        super().__init__(seeds)
        self._seed = seed

    def __iter__(self) -> Iterator[int]:
        # Not before the first one is asked for: only then has the epoch begun.
        order = torch.Generator().manual_seed(batch_seed(self._seed, self.ledger.epoch, -2))
        yield from torch.randperm(self.num_samples, generator=order).tolist()


def _names(names: Iterable[str] | None, argument: str, there: dict[Any, dict[str, Any]]) -> tuple[str, ...] | None:
    if names is None:
        return None
    if isinstance(names, str):
        raise TypeError(f"{argument} must be a list of names, got the str {names!r} (write [{names!r}])")
    chosen = tuple(names)
    known = {name for arrays in there.values() for name in arrays}
    for name in chosen:
        if name not in known:
            raise ValueError(f"{argument} has {name!r}, and the graph has none of this name, but {sorted(known)}")
    return chosen


def seeds_of(graph: SharedGraph, seeds: Any) -> tuple[str, NDArray[Any], NDArray[Any] | None]:
    """Their kind, their numbers, and for a mask which nodes it chooses, as PyG numbers them."""
    kind = ONE_KIND
    if isinstance(seeds, str):
        kind, seeds = seeds, None
    elif isinstance(seeds, tuple) and len(seeds) == 2 and isinstance(seeds[0], str):
        kind, seeds = seeds
    if kind not in graph.num_nodes:
        kinds = list(graph.num_nodes)
        raise ValueError(
            f"seeds must say of which kind they are, such as seeds=({kinds[0]!r}, numbers): the graph has {kinds}"
            if kind == ONE_KIND
            else f"seeds are of the kind {kind!r}, and the graph has {kinds}"
        )
    count = graph.num_nodes[kind]
    if seeds is None:
        return kind, np.arange(count), None
    array = checking.as_array(seeds, "seeds")
    if array.dtype == bool:
        if array.shape != (count,):
            raise ValueError(f"seeds is a mask of shape {array.shape}, and there are {count} nodes")
        numbers = np.flatnonzero(array)
        return kind, numbers, numbers
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] != 2):
        raise ValueError(f"seeds must be a flat array of nodes, or rows of two for edges, got shape {array.shape}")
    if not array.size:
        array = array.astype(np.int64)
    if array.dtype.kind not in "iu":
        raise TypeError(f"seeds has dtype {array.dtype}, and node numbers are whole (if these are: .astype('int64'))")
    outside = np.flatnonzero(((array < 0) | (array >= count)).reshape(len(array), -1).any(1))
    if outside.size:
        at = int(outside[0])
        raise ValueError(f"seeds[{at}] is {array[at]}, and there are {count} nodes (0 … {count - 1})")
    return kind, array.astype(np.int64), None
