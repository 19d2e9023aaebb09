"""What a graph loader yields: a sampled neighbourhood with its features.

Reads   a graph, and what a sampler found in it.
Writes  the rows of the sampled nodes and edges, gathered, into the room it is given.
Never   a row of the graph that was not sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from outlive.graph.checking import ONE_KIND, ONE_RELATION
from outlive.graph.rooms import Plain, Room
from outlive.graph.sampled import Sampled
from outlive.graph.sampling.gathering import gather_rows
from outlive.graph.topology import EdgeType

if TYPE_CHECKING:
    from outlive.graph.shared import SharedGraph


class BatchEdges(NamedTuple):
    """Sampled edges of one kind: `edge_index[0][i] → edge_index[1][i]`, local numbers; hop after hop."""

    edge_index: Any  # (2, edges): rows of the batch's nodes of the source's and of the target's kind
    edge_ids: Any  # the graph's numbers of the edges
    per_hop: tuple[int, ...]  # how many each hop added


@dataclass(frozen=True)
class Batch:
    """A neighbourhood around some seeds. Arrays are torch's tensors when they come from a loader.

    nodes          the graph's numbers of the nodes, by kind: the seeds first, then hop after hop
    nodes_per_hop  seeds, then how many each hop added, by kind
    edges          `BatchEdges`, by kind
    node_features  by kind of node and name; row i is that of `nodes[kind][i]`
    edge_features  by kind of edge and name; row i is that of `edges[kind].edge_ids[i]`
    kind           of the seeds
    seeds          as the sampler was given them
    input_ids      where each seed stands in the loader's `seeds` (of a mask: which node it is)
    batch_size     how many seeds there are
    epoch, number  which batch of which epoch this is

    Of a graph of one kind, `batch["x"]` is the node feature x, and `node_ids`, `edge_index` and `edge_ids` are short.
    """

    nodes: dict[str, Any]
    nodes_per_hop: dict[str, tuple[int, ...]]
    edges: dict[EdgeType, BatchEdges]
    node_features: dict[str, dict[str, Any]]
    edge_features: dict[EdgeType, dict[str, Any]]
    kind: str
    seeds: Any
    input_ids: Any
    batch_size: int
    epoch: int = 0
    number: int = 0
    seed_times: Any = None
    trees: dict[str, Any] | None = None  # for disjoint sampling: which seed a node belongs to

    @property
    def node_ids(self) -> Any:
        """The graph's numbers of the nodes, of a graph of one kind."""
        return self._only(self.nodes, "nodes")

    @property
    def edge_index(self) -> Any:
        """(2, edges), local numbers, of a graph of one kind."""
        return self._only(self.edges, "edges").edge_index

    @property
    def edge_ids(self) -> Any:
        """The graph's numbers of the edges, of a graph of one kind."""
        return self._only(self.edges, "edges").edge_ids

    def __getitem__(self, name: str) -> Any:
        found = self._only(self.node_features, "node_features")
        if name not in found:
            raise KeyError(f"no node feature {name!r} in this batch, but {list(found)}")
        return found[name]

    @property
    def labels(self) -> Any:
        """What the seeds have as the node feature "y"."""
        found = self.node_features[self.kind]
        if "y" not in found:
            raise KeyError(f'the seeds have no node feature "y", but {list(found)}')
        return found["y"][: self.batch_size]

    def hops(self, kind: EdgeType = ONE_RELATION) -> Iterator[BatchEdges]:
        """The edges that each hop added: those into the seeds first."""
        edges = self.edges[kind]
        begin = 0
        for count in edges.per_hop:
            end = begin + count
            yield BatchEdges(edges.edge_index[:, begin:end], edges.edge_ids[begin:end], (count,))
            begin = end

    def as_pyg(self) -> Any:
        """A `torch_geometric.data.Data` or `HeteroData`, laid out as PyG's own NeighborLoader lays it out."""
        from outlive.graph import exports

        return exports.to_pyg(self)

    def as_dgl(self) -> Any:
        """`(input_nodes, output_nodes, blocks)` of DGL, as its own samplers give them; the outermost block first."""
        from outlive.graph import exports

        return exports.to_dgl(self)

    def to(self, device: Any, **options: Any) -> Batch:
        """The same batch with its tensors on a device; options are those of `torch.Tensor.to`."""
        return self.map(lambda tensor: tensor.to(device, **options))

    def pin_memory(self) -> Batch:
        """The same batch with its tensors in pinned memory; torch's loader calls this for `pin_memory=True`."""
        return self.map(lambda tensor: tensor.pin_memory())

    def map(self, function: Callable[[Any], Any]) -> Batch:
        """The same batch with `function` applied to each array."""
        return replace(self, **{field.name: _mapped(getattr(self, field.name), function) for field in fields(self)})

    def _only(self, by_kind: dict[Any, Any], name: str) -> Any:
        if set(by_kind) not in ({ONE_KIND}, {ONE_RELATION}):
            raise TypeError(f"this batch has several kinds of nodes or edges: use batch.{name}[kind] ({list(by_kind)})")
        return next(iter(by_kind.values()))

    def __repr__(self) -> str:
        nodes = ", ".join(f"{len(ids)} {kind}".rstrip() for kind, ids in self.nodes.items())
        edges = sum(len(edges.edge_ids) for edges in self.edges.values())
        return (
            f"Batch({self.batch_size} seeds, nodes: {nodes}, {edges} edges; batch {self.number} of epoch {self.epoch})"
        )


