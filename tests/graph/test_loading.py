"""What a NeighborLoader delivers: the same whoever makes it, in the cell it is made in; as other libraries have it."""

from __future__ import annotations

import inspect
import random
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graph import fake_dgl
from graph.example_graphs import NODES, ONLY, HopSampler, UserSampler, as_lists, edges, longs, make_graph
from outlive import DataLoader
from outlive._system import choice
from outlive._transport import packing
from outlive._transport.cells import Arena
from outlive.graph import Batch, NeighborLoader, NeighborSampler, Sampled, SampledEdges, SharedGraph
from outlive.graph.batch import assemble
from outlive.graph.rooms import Tensors

METHODS = ("spawn",) if choice.PORTABLE else ("fork", "spawn", "forkserver")
BUYS, LIKE = ("user", "buys", "item"), ("item", "like", "item")


@pytest.fixture(scope="module")
def graph() -> SharedGraph:
    return make_graph()


@pytest.fixture(scope="module")
def several() -> SharedGraph:
    """Two kinds of nodes, two of edges."""
    dice = np.random.default_rng(4)
    return SharedGraph.from_edge_index(
        {BUYS: (dice.integers(0, 30, 200), dice.integers(0, 50, 200)), LIKE: dice.integers(0, 50, (2, 100))},
        {"user": 30, "item": 50},
        node_features={"item": {"x": np.arange(50.0), "y": np.arange(50)}},
        edge_features={BUYS: {"price": np.arange(200)}},
    )


def epochs(loader: Any, count: int = 2) -> list[Any]:
    return [[as_lists(batch) for batch in loader] for _ in range(count)]


@pytest.mark.parametrize(
    "sampler", [HopSampler(), UserSampler(), NeighborSampler([3, 2])], ids=["told", "untold", "ours"]
)
def test_batches_depend_on_seed_epoch_and_number_alone(graph, sampler):
    """Not on how many make them, nor on whether they stay; nor does making them disturb whoever asks."""

    def run(num_workers: int, **options: Any) -> list[Any]:
        seeds = np.arange(100)
        loader = NeighborLoader(graph, sampler, seeds, batch_size=24, shuffle=True, num_workers=num_workers, **options)
        return epochs(loader)

    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    drawn = random.random(), np.random.random(), torch.rand(()).item()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    first = run(0)
    assert (random.random(), np.random.random(), torch.rand(()).item()) == drawn

    assert run(0) == first
    assert run(0, seed=1) != first
    assert run(1, multiprocessing_context=METHODS[0]) == first
    assert run(2, multiprocessing_context=METHODS[0], persistent_workers=True) == first
    assert [batch[0] for batch in first[0]] != [batch[0] for batch in first[1]]
    assert sorted(seed for batch in first[1] for seed in batch[0]) == list(range(100))


@pytest.mark.parametrize("method", METHODS)
def test_rows_of_features_are_those_of_the_nodes_and_edges(graph, method):
    """Under each start method; tensors, with labels of the seeds and edges hop by hop."""
    loader = NeighborLoader(
        graph,
        HopSampler(),
        torch.arange(NODES - 1, 0, -2),
        batch_size=30,
        num_workers=2,
        multiprocessing_context=method,
    )
    for number, batch in enumerate(loader):
        assert isinstance(batch["x"], torch.Tensor)
        assert batch["x"][:, 0].tolist() == batch.node_ids.tolist()
        assert batch["x"].shape[1] == 8
        assert batch.labels.tolist() == (batch.seeds % 7).tolist()
        assert batch.edge_features[ONLY]["edge_attr"].tolist() == batch.edge_ids.tolist()
        assert batch.input_ids.tolist() == list(range(30 * number, 30 * number + 30))
        assert batch.node_ids[: batch.batch_size].tolist() == batch.seeds.tolist()
        ends = torch.from_numpy(edges())[:, batch.edge_ids]
        assert torch.equal(batch.node_ids[batch.edge_index], ends)
        assert [hop.edge_index.shape[1] for hop in batch.hops()] == list(batch.edges[ONLY].per_hop)
        batch["x"][0] = 5  # it is the consumer's own


