"""Trains GraphSAGE on a graph of real data, under spawn, while its sampler kills and hangs workers: `graphsage.py`.

The graph: scikit-learn's 1,797 handwritten digits, each with edges from the eight that look most alike. A third of them
have a label to learn from; the accuracy is that of the others, at least 95 %. The sampler is a custom one, as people
write them, and it has three bugs: at one digit it reads address zero, at one it waits for a lock that it holds, and at
one it raises. Each costs its digit, and nothing else.

    python examples/graphsage.py
    OUTLIVE_SYSTEM=portable python examples/graphsage.py     as it runs on Windows and macOS
"""

from __future__ import annotations

import ctypes
import random
import threading
from typing import Any

import numpy as np
import torch
from torch import nn

from outlive import FaultPolicy
from outlive.graph import Batch, NeighborLoader, NeighborSampler, Sampled, SampledEdges, SharedGraph

FANOUTS = (6, 4)
CRASHES, HANGS, RAISES = 300, 600, 900
GOAL = 0.95


class BuggySampler:
    """Some of the edges into each node, in plain Python; a sampler of the user's own."""

    def sample(self, graph: SharedGraph, seeds: Any) -> Sampled:
        nodes = [int(node) for node in seeds]
        if CRASHES in nodes:
            ctypes.string_at(0)
        if HANGS in nodes:
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        if RAISES in nodes:
            raise ValueError(f"no neighbours for {RAISES}")
        local = {node: place for place, node in enumerate(nodes)}
        rows, cols, ids, edges_per_hop, nodes_per_hop = [], [], [], [], [len(nodes)]
        begin = 0
        for fanout in FANOUTS:
            end, before = len(nodes), len(ids)
            for place in range(begin, end):
                sources, numbers = graph.neighbors(nodes[place])
                for choice in random.sample(range(len(sources)), min(fanout, len(sources))):
                    source = int(sources[choice])
                    if source not in local:
                        local[source] = len(nodes)
                        nodes.append(source)
                    rows.append(local[source])
                    cols.append(place)
                    ids.append(int(numbers[choice]))
            edges_per_hop.append(len(ids) - before)
            nodes_per_hop.append(len(nodes) - end)
            begin = end
        edges = SampledEdges(*(np.array(part, np.int64) for part in (rows, cols, ids)), tuple(edges_per_hop))
        return Sampled({"": np.array(nodes, np.int64)}, {"": tuple(nodes_per_hop)}, {("", "", ""): edges})


class Sage(nn.Module):
    """One layer: what a node is, and the mean of what its neighbours are."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(inputs, outputs), nn.Linear(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor, edge_index: torch.Tensor) -> torch.Tensor:
        source, target = edge_index
        total = torch.zeros_like(x).index_add_(0, target, x[source])
        count = torch.zeros(len(x)).index_add_(0, target, torch.ones(len(target)))
        mixed: torch.Tensor = self.own(x) + self.others(total / count.clamp(min=1)[:, None])
        return mixed


class GraphSage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Sage(64, 64), Sage(64, 10)

    def forward(self, batch: Batch) -> torch.Tensor:
        hidden = torch.relu(self.first(batch["x"], batch.edge_index))
        answer: torch.Tensor = self.second(hidden, batch.edge_index)
        return answer[: batch.batch_size]


def digits() -> SharedGraph:
    from sklearn.datasets import load_digits  # here, for workers import this module and have no need of it
    from sklearn.neighbors import kneighbors_graph

    images, labels = load_digits(return_X_y=True)
    alike = kneighbors_graph(images, 8).tocoo()
    return SharedGraph.from_edge_index(
        (alike.col, alike.row),  # from the eight that look most alike, to the digit
        node_features={"x": (images / 16).astype(np.float32), "y": labels.astype(np.int64)},
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    graph = digits()
    known = np.arange(0, len(graph["y"]), 3)
    rest = np.setdiff1d(np.arange(len(graph["y"])), known)
    policy = FaultPolicy("skip", retries=0, sample_timeout=0.5)
    loader = NeighborLoader(
        graph,
        BuggySampler(),
        known,
        batch_size=8,
        shuffle=True,
        num_workers=2,
        faults=policy,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    model = GraphSage()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.004)
    for _ in range(4):
        seeds = 0
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seeds += batch.batch_size
    left_out = sorted(int(known[position]) for position in loader.quarantine)
    for incident in loader.quarantine.values():
        print(f"{incident.described[0]}: {incident.verdict.words}")
    print(f"{seeds} of {len(known)} seeds in the last epoch; left out: {left_out}")

    right = 0
    with torch.no_grad():
        for batch in NeighborLoader(graph, NeighborSampler(FANOUTS), rest, batch_size=256):
            right += int((model(batch).argmax(1) == batch.labels).sum())
    accuracy = right / len(rest)
    print(f"accuracy on {len(rest)} digits without a label: {accuracy:.3f}")
    assert left_out == [CRASHES, HANGS, RAISES]
    assert seeds == len(known) - 3
    assert accuracy >= GOAL


if __name__ == "__main__":
    main()
