"""PyTorch Geometric: its DataLoader over graphs, and its NeighborLoader with a sampler of one's own."""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader, NeighborLoader
from torch_geometric.nn import SAGEConv, global_mean_pool
from torch_geometric.sampler import BaseSampler, SamplerOutput

from faulty import SIZE, indices_of, model, report, touch


class Graphs(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        touch(index)
        return Data(
            x=torch.tensor([[index / SIZE, 1.0, 0.0, 1.0]] * 3),
            edge_index=torch.tensor([[0, 1, 2], [1, 2, 0]]),
            y=torch.tensor([index % 2]),
        )


class Ring(BaseSampler):
    """Neighbours in a ring: PyG's own sampler needs a library that is not on PyPI."""

    def sample_from_nodes(self, inputs, **_):
        for node in inputs.node.tolist():
            touch(node)
        node = torch.cat([inputs.node, (inputs.node + 1) % SIZE])
        here = torch.arange(len(inputs.node))
        return SamplerOutput(
            node=node, row=here + len(here), col=here, edge=None, batch=None, metadata=(inputs.input_id, inputs.time)
        )

    def sample_from_edges(self, inputs, **_):
        raise NotImplementedError


def main(DataLoader=DataLoader):
    layer, convolution = model(), SAGEConv(4, 4)
    optimizer = torch.optim.SGD([*layer.parameters(), *convolution.parameters()], 0.1)
    steps, seen = 0, []
    for batch in DataLoader(Graphs(), batch_size=4, shuffle=True, num_workers=2):
        pooled = global_mean_pool(convolution(batch.x, batch.edge_index), batch.batch)
        steps, seen = steps + 1, seen + indices_of(global_mean_pool(batch.x, batch.batch))
        optimizer.zero_grad()
        cross_entropy(layer(pooled), batch.y).backward()
        optimizer.step()

    edges = torch.stack([torch.arange(SIZE), (torch.arange(SIZE) + 1) % SIZE])
    graph = Data(x=torch.arange(SIZE).float()[:, None], edge_index=edges)
    nodes = []
    for part in NeighborLoader(graph, [1], neighbor_sampler=Ring(), batch_size=4, num_workers=2):
        nodes += part.x[: part.batch_size].flatten().int().tolist()
    assert sorted(nodes) == sorted(set(seen)), nodes
    report(steps, seen)


if __name__ == "__main__":
    main()