def test_features_are_gathered_into_the_cell_that_the_batch_travels_in(graph):
    """Packing takes no more memory for them: they lie there already."""
    wide = make_graph(columns=2000)
    arena = Arena()
    arena.begin()
    found = HopSampler().sample(wide, np.arange(50), seed=1, batch=2)
    batch = assemble(wide, found, np.arange(50), room=Tensors(arena))
    taken = arena.large_used
    packed = packing.Packer(arena).pack(batch)

    assert taken >= batch["x"].nbytes > 1_000_000
    assert arena.large_used - taken < 100_000
    assert packed.cells
    arena.forget()


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "f2", "u4", "i8", "f8", "c8", ">f4"])
def test_features_of_any_type_arrive_as_they_are(dtype):
    """Also those that torch has hardly any use for, and those of another byte order."""
    values = (np.arange(600).reshape(200, 3) % 100).astype(dtype)
    graph = SharedGraph.from_edge_index([[0], [1]], 200, node_features={"x": values})
    loader = NeighborLoader(
        graph, NeighborSampler([1]), batch_size=200, num_workers=1, multiprocessing_context=METHODS[0]
    )
    (batch,) = loader

    assert batch["x"].numpy().tolist() == values[batch.node_ids].tolist()
    assert batch["x"].numpy().dtype == np.dtype(dtype).newbyteorder("=")


class RaisingSampler(HopSampler):
    def sample(self, graph: Any, seeds: Any, *, seed: int, batch: int) -> Sampled:
        if 7 in seeds:
            raise ValueError("not this one")
        return super().sample(graph, seeds, seed=seed, batch=batch)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_another_seed_takes_the_place_of_a_bad_one(graph, num_workers):
    """Under «replace» batches keep their size; under «raise» the error is the sampler's own."""
    options: dict[str, Any] = {"batch_size": 10, "num_workers": num_workers}
    if num_workers:
        options["multiprocessing_context"] = METHODS[0]
    loader = NeighborLoader(graph, RaisingSampler(), np.arange(40), faults="replace", **options)
    seeds = [batch.seeds.tolist() for batch in loader]

    assert [len(found) for found in seeds] == [10, 10, 10, 10]
    assert seeds[0][:7] + seeds[0][8:] == [0, 1, 2, 3, 4, 5, 6, 8, 9]
    assert seeds[0][7] in range(10, 40)
    assert seeds[1:] == np.arange(10, 40).reshape(3, 10).tolist()
    assert set(loader.quarantine) == {7}
    with pytest.raises(ValueError, match="not this one"):
        list(NeighborLoader(graph, RaisingSampler(), np.arange(40), **options))


def test_seeds_are_given_as_pyg_takes_them(graph, several):
    """Numbers, a mask, nothing for all; of several kinds with their kind."""

    def first(graph: SharedGraph, seeds: Any) -> Any:
        return next(iter(NeighborLoader(graph, NeighborSampler([1]), seeds, batch_size=4)))

    mask = np.arange(NODES) % 50 == 7
    assert first(graph, None).seeds.tolist() == [0, 1, 2, 3]
    assert first(graph, [9, 8]).input_ids.tolist() == [0, 1]
    assert first(graph, torch.from_numpy(mask)).seeds.tolist() == [7, 57, 107, 157]
    assert first(graph, mask).input_ids.tolist() == [7, 57, 107, 157]
    assert first(several, "item").kind == "item"
    assert first(several, ("user", [3, 3])).seeds.tolist() == [3, 3]


