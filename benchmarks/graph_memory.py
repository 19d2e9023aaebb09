"""What a graph costs its workers under spawn, shared and pickled: memory, and seconds to the first batch.

Two million nodes with 128 floats each, thirty million edges, four spawned workers that sample [15, 10] around batches.
*Shared* is a `SharedGraph` and outlive's NeighborLoader; *pickled* is the same arrays in a dataset of stock torch's
loader, whose workers sample with the same sampler. Each run has a process of its own. *Copies*: the most PSS that all
processes had in an epoch of batches of 64, less that of the same on a graph a hundredth of the size, in its own sizes.
*First batch*: from making the loader, with the graph in memory already, to having the first batch of 1,024.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import psutil
import torch

from machine import write
from memory import pss_bytes
from outlive.graph import NeighborLoader, NeighborSampler, SharedGraph
from outlive.graph.topology import Topology

NODES, EDGES, COLUMNS = 2_000_000, 30_000_000, 128
FANOUTS = (15, 10)
BATCH, BATCHES = 1024, 8
LITTLE, MANY = 64, 400  # what is in flight is to be small beside the graph
SMALL = 0.01
QUIET_S = 1.0
ONLY = ("", "", "")


def build(share: float) -> SharedGraph:
    """Ends of edges are drawn towards the low numbers, so that degrees differ as they do in real graphs."""
    dice = np.random.default_rng(7)
    nodes, edges = int(NODES * share), int(EDGES * share)
    ends = (nodes * dice.random((2, edges), dtype=np.float32) ** 2).astype(np.int32)
    features = dice.random((nodes, COLUMNS), dtype=np.float32)
    return SharedGraph.from_edge_index(ends, nodes, node_features={"x": features})


class Plain:
    """The same graph in ordinary memory, as a user's dataset has it."""

    def __init__(self, graph: SharedGraph) -> None:
        parts = (None if part is None else np.array(part) for part in graph.topologies[ONLY])
        self.topologies = {ONLY: Topology(*parts)}  # type: ignore[arg-type]
        self.num_nodes = graph.num_nodes
        self.features = np.array(graph["x"])


class Batches(torch.utils.data.Dataset[Any]):
    """A sample is a whole batch."""

    def __init__(self, graph: Plain, seeds: Any, batch_size: int) -> None:
        self.graph, self.seeds, self.sampler = graph, seeds.reshape(-1, batch_size), NeighborSampler(FANOUTS)

    def __len__(self) -> int:
        return len(self.seeds)

    def __getitem__(self, number: int) -> Any:
        found = self.sampler.sample(self.graph, self.seeds[number], seed=0, batch=number)
        nodes, edges = found.nodes[""], found.edges[ONLY]
        return torch.from_numpy(self.graph.features[nodes]), torch.from_numpy(np.stack([edges.rows, edges.cols]))


def make_loader(graph: Any, batch_size: int, batches: int, workers: int) -> Any:
    seeds = np.random.default_rng(1).integers(0, graph.num_nodes[""], batch_size * batches)
    options: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "spawn"}
    if isinstance(graph, Plain):
        return torch.utils.data.DataLoader(Batches(graph, seeds, batch_size), batch_size=None, **options)
    return NeighborLoader(graph, NeighborSampler(FANOUTS), seeds, batch_size=batch_size, **options)


def held_mib(graph: Any, workers: int) -> float:
    """The most that was seen in an epoch of small batches, at moments when nobody reads a page for the first time.

    Else a page would be counted whole where it was looked up first, and in part where it was mapped since.
    """
    most = 0.0
    for number, _ in enumerate(make_loader(graph, LITTLE, MANY, workers)):
        if number % 100 == 99:
            time.sleep(QUIET_S)  # workers have made what they may make ahead
            family = [psutil.Process(), *psutil.Process().children(recursive=True)]
            most = max(most, sum(pss_bytes(process.pid) for process in family) / 2**20)
    return most


def first_batch_s(graph: Any, workers: int) -> float:
    begun = time.perf_counter()
    iterator = iter(make_loader(graph, BATCH, BATCHES, workers))
    next(iterator)
    return time.perf_counter() - begun


def run(what: str, way: str, share: float, workers: int) -> dict[str, float]:
    """One figure, in this process."""
    graph: Any = build(share)
    size = graph.nbytes / 2**20
    if way == "pickled":
        graph = Plain(graph)
    return {"value": (held_mib if what == "held" else first_batch_s)(graph, workers), "graph_mib": size}


def measure(share: float = 1.0, workers: int = 4, rounds: int = 3) -> dict[str, Any]:
    """The rows of benchmarks/graph.py: copies of the graph that all processes hold, and times to the first batch."""
    found: dict[str, Any] = {"workers": workers, "nodes": int(NODES * share), "edges": int(EDGES * share)}
    ways = ("shared", "pickled")
    for way in ways:
        small = _elsewhere("held", way, share * SMALL, workers)
        large = _elsewhere("held", way, share, workers)
        copies = (large["value"] - small["value"]) / large["graph_mib"]
        found[way] = {"copies": copies, "held_mib": large["value"], "held_of_small_mib": small["value"], "runs_s": []}
        found["graph_mib"] = large["graph_mib"]
    for _ in range(rounds):
        for way in ways:
            found[way]["runs_s"].append(_elsewhere("first", way, share, workers)["value"])
    for way in ways:
        found[way]["first_batch_s"] = statistics.median(found[way]["runs_s"])
    found["first_batch_ratio"] = found["pickled"]["first_batch_s"] / found["shared"]["first_batch_s"]
    return found


def _elsewhere(what: str, way: str, share: float, workers: int) -> dict[str, float]:
    words = ["--what", what, "--way", way, "--share", str(share), "--workers", str(workers)]
    said = subprocess.check_output([sys.executable, "-W", "ignore", __file__, *words], text=True)
    answer: dict[str, float] = json.loads(said)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=1.0, help="of the nodes and edges")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--what", choices=("held", "first"), help="one run in this process, as JSON")
    parser.add_argument("--way", choices=("shared", "pickled"), default="shared", help="which, for --what")
    options = parser.parse_args()
    if options.what:
        print(json.dumps(run(options.what, options.way, options.share, options.workers)))
        return
    found = measure(options.share, options.workers, options.rounds)
    for way in ("shared", "pickled"):
        print(f"{way}: {found[way]['copies']:.2f} copies, first batch after {found[way]['first_batch_s']:.1f} s")
    print(f"{found['first_batch_ratio']:.1f} times sooner; graph of {found['graph_mib']:.0f} MiB")
    print(write("graph_memory", {"workers": options.workers, "rounds": options.rounds, **found}))


if __name__ == "__main__":
    main()
