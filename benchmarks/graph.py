"""Sampling a large graph: `graph.py [PART…]`. Each part measures one thing, and replaces its own results.

sampler  Neighbourhoods of 1,024 seeds in an R-MAT graph of 2 million nodes and 30 million edges, fanouts 15 and 10, one
         thread: in C, with NumPy, by PyG's compiled sampler where one can be imported (pyg-lib; it is not on PyPI), and
         by a dataset whose `__getitem__` samples around one seed in Python, as people write them for DGL.
options  The same in C and by PyG's, with other options: by weight, with replacement, disjoint.
gather   128 floats of each node that was found, copied from shared memory into one of eight cells, against memcpy of as
         many bytes that lie side by side.

Contenders take turns, each on one thread whose processor time is counted, not the clock: others may use the machine.
Ratios are of medians over all turns.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import machine
from outlive.graph.sampled import Sampled
from outlive.graph.sampling import choice, compiled
from outlive.graph.sampling.gathering import gather_rows
from outlive.graph.sampling.neighbors import NeighborSampler
from outlive.graph.topology import EdgeType, Topology

NODES, EDGES = 2_000_000, 30_000_000
FANOUTS = (15, 10)
BATCH = 1_024
FEATURES = 128
ROUNDS = 40
SLOW_EVERY = 8  # turns between those of the contender that takes seconds
CELLS = 8
ONE: EdgeType = ("", "", "")
NO_PEER = "none: pyg-lib cannot be imported here"
SKEW = (0.57, 0.19, 0.19)  # Graph500's, for the quarters of the adjacency matrix


@dataclass(frozen=True)
class Graph:
    """What samplers ask for."""

    topologies: dict[EdgeType, Topology]
    num_nodes: dict[str, int]


def rmat(nodes: int, edges: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Sources and destinations of a graph whose degrees are as skewed as those of real ones; numbers are shuffled."""
    generator = np.random.default_rng(seed)
    bits = (nodes - 1).bit_length()
    ends = np.zeros((2, edges), np.int32)
    for _ in range(bits):
        quarter = np.searchsorted(np.cumsum(SKEW), generator.random(edges, np.float32), side="right")
        ends[0] = ends[0] << 1 | (quarter >> 1)
        ends[1] = ends[1] << 1 | (quarter & 1)
    shuffled = (generator.permutation(1 << bits) % nodes).astype(np.int32)
    return shuffled[ends[0]], shuffled[ends[1]]


@functools.cache
def graph() -> Graph:
    sources, destinations = rmat(NODES, EDGES)
    order = np.lexsort((sources, destinations))
    indptr = np.zeros(NODES + 1, np.int64)
    np.cumsum(np.bincount(destinations, minlength=NODES), out=indptr[1:])
    weights = np.random.default_rng(1).random(EDGES, np.float32) + np.float32(0.01)
    return Graph({ONE: Topology(indptr, sources[order], order.astype(np.int32), weights)}, {"": NODES})


def seeds_of(turn: int) -> np.ndarray:
    """Of nodes that have neighbours: half of an R-MAT graph's have none, and cost nothing."""
    return np.random.default_rng(turn).choice(_connected(), BATCH, replace=False)


@functools.cache
def _connected() -> np.ndarray:
    return np.flatnonzero(np.diff(graph().topologies[ONE].indptr))


# ---------------------------------------------------------------- samplers


class PerSeed(torch.utils.data.Dataset[Any]):
    """A neighbourhood per seed, in Python; a batch is their union, numbered anew."""

    def __init__(self, seeds: Sequence[int]) -> None:
        topology = graph().topologies[ONE]
        self.seeds, self.indptr, self.indices = seeds, topology.indptr, topology.indices

    def __getitem__(self, index: int) -> list[tuple[int, int, int]]:
        edges = []
        frontier = [int(self.seeds[index])]
        for fanout in FANOUTS:
            met = []
            for node in frontier:
                start, end = int(self.indptr[node]), int(self.indptr[node + 1])
                places = range(start, end)
                for place in random.sample(places, fanout) if end - start > fanout else places:
                    source = int(self.indices[place])
                    edges.append((source, node, place))
                    met.append(source)
            frontier = list(dict.fromkeys(met))
        return edges

    def collate(self, parts: list[list[tuple[int, int, int]]]) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = {int(seed): number for number, seed in enumerate(self.seeds)}
        rows, cols, ids = [], [], []
        for part in parts:
            for source, destination, place in part:
                rows.append(numbers.setdefault(source, len(numbers)))
                cols.append(numbers.setdefault(destination, len(numbers)))
                ids.append(place)
        return torch.tensor(list(numbers)), torch.tensor([rows, cols, ids])