def test_only_features_that_are_named_are_gathered(graph):
    """The rest stays where it is."""
    loader = NeighborLoader(graph, HopSampler(), batch_size=9, node_features=["y"], edge_features=())
    batch = next(iter(loader))

    assert list(batch.node_features[""]) == ["y"]
    assert batch.edge_features == {ONLY: {}}
    with pytest.raises(KeyError, match=r"no node feature 'x' in this batch, but \['y'\]"):
        batch["x"]


class PairSampler:
    """Seed edges, and a kind of batch of its own."""

    def sample(self, graph: Any, seeds: Any) -> Any:
        return {"pairs": seeds.tolist()}


def test_seed_edges_and_batches_of_a_samplers_own_kind_are_passed_on(graph):
    """Whatever a sampler makes of what it is given."""
    loader = NeighborLoader(graph, PairSampler(), [[1, 2], [3, 4], [5, 6]], batch_size=2)

    assert list(loader) == [{"pairs": [[1, 2], [3, 4]]}, {"pairs": [[5, 6]]}]
    assert loader.describe(2) == "edge 5 → 6"


def test_temporal_seeds_bring_their_times():
    """Each batch's own, to a sampler that asks for them."""
    graph = SharedGraph.from_edge_index([[0, 1, 2], [3, 3, 3]], 4, times=[10, 20, 30])
    loader = NeighborLoader(
        graph, NeighborSampler([-1], temporal="uniform"), [3, 3, 3], batch_size=2, seed_times=[5, 25, 15]
    )
    first, second = loader

    assert first.seed_times.tolist() == [5, 25]
    assert [first.edge_ids.tolist(), second.edge_ids.tolist()] == [[0, 1], [0]]
    assert first.trees[""].tolist()[:2] == [0, 1]


def test_a_batch_is_moved_and_mapped_as_a_whole(graph):
    """To a device, and by torch's own pinning."""
    batch = next(iter(NeighborLoader(graph, HopSampler(), batch_size=3)))
    moved = batch.to("meta")

    assert {moved["x"].device.type, moved.edge_index.device.type, moved.seeds.device.type} == {"meta"}
    assert (moved.batch_size, moved.nodes_per_hop) == (batch.batch_size, batch.nodes_per_hop)
    assert as_lists(batch.map(lambda tensor: tensor.clone())) == as_lists(batch)
    assert "3 seeds" in repr(batch)


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"graph": None}, TypeError, r"graph must be a SharedGraph, got NoneType \(make one: SharedGraph.from_edge_index"),
    ({"sampler": object()}, TypeError, r"sampler must have a method sample\(graph, seeds\), and object has none"),
    ({"seeds": [240]}, ValueError, r"seeds\[0\] is 240, and there are 240 nodes"),
    ({"seeds": [1.0]}, TypeError, r"seeds has dtype float64"),
    ({"seeds": [True]}, ValueError, r"seeds is a mask of shape \(1,\), and there are 240 nodes"),
    ({"seeds": [[1, 2, 3]]}, ValueError, r"a flat array of nodes, or rows of two for edges, got shape \(1, 3\)"),
    ({"seeds": "user"}, ValueError, r"seeds are of the kind 'user', and the graph has \[''\]"),
    ({"seed": -1}, ValueError, r"seed must be a whole number from 0"),
    ({"batch_size": None}, TypeError, r"batch_size must be a number"),
    ({"collate_fn": list}, TypeError, r"NeighborLoader takes no collate_fn: the sampler makes batches"),
    ({"node_features": "x"}, TypeError, r"write \['x'\]"),
    ({"node_features": ["z"]}, ValueError, r"has 'z', and the graph has none of this name, but \['x', 'y'\]"),
    ({"seed_times": [1.5] * NODES}, TypeError, r"seed_times has dtype float64"),
    ({"seed_times": [1]}, ValueError, r"seed_times has shape \(1,\)"),
    ({"faults": "ignore"}, ValueError, r"ignore"),
]


@pytest.mark.parametrize(("arguments", "error", "words"), BAD)
def test_a_wrong_argument_is_refused(graph, arguments, error, words):
    """With what is wrong, and what to do."""
    with pytest.raises(error, match=words):
        NeighborLoader(**{"graph": graph, "sampler": HopSampler(), **arguments})