def _mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(inner, function) for key, inner in value.items()}
    if isinstance(value, BatchEdges):
        return BatchEdges(function(value.edge_index), function(value.edge_ids), value.per_hop)
    return function(value) if hasattr(value, "dtype") else value


# ---------------------------------------------------------------- making one


@dataclass(frozen=True)
class Choice:
    """Which features are gathered; None: all."""

    node_features: tuple[str, ...] | None = None
    edge_features: tuple[str, ...] | None = None


ALL = Choice()


def assemble(
    graph: SharedGraph,
    sampled: Sampled,
    seeds: Any,
    *,
    kind: str = ONE_KIND,
    input_ids: NDArray[Any] | None = None,
    choice: Choice = ALL,
    room: Room | None = None,
    epoch: int = 0,
    number: int = 0,
    seed_times: Any = None,
) -> Batch:
    """A batch of what a sampler found: features are gathered into `room`."""
    room = Plain() if room is None else room
    node_features = {
        kind: _gathered(graph.node_features.get(kind, {}), choice.node_features, ids, room)
        for kind, ids in sampled.nodes.items()
    }
    edges, edge_features = {}, {}
    for edge_kind, found in sampled.edges.items():
        edge_index, held = room.take((2, len(found.rows)), np.int64)
        edge_index[0] = found.rows
        edge_index[1] = found.cols
        ids = np.asarray(found.edge_ids, np.int64)
        edges[edge_kind] = BatchEdges(held, room.wrap(ids), tuple(found.per_hop))
        edge_features[edge_kind] = _gathered(graph.edge_features.get(edge_kind, {}), choice.edge_features, ids, room)
    seeds = np.asarray(seeds)
    return Batch(
        nodes={kind: room.wrap(np.asarray(ids, np.int64)) for kind, ids in sampled.nodes.items()},
        nodes_per_hop={kind: tuple(counts) for kind, counts in sampled.nodes_per_hop.items()},
        edges=edges,
        node_features=node_features,
        edge_features=edge_features,
        kind=kind,
        seeds=room.wrap(seeds),
        input_ids=room.wrap(np.arange(len(seeds)) if input_ids is None else input_ids),
        batch_size=len(seeds),
        epoch=epoch,
        number=number,
        seed_times=None if seed_times is None else room.wrap(np.asarray(seed_times)),
        trees=None if sampled.batch is None else {kind: room.wrap(ids) for kind, ids in sampled.batch.items()},
    )


def _gathered(
    arrays: Mapping[str, NDArray[Any]], wanted: Iterable[str] | None, ids: NDArray[Any], room: Room
) -> dict[str, Any]:
    found = {}
    for name in arrays if wanted is None else [name for name in wanted if name in arrays]:
        source = arrays[name]
        out, held = room.take((len(ids), *source.shape[1:]), source.dtype)
        gather_rows(source, ids, out)
        found[name] = held
    return found