def _ours(backend: str, turn: int, seeds: np.ndarray, **options: Any) -> int:
    os.environ[choice.VARIABLE] = backend
    sampled: Sampled = NeighborSampler(FANOUTS, **options).sample(graph(), seeds, seed=0, batch=turn)
    return len(sampled.edges[ONE].rows)


def _per_seed(turn: int, seeds: np.ndarray) -> int:
    dataset = PerSeed(seeds)
    _, edges = dataset.collate([dataset[index] for index in range(len(seeds))])
    return edges.shape[1]


def _pyg_lib() -> tuple[str, Callable[..., int]]:
    """PyG's own, as its NeighborLoader calls it: whole numbers of 64 bits, with edge ids."""
    import pyg_lib

    topology = graph().topologies[ONE]
    indptr, indices = torch.from_numpy(topology.indptr), torch.from_numpy(topology.indices.astype(np.int64))

    assert topology.weights is not None
    edge_weights = torch.from_numpy(topology.weights)

    def sample(turn: int, seeds: np.ndarray, weights: bool = False, **options: Any) -> int:
        found = pyg_lib.sampler.neighbor_sample(
            indptr,
            indices,
            torch.from_numpy(seeds),
            list(FANOUTS),
            edge_weight=edge_weights if weights else None,
            csc=True,
            return_edge_id=True,
            **options,
        )
        return len(found[0])

    return f"pyg-lib {pyg_lib.__version__}", sample


def measure_sampler(rounds: int) -> dict[str, Any]:
    contenders: dict[str, Callable[[int, np.ndarray], int]] = {}
    if compiled.AVAILABLE:
        contenders["c"] = functools.partial(_ours, "c")
    contenders["numpy"] = functools.partial(_ours, "numpy")
    peer = NO_PEER
    try:
        peer, contenders["peer"] = _pyg_lib()
    except ImportError:
        pass  # said in the result
    contenders["per_seed"] = _per_seed
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    edges: dict[str, list[int]] = {name: [] for name in contenders}
    names = list(contenders)
    for turn in range(-2, rounds):  # two to warm up
        seeds = seeds_of(turn + 2)
        first = turn % len(names)
        for name in (*names, *names)[first : first + len(names)]:
            if name == "per_seed" and turn % SLOW_EVERY:
                continue
            begun = time.thread_time()
            count = contenders[name](turn + 2, seeds)
            if turn >= 0:
                seconds[name].append(time.thread_time() - begun)
                edges[name].append(count)
    del os.environ[choice.VARIABLE]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    best = next(iter(medians))
    result = {
        "nodes": NODES,
        "edges": EDGES,
        "fanouts": FANOUTS,
        "batch_size": BATCH,
        "rounds": rounds,
        "peer": peer,
        "ms_per_batch": {name: 1e3 * value for name, value in medians.items()},
        "edges_per_batch": {name: statistics.median(values) for name, values in edges.items()},
        "times_as_fast": {name: value / medians[best] for name, value in medians.items()},
        "seconds": seconds,
    }
    for name, value in medians.items():
        print(
            f"{name:10}{1e3 * value:10.2f} ms a batch of {statistics.median(edges[name]):,.0f} edges; "
            f"{best} is {value / medians[best]:.1f} times as fast"
        )
    print(f"peer: {peer}")
    return result


OPTIONS: dict[str, dict[str, Any]] = {
    "replace": {"replace": True},
    "weights": {"weights": True},
    "weights and replace": {"weights": True, "replace": True},
    "disjoint": {"disjoint": True},
}