def test_a_graph_of_several_kinds_wants_the_kind_of_its_seeds(several):
    """Else a number would mean nothing."""
    with pytest.raises(ValueError, match=r"such as seeds=\('user', numbers\): the graph has \['user', 'item'\]"):
        NeighborLoader(several, HopSampler(), [1, 2])
    with pytest.raises(TypeError, match=r"batch.nodes\[kind\]"):
        next(iter(NeighborLoader(several, NeighborSampler([1]), "item"))).node_ids  # noqa: B018


class OutOfRangeSampler:
    def sample(self, graph: Any, seeds: Any) -> Sampled:
        none = longs([])
        return Sampled({"": longs([240])}, {"": (1,)}, {ONLY: SampledEdges(none, none, none, (0,))})


def test_a_sampler_that_names_no_node_of_the_graph_is_told(graph):
    """Nothing beyond the features is read."""
    with pytest.raises(IndexError, match="240"):
        next(iter(NeighborLoader(graph, OutOfRangeSampler(), [1])))


def test_the_guide_has_every_option_with_its_default():
    """Its table says what the class says."""
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "graphs.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| `(.+?)` \|", guide, re.M))
    options = inspect.signature(NeighborLoader.__init__).parameters.values()

    assert told == {o.name: repr(o.default).replace("'", '"') for o in options if o.default is not o.empty}


def test_a_loader_is_a_loader_of_torch(graph):
    """What libraries ask for."""
    loader = NeighborLoader(graph, HopSampler(), [5, 6, 7], batch_size=2, drop_last=True)

    assert isinstance(loader, DataLoader)
    assert isinstance(loader, torch.utils.data.DataLoader)
    assert len(loader) == 1
    assert isinstance(next(iter(loader)), Batch)


# ---------------------------------------------------------------- as PyG has it


def pyg_loader(data: Any, graph: SharedGraph, sampler: NeighborSampler, seeds: Any, loader: NeighborLoader) -> Any:
    """PyG's own loader over the same data, with our sampler behind its interface."""
    sampling = pytest.importorskip("torch_geometric.sampler")
    pyg = pytest.importorskip("torch_geometric.loader")

    class Sampler(sampling.BaseSampler):  # type: ignore[name-defined,misc]
        batch = -1

        def sample_from_nodes(self, index: Any, **options: Any) -> Any:
            self.batch += 1
            given = index.node.numpy() if index.input_type is None else {index.input_type: index.node.numpy()}
            seed = loader_seed(loader)
            found = sampler.sample(graph, given, seed=seed, batch=self.batch)
            nodes = {kind: torch.from_numpy(ids) for kind, ids in found.nodes.items()}
            rows = {kind: torch.from_numpy(part.rows.copy()) for kind, part in found.edges.items()}
            cols = {kind: torch.from_numpy(part.cols.copy()) for kind, part in found.edges.items()}
            ids = {kind: torch.from_numpy(part.edge_ids.copy()) for kind, part in found.edges.items()}
            hops = {kind: list(counts) for kind, counts in found.nodes_per_hop.items()}
            added = {kind: list(part.per_hop) for kind, part in found.edges.items()}
            made = (nodes, rows, cols, ids, None, hops, added)
            if index.input_type is None:
                made = tuple(None if part is None else next(iter(part.values())) for part in made)
                return sampling.SamplerOutput(*made, metadata=(index.input_id, index.time))
            return sampling.HeteroSamplerOutput(*made, metadata=(index.input_id, index.time))

        def sample_from_edges(self, index: Any, **options: Any) -> Any:
            raise NotImplementedError

        @property
        def edge_permutation(self) -> Any:
            return None

    return pyg.NodeLoader(data, node_sampler=Sampler(), input_nodes=seeds, batch_size=loader.batch_size)


