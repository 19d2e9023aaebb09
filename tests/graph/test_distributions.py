"""Draws have the frequencies that they should have: chi-square over thousands of batches, with a fixed seed."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from graph.reference_sampling import ONE, PlainGraph, use_backend
from outlive.graph.sampling import compiled, keys
from outlive.graph.sampling.layers import LayerSampler
from outlive.graph.sampling.negatives import negative_edges
from outlive.graph.sampling.neighbors import NeighborSampler
from outlive.graph.sampling.walks import RandomWalkSampler

BACKEND = "c" if compiled.AVAILABLE else "numpy"  # they draw the same: one of them is enough
SEEDS = 3_000


def assert_distributed(seen: Iterable[Any], expected: dict[Any, float]) -> None:
    """Chi-square below what chance exceeds once in 10,000 times (by Wilson and Hilferty)."""
    counts = Counter(seen)
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, chance in expected.items() if chance > 0}
    assert math.isclose(sum(expected.values()), 1.0)
    parts = [(counts[outcome], total * chance) for outcome, chance in expected.items() if chance > 0]
    assert min(wanted for _, wanted in parts) > 5
    statistic = sum((count - wanted) ** 2 / wanted for count, wanted in parts)
    freedom = len(parts) - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, f"chi-square {statistic:.1f}, at most {limit:.1f}"


def star(weights: Sequence[float]) -> PlainGraph:
    """Edges 0, 1, … from nodes 1, 2, … into node 0."""
    size = len(weights)
    return PlainGraph({"": size + 1}).add(ONE, np.arange(1, size + 1), np.zeros(size), weights=np.array(weights))


def taken(sampler: NeighborSampler, graph: PlainGraph, count: int) -> list[tuple[int, ...]]:
    """What was taken in each of many neighbourhoods of node 0, in the order of the draws."""
    with use_backend(BACKEND):
        found = [
            sampler.sample(graph, np.zeros(SEEDS, np.int64), seed=7, batch=batch).edges[ONE].edge_ids.reshape(-1, count)
            for batch in range(3)
        ]
    return [tuple(row) for row in np.concatenate(found).tolist()]


def test_subsets_are_drawn_uniformly():
    """Each three of six edges are as likely as any other three."""
    seen = taken(NeighborSampler([3]), star([1.0] * 6), 3)

    subsets = list(itertools.combinations(range(6), 3))
    assert_distributed((tuple(sorted(row)) for row in seen), dict.fromkeys(subsets, 1 / len(subsets)))


def test_draws_with_replacement_are_independent():
    """All pairs of six, repeats included, are equally likely."""
    seen = taken(NeighborSampler([2], replace=True), star([1.0] * 6), 2)

    assert_distributed(seen, dict.fromkeys(itertools.product(range(6), repeat=2), 1 / 36))


def test_draws_with_replacement_follow_weights():
    """Each draw by itself, by weight."""
    weights = [1.0, 2.0, 0.0, 4.0, 0.5]
    total = sum(weights)
    seen = taken(NeighborSampler([2], replace=True, weights=True), star(weights), 2)

    pairs = itertools.product(range(5), repeat=2)
    assert_distributed(seen, {pair: weights[pair[0]] * weights[pair[1]] / total**2 for pair in pairs})


def test_draws_without_replacement_follow_weights():
    """One by weight, then one of the others by weight: in that order."""
    weights = [1.0, 2.0, 0.0, 4.0, 0.5]
    total = sum(weights)
    seen = taken(NeighborSampler([2], weights=True), star(weights), 2)

    pairs = itertools.permutations(range(5), 2)
    chances = {(a, b): weights[a] / total * weights[b] / (total - weights[a]) for a, b in pairs}
    assert_distributed(seen, chances)


def test_walks_step_uniformly():
    """Two steps from node 0, on a graph whose nodes have one, two and three edges into them."""
    graph = PlainGraph({"": 4}).add(ONE, [1, 2, 3, 0, 2, 3], [0, 0, 0, 1, 1, 2])
    with use_backend(BACKEND):
        walks = RandomWalkSampler(2, walks=SEEDS).trace(graph, [0], seed=1, batch=0)

    chances = {(0, 1, 0): 1 / 6, (0, 1, 2): 1 / 6, (0, 2, 3): 1 / 3, (0, 3, 3): 1 / 3}
    assert_distributed(map(tuple, walks.tolist()), chances)


@pytest.mark.parametrize("backend", ["numpy", *(["c"] if compiled.AVAILABLE else [])])
def test_walks_are_biased_as_in_node2vec(backend):
    """From 0 to 1, then: back to 0 with 1/p, to 2 (a neighbour of 0) with 1, to 3 (not one) with 1/q."""
    ends = [(0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0), (1, 3), (3, 1)]
    graph = PlainGraph({"": 4}).add(ONE, [source for source, _ in ends], [destination for _, destination in ends])
    with use_backend(backend):
        walks = RandomWalkSampler(2, walks=4 * SEEDS, p=4.0, q=0.5).trace(graph, [0], seed=1, batch=0)

    third = walks[walks[:, 1] == 1, 2].tolist()
    total = 1 / 4 + 1 + 2
    assert_distributed(third, {0: 1 / 4 / total, 2: 1 / total, 3: 2 / total})


def test_layers_follow_importance():
    """A source's importance is the sum of squares of its shares: here 1, 1/4, 1/4 + 1/9, 1/9, 1/9."""
    graph = PlainGraph({"": 8}).add(ONE, [3, 4, 5, 5, 6, 7], [0, 1, 1, 2, 2, 2])
    seen = [
        LayerSampler([1]).sample(graph, [0, 1, 2], seed=2, batch=batch).nodes[""][3:].tolist() for batch in range(3_000)
    ]

    importance = {3: 1.0, 4: 1 / 4, 5: 1 / 4 + 1 / 9, 6: 1 / 9, 7: 1 / 9}
    total = sum(importance.values())
    assert_distributed((node for row in seen for node in row), {k: v / total for k, v in importance.items()})


def test_negatives_are_uniform_over_what_is_no_edge():
    """Every pair that is no edge and no loop is equally likely."""
    edges = [(0, 1), (1, 2), (2, 3), (3, 0), (0, 2)]
    graph = PlainGraph({"": 4}).add(ONE, [source for source, _ in edges], [destination for _, destination in edges])
    pairs = negative_edges(graph, SEEDS, seed=3)

    others = set(itertools.permutations(range(4), 2)) - set(edges)
    assert_distributed(map(tuple, pairs.T.tolist()), dict.fromkeys(others, 1 / len(others)))


def test_exponential_variates_are_logarithms():
    """Our own logarithm, to a few units in the last place."""
    draws = keys.drawn(5, np.arange(100_000))
    draws[:4] = [0, 2**64 - 1, 2**63, 2**63 - 1]

    found = keys.exponential(draws)

    uniform = ((draws >> np.uint64(11)).astype(np.float64) + 1) * 2.0**-53
    np.testing.assert_allclose(found, -np.log(uniform), rtol=1e-14, atol=1e-300)
    assert (found >= 0).all()
