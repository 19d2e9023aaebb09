"""A shared graph is what was given, sorted, whichever way it is built, saved or sent; bad input is refused in words."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import pickle
import subprocess
import sys
from typing import Any

import networkx
import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graph.example_graphs import ONLY, edges, make_graph
from outlive._system import choice
from outlive.graph import SharedGraph, building

METHODS = ("spawn",) if choice.PORTABLE else ("fork", "spawn", "forkserver")
INTEGERS = (np.int8, np.uint8, np.int32, np.int64, np.uint64)


@st.composite
def edge_lists(draw: Any) -> Any:
    nodes = draw(st.integers(1, 60))
    count = draw(st.integers(0, 200))
    ends = draw(st.lists(st.integers(0, nodes - 1), min_size=2 * count, max_size=2 * count))
    listed = np.array(ends, draw(st.sampled_from(INTEGERS))).reshape(2, count)
    if draw(st.booleans()):
        listed = listed[:, np.lexsort(listed)]  # as it will lie
    return nodes, listed


@pytest.fixture
def in_small_pieces(monkeypatch):
    """So that small graphs take the way of large ones: several chunks, several ranges, two threads."""
    monkeypatch.setattr(building, "CHUNK", 7)
    monkeypatch.setattr(building, "EDGES_PER_RANGE", 3)
    monkeypatch.setattr(building, "COPIED_BYTES", 64)


@pytest.mark.usefixtures("in_small_pieces")
@settings(max_examples=150, deadline=None, suppress_health_check=["function_scoped_fixture"])
@given(edge_lists(), st.sampled_from([1, 2]))
def test_edges_lie_sorted_by_destination_then_source(listed, threads):
    """With weights, times and features of each; those into one node from one source in the order given."""
    nodes, ends = listed
    count = ends.shape[1]
    weights, times = np.arange(count) / 2, np.arange(count) - 3
    graph = SharedGraph.from_edge_index(
        ends,
        nodes,
        weights=weights,
        times=times,
        edge_features={"a": weights[:, None]},
        node_features={"x": np.arange(nodes)},
        threads=threads,
    )

    order = np.lexsort((np.arange(count), ends[0], ends[1]))
    found = graph.topologies[ONLY]
    degrees = np.bincount(ends[1].astype(np.int64), minlength=nodes)
    assert found.indptr.tolist() == [0, *np.cumsum(degrees)]
    assert found.indices.tolist() == ends[0][order].tolist()
    assert (np.arange(count) if found.edge_ids is None else found.edge_ids).tolist() == order.tolist()
    assert (found.edge_ids is None) == (order.tolist() == list(range(count)))
    assert found.weights.tolist() == weights[order].tolist()
    assert found.times.tolist() == times[order].tolist()
    assert graph.edge_features[ONLY]["a"].tolist() == weights[:, None].tolist()
    assert graph["x"].tolist() == list(range(nodes))


def test_many_ranges_of_destinations_are_sorted_side_by_side():
    """At its real sizes: more edges than one range has, and several chunks of them."""
    nodes, count = 5000, 2_200_000
    ends = edges(nodes, count).astype(np.int32)
    graph = SharedGraph.from_edge_index(torch.from_numpy(ends), threads=2)

    order = np.lexsort((ends[0], ends[1]))
    found = graph.topologies[ONLY]
    assert graph.num_nodes == {"": nodes}
    assert np.array_equal(found.edge_ids, order)
    assert np.array_equal(found.indices, ends[0][order])
    assert np.array_equal(np.diff(found.indptr), np.bincount(ends[1], minlength=nodes))


def test_a_graph_has_kinds_of_nodes_and_edges_when_it_is_given_by_kind():
    """Numbers of nodes are as said, as there are features, or as the edges need; all else is by kind."""
    graph = SharedGraph.from_edge_index(
        {("user", "buys", "item"): [[0, 1, 1], [2, 0, 4]], ("item", "like", "item"): np.zeros((2, 0), int)},
        {"user": 9},
        node_features={"item": {"x": np.ones((6, 2))}},
        edge_features={("user", "buys", "item"): {"price": [1.0, 2.0, 3.0]}},
        times={("user", "buys", "item"): [5, 6, 7]},
    )

    assert graph.num_nodes == {"user": 9, "item": 6}
    assert graph.num_edges == {("user", "buys", "item"): 3, ("item", "like", "item"): 0}
    assert graph.topologies["user", "buys", "item"].times.tolist() == [6, 5, 7]
    assert graph.topologies["user", "buys", "item"].weights is None
    assert graph.neighbors(4, ("user", "buys", "item"))[1].tolist() == [2]
    assert graph.is_heterogeneous
    assert "9 user" in repr(graph)
    with pytest.raises(TypeError, match=r"graph.node_features\[kind\]\['x'\]"):
        graph["x"]


RING = [[0, 1, 2], [1, 2, 0]]
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"edge_index": np.array(RING, float)}, TypeError, r"edge_index has dtype float64, and node numbers are whole"),
    (
        {"edge_index": np.zeros((3, 2), int)},
        ValueError,
        r"must have shape \(2, number of edges\), got \(3, 2\) \(it seems",
    ),
    ({"edge_index": np.zeros(4, int)}, ValueError, r"must have shape \(2, number of edges\), got \(4,\)$"),
    ({"edge_index": ([0, 1], [1])}, ValueError, r"sources of shape \(2,\) and targets of shape \(1,\)"),
    ({"edge_index": [["a"], ["b"]]}, TypeError, r"edge_index\[0\] has dtype <U1"),
    (
        {"num_nodes": 2},
        ValueError,
        r"edge 1 is 1 → 2, and its target is none of the 2 nodes .* num_nodes to at least 3",
    ),
    ({"edge_index": [[0, -1], [1, 1]]}, ValueError, r"edge 1 is -1 → 1, and its source .* numbered from 0"),
    ({"num_nodes": -1}, ValueError, "num_nodes must be a whole number from 0, got -1"),
    ({"num_nodes": {"": 3}}, TypeError, "num_nodes is a dict, and edge_index is not"),
    ({"node_features": {"x": np.ones((2, 4))}}, ValueError, r"edge 1 is 1 → 2, and its target is none of the 2 nodes"),
    ({"num_nodes": 4, "node_features": {"x": [1, 2, 3]}}, ValueError, r"node_features\['x'\] has 3 rows for 4 nodes"),
    ({"node_features": {"x": 5}}, ValueError, r"has no rows, it is a single number for 3 nodes"),
    ({"node_features": [1, 2, 3]}, TypeError, r"node_features must be a dict of names and arrays"),
    ({"node_features": {"x": ["a", "b", "c"]}}, TypeError, r"a graph holds numbers and booleans"),
    ({"node_features": {"x": torch.ones(3, dtype=torch.bfloat16)}}, TypeError, r"tensor of torch.bfloat16"),
    ({"node_features": {3: [1, 2, 3]}}, TypeError, r"a name in node_features must be a str"),
    ({"node_features": {"a": {"x": [1]}}}, TypeError, r"node_features is a dict of dicts"),
    ({"edge_features": {"a": [1, 2]}}, ValueError, r"edge_features\['a'\] has 2 rows for 3 edges"),
    ({"weights": [1, 2]}, ValueError, r"weights has shape \(2,\) for 3 edges"),
    ({"weights": [1, -1, 2]}, ValueError, r"weights\[1\] is -1: .* must be finite and not negative"),
    ({"weights": [1, 2, float("nan")]}, ValueError, r"weights\[2\] is nan"),
    ({"weights": [1, 2, 3j]}, TypeError, r"weights has dtype complex128"),
    ({"times": [1.5, 2, 3]}, TypeError, r"times has dtype float64: times are whole numbers"),
    ({"times": np.array([1, 2, 3], "M8[s]")}, TypeError, r"times has dtype datetime64\[s\]"),
    ({"times": [[1, 2, 3]]}, ValueError, r"times has shape \(1, 3\) for 3 edges"),
    ({"times": np.array([0, 1, 2**63], "u8")}, ValueError, r"beyond int64"),
    ({"threads": 0}, ValueError, r"threads must be at least 1, got 0"),
    ({"edge_index": {"a": RING}}, TypeError, r"a kind of edge is \(kind of source, relation, kind of target\)"),
    ({"edge_index": {}}, ValueError, r"edge_index has no kind of edges"),
    ({"edge_index": {("a", "r", "b"): RING}, "num_nodes": 3}, TypeError, r"so num_nodes must be one, too, got int"),
    ({"edge_index": {("a", "r", "b"): RING}, "weights": {("a", "r", "c"): []}}, ValueError, r"no such edges"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD)
def test_bad_input_is_refused_before_anything_is_shared(monkeypatch, arguments, error, words):
    """With what is wrong, where, and what to do."""
    made = []
    monkeypatch.setattr(building, "build", made.append)

    with pytest.raises(error, match=words):
        SharedGraph.from_edge_index(**{"edge_index": RING, **arguments})

    assert made == []


# ---------------------------------------------------------------- other libraries


def test_an_edge_is_what_a_matrix_stores():
    """In the order of its data, whatever its format."""
    dense = np.array([[0, 2, 0], [0, 0, 3], [4, 0, 5]])
    for kind in (scipy.sparse.coo_array, scipy.sparse.csr_array, scipy.sparse.csc_matrix):
        matrix = kind(dense)
        graph = SharedGraph.from_scipy(matrix, weights="values", edge_features={"v": matrix.data})

        topology = graph.topologies[ONLY]
        assert [graph.neighbors(node)[0].tolist() for node in range(3)] == [[2], [0], [1, 2]]
        assert topology.weights.tolist() == [4, 2, 3, 5]
        assert graph.edge_features[ONLY]["v"][graph.neighbors(2)[1]].tolist() == [3, 5]
    with pytest.raises(ValueError, match=r"this one has shape \(2, 3\)"):
        SharedGraph.from_scipy(scipy.sparse.coo_array(dense[:2]))
    with pytest.raises(TypeError, match="takes a sparse matrix of SciPy, got ndarray"):
        SharedGraph.from_scipy(dense)
    with pytest.raises(ValueError, match='weights must be "values"'):
        SharedGraph.from_scipy(matrix, weights="data")


def test_a_graph_of_networkx_has_each_undirected_edge_both_ways():
    """Nodes are numbered as listed; attributes become features."""
    source = networkx.les_miserables_graph()
    club = [len(name) for name in source]
    networkx.set_node_attributes(source, dict(zip(source, club)), "length")
    graph = SharedGraph.from_networkx(source, node_features=["length"], edge_features=["weight"], weights="weight")

    names = list(source)
    assert graph.num_edges[ONLY] == 2 * source.number_of_edges()
    assert graph["length"].tolist() == club
    for number, name in enumerate(names):
        sources, ids = graph.neighbors(number)
        assert {names[other] for other in sources} == set(source[name])
        assert graph.edge_features[ONLY]["weight"][ids].tolist() == [source[name][names[o]]["weight"] for o in sources]
    several = networkx.MultiDiGraph([("b", "a"), ("b", "a"), ("a", "a")])
    assert SharedGraph.from_networkx(several).neighbors(1)[0].tolist() == [0, 0, 1]
    with pytest.raises(ValueError, match=r"edge \(0, 1\) has no attribute 'weight'"):
        SharedGraph.from_networkx(several, weights="weight")
    with pytest.raises(TypeError, match=r"write \['x'\]"):
        SharedGraph.from_networkx(several, node_features="x")
    with pytest.raises(TypeError, match="takes a graph of NetworkX, got list"):
        SharedGraph.from_networkx([])


def test_a_graph_of_pyg_brings_all_that_belongs_to_nodes_and_edges():
    """Of one kind, and of several."""
    data = pytest.importorskip("torch_geometric.data")
    one = data.Data(
        x=torch.rand(4, 3),
        y=torch.arange(4),
        train_mask=torch.tensor([True, False, True, False]),
        edge_index=torch.tensor([[0, 1, 2], [1, 2, 3]]),
        edge_attr=torch.rand(3, 2),
        edge_weight=torch.tensor([1.0, 2.0, 3.0]),
        name="a graph",
    )
    graph = SharedGraph.from_pyg(one, weights="edge_weight")

    assert set(graph.node_features[""]) == {"x", "y", "train_mask"}
    assert set(graph.edge_features[ONLY]) == {"edge_attr", "edge_weight"}
    assert np.array_equal(graph["x"], one.x.numpy())
    assert graph.topologies[ONLY].weights.tolist() == [1, 2, 3]

    several = data.HeteroData()
    several["user"].x = torch.rand(3, 2)
    several["item"].num_nodes = 5
    several["user", "buys", "item"].edge_index = torch.tensor([[0, 2], [4, 0]])
    several["user", "buys", "item"].time = torch.tensor([7, 8])
    several["item", "like", "item"].edge_index = torch.tensor([[0], [1]])
    graph = SharedGraph.from_pyg(several, times="time")
    assert graph.num_nodes == {"user": 3, "item": 5}
    assert graph.topologies["user", "buys", "item"].times.tolist() == [8, 7]
    assert graph.topologies["item", "like", "item"].times is None
    with pytest.raises(ValueError, match=r"weights='w': no edges have data of this name, but \['time'\]"):
        SharedGraph.from_pyg(several, weights="w")
    with pytest.raises(ValueError, match="this Data has no edge_index"):
        SharedGraph.from_pyg(data.Data(x=torch.ones(2, 1)))
    with pytest.raises(TypeError, match="takes a Data or HeteroData of PyG, got dict"):
        SharedGraph.from_pyg({})


# ---------------------------------------------------------------- looking at it


def test_a_subgraph_has_the_edges_between_its_nodes():
    """As NetworkX says; none of a node that is named nowhere."""
    graph = make_graph()
    ends = edges()
    chosen = np.random.default_rng(2).permutation(240)[:60]
    found = graph.subgraph(chosen)

    inside = {node: place for place, node in enumerate(chosen.tolist())}
    expected = sorted(
        (number, inside[a], inside[b]) for number, (a, b) in enumerate(ends.T.tolist()) if a in inside and b in inside
    )
    got = found.edges[ONLY]
    assert sorted(zip(got.edge_ids.tolist(), got.rows.tolist(), got.cols.tolist())) == expected
    assert graph.subgraph([]).edges[ONLY].per_hop == (0,)
    with pytest.raises(IndexError, match="there is no node 240 among the 240"):
        graph.subgraph([240])
    with pytest.raises(IndexError, match="there is no node -1"):
        graph.neighbors(-1)
    with pytest.raises(ValueError, match="named twice"):
        graph.subgraph([3, 3])
    with pytest.raises(KeyError, match=r"no node feature 'z', but \['x', 'y'\]"):
        graph["z"]


def test_a_graph_is_read_only():
    """Nor has a copy of it a second one."""
    graph = make_graph()

    with pytest.raises(ValueError, match="read-only"):
        graph["x"][0] = 1
    with pytest.raises(ValueError, match="read-only"):
        graph.topologies[ONLY].indices[0] = 1


def test_a_graph_needs_no_torch():
    """Built, sent and looked at without it."""
    program = (
        "import sys, pickle, outlive, numpy;"
        "graph = outlive.graph.SharedGraph.from_edge_index(numpy.array([[0, 1], [1, 0]]));"
        "print(pickle.loads(pickle.dumps(graph)).subgraph([0, 1]).edges['', '', ''].rows.tolist());"
        "assert 'torch' not in sys.modules"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True, stdin=subprocess.DEVNULL)

    assert said == "[1, 0]\n"


# ---------------------------------------------------------------- sent and saved


def contents(graph: SharedGraph) -> Any:
    topologies = [[None if part is None else part.tolist() for part in found] for found in graph.topologies.values()]
    features = [{name: value.tolist() for name, value in found.items()} for found in graph.node_features.values()]
    features += [{name: value.tolist() for name, value in found.items()} for found in graph.edge_features.values()]
    return graph.num_nodes, graph.num_edges, topologies, features


def _answer(connection: Any, graph: SharedGraph) -> None:
    connection.send((contents(graph), graph.path))
    connection.close()


@pytest.mark.parametrize(("method", "saved"), list(itertools.product(METHODS, [False, True])))
def test_a_process_that_is_started_gets_the_graph_by_handle(tmp_path, method, saved):
    """Its pickle is a few hundred bytes, whether it lies in shared memory or in a file."""
    graph = make_graph(columns=500)
    if saved:
        graph.save(tmp_path / "g.graph")
        graph = SharedGraph.open(tmp_path / "g.graph")
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=_answer, args=(theirs, graph), daemon=True)
    process.start()
    theirs.close()

    assert ours.recv() == (contents(graph), graph.path)
    assert len(pickle.dumps(graph)) < 1500 < graph.nbytes
    process.join(60)
    ours.close()
    process.close()


def test_a_saved_graph_is_opened_as_it_was(tmp_path):
    """All of it, at places that any machine can read from, and nothing else in the folder."""
    graph = make_graph()
    graph.save(tmp_path / "g.graph")
    opened = SharedGraph.open(tmp_path / "g.graph")

    assert contents(opened) == contents(graph)
    assert contents(pickle.loads(pickle.dumps(opened))) == contents(graph)
    assert os.listdir(tmp_path) == ["g.graph"]
    assert opened.path == str(tmp_path / "g.graph")
    arrays = [part for found in opened.topologies.values() for part in found if part is not None]
    arrays += [array for found in opened.node_features.values() for array in found.values()]
    arrays += [array for found in opened.edge_features.values() for array in found.values()]
    assert all(array.ctypes.data % 64 == 0 for array in arrays)


def test_an_opened_graph_holds_no_descriptor(tmp_path):
    """A zygote that unpickles it may go on to fork."""
    make_graph().save(tmp_path / "g.graph")
    before = set(os.listdir("/proc/self/fd"))
    opened = SharedGraph.open(tmp_path / "g.graph")

    assert set(os.listdir("/proc/self/fd")) == before
    assert opened["y"][0] == 0


def test_a_file_that_is_no_whole_graph_is_refused(tmp_path):
    """Cut short anywhere, of another program, of another version, damaged: an error here, and no SIGBUS later."""
    path = tmp_path / "g.graph"
    graph = make_graph()
    graph.save(path)
    whole = path.read_bytes()
    for size in (0, 10, 30, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="is no graph that" if size < 36 else f"has {size} bytes of {len(whole)}"):
            SharedGraph.open(path)
    for damaged, words in (
        (b"PK" + whole[2:], r"is no graph that SharedGraph.save wrote \(its first bytes are b'PK"),
        (whole[:16] + b"\x02" + whole[17:], "is of format 2, and this version of outlive reads 1"),
        (whole.replace(b'"<i8"', b'"|O8"', 1), "no such type of numbers"),
        (whole.replace(b'"num_edges"', b'"num_edgez"', 1), "is damaged"),
        (whole.replace(b"[241]", b"[999999999]".ljust(5)[:5], 1), "is damaged|outside"),
        (whole[:36] + b"\xff" + whole[37:], "is damaged"),
        (whole + b"more", "added to"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=words):
            SharedGraph.open(path)
    with pytest.raises(FileNotFoundError):
        SharedGraph.open(tmp_path / "none.graph")


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    """A pipe that has no writer would be waited for, for ever."""
    os.mkfifo(tmp_path / "pipe")

    for path in (tmp_path / "pipe", "/dev/zero"):
        with pytest.raises(ValueError, match="is no regular file"):
            SharedGraph.open(path)
    with pytest.raises(IsADirectoryError):
        SharedGraph.open(tmp_path)


def test_a_pickle_of_an_opened_graph_leads_to_no_other(tmp_path):
    """Whoever has opened a file goes on with what it was; whoever comes later is told."""
    path = tmp_path / "g.graph"
    make_graph().save(path)
    opened = SharedGraph.open(path)
    before = contents(opened)
    pickled = pickle.dumps(opened)
    SharedGraph.from_edge_index(RING).save(path)

    assert contents(opened) == before
    with pytest.raises(ValueError, match="is another graph by now"):
        pickle.loads(pickled)


def test_half_a_file_is_never_seen_when_saving_fails(tmp_path):
    """The one that was there stays."""
    graph = make_graph()
    graph.save(tmp_path / "g.graph")
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        graph.save(tmp_path / "folder")

    assert sorted(os.listdir(tmp_path)) == ["folder", "g.graph"]
