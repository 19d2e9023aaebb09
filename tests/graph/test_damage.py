"""Bad options, bad seeds and damaged arrays: refused with a reason, the same in C and NumPy, and never followed."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.reference_sampling import ONE, PlainGraph, use_backend
from outlive.graph.sampling import choice, compiled
from outlive.graph.sampling.layers import LayerSampler
from outlive.graph.sampling.negatives import negative_edges
from outlive.graph.sampling.neighbors import NeighborSampler
from outlive.graph.sampling.walks import RandomWalkSampler
from outlive.graph.topology import Topology

BACKENDS = ["numpy", *(["c"] if compiled.AVAILABLE else [])]
BUYS = ("user", "buys", "item")


def two_kinds() -> PlainGraph:
    return PlainGraph({"user": 4, "item": 3}).add(BUYS, [0, 1, 2, 3], [0, 0, 1, 2])


def ring(**arrays: Any) -> PlainGraph:
    """Five nodes, each with edges from the other four."""
    pairs = [(a, b) for b in range(5) for a in range(5) if a != b]
    graph = PlainGraph({"": 5}).add(
        ONE, [a for a, _ in pairs], [b for _, b in pairs], weights=np.ones(20), times=[0] * 20
    )
    graph.topologies[ONE] = graph.topologies[ONE]._replace(**arrays)
    return graph


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: NeighborSampler(5), "fanouts must be a list of whole numbers, one per hop, got 5"),
        (lambda: NeighborSampler("15"), "fanouts must be a list of whole numbers, one per hop, got '15'"),
        (lambda: NeighborSampler([1.5]), "fanouts must be whole numbers, one per hop, got 1.5"),
        (lambda: NeighborSampler([-2]), "fanouts must be from 0 on, or -1 for all neighbours, got -2"),
        (lambda: NeighborSampler({"buys": [1]}), r"need keys \(source, relation, destination\), all texts, got 'buys'"),
        (lambda: NeighborSampler({BUYS: [True]}), r"fanouts\[\('user', 'buys', 'item'\)\] must be whole numbers"),
        (lambda: NeighborSampler([1], temporal="first"), 'temporal must be None, "uniform" or "last", got \'first\''),
        (lambda: NeighborSampler([1], temporal="last", disjoint=False), "temporal sampling is disjoint"),
        (lambda: NeighborSampler([1], temporal="last", replace=True), "takes the most recent edges, each once"),
        (lambda: NeighborSampler([1], temporal="last", weights=True), "draws nothing, so weights have no meaning"),
        (lambda: NeighborSampler([1], weights="price"), "weights must be True or False .* got 'price'"),
        (lambda: RandomWalkSampler(-1), "length must be a whole number from 0 on, got -1"),
        (lambda: RandomWalkSampler(2, walks=0), "walks must be a whole number from 1 on, got 0"),
        (lambda: RandomWalkSampler(2, p=0), r"p must be from 0.01 to 100 \(1: no bias\), got 0"),
        (lambda: RandomWalkSampler(2, q=float("nan")), "q must be from 0.01 to 100"),
        (lambda: LayerSampler(3), "sizes must be a list of whole numbers, one per hop, got 3"),
        (lambda: LayerSampler([-1]), "sizes must be whole numbers from 0 on, one per hop, got -1"),
        (lambda: LayerSampler([1], weights="w"), "weights must be True or False"),
    ],
)
def test_an_option_is_refused_with_a_reason(make, words):
    """Before anything is sampled."""
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: _sample(two_kinds(), [0]), r"seeds of a graph with several kinds .* the kinds are 'user', 'item'"),
        (lambda: _sample(two_kinds(), ("shop", [0])), "no nodes of kind 'shop'; its kinds are 'user', 'item'"),
        (lambda: _sample(two_kinds(), ("item", [3])), "seed 3 is not a node of the graph: nodes of kind 'item'"),
        (lambda: _sample(ring(), [-1]), "seed -1 is not a node of the graph: nodes are numbered 0 to 4"),
        (lambda: _sample(ring(), [0.5]), r"seeds must be a list of whole numbers, got float64 of shape \(1,\)"),
        (lambda: _sample(ring(), [[1]]), r"seeds must be a list of whole numbers, got int64 of shape \(1, 1\)"),
        (lambda: _sample(ring(), [0], {BUYS: [1]}), r"edges of kind \('user', 'buys', 'item'\), which the graph does"),
        (lambda: _sample(ring(weights=None), [0], weights=True), "weights=True, but the graph's edges have no weights"),
        (lambda: _sample(two_kinds(), ("item", [0]), weights=True), r"edges of kind \('user'.* have no weights"),
        (lambda: _sample(ring(times=None), [0], temporal="last", times=[0]), "the graph's edges have no times"),
        (lambda: _sample(ring(), [0], temporal="last"), "temporal='last' needs seed_times, one per seed"),
        (lambda: _sample(ring(), [0], times=[1]), "seed_times were given, but the sampler is not temporal"),
        (lambda: _sample(ring(), [0], temporal="last", times=[1, 2]), "one whole number per seed, 1 in all, got int64"),
        (lambda: _sample(ring(), [0], temporal="last", times={"a": [1]}), "for the seeds' kinds '', got 'a'"),
        (
            lambda: RandomWalkSampler(1).trace(two_kinds(), ("item", [0]), seed=0, batch=0),
            "a random walk needs a graph",
        ),
        (lambda: LayerSampler([1]).sample(two_kinds(), ("item", [0]), seed=0, batch=0), "layer-wise sampling needs"),
        (
            lambda: LayerSampler([1], weights=True).sample(ring(weights=None), [0], seed=0, batch=0),
            "edges have no weights",
        ),
        (lambda: negative_edges(ring(), 1, seed=0, kind=BUYS), r"no edges of kind \('user', 'buys', 'item'\)"),
        (lambda: negative_edges(ring(), -1, seed=0), "count must be a whole number from 0 on, got -1"),
        (lambda: negative_edges(ring(), 3, seed=0), "nearly all pairs of nodes are edges .* given sources"),
        (lambda: negative_edges(ring(), 3, seed=0, sources=[2]), "node 2 has an edge to every node"),
        (lambda: negative_edges(PlainGraph({"": 0}).add(ONE, [], []), 1, seed=0), "has no nodes to pair"),
    ],
)
def test_a_question_is_refused_with_a_reason(ask, words):
    """Before an array is followed."""
    with pytest.raises(ValueError, match=words):
        ask()


def _sample(graph: PlainGraph, seeds: Any, fanouts: Any = (2,), times: Any = None, **options: Any) -> Any:
    return NeighborSampler(fanouts, **options).sample(graph, seeds, seed=0, batch=0, seed_times=times)


@pytest.mark.parametrize("seed", [1.5, "1", None, True])
def test_a_seed_is_a_whole_number(seed):
    """Or two runs would differ without a word."""
    with pytest.raises(TypeError, match="seed must be a whole number, got"):
        NeighborSampler([1]).sample(ring(), [0], seed=seed, batch=0)


def _ended_at(end: int) -> Any:
    indptr = np.arange(0, 21, 4)
    indptr[3] = end
    return {"indptr": indptr}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        (_ended_at(99), {}, "indptr of node 2 does not ascend within the graph's edges; the graph's file or memory"),
        (_ended_at(-5), {}, "indptr of node 2 does not ascend"),
        (_ended_at(7), {}, "indptr of node 2 does not ascend"),
        (
            {"indices": np.full(20, 5, np.int32)},
            {},
            r"edge \d+ \(sorted by destination\) comes from a node",
        ),
        ({"indices": np.full(20, -1, np.int64)}, {}, r"edge \d+ \(sorted by destination\) comes from a node"),
        ({"weights": np.full(20, -1.0)}, {"weights": True}, "the weight of edge 8 .* is negative or not finite"),
        ({"weights": np.full(20, np.nan, np.float32)}, {"weights": True}, "the weight of edge 8 .* is negative or not"),
        ({"weights": np.full(20, np.inf)}, {"weights": True}, "the weight of edge 8 .* is negative or not finite"),
        (
            {"weights": np.full(20, 1e308)},
            {"weights": True, "replace": True},
            "the weights of edges into node 2 sum to infinity; scale the weights down",
        ),
    ],
)
def test_damage_is_named_and_not_followed(backend, arrays, options, words):
    """Of a file that was cut or overwritten."""
    graph = ring(**arrays)
    with use_backend(backend), pytest.raises(ValueError, match=words):
        _sample(graph, [2], [3, -1], **options)


@pytest.mark.skipif(not compiled.AVAILABLE, reason="the C sampler is not built")
@settings(max_examples=300, deadline=None)
@given(
    words=st.lists(st.integers(-30, 30) | st.integers(-(2**63), 2**63 - 1), min_size=6, max_size=6),
    sources=st.lists(st.integers(-3, 8) | st.integers(-(2**63), 2**63 - 1), min_size=20, max_size=20),
    options=st.sampled_from(
        [{}, {"replace": True}, {"weights": True}, {"temporal": "uniform"}, {"temporal": "last"}, {"directed": False}]
    ),
)
def test_c_reads_nothing_outside_of_arrays_full_of_anything(words, sources, options):
    """It finds damage where NumPy finds it, and the same neighbourhood where there is none."""
    topology = Topology(np.array(words), np.array(sources), None, np.ones(20), np.zeros(20, np.int64))
    graph = PlainGraph({"": 5}, {ONE: topology})
    sampler = NeighborSampler([2, 40, -1], **options)
    times = [0, 0] if sampler.temporal else None
    walker = RandomWalkSampler(5, p=0.5)
    ends = []
    for backend in BACKENDS:
        ended: list[Any] = []
        with use_backend(backend):
            for ask in (
                lambda: sampler.sample(graph, [0, 3], seed=0, batch=0, seed_times=times).nodes[""].tolist(),
                lambda: walker.trace(graph, [0, 3], seed=0, batch=0).tolist(),
            ):
                try:
                    ended.append(ask())
                except ValueError as error:
                    ended.append("damaged" in str(error))
        ends.append(ended)

    assert ends[0] == ends[1]


@pytest.mark.skipif(not compiled.AVAILABLE, reason="the C sampler is not built")
@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"indptr": np.arange(0, 17, 4)}, "indptr of a topology must be a contiguous array of 6 int64, got int64"),
        ({"indptr": np.arange(0, 21, 4, np.int32)}, "indptr .* 6 int64, got int32"),
        ({"indices": np.zeros(20, np.float32)}, "indices .* of 20 int32 or int64, got float32"),
        ({"indices": np.zeros(40, np.int64)[::2]}, "indices of a topology must be a contiguous array"),
        ({"edge_ids": np.zeros(19, np.int64)}, "edge_ids .* of 20 int32 or int64"),
        ({"weights": np.zeros(20, np.int64)}, "weights .* of 20 float32 or float64"),
        ({"times": np.zeros(3, np.int64)}, "times .* of 20 int64"),
    ],
)
def test_c_refuses_arrays_that_it_would_misread(arrays, words):
    """Wrong types and lengths are a mistake of ours, not a crash of the user's."""
    graph = ring(**arrays)
    with use_backend("c"), pytest.raises(ValueError, match=words):
        _sample(graph, [2])


