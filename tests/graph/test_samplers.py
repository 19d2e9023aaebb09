"""Walks, layers, negatives and gathered rows: right for any graph, and the same in C and NumPy."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graph.reference_sampling import ONE, PlainGraph, assert_same, graphs, use_backend
from outlive.graph.sampling import compiled
from outlive.graph.sampling.gathering import gather_rows
from outlive.graph.sampling.layers import LayerSampler
from outlive.graph.sampling.negatives import negative_edges
from outlive.graph.sampling.walks import RandomWalkSampler

BACKENDS = ["numpy", *(["c"] if compiled.AVAILABLE else [])]


def edges_of(graph: PlainGraph, kind: tuple[str, str, str] = ONE) -> set[tuple[int, int]]:
    return {(edge.source, node) for node, column in enumerate(graph.into[kind]) for edge in column}


@settings(max_examples=100, deadline=None)
@given(
    graph=graphs(),
    starts=st.lists(st.integers(0, 11), max_size=5),
    length=st.integers(0, 4),
    bias=st.sampled_from([(1.0, 1.0), (0.25, 4.0), (3.0, 0.5)]),
)
def test_walks_follow_edges(graph, starts, length, bias):
    """Each step goes to the source of an edge; where there is none, the walk stays. C and NumPy walk the same."""
    assume(ONE in graph.topologies)
    seeds = np.array(starts, np.int64) % graph.num_nodes[""]
    sampler = RandomWalkSampler(length, walks=2, p=bias[0], q=bias[1])
    walks, samples = [], []
    for backend in BACKENDS:
        with use_backend(backend):
            walks.append(sampler.trace(graph, seeds, seed=1, batch=2))
            samples.append(sampler.sample(graph, seeds, seed=1, batch=2))

    edges = edges_of(graph)
    assert walks[0].shape == (2 * len(seeds), length + 1)
    assert walks[0][:, 0].tolist() == np.repeat(seeds, 2).tolist()
    for row in walks[0].tolist():
        for here, there in itertools.pairwise(row):
            assert (there, here) in edges or (there == here and not graph.into[ONE][here])
    met = {*seeds.tolist(), *walks[0].ravel().tolist()}
    nodes = samples[0].nodes[""].tolist()
    assert nodes[: len(seeds)] == seeds.tolist()
    assert sorted(set(nodes)) == sorted(met)
    assert len(nodes) == sum(samples[0].nodes_per_hop[""]) == len(seeds) + len(met - set(seeds.tolist()))
    between = sum((edge.source in met) for node in nodes for edge in graph.into[ONE][node])
    assert len(samples[0].edges[ONE].rows) == between
    assert walks[0].tolist() == walks[-1].tolist()
    assert_same(samples[0], samples[-1])


@settings(max_examples=100, deadline=None)
@given(
    graph=graphs(),
    starts=st.lists(st.integers(0, 11), max_size=5),
    sizes=st.lists(st.integers(0, 4), max_size=3),
    weights=st.sampled_from([None, True]),
)
def test_layers_take_n_nodes_and_every_edge_from_them(graph, starts, sizes, weights):
    """A hop adds at most its size, fewer only where no more are near, and all edges that lead from nodes met."""
    assume(ONE in graph.topologies)
    seeds = np.array(starts, np.int64) % graph.num_nodes[""]
    sampled = LayerSampler(sizes, weights=weights).sample(graph, seeds, seed=4, batch=1)

    nodes, edges = sampled.nodes[""].tolist(), sampled.edges[ONE]
    found = list(zip(edges.rows.tolist(), edges.cols.tolist(), edges.edge_ids.tolist()))
    begun, end, cursor = 0, len(seeds), 0
    assert nodes[:end] == seeds.tolist()
    for hop, size in enumerate(sizes):
        columns = [
            [edge for edge in graph.into[ONE][node] if edge.weight > 0 or not weights] for node in nodes[begun:end]
        ]
        near = {edge.source for column in columns for edge in column} - set(nodes[:end])
        added = sampled.nodes_per_hop[""][hop + 1]
        assert added == min(size, len(near))
        assert set(nodes[end : end + added]) <= near
        wanted = [
            (nodes.index(edge.source), begun + place, edge.id)
            for place, column in enumerate(columns)
            for edge in column
            if edge.source in nodes[: end + added]
        ]
        assert found[cursor : cursor + edges.per_hop[hop]] == wanted
        cursor += edges.per_hop[hop]
        begun, end = end, end + added
    assert cursor == len(found)
    assert end == len(nodes)


@settings(max_examples=100, deadline=None)
@given(graph=graphs(), count=st.integers(0, 20), loops=st.booleans(), data=st.data())
def test_negatives_are_no_edges(graph, count, loops, data):
    """Neither uniform ones nor those of given sources, in graphs where nearly every pair is an edge."""
    kind = data.draw(st.sampled_from(list(graph.topologies)))
    edges = edges_of(graph, kind)
    sources, destinations = graph.num_nodes[kind[0]], graph.num_nodes[kind[2]]
    allowed = {(a, b) for a in range(sources) for b in range(destinations) if loops or kind[0] != kind[2] or a != b}
    free = allowed - edges
    able = sorted({source for source, _ in free})
    if len(free) * 3 > sources * destinations:
        pairs = negative_edges(graph, count, seed=0, batch=5, kind=kind, loops=loops)
        assert pairs.shape == (2, count)
        assert set(map(tuple, pairs.T.tolist())) <= free
    given_ = data.draw(st.lists(st.sampled_from(able), max_size=4)) if able else []
    of_sources = negative_edges(graph, count, seed=0, batch=5, kind=kind, loops=loops, sources=given_)

    assert of_sources[0].tolist() == np.repeat(given_, count).tolist()
    assert set(map(tuple, of_sources.T.tolist())) <= free


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["u1", "f2", "f4", "f8", "c16", "S3", "i4,f8"])
@pytest.mark.parametrize("row", [(), (1,), (5,), (128,), (3, 7), (0,)])
def test_rows_are_gathered_of_any_type(backend, dtype, row):
    """Bit for bit what indexing gives, from read-only memory as well, and nothing beside it is touched."""
    generator = np.random.default_rng(0)
    size = np.dtype(dtype).itemsize
    source = generator.integers(256, size=(300, *row, size), dtype=np.uint8).view(dtype)[..., 0]
    source.flags.writeable = False
    index = generator.integers(300, size=200)
    room = np.zeros((202, *row), dtype)
    with use_backend(backend):
        out = gather_rows(source, index.astype(np.int32 if len(row) == 1 else np.int64), room[1:201])

    assert out.tobytes() == source[index].tobytes()
    assert room[:1].tobytes() + room[201:].tobytes() == bytes(room[:1].nbytes + room[201:].nbytes)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_gathered_when_they_are_not_contiguous(backend):
    """A slice of columns, or a target that is one."""
    source = np.arange(60.0).reshape(10, 6)
    room = np.zeros((3, 6))
    with use_backend(backend):
        gather_rows(source[:, ::2], np.array([9, 0, 9]), room[:, :3])

    assert room[:, :3].tolist() == source[[9, 0, 9], ::2].tolist()
    assert not room[:, 3:].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("index", "out", "words"),
    [
        (np.array([3]), np.zeros((1, 2)), "row 3 was asked for, of 3"),
        (np.array([0, -1]), np.zeros((2, 2)), "row -1 was asked for, of 3"),
        (np.array([0.0]), np.zeros((1, 2)), "index must be a list of whole numbers"),
        (np.array([0]), np.zeros((1, 3)), "out must be float64 of shape \\(1, 2\\), got float64 of shape \\(1, 3\\)"),
        (np.array([0]), np.zeros((1, 2), np.float32), "out must be float64"),
        (np.array([0]), np.broadcast_to(np.zeros(2), (1, 2)), "out is read-only"),
    ],
)
def test_rows_are_refused_with_a_reason(backend, index, out, words):
    """Nothing is read or written outside."""
    with use_backend(backend), pytest.raises((ValueError, IndexError), match=words):
        gather_rows(np.zeros((3, 2)), index, out)


def test_samplers_travel_to_workers():
    """Pickled, they are the same."""
    for sampler in (RandomWalkSampler(3, p=0.5), LayerSampler([3, 4], weights=True)):
        assert pickle.loads(pickle.dumps(sampler)) == sampler
