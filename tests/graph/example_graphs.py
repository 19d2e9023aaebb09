"""Graphs, samplers and datasets that tests hand to loaders; in a module of their own, which spawned workers find.

Reads   nothing.
Writes  marks of faults that have struck, in folders that tests give.
Never   anything of the library's own samplers: these here are brute force, as a user may write them.
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from outlive.graph import Sampled, SampledEdges, SharedGraph

NODES = 240
EDGES = 3000
ONLY = ("", "", "")


def edges(nodes: int = NODES, count: int = EDGES, seed: int = 1) -> Any:
    return np.random.default_rng(seed).integers(0, nodes, (2, count))


def make_graph(columns: int = 8) -> SharedGraph:
    """Its features tell which node and which edge they are of."""
    return SharedGraph.from_edge_index(
        edges(),
        NODES,
        node_features={
            "x": np.repeat(np.arange(NODES, dtype=np.float32)[:, None], columns, 1),
            "y": np.arange(NODES) % 7,
        },
        edge_features={"edge_attr": np.arange(EDGES, dtype=np.float64)},
        weights=np.arange(1, EDGES + 1),
    )


def longs(values: Any) -> Any:
    return np.asarray(values, np.int64)


class HopSampler:
    """Brute force: some of the edges into each node that the hop before met; drawn by the seed it is told."""

    fanouts = (4, 3)

    def sample(self, graph: Any, seeds: Any, *, seed: int, batch: int) -> Sampled:
        dice = random.Random(f"{seed}/{batch}")
        return self.walk(graph, [int(node) for node in seeds], dice)

    def walk(self, graph: Any, nodes: list[int], dice: Any) -> Sampled:
        local = {node: place for place, node in reversed(list(enumerate(nodes)))}
        rows, cols, ids, per_hop, met = [], [], [], [], [len(nodes)]
        begin = 0
        for fanout in self.fanouts:
            end, before = len(nodes), len(ids)
            for place in range(begin, end):
                sources, numbers = graph.neighbors(nodes[place])
                for choice in dice.sample(range(len(sources)), min(fanout, len(sources))):
                    source = int(sources[choice])
                    if source not in local:
                        local[source] = len(nodes)
                        nodes.append(source)
                    rows.append(local[source])
                    cols.append(place)
                    ids.append(int(numbers[choice]))
            begin = end
            per_hop.append(len(ids) - before)
            met.append(len(nodes) - end)
        found = SampledEdges(longs(rows), longs(cols), longs(ids), tuple(per_hop))
        return Sampled({"": longs(nodes)}, {"": tuple(met)}, {ONLY: found})


class UserSampler(HopSampler):
    """As users write them: `sample(graph, seeds)`, and draws from whatever generators there are."""

    def sample(self, graph: Any, seeds: Any) -> Sampled:  # type: ignore[override]
        drawn = (random.random(), float(np.random.random()), float(torch.rand(())))
        return self.walk(graph, [int(node) for node in seeds], random.Random(str(drawn)))


def segfault() -> None:
    ctypes.string_at(0)


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


def fail() -> None:
    raise KeyError("no such neighbour")


def hang() -> None:
    threading.Event().wait()


def deadlock() -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


class Faulty(UserSampler):
    """Does to its process what is planned for a seed; with a mark, once."""

    def __init__(self, faults: dict[int, Any], mark: Path | None = None) -> None:
        self.faults = faults
        self.mark = mark

    def sample(self, graph: Any, seeds: Any) -> Sampled:
        for seed in seeds:
            fault = self.faults.get(int(seed))
            if fault is not None and not self.has_struck(int(seed)):
                fault()
        return super().sample(graph, seeds)

    def has_struck(self, seed: int) -> bool:
        if self.mark is None:
            return False
        path = self.mark / str(seed)
        struck = path.exists()
        path.touch()
        return struck


class SubgraphDataset(Dataset[Any]):
    """As people write them for DGL: a plain dataset, whose `__getitem__` takes a piece of the graph."""

    def __init__(self, graph: SharedGraph, faults: dict[int, Any]) -> None:
        self.graph = graph
        self.faults = faults

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index in self.faults:
            self.faults[index]()
        sources, numbers = self.graph.neighbors(index)
        found = self.graph.subgraph(np.unique([index, *sources]))
        return index, int(numbers.sum()), len(found.edges[ONLY].rows), float(self.graph["x"][sources].sum())


def as_lists(batch: Any) -> Any:
    """All that is in a batch, as plain values."""
    return [
        batch.seeds.tolist(),
        batch.input_ids.tolist(),
        {kind: ids.tolist() for kind, ids in batch.nodes.items()},
        batch.nodes_per_hop,
        {kind: (e.edge_index.tolist(), e.edge_ids.tolist(), e.per_hop) for kind, e in batch.edges.items()},
        {kind: {name: v.tolist() for name, v in found.items()} for kind, found in batch.node_features.items()},
        {kind: {name: v.tolist() for name, v in found.items()} for kind, found in batch.edge_features.items()},
        (batch.epoch, batch.number),
    ]