def measure_options(rounds: int) -> dict[str, Any]:
    contenders: dict[str, Callable[..., int]] = {"c" if compiled.AVAILABLE else "numpy": functools.partial(_ours, "")}
    peer = NO_PEER
    try:
        peer, contenders["peer"] = _pyg_lib()
    except ImportError:
        pass  # said in the result
    result: dict[str, Any] = {"rounds": rounds, "peer": peer, "ms_per_batch": {}, "times_as_fast": {}}
    for title, options in OPTIONS.items():
        seconds: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(-1, rounds):
            seeds = seeds_of(turn + 1)
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                begun = time.thread_time()
                contenders[name](turn + 1, seeds, **options)
                if turn >= 0:
                    seconds[name].append(time.thread_time() - begun)
        medians = [statistics.median(values) for values in seconds.values()]
        result["ms_per_batch"][title] = {name: 1e3 * value for name, value in zip(seconds, medians)}
        result["times_as_fast"][title] = medians[-1] / medians[0]
        print(f"{title:20}" + ", ".join(f"{name} {1e3 * value:.2f} ms" for name, value in zip(seconds, medians)))
    del os.environ[choice.VARIABLE]
    return result


# ---------------------------------------------------------------- features


def _shared(rows: int) -> np.ndarray:
    """As a segment or a cell has it: pages of the usual size, already there."""
    memory = np.frombuffer(mmap.mmap(-1, 4 * rows * FEATURES), np.float32).reshape(rows, FEATURES)
    memory[:] = 1.0
    return memory


def measure_gather(rounds: int) -> dict[str, Any]:
    source = _shared(NODES)
    source[:, 0] = np.arange(NODES)
    found = [
        NeighborSampler(FANOUTS).sample(graph(), seeds_of(turn), seed=0, batch=turn).nodes[""] for turn in range(rounds)
    ]
    cells = [_shared(max(map(len, found))) for _ in range(CELLS)]
    generator = np.random.default_rng(0)
    rates: dict[str, list[float]] = {"c": [], "numpy": [], "memcpy": []}
    if not compiled.AVAILABLE:
        del rates["c"]
    names = list(rates)
    used = 0
    for turn in range(-2, rounds):
        nodes = found[turn % rounds]
        first = turn % len(names)
        for name in (*names, *names)[first : first + len(names)]:
            out = cells[used % CELLS][: len(nodes)]
            used += 1
            start = int(generator.integers(NODES - len(nodes)))
            if name == "memcpy":
                begun = time.thread_time()
                np.copyto(out, source[start : start + len(nodes)])
            else:
                os.environ[choice.VARIABLE] = name
                begun = time.thread_time()
                gather_rows(source, nodes, out)
            took = time.thread_time() - begun
            if turn >= 0:
                rates[name].append(out.nbytes / took / 1e9)
            assert out[-1, 0] == (start + len(nodes) - 1 if name == "memcpy" else nodes[-1])
    del os.environ[choice.VARIABLE]
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "row_bytes": 4 * FEATURES,
        "rows": statistics.median(map(len, found)),
        "rounds": rounds,
        "gb_per_s": medians,
        "share_of_memcpy": {name: value / medians["memcpy"] for name, value in medians.items()},
        "values": rates,
    }
    for name, value in medians.items():
        print(f"{name:10}{value:10.2f} GB/s, {value / medians['memcpy']:.0%} of memcpy")
    return result


PARTS: dict[str, Callable[[int], dict[str, Any]]] = {
    "sampler": measure_sampler,
    "options": measure_options,
    "gather": measure_gather,
}


def main(parts: Sequence[str], rounds: int = ROUNDS) -> None:
    unknown = set(parts) - set(PARTS)
    if unknown:
        sys.exit(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    path = machine.RESULTS / "graph.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result.pop("machine", None)
    for part in parts or PARTS:
        print(f"{part}:")
        result[part] = PARTS[part](rounds)
    print(f"written to {machine.write('graph', result)}")


if __name__ == "__main__":
    main(sys.argv[1:])