def loader_seed(loader: NeighborLoader) -> int:
    """What the samplers of an untouched loader are told in its first epoch."""
    from outlive.loader.jobs import batch_seed

    return batch_seed(loader.seed, 0, 0)


def assert_same_store(mine: Any, theirs: Any) -> None:
    there = {key: value for key, value in theirs.items() if value is not None}
    assert set(mine.keys()) == set(there)
    for key, value in there.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(mine[key], value), key
            assert mine[key].dtype == value.dtype, key
        else:
            assert mine[key] == value, key


@pytest.mark.parametrize("masked", [False, True])
def test_as_pyg_is_what_pygs_own_loader_yields(masked):
    """Every attribute, its type and its value: x, y, edge_attr, n_id, e_id, input_id, batch_size, hops."""
    data = pytest.importorskip("torch_geometric.data")
    given = data.Data(
        x=torch.rand(NODES, 5),
        y=torch.arange(NODES),
        edge_index=torch.from_numpy(edges()),
        edge_attr=torch.rand(3000, 2),
    )
    graph = SharedGraph.from_pyg(given)
    seeds = torch.arange(NODES) % 3 == 1 if masked else torch.arange(5, 90, 3)
    sampler = NeighborSampler([4, 3])
    loader = NeighborLoader(graph, sampler, seeds, batch_size=10)

    pairs = list(zip(loader, pyg_loader(given, graph, sampler, seeds, loader), strict=True))

    assert len(pairs) == len(loader)
    for mine, theirs in pairs:
        assert_same_store(mine.as_pyg()._store, theirs._store)
        mine.as_pyg().validate()


def test_as_pyg_is_what_pygs_own_loader_yields_of_several_kinds(several):
    """HeteroData, store by store."""
    data = pytest.importorskip("torch_geometric.data")
    given = data.HeteroData()
    given["user"].num_nodes = 30
    given["item"].x, given["item"].y = (torch.from_numpy(v.copy()) for v in several.node_features["item"].values())
    dice = np.random.default_rng(4)
    given[BUYS].edge_index = torch.stack(
        [torch.from_numpy(dice.integers(0, 30, 200)), torch.from_numpy(dice.integers(0, 50, 200))]
    )
    given[BUYS].price = torch.arange(200)
    given[LIKE].edge_index = torch.from_numpy(dice.integers(0, 50, (2, 100)))
    sampler = NeighborSampler([3, 2])
    seeds = ("item", torch.arange(0, 50, 2))
    loader = NeighborLoader(several, sampler, seeds, batch_size=10)

    for mine, theirs in zip(loader, pyg_loader(given, several, sampler, seeds, loader), strict=True):
        made = mine.as_pyg()
        assert made.node_types == theirs.node_types
        assert set(made.edge_types) == set(theirs.edge_types)
        for kind in (*theirs.node_types, *theirs.edge_types):
            assert_same_store(made[kind], theirs[kind])


# ---------------------------------------------------------------- as DGL has it


@pytest.fixture(scope="module", params=["documented", "real"])
def dgl(request: pytest.FixtureRequest) -> Any:
    """DGL, where it imports; else, and besides, what it documents."""
    module = fake_dgl.real() if request.param == "real" else fake_dgl.as_documented()
    if module is None:
        pytest.skip("DGL does not import here")
    before = sys.modules.get("dgl")
    sys.modules["dgl"] = module
    yield module
    sys.modules.pop("dgl") if before is None else sys.modules.update(dgl=before)


