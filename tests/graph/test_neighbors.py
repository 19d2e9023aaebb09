"""Neighbourhoods are what a brute-force reference says, and the same in C and NumPy."""

from __future__ import annotations

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.reference_sampling import ONE, Expected, PlainGraph, assert_same, cases, use_backend
from outlive.graph.sampled import Sampled
from outlive.graph.sampling import compiled
from outlive.graph.sampling.neighbors import NeighborSampler

needs_c = pytest.mark.skipif(not compiled.AVAILABLE, reason="the C sampler is not built")
NUMBERS = st.integers(-(2**63), 2**63)


@settings(max_examples=250, deadline=None)
@given(case=cases(), seed=NUMBERS, batch=NUMBERS)
def test_a_neighbourhood_is_that_of_the_reference(case, seed, batch):
    """Every edge exists, as often as it may; nodes are numbered as they are met; times and kinds are kept apart."""
    graph, sampler, seeds, times = case
    directed = dataclasses.replace(sampler, directed=True)
    expected = Expected(graph, sampler, seeds, times)
    with use_backend("numpy"):
        found = directed.sample(graph, seeds, seed=seed, batch=batch, seed_times=times)
        between = sampler.sample(graph, seeds, seed=seed, batch=batch, seed_times=times)

    expected.check_hops(found)
    expected.check_nodes(found)
    if not sampler.directed:
        expected.check_induced(between, found)


@needs_c
@settings(max_examples=250, deadline=None)
@given(case=cases(), seed=NUMBERS, batch=NUMBERS)
def test_c_and_numpy_sample_the_same(case, seed, batch):
    """Whoever has no compiler trains on the same batches."""
    graph, sampler, seeds, times = case
    with use_backend("numpy"):
        plain = sampler.sample(graph, seeds, seed=seed, batch=batch, seed_times=times)
    with use_backend("c"):
        fast = sampler.sample(graph, seeds, seed=seed, batch=batch, seed_times=times)

    assert_same(plain, fast)


@needs_c
@pytest.mark.parametrize(
    ("weights", "replace", "temporal"),
    [
        (weights, replace, temporal)
        for weights in (None, True)
        for replace in (False, True)
        for temporal in (None, "uniform")
    ]
    + [(None, False, "last")],
)
def test_c_and_numpy_sample_the_same_when_columns_are_long(weights, replace, temporal):
    """Hubs, fanouts beyond what is scanned for repeats, and tables that grow on the way."""
    generator = np.random.default_rng(5)
    count, nodes = 60_000, 3_000
    graph = PlainGraph({"": nodes})
    graph.add(
        ONE,
        generator.integers(nodes, size=count),
        (nodes * generator.random(count) ** 4).astype(np.int64),  # a hub with thousands, and many with none
        weights=generator.random(count).astype(np.float32),
        times=generator.integers(100, size=count),
    )
    sampler = NeighborSampler([40, 100, 3], replace=replace, weights=weights, temporal=temporal)
    seeds = generator.integers(nodes, size=50)
    times = None if temporal is None else generator.integers(100, size=50)
    with use_backend("numpy"):
        plain = sampler.sample(graph, seeds, seed=3, batch=9, seed_times=times)
    with use_backend("c"):
        fast = [sampler.sample(graph, seeds, seed=3, batch=9, seed_times=times) for _ in range(3)]

    for sampled in fast:  # the second reuses the first one's table
        assert_same(plain, sampled)
    assert sum(plain.edges[ONE].per_hop) > 5_000


def test_batches_differ_and_come_again():
    """Draws are by (seed, batch), and by nothing else: a pickled sampler finds the same."""
    graph = PlainGraph({"": 50}).add(ONE, np.arange(50).repeat(50), np.tile(np.arange(50), 50))
    sampler = NeighborSampler([5, 5])

    def ids(seed: int, batch: int, its: NeighborSampler = sampler) -> list[int]:
        return its.sample(graph, np.arange(10), seed=seed, batch=batch).edges[ONE].edge_ids.tolist()

    assert ids(1, 2) == ids(1, 2, pickle.loads(pickle.dumps(sampler)))
    assert len({tuple(ids(seed, batch)) for seed in range(5) for batch in range(5)}) == 25


def test_threads_sample_beside_each_other():
    """C lets go of the GIL, and no thread numbers nodes in another's table."""
    generator = np.random.default_rng(2)
    graph = PlainGraph({"": 2_000}).add(
        ONE, generator.integers(2_000, size=20_000), generator.integers(2_000, size=20_000)
    )
    sampler = NeighborSampler([5, 5, 5])

    def sample(batch: int) -> Sampled:
        return sampler.sample(graph, np.arange(batch, batch + 100), seed=0, batch=batch)

    with ThreadPoolExecutor(4) as threads:
        beside = list(threads.map(sample, range(60)))

    for batch, sampled in enumerate(beside):
        assert_same(sampled, sample(batch))


def test_seeds_come_as_pairs_or_dicts_when_there_are_kinds():
    """One kind of seeds needs no dict."""
    kind = ("user", "buys", "item")
    graph = PlainGraph({"user": 4, "item": 3}).add(kind, [0, 1, 2, 3], [0, 0, 1, 2])

    pair = NeighborSampler([-1]).sample(graph, ("item", np.array([0, 2])), seed=0, batch=0)

    assert_same(pair, NeighborSampler([-1]).sample(graph, {"item": [0, 2]}, seed=0, batch=0))
    assert pair.nodes["user"].tolist() == [0, 1, 3]
    assert pair.nodes_per_hop == {"user": (0, 3), "item": (2, 0)}


@needs_c
def test_nodes_are_kept_apart_when_their_hashes_are_equal():
    """These two nodes, each with its seed, have the same slot and the same tag in C's smallest table."""
    graph = PlainGraph({"": 23_844}).add(ONE, [2_632, 23_843], [29, 12])
    with use_backend("c"):
        sampled = NeighborSampler([-1], disjoint=True).sample(graph, np.arange(64), seed=0, batch=0)

    assert sampled.nodes[""][64:].tolist() == [23_843, 2_632]
    assert sampled.edges[ONE].rows.tolist() == [64, 65]