def test_the_choice_of_a_sampler_is_checked(monkeypatch):
    """A typo is no wish for the default."""
    monkeypatch.setenv(choice.VARIABLE, "cuda")
    with pytest.raises(ValueError, match='OUTLIVE_SAMPLER must be "c" or "numpy", got \'cuda\''):
        _sample(ring(), [0])

    monkeypatch.setenv(choice.VARIABLE, "c")
    monkeypatch.setattr(compiled, "AVAILABLE", False)
    with pytest.raises(RuntimeError, match="OUTLIVE_SAMPLER=c, but outlive was installed without its C sampler"):
        _sample(ring(), [0])


def test_numpy_serves_when_the_extension_is_missing():
    """As on a machine without a compiler."""
    program = (
        "import sys; sys.modules['outlive.graph.sampling._sampler'] = None\n"
        "import numpy as np\n"
        "from types import SimpleNamespace\n"
        "from outlive.graph.sampling import choice\n"
        "from outlive.graph.sampling.neighbors import NeighborSampler\n"
        "from outlive.graph.topology import Topology\n"
        "topology = Topology(np.array([0, 2, 2]), np.array([0, 1]), None)\n"
        "graph = SimpleNamespace(topologies={('', '', ''): topology}, num_nodes={'': 2})\n"
        "print(choice.use_c(), NeighborSampler([-1]).sample(graph, [0], seed=0, batch=0).nodes[''].tolist())\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert ended.stdout == "False [0, 1]\n", ended.stderr