def test_a_graph_of_dgl_brings_all_that_belongs_to_nodes_and_edges(dgl):
    """Of one kind, and of several, through its own methods."""
    ends = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 2])
    one = dgl.graph(ends, num_nodes=4)
    one.nodes["_N"].data["feat"] = torch.rand(4, 3)
    one.edges[fake_dgl.ONE].data["w"] = torch.tensor([1.0, 2.0, 3.0])
    graph = SharedGraph.from_dgl(one, weights="w")

    assert np.array_equal(graph["feat"], one.nodes["_N"].data["feat"].numpy())
    assert graph.num_nodes == {"": 4}
    assert graph.topologies[ONLY].weights.tolist() == [1, 2, 3]
    assert graph.neighbors(2)[0].tolist() == [1, 2]

    more = dgl.heterograph({BUYS: ends, LIKE: ends}, num_nodes_dict={"user": 3, "item": 5})
    more.nodes["item"].data["feat"] = torch.arange(5)
    more.edges[BUYS].data["t"] = torch.tensor([4, 5, 6])
    graph = SharedGraph.from_dgl(more, times="t")
    assert graph.num_nodes == {"item": 5, "user": 3}
    assert graph.node_features["item"]["feat"].tolist() == [0, 1, 2, 3, 4]
    assert graph.topologies[BUYS].times.tolist() == [4, 5, 6]
    assert graph.topologies[LIKE].times is None
    with pytest.raises(TypeError, match="takes a graph of DGL, got int"):
        SharedGraph.from_dgl(3)


def test_as_dgl_gives_blocks_whose_destinations_come_first(dgl, graph):
    """The outermost first; each has the edges into all nodes that its inner neighbour reads from."""
    batch = next(iter(NeighborLoader(graph, NeighborSampler([4, 3]), [3, 1, 4], batch_size=3)))
    inputs, outputs, (outer, inner) = batch.as_dgl()

    listed = torch.from_numpy(edges())
    assert outputs.tolist() == [3, 1, 4]
    assert inputs.tolist() == batch.node_ids.tolist()
    assert outer.num_dst_nodes("_N") == inner.num_src_nodes("_N")
    for block, hops in ((inner, 1), (outer, 2)):
        ids = block.edges[fake_dgl.ONE].data[dgl.EID]
        sources, targets = block.edges(form="uv", order="eid", etype=fake_dgl.ONE)
        assert ids.tolist() == batch.edge_ids[: sum(batch.edges[ONLY].per_hop[:hops])].tolist()
        assert torch.equal(block.srcnodes["_N"].data[dgl.NID][sources.long()], listed[0, ids])
        assert torch.equal(block.dstnodes["_N"].data[dgl.NID][targets.long()], listed[1, ids])
        assert block.edges[fake_dgl.ONE].data["edge_attr"].tolist() == ids.tolist()
    assert torch.equal(outer.srcnodes["_N"].data["x"], batch["x"])
    assert torch.equal(inner.dstnodes["_N"].data["y"], batch.labels)


def test_as_dgl_gives_blocks_of_several_kinds(dgl, several):
    """Nodes by kind, and edges of each."""
    batch = next(iter(NeighborLoader(several, NeighborSampler([4, 3]), ("item", [3, 1]), batch_size=2)))
    inputs, outputs, made = batch.as_dgl()

    assert outputs["item"].tolist() == [3, 1]
    assert outputs["user"].tolist() == []
    assert inputs["user"].tolist() == batch.nodes["user"].tolist()
    assert len(made) == 2
    assert made[0].num_src_nodes("user") == len(batch.nodes["user"])
    assert made[1].num_dst_nodes("item") == 2
    assert len(made[0].edges[LIKE].data[dgl.EID]) == len(batch.edges[LIKE].edge_ids)


def test_as_dgl_says_why_when_it_cannot(dgl, graph, monkeypatch):
    """Edges that belong to no hop; a DGL that does not import."""
    batch = next(iter(NeighborLoader(graph, NeighborSampler([4, 3], directed=False), [3, 1, 4], batch_size=3)))
    with pytest.raises(ValueError, match=r"needs the edges hop by hop, .*directed=True"):
        batch.as_dgl()
    monkeypatch.setitem(sys.modules, "dgl", None)
    with pytest.raises(ImportError, match=r"as_dgl\(\) needs dgl, which cannot be imported here"):
        batch.as_dgl()
